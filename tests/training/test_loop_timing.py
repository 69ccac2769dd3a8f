"""The loop's clock: what is a mean per step, what is not, and when a checkpoint is due."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkring.training.data.batch import Meter
from sparkring.training.launch.messages import WindowTiming
from sparkring.training.loop.timing import LoopTiming


def test_a_window_holds_means_per_step_and_the_next_one_begins_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sparkring.training.loop.timing.time", SimpleNamespace(monotonic=lambda: now[0]))
    timing = LoopTiming()
    reader: Any = SimpleNamespace(meter=Meter({"decode": 1.0, "first_batch": 5.0}, {"rows": 100}))
    strategy: Any = SimpleNamespace(waited_s=3.0)
    batches: Any = iter(["a", "b"])
    waits = iter([0.5, 1.0])  # so the steps' own seconds are 1.5 and 1.0
    for _ in timing.waiting(batches):
        with timing.measure("step"):
            now[0] += 2.0
        timing.step_done(waited_s=next(waits))
    with timing.measure("evaluate"):
        now[0] += 6.0
    window, shown = timing.take(reader, strategy, global_rows=50)
    assert window == WindowTiming(
        step_s=2.0, wait_s=1.5, data_stall_s=0.0, busy_sd_s=0.25,
        between_s={"evaluate_s": 3.0}, reader_s={"decode_s": 0.5}, once_s={"first_batch_s": 5.0},
    )  # fmt: skip
    assert window.busy_s == 0.5
    assert shown == {
        "perf/step_s": 2.0, "perf/evaluate_s": 3.0, "perf/data_stall_s": 0.0, "perf/wait_s": 1.5,
        "perf/busy_sd_s": 0.25,
        "perf/rows_per_s": 10.0, "data/decode_s": 0.5, "data/first_batch_s": 5.0, "data/rows": 50.0,
    }  # fmt: skip
    assert timing.take(reader, strategy, 50)[0] == WindowTiming(0.0, 0.0, 0.0, 0.0, {}, {}, {})


def test_a_checkpoint_by_the_clock_is_asked_for_once_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sparkring.training.loop.timing.time", SimpleNamespace(monotonic=lambda: now[0]))
    timing, found = LoopTiming(), list[bool]()
    for now[0] in (1.0, 2.0, 3.0):
        assert not timing.is_overdue(None)
        found.append(timing.is_overdue(2.0))
    timing.checkpoint_written()
    for now[0] in (4.0, 5.0, 6.0):
        found.append(timing.is_overdue(2.0))
    assert found == [False, True, False, False, True, False]
