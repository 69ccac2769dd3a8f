"""What the benchmarks share with the product: its data sets, servers, and the operations that its journals hold."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines.tracking import ops
from tests.pipelines.tracking.test_ops import EVERY

ROOT = Path(__file__).parents[2]
WRITE = "import sys, pathlib, data_readers as d; d.write(pathlib.Path(sys.argv[1]), 'values', 40_000)"
SERVERS = """
import sys
import servers as s
s.PULLS_S, s.ROWS, s.PULLS, s.DENSE, s.WARM_S, s.WINDOW_S = 0.05, 1000, (64, 0), 1000, 0.1, 0.2
assert not sys.argv[2:] or len(s.rates_of(s.our_rates)) == 2
for case in eval(sys.argv[1]):
    assert s.samples_per_second(case) > 0, case
"""


def test_it_is_known_what_each_result_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("stale")
    results = [path.name for path in script.RESULTS.iterdir()]
    missing = [path for name in results for path in script.measured(name) if not (ROOT / path).exists()]
    assert not missing and len(results) > 40
    assert not [prefix for prefix in script.MEASURES if not any(name.startswith(prefix) for name in results)]
    assert not [prefix for prefix, paths in script.MEASURES.items() if script.measured(f"{prefix}_x.md") != paths]
    with pytest.raises(KeyError):
        script.measured("nothing_of_ours.md")


@pytest.mark.parametrize(
    "case", ["sparkring", pytest.param("decode + transforms + numpy gather", marks=pytest.mark.slow)]
)
def test_a_case_of_the_readers_benchmark_reads_what_its_own_writer_wrote(tmp_path: Path, case: str) -> None:
    scripts = ROOT / "benchmarks"
    subprocess.run([sys.executable, "-c", WRITE, tmp_path], cwd=scripts, check=True)
    command = [sys.executable, "data_cases.py", case, tmp_path, "4096", "60"]
    done = subprocess.run(command, cwd=scripts, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["rows"] >= 9 * 4096


def test_every_operation_of_a_recorded_night_can_be_sent_for_another_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # its scripts import each other by name
    script = importlib.import_module("night_pages")
    recorded, first, other = "2013-03-02", date(2026, 1, 1), "2026-01-05"
    lines = [json.loads(json.dumps(vars(op))) for op, _ in EVERY]
    template = script.Template(tmp_path, recorded, lines, ["identity-of-2013"], lines[0]["at"])
    moved = [*script.Year(template, TrackingConfig(root=str(tmp_path)).named("flights"), [], first)._ops(other)]
    assert [type(op) for op in moved] == [type(op) for op, _ in EVERY]
    by_kind = {type(op): op for op in moved}
    assert by_kind[ops.HistoryFigure].step == 4
    assert by_kind[ops.History].values["loss"] == script.drawn(other, "loss", 0.5) != 0.5
    assert by_kind[ops.Metrics].points[0][1] == script.drawn(other, "loss", 0.5)


@pytest.mark.parametrize(
    ("cases", "more"),
    [
        ("[s.Case(0, backup=1, slow=True)]", []),
        pytest.param("[s.Case(-1), s.Case(0), s.Case(None)]", ["rates"], marks=pytest.mark.slow),
    ],
)
def test_the_benchmark_of_servers_runs_on_todays_servers(cases: str, more: list[str]) -> None:
    command = [sys.executable, "-c", SERVERS, cases, *more]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_arena_counts_wins_with_an_interval_and_names_the_tables_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    arena = importlib.import_module("arena")
    assert arena.interval_of_share(8, 10) == pytest.approx((0.490, 0.943), abs=1e-3), "Wilson's"
    losses = {
        "a": {arena.DEFAULT: 1.0, "lightgbm": 1.1, "xgboost": 1.2, "catboost": 0.99},
        "b": {arena.DEFAULT: 1.0, "lightgbm": 0.9, "xgboost": 1.2, "catboost": 1.1},
        "c": {arena.DEFAULT: 1.0, "lightgbm": 1.0},
    }
    assert arena.wins(losses, arena.DEFAULT, "lightgbm") == (1, 3), "equal is no win"
    rank, lightgbm, xgboost, behind = arena.targets(losses)
    assert rank == "- mean rank 2.00, better than CatBoost's 2.00: not reached"
    assert lightgbm.startswith("- at least 60% wins over lightgbm: 1 of 2 (9% to 91%): not reached")
    assert xgboost.startswith("- at least 60% wins over xgboost: 2 of 2 (34% to 100%): reached")
    assert behind.endswith(": not reached on b 11.1 %"), "1 % is near enough"
    head, _, ours, *_ = arena.summary(losses)
    assert head.count("|") == ours.count("|") and "| - |" in ours


def test_the_arena_shows_the_spread_of_seeds_and_what_a_refit_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    arena = importlib.import_module("arena")
    scores = [arena.Score("a", arena.DEFAULT, seed, loss, math.nan) for seed, loss in enumerate((1.0, 2.0, 3.0))]
    scores.append(arena.Score("a", "catboost", 0, 4.0, 1.0))
    assert arena.table_of(scores, "loss")[2] == "| a | **2 ± 1 (3)** | 4 |"
    assert arena.table_of(scores, "seconds")[2] == "| a | - | **1** |"
    jobs = [("a", arena.WITHOUT, 10.0), ("a", arena.REFIT, 12.0), ("b", arena.WITHOUT, 10.0), ("b", arena.REFIT, 14.0)]
    found = arena.refit_costs([arena.Score(t, arena.OURS + family, 0, 0.5, seconds) for t, family, seconds in jobs])
    assert "| 1.20 (reached) |" in found[2] and "| 1.40 (not reached) |" in found[3]
    assert arena.refit_costs(scores) == []


def test_the_arena_measures_what_it_has_no_score_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    arena = importlib.import_module("arena")
    kept, asked = tmp_path / "kept.jsonl", []

    def measured(table: str, split: int, models: list[tuple[str, int]], folder: Path, more: list[str]):
        asked.append((split, models))
        for number, (model, seed) in enumerate(models):
            if number == 2:
                raise SystemExit("out of time")
            yield arena.Score(table, model, seed, 1.0 + number, 2.0, split)

    monkeypatch.setattr(arena, "measure", measured)
    words = ["arena.py", "--only", "cells", "--families", "both", "--peers", "catboost", "xgboost", "--kept", str(kept)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        arena.main()
    arena.main()
    every = [(arena.DEFAULT, 0), ("catboost", 0), ("xgboost", 0)]
    assert asked == [(0, every), (0, [("xgboost", 0)])]
    monkeypatch.setattr(sys, "argv", [*words, "--splits", "0", "1"])
    with pytest.raises(SystemExit):
        arena.main()
    assert asked[2:] == [(1, every)], "the scores of another split say nothing of this one"
    before = '{"table": "cells", "model": "catboost", "seed": 0, "loss": 1.0, "seconds": 2.0}\n'
    kept.write_text(before)
    assert [score.split for score in arena.read_kept(kept)] == [0], "of before there were splits"


def test_the_arena_compares_with_the_best_peer_split_by_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    arena = importlib.import_module("arena")

    def scores(table: str, model: str, losses: dict[int, list[float]]) -> list[Any]:
        return [
            arena.Score(table, model, seed, loss, 1.0, split)
            for split, found in losses.items()
            for seed, loss in enumerate(found)
        ]

    ours = scores("a", arena.DEFAULT, {0: [1.0, 1.2], 1: [2.2], 2: [3.0], 7: [9.0]})
    catboost = scores("a", "catboost", {0: [1.0], 1: [2.0], 2: [3.0]})
    others = [
        *scores("a", "xgboost", {0: [0.5], 1: [2.5], 2: [5.0]}),
        *scores("a", "lightgbm", {n: [9.0] for n in range(3)}),
    ]
    one = [score for peer in (arena.DEFAULT, *arena.PEERS) for score in scores("b", peer, {0: [1.0, 2.0]})]
    (_, _, line) = arena.differences([*ours, *catboost, *others, *one])
    spread = 0.1 * math.sqrt(1 / 3 + 1 / 9) * 4.303 / 2.0  # t of two degrees of freedom
    assert line == f"| a | 3 | catboost | +5.0 % ± {100 * spread:.1f} |"
    assert arena.differences(one) == [], "one split has no interval"
