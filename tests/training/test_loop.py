"""The loop's decisions, as pure functions; which batches it asks for, and when it stops and writes checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from sparkring.conf.blocks.checkpoint import CheckpointConfig
from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.train import EarlyStopping, TrainConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import Batch, Meter
from sparkring.training.data.order import epoch_ids
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import ReadRequest
from sparkring.training.launch.messages import WindowTiming
from sparkring.training.loop.fit import (
    Callbacks,
    LoopRecord,
    TrainerState,
    TrainingDiverged,
    after_evaluation,
    after_step,
    fit,
    improved,
    meets_after,
    next_meeting,
    on_skipped,
    total_steps,
)
from sparkring.training.parallel.local import StepInfo

CONFIG = TrainConfig(epochs=3, early_stopping=EarlyStopping(patience=2))
NO_CHECKPOINTS = CheckpointConfig(every_s=None, on_improvement=False)


def changed(config: TrainConfig, **changes: Any) -> TrainConfig:
    return config.model_copy(update=changes)


@pytest.mark.parametrize(
    ("value", "best", "mode", "delta", "expected"),
    [
        (1.0, None, "min", 0.0, True),
        (math.nan, None, "min", 0.0, False),
        (0.9, 1.0, "min", 0.0, True),
        (0.9, 1.0, "min", 0.2, False),
        (1.1, 1.0, "max", 0.0, True),
        (math.inf, 1.0, "max", 0.0, False),
    ],
)
def test_improved(value: float, best: float | None, mode: str, delta: float, expected: bool) -> None:
    assert improved(value, best, mode, delta) is expected


def test_total_steps() -> None:
    assert total_steps(CONFIG, 7) == 21
    assert total_steps(changed(CONFIG, steps=5), 7) == 5
    with pytest.raises(ValueError, match=r"train\.global_batch: larger than the training split"):
        total_steps(CONFIG, 0)


def test_early_stopping_waits_for_patience_and_keeps_the_best() -> None:
    state = TrainerState()
    for step, loss in enumerate([1.0, 0.5, 0.6, 0.7], start=1):
        assert not state.stopped_early
        state = after_evaluation(replace(state, step=step), {"loss": loss}, CONFIG)
    assert state.stopped_early and state.best_value == 0.5 and state.best_step == 2


def test_a_metric_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"train\.best_metric = 'auc': .*\['loss'\]"):
        after_evaluation(TrainerState(), {"loss": 1.0}, changed(CONFIG, best_metric="auc"))


def test_skipped_steps_of_replicas_are_counted_when_all_know_of_them() -> None:
    batch = Batch({}, 1, 1, 7)
    alone = after_step(TrainerState(skipped_steps=1), batch, StepInfo(math.nan, skipped=True, counted_skips=0))
    assert (alone.skipped_steps, alone.skipped_in_a_row, alone.step, alone.consumed_samples) == (1, 1, 1, 7)
    all_of_it = after_step(alone, batch, StepInfo(1.0, counted_skips=3))
    assert (all_of_it.skipped_steps, all_of_it.skipped_in_a_row) == (4, 0)
    ring = after_step(all_of_it, batch, StepInfo(math.nan, skipped=True))
    assert (ring.skipped_steps, ring.skipped_in_a_row) == (5, 1)


def test_steps_skipped_in_a_row_end_training_and_steps_skipped_in_all_do_not() -> None:
    told: list[str] = []
    reporter: Any = SimpleNamespace(event=lambda kind, _: told.append(kind))
    on_skipped(TrainerState(skipped_steps=99, skipped_in_a_row=2), 1, 2, reporter)
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row .* first on rank 1; .*max_skipped_steps = 2"):
        on_skipped(TrainerState(skipped_steps=3, skipped_in_a_row=3), 1, 2, reporter)
    assert told == ["step_skipped"] * 2


def test_state_survives_json() -> None:
    state = TrainerState(step=3, consumed_samples=99, last_valid={"loss": 0.1})
    record = {"state": state.to_json(), "dataset": "d", "order": {}, "config_digest": ""}
    assert TypeAdapter(LoopRecord).validate_python(record)["state"] == state


class Still:
    """A strategy that changes nothing; and a driver that wants nothing."""

    rank, waited_s, lookahead = 0, 0.0, 1

    def ahead(self, batches: Any) -> Any:
        return batches

    def forward_backward(self, batch: Any) -> torch.Tensor:
        return torch.tensor(0.0)

    def step(self, lr: float) -> Any:
        return StepInfo(grad_norm=0.0)

    @property
    def meeting(self) -> Any:
        return self

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def share_of_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def heartbeat(self, *_: Any) -> None: ...
    def metrics(self, *_: Any, **__: Any) -> None: ...
    def begin_steps(self, step: int, last: int, lookahead: int = 1) -> None: ...
    def ask_checkpoint(self) -> None: ...
    def cut_after(self, step: int) -> tuple[bool, bool]:
        return False, False


class Clocked(Still):
    """Steps of `step_s` by the loop's own clock, whose time `now` is; and their reader."""

    meter = Meter()

    def __init__(self, step_s: float, steps_per_epoch: int):
        self.step_s, self.steps_per_epoch, self.now = step_s, steps_per_epoch, 0.0

    def batches(self, consumed: int, count: int) -> Any:
        return (Batch({}, 1, 1, i + 1) for i in range(consumed, consumed + count))

    def forward_backward(self, batch: Any) -> torch.Tensor:
        self.now += self.step_s
        return super().forward_backward(batch)


class Announced(Clocked):
    """The driver announces cuts: step -> (stop, checkpoint). Sums over ranks are counted."""

    def __init__(self, cuts: dict[int, tuple[bool, bool]]):
        super().__init__(1.0, steps_per_epoch=1000)
        self.cuts, self.begun, self.heard, self.sums = cuts, list[tuple[int, int]](), list[int](), 0

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return values

    def begin_steps(self, step: int, last: int, lookahead: int = 1) -> None:
        self.begun.append((step, last))

    def cut_after(self, step: int) -> tuple[bool, bool]:
        self.heard.append(step)
        return self.cuts.get(step, (False, False))


@pytest.mark.parametrize(
    ("cuts", "saved", "ended"),
    [
        ({23: (True, False)}, [23], 23),
        ({13: (False, True), 17: (True, True)}, [13, 17], 17),
        ({40: (False, True)}, [40], 40),  # the last step: once
        ({41: (True, False)}, [40], 40),  # beyond it: training ends as if nothing had been asked
    ],
)
def test_the_loop_acts_after_the_announced_step_and_only_a_checkpoint_makes_ranks_meet(
    cuts: dict[int, tuple[bool, bool]], saved: list[int], ended: int
) -> None:
    driver: Any = Announced(cuts)
    written = list[int]()
    callbacks = Callbacks(lambda _: 0.1, lambda _: {"loss": 0.0}, lambda state, _: written.append(state.step))
    config = changed(CONFIG, epochs=None, steps=40, log_every_steps=1, eval_every_steps=100)
    state = fit(driver, driver, callbacks, driver, config, NO_CHECKPOINTS, TrainerState(step=10))
    assert (written, state.step, driver.sums) == (saved, ended, len(saved))
    assert driver.begun == [(10, 40)] and driver.heard == list(range(11, ended + 1))


def test_a_stop_that_is_asked_for_while_an_evaluation_runs_is_heard_when_it_ends() -> None:
    driver: Any = Announced({})
    saved = list[int]()

    def evaluate(step: int) -> dict[str, float]:
        driver.cuts = {step: (True, False)}  # the rank has not passed this step
        return {"loss": 1.0}

    callbacks = Callbacks(lambda _: 0.1, evaluate, lambda state, _: saved.append(state.step))
    config = changed(CONFIG, eval_every_steps=7)
    assert fit(driver, driver, callbacks, driver, config, NO_CHECKPOINTS, TrainerState()).step == 7
    assert saved == [7]


class Parts(Clocked):
    """One of two ranks; its parts of the loss by step. A step's loss is its number, times ten on rank 1."""

    def __init__(self, rank: int):
        super().__init__(1.0, steps_per_epoch=1000)
        self.rank, self.parts = rank, dict[int, tuple[float, float]]()

    def forward_backward(self, batch: Any) -> torch.Tensor:
        return torch.tensor(float(batch.consumed_samples) * (10 if self.rank else 1), dtype=torch.float64)

    def metrics(self, step: int, values: dict[str, float], *, timing: Any, means: Any = None) -> None:
        if means:
            assert "train/loss" not in values
            self.parts[step] = means["train/loss"]


def test_each_rank_reports_its_own_part_of_the_loss_and_the_first_what_was_carried_over() -> None:
    config = changed(CONFIG, epochs=None, steps=6, log_every_steps=2, eval_every_steps=100)
    callbacks = Callbacks(lambda _: 0.1, lambda _: {"loss": 0.0}, lambda *_: None)
    began = TrainerState(step=1, consumed_samples=1, loss_sum=100.0, loss_rows=3)
    found = []
    for rank in (0, 1):
        one: Any = Parts(rank)
        fit(one, one, callbacks, one, config, NO_CHECKPOINTS, began)
        found.append(one.parts)
    assert found == [
        {2: (100.0 + 2, 3 + 1), 4: (3.0 + 4, 2), 6: (5.0 + 6, 2)},
        {2: (20.0, 0.0), 4: (70.0, 0.0), 6: (110.0, 0.0)},
    ]


def test_a_checkpoint_from_before_there_were_plateaus_is_read() -> None:
    stored = TrainerState(step=3).to_json()
    del stored["plateau"]
    assert TypeAdapter(TrainerState).validate_python(stored) == TrainerState(step=3)


def test_training_reads_on_across_epochs_and_not_past_its_last_step(
    make_dataset: Callable[..., DatasetManifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, stopped early, or resumed in the middle or at the end of an epoch: each step has the same batch."""
    manifest = make_dataset(tmp_path, [[20] * 5])  # 10 steps an epoch
    asked: list[tuple[int, int]] = []
    batches = ParquetReader.batches
    monkeypatch.setattr(ParquetReader, "batches", lambda self, *at: asked.append(at) or batches(self, *at))

    def train(state: TrainerState, losses: tuple[float, ...] = (), **how: Any) -> tuple[TrainerState, dict[Any, Any]]:
        request = ReadRequest(open_storage(str(tmp_path)), manifest, "train", None, 10)
        reader = ParquetReader(request, config=DataConfig(lanes=2, audit=True))
        seen: dict[tuple[int, int], list[int]] = {}

        def on_step(epoch: int, step: int, batch: Batch) -> None:
            seen[epoch, step] = batch.ids.tolist()  # type: ignore[union-attr]
            plan = epoch_ids(reader.plan, epoch)[step * 10 : (step + 1) * 10]
            assert seen[epoch, step] == plan.tolist() and batch.consumed_samples == (epoch * 10 + step + 1) * 10

        value = iter(losses)
        still: Any = Still()
        callbacks = Callbacks(lambda _: 0.1, lambda _: {"loss": next(value, 0.0)}, lambda *_: None, on_step)
        state = fit(still, reader, callbacks, still, changed(CONFIG, **how), NO_CHECKPOINTS, state)
        reader.close()
        return state, seen

    state, whole = train(TrainerState(), (3.0, 2.0, 1.0))
    assert (
        state.step == 30
        and state.consumed_samples == 300
        and list(whole) == [(e, s) for e in range(3) for s in range(10)]
    )
    for step in (7, 10, 20):
        state, rest = train(TrainerState(step=step, consumed_samples=10 * step, best_value=9.0), (3.0, 2.0, 1.0))
        assert state.consumed_samples == 300 and rest == {
            key: ids for key, ids in whole.items() if key[0] * 10 + key[1] >= step
        }
    state, part = train(TrainerState(), epochs=None, steps=14)
    assert state.step == 14 and part == {key: ids for key, ids in whole.items() if key[0] * 10 + key[1] < 14}
    state, early = train(TrainerState(), (1.0, 2.0, 2.0), early_stopping=EarlyStopping(patience=1))
    assert state.stopped_early and list(early) == list(whole)[:20]
    assert train(state)[1] == {} == train(TrainerState(step=30))[1]
    assert asked == [(0, 30), (70, 23), (100, 20), (200, 10), (0, 14), (0, 30)]


STEPS, LOSSES = 24, (5.0, 4.0, 6.0, 3.0)  # of the validations at steps 6, 12, 18, 24
SHORT = TrainConfig(epochs=None, steps=STEPS, log_every_steps=3, eval_every_steps=6)


class World(Clocked):
    """Steps take one second each; the driver asks for a checkpoint at second `asked_at`."""

    def __init__(self, asked_at: int | None = None):
        super().__init__(1.0, steps_per_epoch=STEPS)
        self.asked_at, self.saved = asked_at, list[int]()

    def ask_checkpoint(self) -> None:
        """The driver announces it for the step that was made."""
        self.asked_at = 0

    def cut_after(self, step: int) -> tuple[bool, bool]:
        asked = self.asked_at is not None and self.now >= self.asked_at
        self.asked_at = None if asked else self.asked_at
        return False, asked

    def save(self, state: TrainerState, metric: float | None) -> None:
        self.saved.append(state.step)


@pytest.mark.parametrize(
    ("how", "asked_at", "saved"),
    [
        ({}, None, [24]),  # the end always
        ({"every_steps": 10}, None, [10, 20, 24]),
        ({"every_s": 7.0}, None, [7, 14, 21, 24]),
        ({"on_improvement": True}, None, [6, 12, 24]),
        ({}, 4, [4, 24]),  # asked for: once
        ({"every_steps": 12, "every_s": 7.0}, None, [7, 12, 19, 24]),  # seconds since the last
    ],
)
def test_when_a_checkpoint_is_written(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], asked_at: int | None, saved: list[int]
) -> None:
    world: Any = World(asked_at)
    monkeypatch.setattr("sparkring.training.loop.timing.time", SimpleNamespace(monotonic=lambda: world.now))
    callbacks = Callbacks(lambda _: 0.1, lambda step: {"loss": LOSSES[step // 6 - 1]}, world.save)
    fit(world, world, callbacks, world, SHORT, NO_CHECKPOINTS.model_copy(update=how), TrainerState())
    assert world.saved == saved


class Metered(World):
    """A reader that took 2 s to its first batch, and 3 s of decoding since it was last asked; what is logged of it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = iter([{"first_batch_s": 2.0}])
        self.meter = SimpleNamespace(take_seconds=lambda: {"decode_s": 3.0, **next(self.taken, {})}, take_counts=dict)
        self.logged = dict[int, dict[str, float]]()
        self.timed, self.reported = set[int](), set[int]()  # steps

    def metrics(self, step: int, values: dict[str, float], *, timing: Any, means: Any = None) -> None:
        self.logged[step] = {name: value for name, value in values.items() if name.startswith("data/")}
        self.reported |= {step} if means else set()
        self.timed |= {step} if isinstance(timing, WindowTiming) else set()


def test_the_time_to_the_first_batch_is_not_divided_by_steps() -> None:
    world: Any = Metered()
    callbacks = Callbacks(lambda _: 0.1, lambda _: {"loss": 0.0}, world.save)
    fit(world, world, callbacks, world, SHORT, NO_CHECKPOINTS, TrainerState())
    assert world.logged.pop(3) == {"data/first_batch_s": 2.0, "data/decode_s": 1.0}
    assert all(said in ({}, {"data/decode_s": 1.0}) for said in world.logged.values()) and 24 in world.logged
    assert world.timed == world.reported and 24 in world.timed, "stragglers are found by these"


class Late(Parts):
    """A rank with backup workers: in every third step its gradient comes too late; what it records."""

    def __init__(self, rank: int):
        super().__init__(rank)
        self.made = 0

    def step(self, lr: float) -> StepInfo:
        self.made += 1
        return StepInfo(grad_norm=0.0, counted=self.made % 3 != 0)


def test_rows_that_came_too_late_are_neither_in_the_logged_loss_nor_recorded() -> None:
    rank, recorded = Late(0), list[int]()
    config = changed(CONFIG, epochs=None, steps=6, log_every_steps=6, eval_every_steps=100)
    callbacks = Callbacks(
        lambda _: 0.1, lambda _: {"loss": 0.0}, lambda *_: None, lambda epoch, step, batch: recorded.append(step + 1)
    )
    one: Any = rank
    fit(one, one, callbacks, one, config, NO_CHECKPOINTS, TrainerState())
    assert recorded == [1, 2, 4, 5] and rank.parts[6] == (1 + 2 + 4 + 5, 6)


@pytest.mark.parametrize(
    ("step", "evaluated", "saved", "cut", "expected"),
    [
        (0, None, None, None, 10), (9, None, None, None, 10), (10, None, None, None, 20), (7, 4, None, None, 8),
        (8, 4, 3, None, 9), (24, 4, 3, None, 25), (0, 4, None, 3, 3), (0, 4, None, 5, 4), (20, None, None, 99, 25),
    ],
)  # fmt: skip
def test_ranks_meet_next_where_an_epoch_an_evaluation_a_checkpoint_or_a_cut_is_due(
    step: int, evaluated: int | None, saved: int | None, cut: int | None, expected: int
) -> None:
    config = changed(CONFIG, epochs=None, steps=25, eval_every_steps=evaluated)
    assert next_meeting(step, 10, config, CheckpointConfig(every_steps=saved), cut) == expected


def test_ranks_meet_where_they_evaluate_or_write_a_checkpoint_on_schedule_and_at_the_end() -> None:
    def meetings(evaluated: int | None, saved: int | None) -> list[int]:
        config, keep = TrainConfig(steps=17, eval_every_steps=evaluated), CheckpointConfig(every_steps=saved)
        return [step for step in range(1, 18) if meets_after(step, 10, config, keep)]

    assert meetings(None, None) == [10, 17]
    assert meetings(100, None) == [17]
    assert meetings(100, 6) == [6, 12, 17]
    assert meetings(8, 6) == [6, 8, 12, 16, 17]
