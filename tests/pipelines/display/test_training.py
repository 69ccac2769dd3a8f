"""What a person sees while ranks train: lines, a bar on a terminal, the ranks' output."""

from __future__ import annotations

import logging

import pytest

from sparkring.pipelines.job import progress as training
from sparkring.pipelines.job.progress import ProgressDisplay, time_left
from sparkring.training.launch.messages import AttemptStarted, ChildEvent, Event, Heartbeat, LogLines, RankMetrics
from sparkring.training.launch.topology import Child

EVENTS: list[Event] = [
    AttemptStarted(1, 2, 1.25),
    ChildEvent(Child("rank", 0), 1, "ring", {"world": 2, "engine": "torch-gloo"}),
    ChildEvent(Child("rank", 1), 1, "ring", {"world": 2, "engine": "torch-gloo"}),
    ChildEvent(Child("rank", 0), 1, "training", {"steps": 20, "from_step": 10, "per_epoch": 5}),
    LogLines(Child("rank", 1), 1, ("hello",)),
    RankMetrics(0, 1, 11, {"train/loss": 0.5, "perf/rows_per_s": 1000.0}, None),
    RankMetrics(1, 1, 11, {"train/loss": 0.9}, None),
    RankMetrics(0, 1, 12, {"train/loss": 0.4}, None),
    RankMetrics(0, 1, 12, {"valid/loss": 0.25}, None),
    ChildEvent(Child("rank", 0), 1, "resumed", {"step": 10, "skipped": ["step-12: no marker"]}),
]


def test_events_of_rank_0_are_lines_and_losses_come_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    display = ProgressDisplay(interactive=False)
    with caplog.at_level(logging.INFO, "train"):
        for event in EVENTS:
            display.on_event(event)
        display.close()
    assert caplog.messages == [
        "2 ranks started in 1.2 s",
        "ring of 2 formed, engine torch-gloo",
        "training from step 10 to 20, 4 epochs",
        "[rank 1] hello",
        "step 11 of 20, epoch 3: loss 0.5000, 1,000 rows/s, 0 s left",
        "step 12: valid loss 0.2500",
        "resumed from the checkpoint of step 10",
        "checkpoint skipped: step-12: no marker",
    ]


def test_on_a_terminal_losses_are_beside_a_bar(caplog: pytest.LogCaptureFixture) -> None:
    display = ProgressDisplay(interactive=True)
    with caplog.at_level(logging.INFO, "train"):
        for event in EVENTS[3:8]:
            display.on_event(event)
    assert display.bar is not None and (display.bar.n, display.bar.total) == (12, 20)
    assert not [line for line in caplog.messages if "loss" in line]
    display.close()
    assert display.bar is None


def test_of_many_evaluations_a_second_some_are_shown_and_the_last(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(training.time, "monotonic", lambda: now)
    display = ProgressDisplay(interactive=False)
    with caplog.at_level(logging.INFO, "train"):
        for step in range(1, 16):
            now += 0.125
            display.on_event(RankMetrics(0, 1, step, {"valid/loss": float(step)}, None))
        display.close()
        display.close()
    assert [line.split(":")[0] for line in caplog.messages] == ["step 1", "step 9", "step 15"]


def test_the_step_that_ends_an_epoch_is_of_that_epoch(caplog: pytest.LogCaptureFixture) -> None:
    for step, epoch in ((1, 1), (5, 1), (6, 2), (20, 4)):
        display = ProgressDisplay(interactive=False)
        with caplog.at_level(logging.INFO, "train"):
            for event in (EVENTS[3], RankMetrics(0, 1, step, {"train/loss": 0.5}, None)):
                display.on_event(event)
        assert f"step {step} of 20, epoch {epoch}:" in caplog.messages[-1]


PHASES = ["step", "evaluate batch 1 of 30", "evaluate batch 2 of 30", "test batch 5 of 9", "export tensor 4 of 8"]


def test_evaluation_and_export_say_how_far_they_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(training.time, "monotonic", lambda: now)
    display = ProgressDisplay(interactive=False)
    with caplog.at_level(logging.INFO, "train"):
        for phase, at in zip(PHASES, (100.0, 101.0, 102.0, 110.0, 120.0), strict=True):
            now = at
            display.on_event(Heartbeat(0, 1, 10, phase))
            display.on_event(Heartbeat(1, 1, 10, phase.replace("batch", "batch of rank 1,")))
    assert caplog.messages == ["evaluate batch 1 of 30", "test batch 5 of 9", "export tensor 4 of 8"]
    bar = ProgressDisplay(interactive=True)
    for event in (EVENTS[3], Heartbeat(0, 1, 10, "evaluate batch 2 of 30")):
        bar.on_event(event)
    assert bar.bar is not None and bar.bar.desc == "evaluate batch 2 of 30"
    bar.on_event(EVENTS[5])
    assert bar.bar.desc == "epoch 3", "steps again"
    bar.close()


@pytest.mark.parametrize(
    ("step", "total", "seconds", "left"),
    [
        (10, 20, 5.0, ""),  # begun at step 10
        (15, 20, 5.0, ", 5 s left"),
        (11, 110, 7.0, ", 12 min left"),
        (11, 1010, 60.0, ", 16 h 39 min left"),
        (20, 20, 3.0, ", 0 s left"),
    ],
)
def test_the_time_that_is_left(step: int, total: int, seconds: float, left: str) -> None:
    assert time_left(step, total, (10, 100.0), 100.0 + seconds) == left
