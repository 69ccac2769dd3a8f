"""What the benchmarks share with the product: its data sets, servers, and the operations that its journals hold."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

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
    subprocess.run(command, cwd=ROOT / "benchmarks", check=True, timeout=600)
