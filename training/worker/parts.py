"""What a training is made of on one rank, and what every kind of model does the same way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from sparkring.conf.blocks.checkpoint import CheckpointConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import Storage
from sparkring.training.checkpoint.checkpointer import ROUNDS_OF_SAVE, Checkpointer, CheckpointInfo
from sparkring.training.checkpoint.layout import CHECKPOINTS
from sparkring.training.checkpoint.policy import Retention
from sparkring.training.data.batch import Reader
from sparkring.training.data.resume import PASSES, explain_difference
from sparkring.training.hooks import CheckpointSeen, Hooks
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.loop.evaluation import WholeSplit, evaluate_split
from sparkring.training.loop.fit import LoopRecord
from sparkring.training.model.calibration import is_calibrated
from sparkring.training.model.predictions import Predictions
from sparkring.training.models.task import Task
from sparkring.training.parallel.strategy import Ranks
from sparkring.training.tables.files import RowFile, check_whole
from sparkring.training.worker.agreement import peers
from sparkring.training.worker.payload import TrainPayload
from sparkring.training.worker.result import SplitScores, WorkerResult
from sparkring.training.worker.splits import Splits, left_out

log = logging.getLogger(__name__)
MODEL_FOLDER = "model"  # below the run folder


@dataclass(frozen=True)
class RankParts:
    """What one training is made of on this rank, whatever model it trains."""

    ctx: WorkerContext
    payload: TrainPayload
    config: RunConfig
    manifest: DatasetManifest
    run: Storage
    strategy: Ranks
    task: Task
    gather: Callable[[bytes], list[bytes]]  # between all ranks
    hooks: Hooks
    checkpoints: Checkpointer
    latest: CheckpointInfo | None  # the checkpoint to continue from
    splits: Splits

    def whole_split(self) -> WholeSplit:
        """Make a collector for one evaluation."""
        return WholeSplit(self.task, self.gather, self.strategy.is_data_leader, self.manifest.weight is not None)


def open_checkpoints(ctx: WorkerContext, config: RunConfig, run: Storage, hooks: Hooks, ranks: Ranks) -> Checkpointer:
    """Open the run's checkpoints; notify the driver and hooks of each commit. Collective.

    Args:
        ctx: context of this rank.
        config: resolved configuration of the run.
        run: folder of the run.
        hooks: hooks of the user.
        ranks: carry messages between ranks.
    """
    keep = config.checkpoint

    def on_commit(info: CheckpointInfo) -> None:
        data = {"step": info.step, "uri": info.uri, "metric": info.metric, "bytes": info.bytes, "world": info.world}
        ctx.event("checkpoint", data)
        hooks.committed(CheckpointSeen(info.step, info.uri, info.bytes))

    return Checkpointer(
        run.at(CHECKPOINTS),
        peers(ranks, ctx, keep.timeout_s, ROUNDS_OF_SAVE),
        Retention(keep.keep_last, keep.keep_best, keep.keep_every, config.train.best_mode),
        asynchronous=keep.asynchronous,
        on_commit=on_commit,
        on_progress=ctx.on_progress,
        check=check_usable,
    )


def check_usable(trainer: dict[str, Any], tables: Mapping[str, Sequence[Mapping[str, RowFile]]]) -> None:
    """Raise ValueError where training cannot continue from a checkpoint's values, or a table lacks some of its rows."""
    TypeAdapter(LoopRecord).validate_python(trainer)
    for name, files in tables.items():
        check_whole(name, files)


def check_continues(
    latest: CheckpointInfo, stored: LoopRecord, record: Mapping[str, Any], keep: CheckpointConfig
) -> None:
    """Raise ValueError, with the differences, if a checkpoint used another dataset, order or pass count.

    Args:
        latest: checkpoint to continue from.
        stored: loop record in the checkpoint.
        record: loop record that this attempt would store.
        keep: settings, which may allow another order.
    """
    passes = record.get("accumulate")
    before = {"dataset": stored["dataset"], PASSES: stored.get("accumulate", passes)} | stored["order"]
    if differences := explain_difference(before, {"dataset": record["dataset"], PASSES: passes} | record["order"]):
        message = f"{latest.uri}: was trained on other batches: {'; '.join(differences)}"
        if not keep.allow_other_order:
            raise ValueError(
                f"{message}. Give the run another name, set checkpoint.resume=false to start again, "
                "or checkpoint.allow_other_order=true to continue all the same"
            )
        log.warning("%s; going on because checkpoint.allow_other_order is set", message)


def score_valid(parts: RankParts, valid: Reader, result: WorkerResult) -> WorkerResult:
    """Add what the model scores on the validation rows, where it is compared with another family's or calibrated."""
    if not (parts.payload.is_compared or is_calibrated(parts.config)):
        return result
    folder = f"{predictions_folder(parts)}/valid"
    return replace(result, exported_valid=score_split(parts, valid, "valid", folder, result.steps))


def score_test(parts: RankParts, test: Reader | None, result: WorkerResult) -> WorkerResult:
    """Add what the exported model scores on `train.test_split`, where there is one."""
    if test is None:
        return result
    scored = score_split(parts, test, "test", predictions_folder(parts), result.steps)
    return replace(result, test=scored.metrics, test_left_out=scored.left_out, predictions=scored.predictions)


def predictions_folder(parts: RankParts) -> str:
    return f"predictions/attempt-{parts.ctx.attempt}"


def score_split(parts: RankParts, reader: Reader, name: str, folder: str, step: int) -> SplitScores:
    """Score a split by the model, and write this rank's predictions where the task has any. Collective.

    Args:
        parts: model, reader settings and links of this rank.
        reader: reader of the split.
        name: name of the split in heartbeats.
        folder: folder of the predictions, relative to the run's.
        step: step shown in heartbeats.
    """
    ctx, strategy, task = parts.ctx, parts.strategy, parts.task
    predictions = Predictions(task, parts.manifest.weight is not None) if strategy.is_data_leader else None
    metrics = evaluate_split(
        strategy,
        reader.batches(),
        task,
        on_batch=predictions.add if predictions else None,
        on_progress=lambda n: ctx.heartbeat(step, f"{name} batch {n + 1} of {reader.steps_per_epoch}"),
        whole=parts.whole_split() if task.split_metric_names() else None,
    )
    file = predictions.write(parts.run, f"{folder}/part-{ctx.rank:05d}.parquet") if predictions else None
    return SplitScores(metrics=metrics, left_out=left_out(reader), predictions=file)
