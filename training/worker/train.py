"""One rank of a training job: configuration and dataset in; trained shards, predictions and scores out.

`train` is the entry of every job and reads top to bottom. Configuration stops here: what is built below gets its own
block of it, or plain arguments.
"""

from __future__ import annotations

import collections
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
from pydantic import TypeAdapter

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.train import EarlyStopping
from sparkring.conf.blocks.warm_start import WarmStartConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.checkpointer import CheckpointInfo
from sparkring.training.checkpoint.weights import write_weights
from sparkring.training.data.audit.log import FORMAT, AuditHeader, AuditLog
from sparkring.training.data.audit.parts import PartsAudit
from sparkring.training.data.batch import Batch, Reader
from sparkring.training.data.parts import PartsReader
from sparkring.training.hooks import EvaluationSeen, Hooks, StepSeen
from sparkring.training.launch.host.processes import usable_cores
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.loop.evaluation import evaluate_split, wants_whole_split
from sparkring.training.loop.fit import (
    Callbacks,
    LoopRecord,
    Stepped,
    TrainerState,
    fit,
    improved,
    meets_after,
    pick,
    sum_over_ranks,
    total_steps,
)
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.loop.optim.schedules import after_value, make_schedule, scaled_lr
from sparkring.training.model.folder import open_tables, write_tables
from sparkring.training.model.prepare import TrainableModel, prepare_model
from sparkring.training.model.recipe_model import start_model
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.data_parallel.batch_norm import batch_norms
from sparkring.training.parallel.local import OptimizerFactory
from sparkring.training.parallel.servers.link import ServersAt
from sparkring.training.parallel.sparse import TableSettings
from sparkring.training.parallel.strategy import Strategy
from sparkring.training.tables.hot_ids import HotIds
from sparkring.training.worker.agreement import agree_threads, agreed_model, peers, seed_everything
from sparkring.training.worker.device import pick_device
from sparkring.training.worker.parts import (
    MODEL_FOLDER,
    RankParts,
    check_continues,
    open_checkpoints,
    score_test,
    score_valid,
)
from sparkring.training.worker.payload import TrainPayload
from sparkring.training.worker.result import IdUses, ServerTotals, WorkerResult
from sparkring.training.worker.splits import Splits, left_out
from sparkring.training.worker.threads import recipe_work, useful_threads

log = logging.getLogger(__name__)
HOT_IDS = 20  # of each sparse table, in the result


@dataclass(frozen=True)
class Parts(RankParts):
    """What training a network is made of on this rank."""

    strategy: Strategy
    model: TrainableModel


def train(ctx: WorkerContext) -> WorkerResult:
    """Train, export and score on this rank. `ctx.payload`: a TrainPayload as JSON."""
    began = time.monotonic()
    payload = TrainPayload.of_json(ctx.payload)
    config, dataset, run = payload.recipe(), open_storage(payload.dataset), payload.run_folder
    manifest = read_manifest(dataset)
    timeout = timedelta(seconds=config.launch.collective_timeout_s)
    device = pick_device(config.train.device, ctx.rank_info, timeout, together=not config.parallel.servers.per_host)
    offer = max(1, usable_cores() // max(ctx.local_size, 1))  # ranks of one host share its cores
    torch.set_num_threads(config.train.threads_per_rank or offer)
    seed_everything(config.train.seed)
    made = start_model(config, manifest)
    if device.type == "cpu":
        offer = useful_threads(offer, recipe_work(made, config, manifest, ctx.world_size))
    ctx.heartbeat(0, "ring")
    strategy = build_strategy(
        config.parallel,
        ctx.rank_info,
        device,
        config.optim.clip_norm,
        timeout,
        config.optim.ema,
        table_settings(config),
        ServersAt(ctx.servers, ctx.server_secret),
    )
    failed, parts = True, None
    try:
        gather = peers(strategy, ctx, config.checkpoint.timeout_s).gather
        torch.set_num_threads(agree_threads(run, config.train.threads_per_rank, offer, gather, ctx.rank))
        ctx.event("ring", {"engine": strategy.engine, "world": ctx.world_size, "seconds_s": time.monotonic() - began})
        initial = agreed_model(made, config, manifest, ctx, strategy)
        hooks = Hooks(config.train.hooks, ctx.rank == 0)
        checkpoints = open_checkpoints(ctx, config, run, hooks, strategy)
        # once for the dense part and the tables: where all are damaged, both begin again
        latest = checkpoints.latest(config.checkpoint.verify)
        if latest is not None and strategy.replaces_ranks:
            checkpoints.hold(latest)  # a new process reads it again, however late
        continued = latest is not None
        model = prepare_model(initial, config, manifest, continued=continued, gather=gather, rank=ctx.rank)
        # For the user's own random numbers, such as nn.Dropout's: another world draws others (models/dropout.py).
        seed_everything(config.train.seed, strategy.data_rank)
        splits = Splits(ctx, config, dataset, manifest, strategy, device, model.columns.read)
        parts = Parts(
            ctx=ctx,
            payload=payload,
            config=config,
            manifest=manifest,
            run=run,
            strategy=strategy,
            task=model.task,
            gather=gather,
            hooks=hooks,
            checkpoints=checkpoints,
            latest=latest,
            splits=splits,
            model=model,
        )
        result = _train(parts, began)
        failed = False
        return result
    finally:
        if parts is not None:
            parts.splits.close()
        strategy.close(failed)


def _train(parts: Parts, began: float) -> WorkerResult:
    """Resume, fit, export, score."""
    ctx, config, strategy, checkpoints = parts.ctx, parts.config, parts.strategy, parts.checkpoints
    reader = parts.splits.open_training()
    valid = parts.splits.open(config.train.valid_split)
    # now, not when training is done: filters may leave nothing of it
    test = parts.splits.open(config.train.test_split) if config.train.test_split is not None else None
    steps = total_steps(config.train, reader.steps_per_epoch)
    sample = next(iter(valid.batches(0)), None) if strategy.needs_sample else None
    ctx.heartbeat(0, "prepare")
    normalized = bool(batch_norms(parts.model.initial.module))
    strategy.prepare(parts.model.initial, parts.task, optimizer_factory(config.optim), sample, config.train.compile)
    record: dict[str, Any] = {  # a LoopRecord without its state
        "dataset": parts.manifest.fingerprint,
        "order": reader.order_state(),
        "config_digest": parts.payload.config_digest,
    } | ({"accumulate": config.parallel.accumulate} if normalized else {})
    audit = open_audit(parts, reader)
    callbacks = make_callbacks(parts, reader, valid, record, audit)
    begun = begin(parts, reader, resume(parts, record), audit)
    for split in filter(None, (reader, valid, test)):
        split.verify()  # now: a damaged test file would else be found when training is done
    per_epoch = reader.steps_per_epoch
    ctx.event(
        "training",
        {"from_step": begun.step, "steps": steps, "per_epoch": per_epoch, "startup_s": time.monotonic() - began},
    )
    training = time.monotonic()
    state = fit(strategy, reader, callbacks, ctx, config.train, config.checkpoint, begun)
    checkpoints.wait()
    parts.hooks.deliver()
    train_s = time.monotonic() - training
    result = WorkerResult(
        engine=strategy.engine,
        world=ctx.world_size,
        threads_per_rank=torch.get_num_threads(),
        finished=state.step >= steps or state.stopped_early,
        steps=state.step,
        consumed_samples=state.consumed_samples,
        skipped_steps=state.skipped_steps,
        stopped_early=state.stopped_early,
        best_step=state.best_step,
        best_value=state.best_value,
        train_s=train_s,
        rows_per_s=(state.consumed_samples - begun.consumed_samples) / max(train_s, 1e-9),
        valid=state.last_valid,
        measured=strategy.measure(),
        train_left_out=left_out(reader),
        tables=table_totals(parts),
        hot_ids=hot_ids(parts),
        servers=server_totals(strategy),
        started=parts.model.started,
    )
    if result.finished:  # else: asked to stop; the last checkpoint is where the next command continues
        exported_step = load_exported_step(parts, state)
        with strategy.averaged():
            export(parts, state.step)
            result = replace(result, exported_step=exported_step, weights=MODEL_FOLDER)
            result = score_test(parts, test, score_valid(parts, valid, result))
    checkpoints.close()
    return result


def make_callbacks(
    parts: Parts, training: Reader, valid: Reader, record: dict[str, Any], audit: AuditLog | PartsAudit | None
) -> Callbacks:
    """Make the functions that the loop calls between two steps.

    Args:
        parts: model, readers and links of this rank.
        training: reader of the training split.
        valid: reader of the validation split.
        record: LoopRecord without its state, for every checkpoint.
        audit: records every batch; None disables the audit.
    """
    ctx, strategy, hooks, per_epoch = parts.ctx, parts.strategy, parts.hooks, training.steps_per_epoch
    gathers = wants_whole_split(parts.config.train, parts.task.split_metric_names())

    def evaluate(step: int) -> dict[str, float]:
        with strategy.averaged():
            return evaluate_split(
                strategy,
                valid.batches(),
                parts.task,
                on_progress=lambda n: ctx.heartbeat(step, f"evaluate batch {n + 1} of {valid.steps_per_epoch}"),
                whole=parts.whole_split() if gathers else None,
            )

    def save(state: TrainerState, metric: float | None) -> None:
        if audit is not None:
            audit.flush()  # no step a checkpoint vouches for may be missing from the audit
        parts.checkpoints.save(
            state.step,
            strategy.state_dict(),
            {"state": state.to_json()} | record,
            metric,
            tables=strategy.tables.copies(),
        )

    def on_step(epoch: int, step: int, batch: Batch) -> None:
        if audit is not None:
            audit.record(*(epoch, step) if batch.part is None else divmod(batch.part.clock, per_epoch), batch)

    follow = follow_plateau(parts.config)

    def on_stepped(state: TrainerState, made: Stepped) -> None:
        if hooks.sees_steps:
            own = float(made.loss_sum) if made.info.counted else float("nan")
            loss = loss_seen(strategy, own) / max(made.global_rows, 1)
            epoch, info, world = state.step / per_epoch, made.info, ctx.world_size
            samples = state.consumed_samples
            hooks.stepped(StepSeen(state.step, epoch, samples, loss, made.lr, info.grad_norm, info.skipped, world))
        hooks.deliver()

    def on_evaluated(state: TrainerState) -> TrainerState:
        hooks.evaluated(EvaluationSeen(state.step, dict(state.last_valid), state.best_step, state.best_value))
        state = follow(state)
        strategy.meeting.keep(to_kept(state))
        return state

    schedule = learning_rate_schedule(parts.config, total_steps(parts.config.train, per_epoch))
    return Callbacks(schedule, evaluate, save, on_step, on_stepped, on_evaluated)


def loss_seen(strategy: Strategy, loss_sum: float) -> float:
    """Return the loss hooks see, over a step's global batch. Collective where ranks synchronize in each step.

    Where they do not (parallel.averaging, parallel.servers), nothing makes them: rank 0's rows stand for all. NaN where
    its gradient came too late for the step.

    `loss_sum`: over this rank's rows.
    """
    if strategy.meets_each_step:
        return sum_over_ranks(strategy, [loss_sum])[0]
    return loss_sum * strategy.parts


def resume(parts: Parts, record: dict[str, Any]) -> TrainerState:
    """Load the newest good checkpoint into the strategy and return its state; a new state without a checkpoint.

    ValueError where the checkpoint is of another dataset, order or pass, by name. checkpoint.resume is not looked
    at: it decides on the command's run folder, whose checkpoints are this run's own.
    """
    keep, strategy, checkpoints, latest = parts.config.checkpoint, parts.strategy, parts.checkpoints, parts.latest
    if latest is None:
        if parts.config.warm_start is not None and strategy.tables:
            begin_tables(parts, parts.config.warm_start)
        return TrainerState()
    weights = strategy.state_dict(checkpoints.shapes(latest))
    check = TypeAdapter(LoopRecord)
    restored = checkpoints.load(latest, weights, check=check.validate_python)
    strategy.load_state_dict(weights)
    load_tables(parts, latest)
    stored = check.validate_python(restored.trainer)
    check_continues(latest, stored, record, keep)
    state = stored["state"]
    parts.ctx.event("resumed", {"step": state.step, "uri": latest.uri, "skipped": list(latest.skipped)})
    return state


def begin(parts: Parts, training: Reader, begun: TrainerState, audit: AuditLog | PartsAudit | None) -> TrainerState:
    """Start at `begun`, or, in a replacement process, at the step the dead rank had reached. Collective.

    Args:
        parts: model, readers and links of this rank.
        training: reader of the training split.
        begun: state from which all ranks start.
        audit: records every batch; None disables the audit.
    """
    strategy = parts.strategy
    strategy.meeting.keep(to_kept(begun))
    train, keep = parts.config.train, parts.config.checkpoint

    def is_due(step: int) -> bool:
        return meets_after(step, training.steps_per_epoch, train, keep) or parts.ctx.next_cut(step) == step

    found = strategy.begin(begun.step, is_due)
    if found is None:
        return begun
    step, kept = found
    state = TypeAdapter(TrainerState).validate_json(kept)
    if audit is not None:
        strategy.record_again(audit, training, begun.step, step)
    return replace(state, step=step, consumed_samples=training.epochs.consumed_at(step), skipped_in_a_row=0)


def to_kept(state: TrainerState) -> bytes:
    """Serialize the loop's state for a replacement rank, which starts a new logging window."""
    return json.dumps(replace(state, loss_sum=0.0, loss_rows=0).to_json()).encode()


def server_totals(strategy: Strategy) -> ServerTotals | None:
    """Return the servers' totals of this attempt; None without servers."""
    counts = strategy.meeting.server_counts()
    return ServerTotals.of(counts) if counts else None


def table_totals(parts: Parts) -> dict[str, dict[str, int]]:
    """Return, by sparse table, rows stored, admitted and evicted, and bytes on all ranks. Collective."""
    every = [json.loads(answer) for answer in parts.gather(json.dumps(parts.strategy.tables.measured()).encode())]
    return {name: {key: sum(rank[name][key] for rank in every) for key in every[0][name]} for name in every[0]}


def hot_ids(parts: Parts) -> dict[str, IdUses]:
    """Return, by sparse table, the ids used most by the batches of all ranks. Collective."""
    own = {name: hot.to_json() for name, hot in parts.strategy.tables.hot.items()}
    every = [json.loads(answer) for answer in parts.gather(json.dumps(own).encode())]
    merged = {name: reduce(HotIds.merged, [HotIds.of_json(rank[name]) for rank in every]) for name in own}
    return {name: IdUses(top=hot.top(HOT_IDS), total=hot.total, missed=hot.missed) for name, hot in merged.items()}


def begin_tables(parts: Parts, start: WarmStartConfig) -> None:
    """Begin with the rows of the model to start from, each rank with its buckets. Collective."""
    assert start.model is not None, "starting_model has read it"
    folder, tables = open_storage(start.model), parts.strategy.tables
    wanted = {name: held.table.spec.dim for name, held in tables.tables.items()}
    parts.checkpoints.peers.together(
        f"reading tables of {start.model}", lambda: tables.begin_with(open_tables(folder, wanted))
    )


def load_tables(parts: Parts, info: CheckpointInfo) -> None:
    """Read this rank's buckets of the model's sparse tables. Collective; CheckpointError where they do not fit."""
    stored = parts.checkpoints.tables(info)
    parts.checkpoints.peers.together(f"loading tables of {info.uri}", lambda: parts.strategy.tables.load(stored))


def load_exported_step(parts: Parts, state: TrainerState) -> int:
    """Load the weights of the step that `train.export` names; return that step. Collective."""
    strategy, checkpoints, step = parts.strategy, parts.checkpoints, state.step
    if parts.config.train.export == "best" and state.best_step not in (None, state.step):
        best = checkpoints.best(parts.config.train.best_mode)
        if best is not None:
            weights = strategy.state_dict(checkpoints.shapes(best))
            checkpoints.load(best, weights, random_state=False)
            strategy.load_state_dict(weights)
            load_tables(parts, best)
            step = best.step
    return step


def export(parts: Parts, step: int) -> None:
    """Write the model's tensors as one file, and this rank's shard of its tables. Collective.

    `step`: of the heartbeats.
    """
    strategy = parts.strategy

    def on_rows(number: int) -> None:
        parts.ctx.heartbeat(step, f"export rows, block {number}")

    described, values = strategy.stream_model()
    of = len(described)
    values = with_progress(values, lambda number: parts.ctx.heartbeat(step, f"export tensor {number + 1} of {of}"))
    if parts.ctx.rank == 0:
        write_weights(parts.run.at(MODEL_FOLDER), described, (v for v in values if v is not None), strategy.aliases)
    else:
        collections.deque(values, maxlen=0)
    strategy.tables.drain()
    write_tables(parts.run.at(MODEL_FOLDER), strategy.tables.tables, on_rows)


def with_progress(values: Iterator[Any], on_progress: Callable[[int], None]) -> Iterator[Any]:
    """Yield `values`; call `on_progress(number)` before each."""
    for number, value in enumerate(values):
        on_progress(number)
        yield value


def optimizer_factory(optim: OptimConfig) -> OptimizerFactory:
    return lambda named: build_optimizer(named, optim)


def table_settings(config: RunConfig) -> TableSettings:
    """Return how sparse tables start and are updated; their rate follows the schedule in proportion."""
    return TableSettings(config.tables, config.train.seed, config.train.dtype, config.tables.lr / config.optim.lr)


def learning_rate_schedule(config: RunConfig, steps: int) -> Callable[[int], float]:
    """Return step -> learning rate, with the batch-size rule applied to the peak."""
    return make_schedule(config.optim, steps, scaled_lr(config.optim, config.train.global_batch))


def follow_plateau(config: RunConfig) -> Callable[[TrainerState], TrainerState]:
    """Make the function that updates the `plateau` share of the rate after an evaluation."""
    optim, stop = config.optim, config.train.early_stopping
    watched = EarlyStopping(metric=config.train.best_metric, mode=config.train.best_mode) if stop is None else stop

    def follow(state: TrainerState) -> TrainerState:
        value = pick(state.last_valid, watched.metric, "train.early_stopping.metric")
        is_better = improved(value, state.plateau.best, watched.mode, watched.min_delta)
        plateau = after_value(state.plateau, value, is_better, optim.plateau, optim.final_lr_share)
        if plateau.share != state.plateau.share:
            log.info("step %d: the learning rate is lowered to %g of the schedule's", state.step, plateau.share)
        return replace(state, plateau=plateau)

    return follow if optim.schedule == "plateau" else lambda state: state


def open_audit(parts: Parts, reader: Reader) -> AuditLog | PartsAudit | None:
    """Open the log of the rows this data rank consumes; None unless `data.audit` is set."""
    strategy, ctx = parts.strategy, parts.ctx
    if not parts.config.data.audit or not strategy.is_data_leader:
        return None
    header = AuditHeader(
        format=FORMAT,
        attempt=ctx.attempt,
        rank=strategy.data_rank,
        size=strategy.parts,
        dataset=parts.payload.dataset,
        order_state=reader.order_state(),
        servers=len(ctx.servers),
    )
    log_of = PartsAudit if isinstance(reader, PartsReader) else AuditLog
    return log_of(parts.run.at("audit"), header)
