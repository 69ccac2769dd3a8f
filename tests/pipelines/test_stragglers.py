"""`sparkring plan stragglers`: what it reads, when it says to stay on the ring, and when not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkring.conf.manifest import ManifestError
from sparkring.conf.storage import open_storage
from sparkring.pipelines.cli import main
from sparkring.pipelines.run import stragglers
from sparkring.pipelines.run.stragglers import advice, read_windows, save_step_times, straggler_advice
from sparkring.training.launch.health import StragglerDetector
from sparkring.training.launch.messages import WindowTiming
from sparkring.training.planner.stragglers import Window


def windows(busy_s: list[float], sd_s: float, exchange_s: float, count: int = 20) -> list[Window]:
    """As of a ring: a step takes what is drawn for the slowest rank, and the exchange."""
    plain = Window(100, np.array(busy_s), np.full(len(busy_s), sd_s), 0.0)
    slowest = stragglers.sampled([plain] * count).busy_s.max(axis=1).mean()
    return [Window(100, plain.busy_s, plain.sd_s, float(slowest) + exchange_s)] * count


def test_equal_ranks_stay_on_the_ring() -> None:
    lines = advice(windows([0.1] * 8, 0.005, 0.005), has_tables=False)
    assert lines[-1].startswith("Stay on the ring: nothing is 1.2 times as fast (the most is 1.")
    assert (
        lines[0].startswith("8 ranks, 2000 steps: a step takes 112") and "5.0 ms are left for the exchange" in lines[0]
    )
    assert not any("tables.lag" in line for line in lines)


def test_jitter_is_cured_by_a_bound() -> None:
    text = "\n".join(advice(windows([0.1] * 8, 0.053, 0.0), has_tables=False))
    assert "servers, bound 3 would give 1.6" in text and "compare the loss over seconds" in text
    assert "Stay on the ring" not in text and "all the time" not in text


def test_a_constant_straggler_is_named_with_what_repairing_it_gives_and_that_no_bound_cures_it() -> None:
    lines = advice(windows([0.1] * 7 + [0.3], 0.0, 0.0), has_tables=False)
    text = "\n".join(lines)
    assert "Rank 7 takes 3.0 times the median rank's time, all the time." in lines
    assert "A bound does not cure a rank that is always slow" in text and "Look at the host of rank 7 first" in text
    assert "3.00 times as fast with it repaired, and 2.62 times without it" in text
    assert "   1.00  servers, bound 10" in lines
    assert lines[-1] == "Stay on the ring, and have its slow host repaired: no form gives much more (2.75)."


def test_a_long_exchange_is_for_a_codec_first() -> None:
    text = "\n".join(advice(windows([0.1] * 2, 0.001, 0.2), has_tables=True))
    assert "The exchange is 67% of a step: `parallel.compress` makes it smaller first" in text
    assert (
        " 1.50  tables.lag: 1, if rows are all that is exchanged" in text and "local SGD, every 10 would give" in text
    )


def columns(steps: int, ranks: int = 2) -> dict[str, list[Any]]:
    """What the driver keeps of ranks' metrics."""
    detector = StragglerDetector(ranks)
    for step in range(10, 10 * steps + 1, 10):
        for rank in range(ranks):
            step_s = 0.3 + (step == 10)  # memory is allocated
            detector.add(rank, step, WindowTiming(step_s, 0.1 * rank, 0.05, 0.02, {}, {}, {}))
    return detector.figure()


def test_the_windows_of_a_run_are_read_without_the_first(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    save_step_times(run, columns(5))
    found = read_windows(run)
    assert [window.steps for window in found] == [10] * 4
    assert found[0].busy_s == pytest.approx([0.35, 0.25]) and found[0].sd_s == pytest.approx([0.02, 0.02])
    assert found[0].step_s == pytest.approx(0.35)


def test_too_few_windows_are_refused(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    save_step_times(run, columns(3))
    with pytest.raises(ManifestError, match=r"step_times.json: has 3 logging windows of 2 ranks; it takes 4"):
        read_windows(run)
    broken = columns(5)
    (tmp_path / "step_times.json").write_text(json.dumps({**{k: v[:-1] for k, v in broken.items()}, "format": 1}))
    with pytest.raises(ManifestError, match="has 5 logging windows"):
        read_windows(run)
    (tmp_path / "step_times.json").write_text('{"step": [-1]}')
    with pytest.raises(ManifestError, match=r"step_times\.json"):
        read_windows(run)


@pytest.mark.parametrize(
    ("parallel", "world", "problem"),
    [
        ({"servers": {"per_host": 1}}, 2, "was trained on parameter servers"),
        ({"averaging": {"kind": "easgd"}}, 2, "was trained with parallel.averaging.kind=easgd"),
        ({"pp": 2}, 2, r"was trained with pp\(2\), tp\(1\), cp\(1\)"),
        ({}, 1, "was trained by one rank"),
    ],
)
def test_times_that_are_not_a_rings_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parallel: dict[str, Any], world: int, problem: str
) -> None:
    from sparkring.conf.blocks.parallel import ParallelConfig

    config = SimpleNamespace(parallel=ParallelConfig.model_validate(parallel))
    result = SimpleNamespace(run_config=lambda: config, train=SimpleNamespace(world=world, tables={}))
    monkeypatch.setattr(stragglers, "read_result", lambda run: result)
    with pytest.raises(ManifestError, match=problem):
        straggler_advice(str(tmp_path))


def test_a_folder_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "stragglers", str(tmp_path)]) == 3
    assert "summary.json" in capsys.readouterr().err
