"""The trunk: batches in, steps out, and everything that happens between two steps. Knows no strategy and no model.

Whatever ranks must decide together (stop, checkpoint now) is summed over them, so no rank can act alone and none waits
for one that does not: in the same small collective as the logged loss, and about once a second between log lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

from conf.stored import Count
from training.data.batch import ONCE, Batch, Reader
from training.models.task import Task
from training.parallel.strategy import Strategy


@dataclass(frozen=True)
class LoopSettings:
    """Seconds end in `_s`; None means never."""

    epochs: int | None
    steps: int | None
    log_every_steps: int
    eval_every_steps: int | None
    best_metric: str = "loss"
    best_mode: str = "min"
    stop_metric: str | None = None
    stop_mode: str = "min"
    patience: int = 3
    min_delta: float = 0.0
    max_skipped_steps: int = 20
    checkpoint_every_steps: int | None = None
    checkpoint_every_s: float | None = None
    checkpoint_on_best: bool = False


@dataclass(frozen=True)
class TrainerState:
    """All the loop must know to go on as if it had never stopped; JSON in every checkpoint."""

    step: Count = 0  # global batches consumed, skipped ones included
    cursor: Count = 0  # samples consumed
    skipped_steps: Count = 0
    skipped_in_a_row: Count = 0
    best_value: float | None = None
    best_step: Count | None = None
    stop_best: float | None = None
    evals_without_gain: Count = 0
    stopped_early: bool = False
    loss_sum: float = 0.0  # of the logging window that was open
    loss_rows: Count = 0
    last_valid: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class LoopRecord(TypedDict):
    """What the loop keeps in a checkpoint: where it was, and on which order of which dataset."""

    state: TrainerState
    dataset: str
    order: dict[str, Any]
    config_digest: str


class Reporter(Protocol):
    """The driver, as a worker sees it."""

    def metrics(self, step: int, values: dict[str, float]) -> None: ...
    def heartbeat(self, step: int, phase: str) -> None: ...
    def event(self, kind: str, data: dict[str, Any]) -> None: ...
    def should_stop(self) -> bool: ...
    def should_checkpoint(self) -> bool: ...


SaveCheckpoint = Callable[[TrainerState, float | None], None]


class TrainingDiverged(RuntimeError):
    """Gradients were not finite for too many steps in a row."""


def total_steps(settings: LoopSettings, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run; ValueError where an epoch has none."""
    if steps_per_epoch < 1:
        raise ValueError(
            "train.global_batch: larger than the training split, so an epoch has no full batch; "
            "make it smaller, or set data.tail to pad"
        )
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None
    return settings.epochs * steps_per_epoch


def improved(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Whether `value` beats `best` by more than min_delta; a value that is not finite never does."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if mode == "min" else value > best + min_delta


def pick(metrics: dict[str, float], name: str, key: str) -> float:
    """The named validation metric; ValueError names the configuration key and what there is."""
    if name not in metrics:
        raise ValueError(f"{key} = {name!r}: no such validation metric; there are {sorted(metrics)}")
    return metrics[name]


def after_evaluation(state: TrainerState, metrics: dict[str, float], settings: LoopSettings) -> TrainerState:
    """Best value, and whether patience has run out."""
    state = replace(state, last_valid=dict(metrics))
    best = pick(metrics, settings.best_metric, "train.best_metric")
    if improved(best, state.best_value, settings.best_mode):
        state = replace(state, best_value=best, best_step=state.step)
    if settings.stop_metric is None:
        return state
    value = pick(metrics, settings.stop_metric, "train.early_stopping.metric")
    if improved(value, state.stop_best, settings.stop_mode, settings.min_delta):
        return replace(state, stop_best=value, evals_without_gain=0)
    without = state.evals_without_gain + 1
    return replace(state, evals_without_gain=without, stopped_early=without >= settings.patience)


def fit(
    strategy: Strategy,
    reader: Reader,
    evaluate: Callable[[int], dict[str, float]],
    lr_at: Callable[[int], float],
    save: SaveCheckpoint,
    reporter: Reporter,
    settings: LoopSettings,
    state: TrainerState,
    on_step: Callable[[int, int, Batch], None] | None = None,
) -> TrainerState:
    """Train from `state` to the end; returns the final state. Raises TrainingDiverged.

    `evaluate(step)` gives validation metrics equal on every rank; `lr_at(step)` the learning rate; `save(state,
    metric)` writes a checkpoint (collective); metric is the best-metric's value right after an evaluation, else None.
    `on_step(epoch, step in the epoch, batch)` hears of every batch the optimizer has consumed.
    """
    steps_per_epoch = reader.steps_per_epoch
    last = total_steps(settings, steps_per_epoch)
    eval_every = settings.eval_every_steps or steps_per_epoch
    clock, looks = _Clock(), _ControlPoller(settings.log_every_steps)
    # Each rank keeps its own sums of the open logging window; a checkpoint keeps them summed over ranks.
    window = _Window(carried_sum=state.loss_sum, carried_rows=state.loss_rows)
    if state.stopped_early or state.step >= last:
        return state
    batches = reader.batches(state.cursor, last - state.step)
    for batch in clock.waiting(batches):
        reporter.heartbeat(state.step, "step")
        lr = lr_at(state.step)
        with clock.timing("step"):
            window.add(strategy.forward_backward(batch), batch.global_rows)
            info = strategy.step(lr)
        if on_step is not None:
            on_step(*divmod(state.step, steps_per_epoch), batch)
        state = _count(state, batch, info.skipped)
        if info.skipped:
            on_skipped(state, info.first_bad_rank, settings, reporter)
        log_now = state.step % settings.log_every_steps == 0 or state.step == last
        eval_now = state.step % eval_every == 0 or state.step == last
        stop = requested = False
        if looks.due() or log_now:
            due = settings.checkpoint_every_s is not None and clock.since_checkpoint_s() >= settings.checkpoint_every_s
            wishes = [float(reporter.should_stop()), float(reporter.should_checkpoint() or due)]
            sums = [*wishes, *looks.spent(clock.stepping_s)]
            loss, sums = window.reduce(strategy, sums) if log_now else (0.0, sum_of(strategy, sums))
            stop, requested = sums[0] > 0, sums[1] > 0
            looks.plan(*sums[2:])
        if log_now:
            reporter.metrics(
                state.step,
                {
                    "train/loss": loss,
                    "train/lr": lr,
                    "train/grad_norm": info.grad_norm,
                    "train/epoch": state.step / steps_per_epoch,
                }
                | {"train/skipped_steps": float(state.skipped_steps)}
                | clock.take(reader, strategy, batch.global_rows),
            )
        metric = None
        if eval_now:
            reporter.heartbeat(state.step, "evaluate")
            with clock.timing("evaluate"):
                values = evaluate(state.step)
            reporter.metrics(state.step, {f"valid/{k}": v for k, v in values.items()})
            best_before = state.best_step
            state = after_evaluation(state, values, settings)
            metric = values[settings.best_metric]
            requested |= settings.checkpoint_on_best and state.best_step != best_before
        finished = stop or state.stopped_early or state.step >= last
        every = settings.checkpoint_every_steps
        if requested or finished or (every is not None and state.step % every == 0):
            reporter.heartbeat(state.step, "checkpoint")
            carried_sum, carried_rows = window.total(strategy)
            with clock.timing("checkpoint_stall"):
                save(replace(state, loss_sum=carried_sum, loss_rows=carried_rows), metric)
            clock.checkpointed()
        if finished:
            break
    return state


def evaluate_split(
    strategy: Strategy,
    reader: Reader,
    task: Task,
    on_batch: Callable[[Batch, Any], None] | None = None,
    tick: Callable[[int], None] = lambda number: None,
) -> dict[str, float]:
    """Loss and metrics over a whole split: sums over rows and ranks divided by real rows, equal on every rank. Where
    the task has a `counted_share` of its rows, they are divided by its sum, not by the number of rows.

    `on_batch(batch, outputs)` sees every non-empty batch on the ranks that see outputs; `tick(number)` is called for
    each batch, so that a long split is not taken for a hang.
    """
    names = ("loss", *task.metric_names())
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    for number, batch in enumerate(reader.batches()):
        tick(number)
        outputs = strategy.evaluate(batch)
        if outputs is None or batch.rows == 0:
            continue
        if on_batch is not None:
            on_batch(batch, outputs)
        weight = batch.row_weights(outputs.device).double()
        values = {"loss": task.loss(outputs, batch.columns)} | task.metric_sums(outputs, batch.columns)
        sums[:-1] += torch.stack([(values[name].double() * weight).sum() for name in names]).cpu()
        share = task.counted_share(batch.columns)
        sums[-1] += (weight if share is None else share.to(weight) * weight).sum().cpu()
    sums = strategy.sum_over_data(sums)
    total = float(sums[-1])
    return {name: float(sums[i]) / total if total else math.nan for i, name in enumerate(names)}


LOOK_S = 1.0


def look_interval(spent_ms: float, ranks: float, steps: int, most: int) -> int:
    """Steps until ranks look again at what the driver wants: as many as a second holds; at least 1, never more than
    `most`. `spent_ms`: of all ranks together, over `steps`. Pure, and given sums only: the same on every rank."""
    step_ms = spent_ms / max(ranks, 1.0) / steps
    return max(1, min(most, int(LOOK_S * 1000 / step_ms))) if step_ms > 0 else most


def sum_of(strategy: Strategy, values: list[float]) -> list[float]:
    summed: list[float] = strategy.sum_over_data(torch.tensor(values, dtype=torch.float64)).tolist()
    return summed


def _count(state: TrainerState, batch: Batch, skipped: bool) -> TrainerState:
    return replace(
        state,
        step=state.step + 1,
        cursor=batch.consumed_samples,
        skipped_steps=state.skipped_steps + skipped,
        skipped_in_a_row=state.skipped_in_a_row + 1 if skipped else 0,
    )


def on_skipped(state: TrainerState, bad_rank: int | None, settings: LoopSettings, reporter: Reporter) -> None:
    where = {"step": state.step, "cursor": state.cursor, "rank": bad_rank}
    reporter.event("step_skipped", where)
    if state.skipped_in_a_row > settings.max_skipped_steps:
        raise TrainingDiverged(
            f"{state.skipped_in_a_row} steps in a row had gradients that are not finite, the last at step {state.step} "
            f"(samples up to {state.cursor}), first on rank {bad_rank}; lower optim.lr, look at those rows, or raise "
            f"train.max_skipped_steps = {settings.max_skipped_steps}"
        )


class _Window:
    """Loss since the last log line. `forward_backward` returns tensors; they are read only when the window closes, so a
    GPU is not made to wait for every step."""

    def __init__(self, carried_sum: float, carried_rows: int) -> None:
        self.carried_sum, self.rows = carried_sum, carried_rows
        self.losses: list[torch.Tensor] = []

    def add(self, loss_sum: torch.Tensor, global_rows: int) -> None:
        self.losses.append(loss_sum)
        self.rows += global_rows

    def _own(self) -> float:
        return float(torch.stack(self.losses).sum()) if self.losses else 0.0

    def total(self, strategy: Strategy) -> tuple[float, int]:
        """Sum over ranks so far and its rows; the window stays open."""
        return self.carried_sum + sum_of(strategy, [self._own()])[0], self.rows

    def reduce(self, strategy: Strategy, extra: list[float]) -> tuple[float, list[float]]:
        """Mean loss per row since the window opened, and `extra` summed over ranks; opens a new window."""
        own, *others = sum_of(strategy, [self._own(), *extra])
        mean = (self.carried_sum + own) / max(self.rows, 1)
        self.carried_sum, self.rows, self.losses = 0.0, 0, []
        return mean, others


class _ControlPoller:
    """At which steps ranks look at what the driver wants. After the first, and then as often as steps are long: a sum
    over ranks costs too much for every short step, and a driver that waits for a checkpoint has no time for many long
    ones."""

    def __init__(self, most: int) -> None:
        self.most, self.every, self.steps = most, 1, 0
        self.before_s = 0.0

    def due(self) -> bool:
        """Called once per step."""
        self.steps += 1
        return self.steps >= self.every

    def spent(self, stepping_s: float) -> tuple[float, float]:
        """What this rank adds to the sums: its milliseconds since the last look, whole ones, whose sum is the same in
        whatever order ranks are added; and itself."""
        spent_s, self.before_s = stepping_s - self.before_s, stepping_s
        return float(round(1000 * spent_s)), 1.0

    def plan(self, spent_ms: float, ranks: float) -> None:
        self.every, self.steps = look_interval(spent_ms, ranks, self.steps, self.most), 0


class _Clock:
    """Where the seconds of the logging window went; `stepping_s`: those of all steps, waiting for their data too."""

    def __init__(self) -> None:
        self.stepping_s = 0.0
        self.spent: dict[str, float] = {}
        self.steps = 0
        self.waited_s = 0.0
        self.opened = self.last_checkpoint = time.monotonic()

    def timing(self, name: str) -> _Timing:
        return _Timing(self, name)

    def waiting(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Count the seconds spent waiting for each next batch as `data_stall`."""
        while True:
            with self.timing("data_stall"):
                batch = next(batches, None)
            if batch is None:
                return
            self.steps += 1
            yield batch

    def checkpointed(self) -> None:
        self.last_checkpoint = time.monotonic()

    def since_checkpoint_s(self) -> float:
        return time.monotonic() - self.last_checkpoint

    def take(self, reader: Reader, strategy: Strategy, global_rows: int) -> dict[str, float]:
        """Mean seconds per step by cause, rows per second of the job, and the reader's own meter: per step too, what is
        of the beginning as it is."""
        wall_s, steps = max(time.monotonic() - self.opened, 1e-9), max(self.steps, 1)
        taken = {f"perf/{name}_s": spent / steps for name, spent in self.spent.items()}
        taken["perf/wait_s"] = (strategy.waited_s - self.waited_s) / steps
        self.waited_s = strategy.waited_s
        taken["perf/rows_per_s"] = steps * global_rows / wall_s
        taken |= {f"data/{name}": v if name in ONCE else v / steps for name, v in reader.meter.take().items()}
        self.spent, self.steps, self.opened = {}, 0, time.monotonic()
        return taken


class _Timing:
    def __init__(self, clock: _Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        spent = time.monotonic() - self.began
        self.clock.spent[self.name] = self.clock.spent.get(self.name, 0.0) + spent
        if self.name in ("step", "data_stall"):
            self.clock.stepping_s += spent
