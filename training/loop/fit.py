"""The training loop: batches in, steps out, and everything that happens between two steps.

It knows no strategy and no model, and never synchronizes ranks: a rank reports its own part of the logged loss, and the
driver announces after which step all ranks stop or write a checkpoint (training/launch/cuts.py). Ranks
synchronize where the strategy says so in a step, in an evaluation, and in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NotRequired, Protocol

import torch
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

from sparkring.conf.blocks.checkpoint import CheckpointConfig
from sparkring.conf.blocks.train import TrainConfig
from sparkring.conf.plain_text import count_of
from sparkring.conf.stored import Count
from sparkring.training.data.batch import Batch, Reader
from sparkring.training.launch.messages import WindowTiming
from sparkring.training.loop.optim.schedules import PlateauState
from sparkring.training.loop.timing import LoopTiming
from sparkring.training.parallel.local import StepInfo
from sparkring.training.parallel.strategy import Strategy


@dataclass(frozen=True)
class TrainerState:
    """All the loop must know to continue as if it had never stopped; JSON in every checkpoint."""

    step: Count = 0  # global batches consumed, skipped ones included
    consumed_samples: Count = 0
    skipped_steps: Count = 0
    skipped_in_a_row: Count = 0
    best_value: float | None = None
    best_step: Count | None = None
    stop_best: float | None = None
    evals_without_gain: Count = 0
    stopped_early: bool = False
    loss_sum: float = 0.0  # of the logging window that was open
    loss_rows: Count = 0
    plateau: PlateauState = field(default_factory=PlateauState)
    last_valid: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class LoopRecord(TypedDict):
    """What the loop keeps in a checkpoint: where it was, and on which order of which dataset."""

    state: TrainerState
    dataset: str
    order: dict[str, Any]
    config_digest: str
    accumulate: NotRequired[int]  # of a model with batch normalization, whose statistics are of a pass's rows


class Reporter(Protocol):
    """The driver, as a worker sees it; training/launch/host/rank.py says what each does."""

    @property
    def rank(self) -> int: ...
    def metrics(
        self,
        step: int,
        values: dict[str, float],
        *,
        timing: WindowTiming | None,
        means: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Report the numbers of a logging window. Of `values` and `timing`, those of rank 0 are shown.

        Args:
            step: the window's last.
            values: by the names in MLflow.
            timing: the window's seconds.
            means: by name, this rank's (total, count) of a mean over all ranks.
        """
        ...

    def heartbeat(self, step: int, phase: str) -> None: ...
    def event(self, kind: str, data: dict[str, Any]) -> None: ...
    def ask_checkpoint(self) -> None: ...
    def begin_steps(self, step: int, last: int, lookahead: int = 1) -> None: ...
    def cut_after(self, step: int) -> tuple[bool, bool]: ...


@dataclass(frozen=True)
class Stepped:
    """What a step was."""

    loss_sum: torch.Tensor  # of this data rank's rows
    global_rows: int
    lr: float
    info: StepInfo


@dataclass(frozen=True)
class Callbacks:
    """What the loop calls between two steps."""

    lr_at: Callable[[int], float]  # step -> learning rate
    evaluate: Callable[[int], dict[str, float]]  # step -> validation metrics, the same on every rank
    save: Callable[[TrainerState, float | None], None]  # collective; (state, best metric if just evaluated)
    on_step: Callable[[int, int, Batch], None] = lambda *_: None  # (epoch, step of the epoch, consumed batch)
    on_stepped: Callable[[TrainerState, Stepped], None] = lambda *_: None
    on_evaluated: Callable[[TrainerState], TrainerState] = lambda state: state  # what a schedule makes of last_valid


class TrainingDiverged(RuntimeError):
    """Gradients were not finite for too many steps in a row."""


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Return the optimizer steps of the whole run; ValueError if an epoch has none."""
    if steps_per_epoch < 1:
        raise ValueError(
            "train.global_batch: larger than the training split, so an epoch has no full batch; "
            "make it smaller, or set data.tail to pad"
        )
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return config.epochs * steps_per_epoch


def next_meeting(
    step: int, steps_per_epoch: int, config: TrainConfig, checkpoint: CheckpointConfig, cut: int | None = None
) -> int:
    """Return the next synchronization point: end of epoch, evaluation, checkpoint or stop.

    Args:
        step: number of steps done.
        steps_per_epoch: steps per epoch with the global batch.
        config: end of training and interval of evaluation.
        checkpoint: interval of scheduled checkpoints.
        cut: coordinated stop that the driver announced (WorkerContext.next_cut).
    """
    last = total_steps(config, steps_per_epoch)
    every = [steps_per_epoch, config.eval_every_steps, checkpoint.every_steps]
    return min(last, last if cut is None else cut, *((step // each + 1) * each for each in every if each))


def meets_after(step: int, steps_per_epoch: int, config: TrainConfig, checkpoint: CheckpointConfig) -> bool:
    """Return whether ranks evaluate or write a checkpoint on schedule after `step` steps."""
    every = [config.eval_every_steps or steps_per_epoch, checkpoint.every_steps]
    return step == total_steps(config, steps_per_epoch) or any(step % each == 0 for each in every if each)


def improved(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Return whether `value` beats `best` by more than min_delta; never if it is not finite."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if mode == "min" else value > best + min_delta


def pick(metrics: dict[str, float], name: str, key: str) -> float:
    """Return the named validation metric; ValueError names the configuration key and the known metrics."""
    if name not in metrics:
        raise ValueError(f"{key} = {name!r}: no such validation metric; there are {sorted(metrics)}")
    return metrics[name]


def after_evaluation(state: TrainerState, metrics: dict[str, float], config: TrainConfig) -> TrainerState:
    """Return the state with the best value so far, and whether patience has run out."""
    state = replace(state, last_valid=dict(metrics))
    best = pick(metrics, config.best_metric, "train.best_metric")
    if improved(best, state.best_value, config.best_mode):
        state = replace(state, best_value=best, best_step=state.step)
    stop = config.early_stopping
    if stop is None:
        return state
    value = pick(metrics, stop.metric, "train.early_stopping.metric")
    if improved(value, state.stop_best, stop.mode, stop.min_delta):
        return replace(state, stop_best=value, evals_without_gain=0)
    without = state.evals_without_gain + 1
    return replace(state, evals_without_gain=without, stopped_early=without >= stop.patience)


def fit(
    strategy: Strategy,
    reader: Reader,
    callbacks: Callbacks,
    reporter: Reporter,
    config: TrainConfig,
    checkpoint: CheckpointConfig,
    state: TrainerState,
) -> TrainerState:
    """Train from `state` to the end and return the final state. Raises TrainingDiverged.

    Args:
        strategy: prepared, with the weights of `state`.
        reader: this rank's share of the training split.
        callbacks: evaluation, checkpoint and learning rate, from the worker.
        reporter: the driver, as this rank sees it.
        config: how long, and when to log and to evaluate.
        checkpoint: when a checkpoint is due.
        state: new, or from a checkpoint.
    """
    steps_per_epoch = reader.steps_per_epoch
    last = total_steps(config, steps_per_epoch)
    eval_every = config.eval_every_steps or steps_per_epoch
    if state.stopped_early or state.step >= last:
        return state
    timing = LoopTiming()
    window = LossWindow(state.loss_sum, state.loss_rows)
    batches = strategy.ahead(reader.batches(state.consumed_samples, last - state.step))
    reporter.begin_steps(state.step, last, strategy.lookahead)
    for batch in timing.waiting(batches):
        reporter.heartbeat(state.step, "step")
        lr = callbacks.lr_at(state.step) * state.plateau.share
        waited_s = strategy.waited_s
        with timing.measure("step"):
            loss_of_rows = strategy.forward_backward(batch)
            info = strategy.step(lr)
        timing.step_done(strategy.waited_s - waited_s)
        window.add(loss_of_rows if info.counted else torch.zeros_like(loss_of_rows), batch.rows_of_step)
        if info.counted:  # else these rows come again
            callbacks.on_step(*divmod(state.step, steps_per_epoch), batch)
        state = after_step(state, batch, info)
        if info.skipped:
            on_skipped(state, info.first_bad_rank, config.max_skipped_steps, reporter)
        callbacks.on_stepped(state, Stepped(loss_of_rows, batch.rows_of_step, lr, info))

        if state.step % config.log_every_steps == 0 or state.step == last:
            values = {"lr": lr, "grad_norm": info.grad_norm, "epoch": state.step / steps_per_epoch}
            values["skipped_steps"] = float(state.skipped_steps)
            seconds, perf = timing.take(reader, strategy, batch.rows_of_step)
            loss = {"train/loss": window.close(strategy, is_first=reporter.rank == 0)}
            shown = {f"train/{name}": value for name, value in values.items()} | perf
            reporter.metrics(state.step, shown, timing=seconds, means=loss)

        metric, improves = None, False
        if state.step % eval_every == 0 or state.step == last:
            metrics = validate(state.step, callbacks, reporter, timing)
            state = callbacks.on_evaluated(after_evaluation(state, metrics, config))
            metric = state.last_valid[config.best_metric]
            improves = state.best_step == state.step
        # after the evaluation: a stop that is asked for while it runs is heard when it ends
        finished, save_now = ends_and_saves(state, last, checkpoint, reporter, timing)
        if save_now or (checkpoint.on_improvement and improves):
            reporter.heartbeat(state.step, "checkpoint")
            loss_sum, loss_rows = window.total(strategy)
            with timing.measure("checkpoint_stall"):
                callbacks.save(replace(state, loss_sum=loss_sum, loss_rows=loss_rows), metric)
            timing.checkpoint_written()
        if finished:
            break
    return state


def ends_and_saves(
    state: TrainerState, last: int, checkpoint: CheckpointConfig, reporter: Reporter, timing: LoopTiming
) -> tuple[bool, bool]:
    """Decide after a step whether training ends, and whether a checkpoint is due by schedule, request or end.

    Args:
        state: after the step and its evaluation.
        last: step that training ends with.
        checkpoint: when one is due.
        reporter: the driver, which announces stops and checkpoints.
        timing: when the last checkpoint was written.
    """
    if timing.is_overdue(checkpoint.every_s):
        reporter.ask_checkpoint()
    stop, save_now = reporter.cut_after(state.step)
    finished = stop or state.stopped_early or state.step >= last
    on_schedule = checkpoint.every_steps is not None and state.step % checkpoint.every_steps == 0
    return finished, save_now or finished or on_schedule


def after_step(state: TrainerState, batch: Batch, info: StepInfo) -> TrainerState:
    """Return the state after a step on `batch`."""
    counted = int(info.skipped) if info.counted_skips is None else info.counted_skips
    return replace(
        state,
        step=state.step + 1,
        consumed_samples=batch.consumed_samples,
        skipped_steps=state.skipped_steps + counted,
        skipped_in_a_row=state.skipped_in_a_row + 1 if info.skipped else 0,
    )


def on_skipped(state: TrainerState, bad_rank: int | None, most: int, reporter: Reporter) -> None:
    """Report a skipped step; raise TrainingDiverged after more than `most` in a row."""
    where = {"step": state.step, "consumed_samples": state.consumed_samples, "rank": bad_rank}
    reporter.event("step_skipped", where)
    if state.skipped_in_a_row > most:
        raise TrainingDiverged(
            f"{count_of(state.skipped_in_a_row, 'step')} in a row had gradients that are not finite, the last at step "
            f"{state.step} (samples up to {state.consumed_samples}), first on rank {bad_rank}; lower optim.lr, look at "
            f"those rows, or raise train.max_skipped_steps = {most}"
        )


def validate(step: int, callbacks: Callbacks, reporter: Reporter, timing: LoopTiming) -> dict[str, float]:
    """Evaluate, and report the metrics as `valid/<metric>`."""
    reporter.heartbeat(step, "evaluate")
    with timing.measure("evaluate"):
        metrics = callbacks.evaluate(step)
    reporter.metrics(step, {f"valid/{name}": value for name, value in metrics.items()}, timing=None)
    return metrics


def sum_over_ranks(strategy: Strategy, values: list[float]) -> list[float]:
    summed: list[float] = strategy.meeting.sum_over_data(torch.tensor(values, dtype=torch.float64)).tolist()
    return summed


class LossWindow:
    """Loss since the last log line.

    Each rank keeps and reports its own sums; a checkpoint, which synchronizes ranks anyway, keeps the sums over ranks.
    `forward_backward` returns tensors, which are read only when the window closes, so a GPU is not made to wait for
    every step.
    """

    def __init__(self, carried_sum: float, carried_rows: int) -> None:
        self.carried_sum, self.rows = carried_sum, carried_rows
        self.losses: list[torch.Tensor] = []

    def add(self, loss_sum: torch.Tensor, global_rows: int) -> None:
        self.losses.append(loss_sum)
        self.rows += global_rows

    def _own(self) -> float:
        return float(torch.stack(self.losses).sum()) if self.losses else 0.0

    def total(self, strategy: Strategy) -> tuple[float, int]:
        """Sum over ranks so far, and its rows; the window stays open."""
        return self.carried_sum + sum_over_ranks(strategy, [self._own()])[0], self.rows

    def close(self, strategy: Strategy, is_first: bool) -> tuple[float, float]:
        """Return this rank's summand (total, count) of the window's mean loss per row; start the next window.

        `is_first`: whether this rank counts the rows, which are the same on all, and the carried-over loss.
        """
        own = float(strategy.meeting.share_of_sum(torch.tensor(self._own(), dtype=torch.float64)))
        part = (self.carried_sum + own, float(max(self.rows, 1))) if is_first else (own, 0.0)
        self.carried_sum, self.rows, self.losses = 0.0, 0, []
        return part
