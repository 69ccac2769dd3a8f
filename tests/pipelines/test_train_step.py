"""The training step's own decisions, and what it records of attempts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkring.conf.load import load_config
from sparkring.conf.storage import open_storage
from sparkring.pipelines.job.progress import ProgressDisplay
from sparkring.pipelines.job.train_step import (
    Events,
    busy_by_rank,
    going_on_said,
    once_s,
    per_step_s,
    point_at_checkpoints,
    policy,
    record_tables,
)
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.training.checkpoint.catalog import encode_marker
from sparkring.training.checkpoint.layout import MARKER
from sparkring.training.launch.job import JobResult
from sparkring.training.launch.messages import (
    AttemptEnded,
    AttemptStarted,
    ChildEvent,
    LateLogLines,
    RankMetrics,
    Recovered,
    Stacks,
    Straggler,
    WindowTiming,
)
from sparkring.training.launch.restart import best_world
from sparkring.training.launch.topology import Child
from sparkring.training.worker.result import FailedAttempt, IdUses
from tests.pipelines.results import rank_result
from tests.pipelines.tracking.test_tracker import away, journaled


@pytest.mark.parametrize(
    ("words", "worlds"),
    [
        ([], [1, 2, 3, 4]),
        (["parallel.zero=2", "parallel.shard=2", "parallel.engine=torch"], [0, 2, 2, 4]),
        (["parallel.dp=4"], [0, 0, 0, 4]),
        (["parallel.pp=2"], [0, 2, 2, 4]),
    ],
)
def test_recovery_goes_to_the_largest_world_the_layout_accepts(
    tmp_path: Path, words: list[str], worlds: list[int]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "{name: r, dataset: d, model: {factory: sparkring.training.models.tabular:Tabular}, "
        "train: {epochs: 1, global_batch: 24}, launch: {world: 4, min_world: 1}}"
    )
    rules = policy(load_config(str(recipe), words).config)
    assert [best_world(slots, rules) for slots in (1, 2, 3, 4)] == worlds


class Recorder:
    """A tracker that keeps what it is told of the training run."""

    def __init__(self) -> None:
        self.points: dict[tuple[str, int], float] = {}
        self.named: dict[str, Any] = {}

    def metrics(self, part: str, step: int, values: dict[str, float]) -> None:
        self.points |= {(name, step): value for name, value in values.items()}

    def tags(self, part: str, tags: dict[str, Any]) -> None:
        self.named |= tags

    def checkpoint(self, part: str, *pointer: Any, **more: Any) -> None:
        pass


ENDED = AttemptEnded(1, 3, "lost", "was lost: nothing is heard", 17, 7, "shrink", 2, why="lost in attempt 1 on 3 ranks")


def test_every_attempt_and_the_slow_host_are_in_the_run() -> None:
    tracker = Recorder()
    events = Events(tracker, ProgressDisplay(interactive=False), open_storage("/nowhere"))  # type: ignore[arg-type]
    for event in (
        AttemptStarted(1, 3, 4.5),
        ENDED,
        AttemptStarted(2, 2, 0.5),
        Recovered(2, 1.5),
        Straggler(1, 2, "h7 (10.0.0.7)", 20, 2.0, 1.0),
        LateLogLines(1, 1, ("Traceback ...", "  ...")),
        Stacks(0, 2, "File ..."),
    ):
        events.on_event(event)
    assert tracker.points == {
        ("launch/start_s", 1): 4.5, ("launch/world", 1): 3, ("launch/steps_lost", 1): 7.0,
        ("launch/start_s", 2): 0.5, ("launch/world", 2): 2, ("launch/recover_s", 2): 1.5,
    }  # fmt: skip
    assert tracker.named == {
        "sparkring.attempt.1": "lost on 3 ranks: was lost: nothing is heard; shrink: lost in attempt 1 on 3 ranks",
        "sparkring.straggler": "rank 1 on h7 (10.0.0.7)",
    }
    assert events.failed_attempts == [
        FailedAttempt(
            attempt=1, world=3, cause="lost", message="was lost: nothing is heard", step=17, steps_lost=7,
            decision="shrink", next_world=2, recover_s=1.5,
        )
    ]  # fmt: skip
    assert events.texts == {
        ("stacks", "attempt-2-rank-0.txt"): "File ...",
        ("late_output", "attempt-1-rank-1.txt"): "Traceback ...\n  ...\n",
    }


@pytest.mark.parametrize("is_first", [True, False])
def test_where_a_command_went_on_is_known_and_not_where_its_later_attempts_did(is_first: bool, tmp_path: Path) -> None:
    events = Events(Recorder(), ProgressDisplay(interactive=False), open_storage(str(tmp_path)))  # type: ignore[arg-type]
    resumed = ChildEvent(Child("rank", 0), 1, "resumed", {"step": 40, "uri": "", "skipped": []})
    measured = RankMetrics(0, 1, 50, {"train/loss": 0.5}, None)
    for event in (resumed, measured) if is_first else (measured, resumed):
        events.on_event(event)
    assert events.resumed_from == (40 if is_first else None) and events.history == {"train/loss": {50: 0.5}}


def test_a_run_keeps_its_curves_over_commands_up_to_the_checkpoint(tmp_path: Path) -> None:
    def command() -> Events:
        return Events(Recorder(), ProgressDisplay(interactive=False), open_storage(str(tmp_path)))  # type: ignore[arg-type]

    def measured(step: int, loss: float) -> RankMetrics:
        return RankMetrics(0, 1, step, {"train/loss": loss}, None)

    resumed = ChildEvent(Child("rank", 0), 1, "resumed", {"step": 40, "uri": "", "skipped": []})
    first = command()
    first.on_event(RankMetrics(0, 1, 30, {"valid/auc": 0.7}, None))
    for step, loss in ((30, 0.9), (40, float("nan"))):
        first.on_event(measured(step, loss))
    written = {"step": 40, "uri": "c", "bytes": 1, "world": 1, "metric": ""}
    first.on_event(ChildEvent(Child("rank", 0), 1, "checkpoint", written))
    first.on_event(measured(50, 0.7))  # and here the driver is killed, without its end
    command().close()  # one that ends before it begins
    second = command()
    second.on_event(resumed)
    second.on_event(measured(50, 0.75))
    second.close()
    third = command()
    third.on_event(ChildEvent(Child("rank", 0), 1, "resumed", {"step": 45, "uri": "", "skipped": []}))
    assert list(third.history["train/loss"]) == [30, 40] and third.history["valid/auc"] == {30: 0.7}
    assert math.isnan(third.history["train/loss"][40]) and second.history["train/loss"][50] == 0.75

    (tmp_path / "history.json").write_text("{")
    fourth = command()
    fourth.on_event(resumed)
    assert fourth.history == {} and fourth.resumed_from == 40


def test_the_figure_shows_the_slowest_ranks() -> None:
    timings = {"step": [10, 10, 10, 20, 20, 20], "rank": [0, 1, 2] * 2, "busy_s": [0.1, 0.9, 0.2] * 2}
    assert busy_by_rank(timings, most=2) == {"rank 1": [(10, 0.9), (20, 0.9)], "rank 2": [(10, 0.2), (20, 0.2)]}
    assert busy_by_rank({}) == {}


def test_what_a_reader_needed_once_is_no_mean_of_steps() -> None:
    windows = [
        WindowTiming(0.4, 0.1, 0.0, 0.0, {}, {"decode_s": 0.1}, {"first_batch_s": 2.0}),
        None,
        WindowTiming(0.2, 0.0, 0.2, 0.0, {"evaluate_s": 1.0}, {"decode_s": 0.3}, {}),
    ]
    result = JobResult([None], 1, 1, [RankMetrics(0, 1, 10, {"x": 1.0}, timing) for timing in windows])
    assert per_step_s(result) == pytest.approx(
        {"decode_s": 0.2, "data_stall_s": 0.1, "evaluate_s": 0.5, "step_s": 0.3, "wait_s": 0.05}
    )
    assert once_s(result) == {"first_batch_s": 2.0}
    assert per_step_s(JobResult([None], 1, 1)) == once_s(JobResult([None], 1, 1)) == {}


def test_a_checkpoint_that_the_driver_did_not_hear_of_gets_its_pointer(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    files = {f"g/{name}": {"bytes": 2, "sha256": "0" * 64} for name in ("index.json", "trainer.json")}
    files |= {f"g/rank-0000{rank}.json": {"bytes": 3, "sha256": "0" * 64} for rank in (0, 1)}
    for step, metric in ((10, None), (20, 0.5)):
        run.put_atomic(f"checkpoints/step-{step}/{MARKER}", encode_marker(step, "g", 2, metric, files))
    run.put_atomic("checkpoints/step-30/g/index.json", b"no marker: a kill came before")
    heard: list[tuple[Any, ...]] = []
    point_at_checkpoints(run, SimpleNamespace(checkpoint=lambda *pointer: heard.append(pointer)))  # type: ignore[arg-type]
    at = run.at("checkpoints")
    assert heard == [("train", 10, at.at("step-10").uri, 10, 2, None), ("train", 20, at.at("step-20").uri, 10, 2, 0.5)]


@pytest.mark.parametrize(
    ("step", "said"), [(None, "at step 0: there is no checkpoint yet"), (20, "at the checkpoint of step 20")]
)
def test_a_stop_says_where_the_command_goes_on(
    tmp_path: Path, step: int | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_storage(str(tmp_path))
    if step is not None:
        files = {f"g/{name}": {"bytes": 1, "sha256": "0" * 64} for name in ("index.json", "trainer.json")}
        files["g/rank-00000.json"] = files["g/index.json"]
        run.put_atomic(f"checkpoints/step-{step}/{MARKER}", encode_marker(step, "g", 1, None, files))
    with pytest.raises(KeyboardInterrupt), going_on_said(run):
        raise KeyboardInterrupt
    assert caplog.messages == [f"stopped; the same command continues {said}"]


def test_what_sparse_tables_hold_and_their_most_used_ids_are_recorded(tmp_path: Path) -> None:
    tables = {"hashed.user": {"rows": 5, "admitted": 7, "evicted": 2, "bytes": 900}}
    hot = {"hashed.user": IdUses(top=[(-42, 9), (7, 3)], total=30, missed=1)}
    tracker = Tracker(away(tmp_path), job="j", name="flights")
    with tracker.part("train"):
        record_tables(tracker, rank_result(steps=10, tables=tables, hot_ids=hot))
        record_tables(tracker, rank_result())
    tracker.close(timeout_s=30)
    ops = [op for op in journaled(tmp_path) if op["op"] in ("metrics", "artifact")]
    (points,) = [op["points"] for op in ops if op["op"] == "metrics"]
    found = {name: (value, step) for name, value, step, _ in points}
    name = "tables/hashed.user"
    values = {"rows": 5.0, "admitted": 7.0, "evicted": 2.0, "bytes": 900.0}
    assert found == {f"{name}/{key}": (value, 10) for key, value in values.items()}
    (file,) = [path for path in tmp_path.rglob("*hot_ids.json") if path.is_file()]
    assert json.loads(file.read_text()) == {"hashed.user": {"top": [[-42, 9], [7, 3]], "total": 30, "missed": 1}}
