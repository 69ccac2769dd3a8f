"""The training loop of trees: a round over all rows is a step. What comes between two steps is as in fit.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sparkring.conf.blocks.checkpoint import CheckpointConfig
from sparkring.conf.blocks.train import EarlyStopping, TrainConfig
from sparkring.conf.blocks.trees import TreesConfig
from sparkring.training.data.batch import Reader
from sparkring.training.loop.fit import Reporter, TrainerState, after_evaluation, ends_and_saves
from sparkring.training.loop.timing import LoopTiming
from sparkring.training.trees.grow import TreesRanks


@dataclass(frozen=True)
class RoundCallbacks:
    """What the loop calls between two rounds."""

    evaluate: Callable[[int], dict[str, float]]  # step -> validation metrics, the same on every rank
    train_loss: Callable[[], tuple[float, float]]  # this rank's (sum, weight) over its training rows
    save: Callable[[TrainerState], None]  # collective
    on_round: Callable[[TrainerState], None] = lambda state: None


def round_settings(train: TrainConfig, trees: TreesConfig) -> TrainConfig:
    """Return the `train` block for boosting rounds: `trees` decides the end, every round is evaluated."""
    stop = None
    if trees.early_stopping_rounds is not None:
        stop = EarlyStopping(metric=train.best_metric, mode=train.best_mode, patience=trees.early_stopping_rounds)
    return train.model_copy(update={"epochs": None, "steps": trees.rounds, "early_stopping": stop})


def fit_rounds(
    ranks: TreesRanks,
    reader: Reader,
    callbacks: RoundCallbacks,
    reporter: Reporter,
    config: TrainConfig,
    checkpoint: CheckpointConfig,
    state: TrainerState,
) -> TrainerState:
    """Add rounds from `state` on to the end and return the final state.

    Args:
        ranks: ranks with the trees of `state`.
        reader: reader of the training split.
        callbacks: evaluation and checkpoints, from the worker.
        reporter: reports to the driver for this rank.
        config: result of `round_settings`.
        checkpoint: interval of checkpoints; `on_improvement` is ignored, as later rounds include the best ones.
        state: new state, or one from a checkpoint.
    """
    assert config.steps is not None, "round_settings has set it"
    last, rows = config.steps, reader.epochs.samples
    if state.stopped_early or state.step >= last:
        return state
    timing = LoopTiming()
    reporter.begin_steps(state.step, last, ranks.lookahead)
    for number in range(state.step, last):
        reporter.heartbeat(number, "round")
        with timing.measure("step"):
            ranks.add_round(number)
        timing.steps += 1
        timing.step_done(0.0)
        state = replace(state, step=number + 1, consumed_samples=state.consumed_samples + rows)
        with timing.measure("evaluate"):
            metrics = callbacks.evaluate(state.step)
        state = after_evaluation(state, metrics, config)
        callbacks.on_round(state)
        ends, saves = ends_and_saves(state, last, checkpoint, reporter, timing)
        if ends or state.step % config.log_every_steps == 0:
            report(state, ranks, reader, callbacks, reporter, timing)
        if saves:
            reporter.heartbeat(state.step, "checkpoint")
            with timing.measure("checkpoint_stall"):
                callbacks.save(state)
            timing.checkpoint_written()
        if ends:
            break
    return state


def report(
    state: TrainerState,
    ranks: TreesRanks,
    reader: Reader,
    callbacks: RoundCallbacks,
    reporter: Reporter,
    timing: LoopTiming,
) -> None:
    """Report the numbers of a logging window, and its last evaluation.

    Args:
        state: state after the window's last round.
        ranks: ranks of the job.
        reader: reader of the training split.
        callbacks: give the training loss.
        reporter: reports to the driver for this rank.
        timing: times of the window, which ends.
    """
    seconds, shown = timing.take(reader, ranks, reader.epochs.samples)
    reporter.metrics(state.step, shown, timing=seconds, means={"train/loss": callbacks.train_loss()})
    valid = {f"valid/{name}": value for name, value in state.last_valid.items()}
    reporter.metrics(state.step, valid, timing=None)
