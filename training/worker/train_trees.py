"""One rank of a job that trains trees: configuration and dataset in; the trees, predictions and scores out.

`train` is the entry, and reads as that of networks does (train.py): what both do is in parts.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.format import CheckpointError
from sparkring.training.data.batch import Batch, Reader
from sparkring.training.hooks import EvaluationSeen, Hooks, StepSeen
from sparkring.training.launch.host.processes import usable_cores
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.loop.evaluation import evaluate_split, wants_whole_split
from sparkring.training.loop.fit import LoopRecord, TrainerState
from sparkring.training.loop.rounds import RoundCallbacks, fit_rounds, round_settings
from sparkring.training.model.recipe_model import ModelColumns, pick_columns, recipe_task
from sparkring.training.parallel.process_groups import start_process_group
from sparkring.training.trees.collective import connected
from sparkring.training.trees.columns import TreeColumns, seen_by
from sparkring.training.trees.grow import TreesRanks
from sparkring.training.trees.model import write_trees
from sparkring.training.trees.params import booster_params, count_classes, rows_per_leaf
from sparkring.training.trees.rows import HeldBatch, TreeRows
from sparkring.training.trees.sample import Sampler
from sparkring.training.worker.agreement import agree_threads, peers
from sparkring.training.worker.parts import (
    MODEL_FOLDER,
    RankParts,
    check_continues,
    open_checkpoints,
    score_test,
    score_valid,
)
from sparkring.training.worker.payload import TrainPayload
from sparkring.training.worker.result import WorkerResult
from sparkring.training.worker.splits import Splits, left_out

log = logging.getLogger(__name__)
CPU = torch.device("cpu")
TREES = "trees"  # of a checkpoint: XGBoost's file as bytes


@dataclass(frozen=True)
class TreesParts(RankParts):
    """What training trees is made of on this rank."""

    strategy: TreesRanks
    columns: ModelColumns
    threads: int
    pages: str  # local folder for rows that do not fit into memory


def train(ctx: WorkerContext) -> WorkerResult:
    """Train, export and score on this rank. `ctx.payload`: a TrainPayload as JSON."""
    began = time.monotonic()
    payload = TrainPayload.of_json(ctx.payload)
    config, dataset, run = payload.recipe(), open_storage(payload.dataset), payload.run_folder
    manifest = seen_by(config.model, read_manifest(dataset))
    columns = pick_columns(manifest, config.model)
    task = recipe_task(config.model, columns, manifest)
    ctx.heartbeat(0, "ring")
    timeout_s = config.launch.collective_timeout_s
    if ctx.world_size > 1:
        start_process_group(ctx.rank_info, CPU, timedelta(seconds=timeout_s))
    sampler = Sampler(config.train.seed, ctx.rank, config.trees.subsample, config.trees.columns_per_tree)
    seen, kind = TreeColumns.of(manifest, columns.features), config.model.kind
    ranks = TreesRanks(ctx.rank_info, seen, sampler, kind, rows_per_leaf(config.trees, kind))
    gather = peers(ranks, ctx, config.checkpoint.timeout_s).gather
    offer = max(1, usable_cores() // max(ctx.local_size, 1))  # ranks of one host share its cores
    threads = agree_threads(run, config.train.threads_per_rank, offer, gather, ctx.rank)
    torch.set_num_threads(threads)
    with connected(ctx.rank_info, gather, timeout_s), TemporaryDirectory(prefix="sparkring-trees-") as pages:
        ctx.event("ring", {"engine": ranks.engine, "world": ctx.world_size, "seconds_s": time.monotonic() - began})
        hooks = Hooks(config.train.hooks, ctx.rank == 0)
        checkpoints = open_checkpoints(ctx, config, run, hooks, ranks)
        latest = checkpoints.latest(config.checkpoint.verify)
        splits = Splits(ctx, config, dataset, manifest, ranks, CPU, columns.read)
        parts = TreesParts(
            ctx=ctx,
            payload=payload,
            config=config,
            manifest=manifest,
            run=run,
            strategy=ranks,
            task=task,
            gather=gather,
            hooks=hooks,
            checkpoints=checkpoints,
            latest=latest,
            splits=splits,
            columns=columns,
            threads=threads,
            pages=pages,
        )
        try:
            result = _train(parts, began)
        finally:
            splits.close()
    if dist.is_initialized():  # after an error it ends with the process
        dist.destroy_process_group()
    return result


def _train(parts: TreesParts, began: float) -> WorkerResult:
    """Read, resume, add rounds, export, score."""
    ctx, config, ranks = parts.ctx, parts.config, parts.strategy
    reader = parts.splits.open("train")  # every row once: a round is over all of them
    valid = parts.splits.open(config.train.valid_split)
    test = parts.splits.open(config.train.test_split) if config.train.test_split is not None else None
    for split in filter(None, (reader, valid, test)):
        split.verify()  # now: a damaged test file would else be found when training is done
    ctx.heartbeat(0, "read")
    training = hold_training(parts, reader)
    held = tree_rows(parts).hold(valid.batches(), like=training.matrix)
    record = {  # a LoopRecord without its state
        "dataset": parts.manifest.fingerprint,
        "order": reader.order_state(),
        "config_digest": parts.payload.config_digest,
    }
    ctx.heartbeat(0, "prepare")
    begun = resume(parts, training, record)
    settings = round_settings(config.train, config.trees)
    steps = config.trees.rounds
    started = {"from_step": begun.step, "steps": steps, "per_epoch": 1, "startup_s": time.monotonic() - began}
    ctx.event("training", started | {"unit": "round"})
    began_training = time.monotonic()
    state = fit_rounds(
        ranks, reader, make_callbacks(parts, training, held, record), ctx, settings, config.checkpoint, begun
    )
    parts.checkpoints.wait()
    parts.hooks.deliver()
    train_s = time.monotonic() - began_training
    result = WorkerResult(
        engine=ranks.engine,
        world=ctx.world_size,
        threads_per_rank=parts.threads,
        finished=state.step >= steps or state.stopped_early,
        steps=state.step,
        consumed_samples=state.consumed_samples,
        skipped_steps=0,
        stopped_early=state.stopped_early,
        best_step=state.best_step,
        best_value=state.best_value,
        train_s=train_s,
        rows_per_s=(state.consumed_samples - begun.consumed_samples) / max(train_s, 1e-9),
        valid=state.last_valid,
        measured={},
        train_left_out=left_out(reader),
    )
    if result.finished:  # else: asked to stop; the last checkpoint is where the next command continues
        rounds = exported_rounds(config, state)
        ranks.keep_rounds(rounds)
        result = score_valid(parts, valid, replace(result, exported_step=rounds, weights=MODEL_FOLDER))
        if config.trees.refit:
            refit(parts, reader, valid, rounds)
        if ctx.rank == 0:
            write_trees(parts.run.at(MODEL_FOLDER), ranks.booster)
        result = score_test(parts, test, result)
    parts.checkpoints.close()
    return result


def exported_rounds(config: RunConfig, state: TrainerState) -> int:
    """Return the model's rounds: with early stopping the best, as later rounds only served to find it."""
    takes_best = config.trees.early_stopping_rounds is not None or config.train.export == "best"
    return state.best_step if takes_best and state.best_step is not None else state.step


def refit(parts: TreesParts, train: Reader, valid: Reader, rounds: int) -> None:
    """Grow the best number of rounds again, on the training and the validation rows together. Collective.

    A command that continues here begins the refit again, and ends with the same bits.
    """
    training = hold_training(parts, train, valid)
    parts.strategy.begin(tree_params(parts, training), training)
    for number in range(rounds):
        parts.ctx.heartbeat(rounds, f"refit round {number + 1} of {rounds}")
        parts.strategy.add_round(number)


def hold_training(parts: TreesParts, *splits: Reader) -> HeldBatch:
    """Read this rank's rows of the splits for all rounds. Collective."""
    config, ctx, columns = parts.config.trees, parts.ctx, parts.strategy.columns
    rows = tree_rows(parts)
    own = sum(-(-split.epochs.samples // ctx.world_size) for split in splits)

    def batches() -> Iterator[Batch]:
        return chain.from_iterable(split.batches() for split in splits)

    fits = rows.fit(own, config.memory_share, ctx.local_size)
    if all(answer == b"fits" for answer in parts.gather(b"fits" if fits else b"-")):
        training = rows.hold(batches())
    else:  # on all ranks, as they make the same passes together
        training = rows.hold_on_disk(batches, mkdtemp(dir=parts.pages))  # a refit has other pages
    where = "in memory" if training.is_in_memory else f"in pages below {parts.pages}"
    log.info("%d training rows of %d columns, %s", training.rows, len(columns.names), where)
    return training


def tree_rows(parts: TreesParts) -> TreeRows:
    columns, labels = parts.strategy.columns, parts.columns.labels
    return TreeRows(columns, parts.task, labels, parts.config.trees.max_bin, parts.threads, parts.ctx.on_progress)


def tree_params(parts: TreesParts, training: HeldBatch) -> dict[str, Any]:
    """Make the parameters of a booster. Collective."""
    config = parts.config
    classes = count_classes(parts.manifest, config.model, training.columns[parts.columns.labels[0]], parts.gather)
    return booster_params(config.trees, config.model.kind, classes, config.train.seed, parts.threads)


def resume(parts: TreesParts, training: HeldBatch, record: dict[str, Any]) -> TrainerState:
    """Begin with the trees of the newest good checkpoint and return its state; a new state without a checkpoint.

    ValueError where the checkpoint is of another dataset or order, by name.
    """
    config, ranks, latest = parts.config, parts.strategy, parts.latest
    params = tree_params(parts, training)
    if latest is None:
        ranks.begin(params, training)
        return TrainerState()
    (size,) = parts.checkpoints.shapes(latest)[TREES] or (0,)
    stored = {TREES: torch.empty(size, dtype=torch.uint8)}
    check = TypeAdapter(LoopRecord).validate_python
    found = check(parts.checkpoints.load(latest, stored, check=check).trainer)
    check_continues(latest, found, record, config.checkpoint)
    try:
        ranks.begin(params, training, stored[TREES].numpy().tobytes())
    except ValueError as error:
        raise CheckpointError(f"{latest.uri}: its trees cannot be read: {error}") from error
    state = found["state"]
    parts.ctx.event("resumed", {"step": state.step, "uri": latest.uri, "skipped": list(latest.skipped)})
    return state


def make_callbacks(parts: TreesParts, training: HeldBatch, valid: HeldBatch, record: dict[str, Any]) -> RoundCallbacks:
    """Make the functions called between two rounds. `record`: LoopRecord without its state, for checkpoints."""
    ranks, task, hooks, train = parts.strategy, parts.task, parts.hooks, parts.config.train
    gathers = wants_whole_split(train, task.split_metric_names())

    def evaluate(step: int) -> dict[str, float]:
        return evaluate_split(ranks, [valid], task, whole=parts.whole_split() if gathers else None)

    def train_loss() -> tuple[float, float]:
        return loss_of(parts, training)

    def save(state: TrainerState) -> None:
        trees = torch.frombuffer(bytearray(ranks.state()), dtype=torch.uint8)
        parts.checkpoints.save(
            state.step, {TREES: trees}, {"state": state.to_json()} | record, state.last_valid[train.best_metric]
        )

    def on_round(state: TrainerState) -> None:
        if hooks.sees_steps:
            loss, weight = ranks.meeting.sum_over_data(torch.tensor(train_loss(), dtype=torch.float64)).tolist()
            lr, world = parts.config.trees.learning_rate, parts.ctx.world_size
            seen = (
                state.step,
                float(state.step),
                state.consumed_samples,
                loss / weight,
                lr,
                float("nan"),
                False,
                world,
            )
            hooks.stepped(StepSeen(*seen))
        hooks.evaluated(EvaluationSeen(state.step, dict(state.last_valid), state.best_step, state.best_value))
        hooks.deliver()

    return RoundCallbacks(evaluate, train_loss, save, on_round)


def loss_of(parts: TreesParts, batch: Batch) -> tuple[float, float]:
    """Sum this rank's losses by row weight; return (sum, total weight)."""
    outputs = parts.strategy.evaluate(batch)
    if outputs is None:
        return 0.0, 0.0
    weights = batch.row_weights().double()
    return float((parts.task.loss(outputs, batch.columns).double() * weights).sum()), float(weights.sum())
