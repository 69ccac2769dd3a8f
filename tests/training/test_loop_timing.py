"""The loop's clock: what is a mean per step, what is not, and how often ranks poll the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkring.training.loop_timing import ControlPoller, LoopTiming, poll_interval


@pytest.mark.parametrize(
    ("spent_ms", "ranks", "steps", "every"),
    [
        (20, 2, 10, 10),  # 1 ms a step: with the log lines only
        (0, 2, 10, 10),
        (10 * 4 * 250, 4, 10, 4),
        (3 * 2 * 900, 2, 3, 1),
        (60_000, 1, 1, 1),
    ],
)
def test_ranks_poll_the_driver_about_once_a_second(spent_ms: float, ranks: float, steps: int, every: int) -> None:
    assert poll_interval(spent_ms, ranks, steps, most=10) == every


def test_a_poller_asks_at_the_first_step_and_then_as_planned() -> None:
    poller = ControlPoller(most_steps=100)
    assert poller.due()
    poller.plan(*poller.own_share(0.25))  # one step of 250 ms, one rank
    assert [poller.due() for _ in range(4)] == [False, False, False, True]
    assert poller.own_share(1.25) == (1000.0, 1.0), "since the last poll"


def test_a_window_holds_means_per_step_and_the_next_one_begins_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sparkring.training.loop_timing.time", SimpleNamespace(monotonic=lambda: now[0]))
    timing = LoopTiming()
    reader: Any = SimpleNamespace(meter=SimpleNamespace(take=lambda: {"decode_s": 1.0, "first_batch_s": 5.0}))
    strategy: Any = SimpleNamespace(waited_s=3.0)
    batches: Any = iter(["a", "b"])
    for _ in timing.waiting(batches):
        with timing.measure("step"):
            now[0] += 2.0
    with timing.measure("evaluate"):
        now[0] += 6.0
    assert timing.stepping_s == 4.0, "evaluation is no step"
    assert timing.take(reader, strategy, global_rows=50) == {
        "perf/step_s": 2.0, "perf/evaluate_s": 3.0, "perf/data_stall_s": 0.0, "perf/wait_s": 1.5,
        "perf/rows_per_s": 10.0, "data/decode_s": 0.5, "data/first_batch_s": 5.0,
    }  # fmt: skip
    assert timing.take(reader, strategy, 50)["perf/wait_s"] == 0.0
    timing.checkpoint_written()
    now[0] += 1.5
    assert timing.since_checkpoint_s() == 1.5
