"""One rank of a training job, top to bottom: configuration and dataset in, trained shards, predictions and scores out.

This is where configuration stops: everything built here gets plain arguments.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import Field, TypeAdapter
from torch import nn

from conf.manifest import DatasetManifest, read_manifest
from conf.schema import RunConfig
from conf.storage import Storage, open_storage
from conf.stored import Stored, read
from training.checkpoint.checkpointer import Checkpointer, CheckpointInfo
from training.checkpoint.peers import Peers, solo, torch_peers
from training.checkpoint.policy import Retention
from training.data.audit.log import FORMAT, AuditHeader, AuditLog
from training.data.batch import SAMPLE, Batch, Reader
from training.data.build import make_reader
from training.data.request import AllGather, DataRank, OnProgress, ReadRequest, gather_alone
from training.data.resume import explain_difference
from training.launch.host.rank import WorkerContext
from training.loop import LoopRecord, LoopSettings, TrainerState, evaluate_split, fit, total_steps
from training.models.dropout import draws_masks
from training.models.initial import InitialModel, Unrecordable, eager_model, record_model
from training.models.task import Task
from training.optim import build_optimizer, learning_rate, scaled_lr
from training.parallel import build_strategy
from training.parallel.strategy import OptimizerFactory, Strategy
from training.tasks import build_task, model_class
from training.weights import write_weights

log = logging.getLogger(__name__)
THREADS = "threads.json"


@dataclass(frozen=True)
class Columns:
    """What a model is fed, which column is its label, and which stored columns they are made of."""

    features: list[str]  # columns, and the masks of those that may be null (conf/manifest.py)
    label: str | None
    read: list[str]


@dataclass(frozen=True)
class Parts:
    """What one training is made of on this rank."""

    ctx: WorkerContext
    config: RunConfig
    run: Storage
    strategy: Strategy
    task: Task
    open_reader: Callable[[str, bool], Reader]  # split, training? -> this rank's share


def train(ctx: WorkerContext) -> dict[str, Any]:
    """The entry of every training job. payload: `config` (resolved), `dataset` and `run` (URIs).

    Returns plain values: rank 0's summary, and on every rank that saw outputs the file of its test predictions.
    """
    began = time.monotonic()
    config = RunConfig.model_validate(ctx.payload["config"])
    folder, run = open_storage(ctx.payload["dataset"]), open_storage(ctx.payload["run"])
    manifest = read_manifest(folder)
    device = pick_device(config.train.device, ctx.local_rank)
    offer = max(1, (os.cpu_count() or 1) // max(ctx.local_size, 1))  # ranks of one host share its cores
    torch.set_num_threads(config.train.threads_per_rank or offer)
    seed_everything(config.train.seed)

    made = start_model(config, manifest)
    ctx.heartbeat(0, "ring")
    timeout = timedelta(seconds=config.launch.collective_timeout_s)
    strategy = build_strategy(
        config.parallel,
        ctx.rank_info,
        device,
        config.optim.clip_norm,
        timeout,
    )
    failed = True
    readers: list[Reader] = []
    try:
        gather = peers(ctx.world_size, config.checkpoint.timeout_s).gather
        torch.set_num_threads(agree_threads(run, config.train.threads_per_rank, offer, gather, ctx.rank))
        ctx.event("ring", {"engine": strategy.engine, "world": ctx.world_size, "seconds_s": time.monotonic() - began})
        model = agreed_model(made, config, manifest, ctx)
        columns = pick_columns(manifest, config.model.inputs, config.model.label, draws_masks(model.module))
        task = build_task(
            config.model.task, columns.features, columns.label, config.model.inputs, manifest.text.get("pad_id", -100)
        )
        # For the user's own random numbers, such as nn.Dropout's: another world draws others (models/dropout.py).
        seed_everything(config.train.seed, strategy.data_rank)
        open_reader = reader_opener(
            config, folder, manifest, columns, strategy, device, ctx.world_size, readers, ctx.on_progress
        )
        parts = Parts(ctx, config, run, strategy, task, open_reader)
        result = _train(parts, model, manifest.fingerprint, began)
        failed = False
        return result
    finally:
        for reader in readers:
            reader.close()
        strategy.close(failed)


def _train(parts: Parts, model: InitialModel, fingerprint: str, began: float) -> dict[str, Any]:
    """Resume, fit, export, score: rank 0's summary as plain values."""
    ctx, config, strategy = parts.ctx, parts.config, parts.strategy
    reader = parts.open_reader("train", True)
    valid = parts.open_reader(config.train.valid_split, False)
    # now, not when training is done: filters may leave nothing of it
    test = parts.open_reader(config.train.test_split, False) if config.train.test_split is not None else None
    settings = loop_settings(config)
    steps = total_steps(settings, reader.steps_per_epoch)
    sample = next(iter(valid.batches(0)), None) if strategy.needs_sample else None
    ctx.heartbeat(0, "prepare")
    strategy.prepare(model, parts.task, optimizer_factory(config), sample, config.train.compile)
    checkpoints = open_checkpoints(parts)
    audit = open_audit(parts, reader)
    facts = {
        "dataset": fingerprint,
        "order": reader.order_state(),
        "config_digest": ctx.payload.get("config_digest", ""),
    }

    def save(state: TrainerState, metric: float | None) -> None:
        if audit is not None:
            audit.flush()  # no step a checkpoint vouches for may be missing from the audit
        checkpoints.save(state.step, strategy.state_dict(), {"state": state.to_json()} | facts, metric)

    def evaluate_valid(step: int) -> dict[str, float]:
        return evaluate_split(strategy, valid, parts.task, tick=lambda n: ctx.heartbeat(step, f"evaluate batch {n}"))

    begun = resume(parts, checkpoints, facts)
    for split in filter(None, (reader, valid, test)):
        split.verify()  # now: a damaged test file would else be found when training is done
    ctx.event("training", {"from_step": begun.step, "steps": steps, "startup_s": time.monotonic() - began})
    training = time.monotonic()
    lr_at, on_step = learning_rate_schedule(config, steps), audit.record if audit else None
    state = fit(strategy, reader, evaluate_valid, lr_at, save, ctx, settings, begun, on_step)
    checkpoints.wait()
    train_s = time.monotonic() - training
    summary: dict[str, Any] = {
        "engine": strategy.engine,
        "world": ctx.world_size,
        "threads_per_rank": torch.get_num_threads(),
        "finished": state.step >= steps or state.stopped_early,
        "steps": state.step,
        "samples": state.cursor,
        "skipped_steps": state.skipped_steps,
        "stopped_early": state.stopped_early,
        "best_step": state.best_step,
        "best_value": state.best_value,
        "train_s": train_s,
        "rows_per_s": (state.cursor - begun.cursor) / max(train_s, 1e-9),
        "valid": state.last_valid,
        "measured": strategy.measure(),
        "train_left_out": left_out(reader),
    }
    if summary["finished"]:  # else: asked to stop; the last checkpoint is where the next command goes on
        summary |= export(parts, checkpoints, state) | score_test_split(parts, test, state.step)
    checkpoints.close()
    return summary


def open_checkpoints(parts: Parts) -> Checkpointer:
    """The run's checkpoints; the driver hears of each that is committed."""
    keep = parts.config.checkpoint

    def on_commit(info: CheckpointInfo) -> None:
        data = {"step": info.step, "uri": info.uri, "metric": info.metric, "bytes": info.bytes, "world": info.world}
        parts.ctx.event("checkpoint", data)

    return Checkpointer(
        parts.run.at("checkpoints"),
        peers(parts.ctx.world_size, keep.timeout_s),
        Retention(keep.keep_last, keep.keep_best, keep.keep_every, parts.config.train.best_mode),
        asynchronous=keep.asynchronous,
        on_commit=on_commit,
        on_progress=parts.ctx.on_progress,
    )


def resume(parts: Parts, checkpoints: Checkpointer, facts: dict[str, Any]) -> TrainerState:
    """The state to go on from: the newest good checkpoint's, loaded into the strategy, or a new one.

    checkpoint.resume is not asked: it decides on the command's run folder, and what lies in that is this run's own.
    """
    keep = parts.config.checkpoint
    latest = checkpoints.latest(keep.verify)
    if latest is None:
        return TrainerState()
    state = restore(checkpoints, latest, parts.strategy, facts, keep.allow_other_order)
    parts.ctx.event("resumed", {"step": state.step, "uri": latest.uri, "skipped": list(latest.skipped)})
    return state


def export(parts: Parts, checkpoints: Checkpointer, state: TrainerState) -> dict[str, Any]:
    """Write the whole model of the step `train.export` names as one file; what the summary says."""
    strategy, said = parts.strategy, dict[str, Any]()
    if parts.config.train.export == "best" and state.best_step not in (None, state.step):
        best = checkpoints.best(parts.config.train.best_mode)
        if best is not None:
            state_dict = strategy.state_dict()
            checkpoints.load(best, state_dict, random_state=False)
            strategy.load_state_dict(state_dict)
            said["exported_step"] = best.step
    described, values = strategy.stream_model()
    values = heard(values, lambda number: parts.ctx.heartbeat(state.step, f"export tensor {number}"))
    if parts.ctx.rank == 0:
        write_weights(parts.run.at("model"), described, (v for v in values if v is not None), strategy.aliases)
        said["weights"] = "model"
    else:
        collections.deque(values, maxlen=0)
    return said


def heard(values: Iterator[Any], tick: Callable[[int], None]) -> Iterator[Any]:
    """`values`, with a `tick` before each."""
    for number, value in enumerate(values):
        tick(number)
        yield value


def score_test_split(parts: Parts, test: Reader | None, step: int) -> dict[str, Any]:
    """Metrics over `train.test_split`, which of its rows these are, and the file of this rank's predictions where the
    task has any."""
    ctx, strategy, task = parts.ctx, parts.strategy, parts.task
    if test is None:
        return {}
    predictions = Predictions(task) if strategy.is_data_leader else None
    on_batch = predictions.add if predictions else None
    said: dict[str, Any] = {
        "test": evaluate_split(strategy, test, task, on_batch, lambda n: ctx.heartbeat(step, f"test batch {n}")),
        "test_left_out": left_out(test),
    }
    if predictions is not None:
        name = f"predictions/attempt-{ctx.attempt}/part-{ctx.rank:05d}.parquet"
        said["predictions"] = predictions.write(parts.run, name)
    return said


def left_out(reader: Reader) -> list[str]:
    """Files of the dataset that all ranks leave out as damaged: the driver compares what is made of the others."""
    files: list[str] = reader.order_state().get("quarantined", [])  # a mix and petastorm have other files
    return files


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """`auto` takes this rank's GPU where there is one. ValueError when `cuda` is asked for and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device = 'cuda': torch sees no GPU on this host; use 'auto' or 'cpu'")
    # With one visible device per rank (Spark's resources) it is device 0 for every rank.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class ThreadsFile(Stored):
    """threads.json of a run folder."""

    threads_per_rank: Annotated[int, Field(ge=1)]


def agree_threads(
    run: Storage, configured: int | None, offer: int, gather: Callable[[bytes], list[bytes]], rank: int
) -> int:
    """Torch threads of every rank, chosen once and kept in the run folder: sums over threads have other last bits for
    another number of them, and how ranks are packed on hosts may change from attempt to attempt. Collective.

    Args:
        configured: `train.threads_per_rank`; goes before what the run has.
        offer: what this rank's host has for it; the smallest is taken where nothing else decides.
    """
    have = run.exists(THREADS) if rank == 0 else False
    kept = read(ThreadsFile, run, THREADS).threads_per_rank if have else None
    answers = [json.loads(answer) for answer in gather(json.dumps([offer, kept]).encode())]
    kept = answers[0][1]
    threads: int = configured or kept or min(answer[0] for answer in answers)
    if rank == 0 and kept not in (None, threads):
        log.warning("train.threads_per_rank = %d, the run began with %d: its last bits may be others", threads, kept)
    if rank == 0 and kept != threads:
        run.put_atomic(THREADS, ThreadsFile(threads_per_rank=threads).model_dump_json().encode())
    return threads


def seed_everything(seed: int, stream: int = 0) -> None:
    mixed = (seed * 1_000_003 + stream) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def pick_columns(
    manifest: DatasetManifest, inputs: list[str] | None, label: str | None, samples: bool = False
) -> Columns:
    """Columns by role, or as the recipe names them; ValueError names the key and the columns there are. `samples`: the
    rows' numbers too, for a model that takes all columns as one dict."""
    names = {column.name for column in manifest.columns}
    masks = {column.mask: column.name for column in manifest.columns if column.mask is not None}
    for key, given, known in (("model.inputs", inputs or [], names | set(masks)), ("model.label", [label], names)):
        if unknown := [name for name in given if name and name not in known]:
            raise ValueError(f"{key}: {unknown} not in dataset {manifest.name!r}, which has {sorted(known)}")
    stored = [column for column in manifest.columns if column.role == "feature"]
    features = inputs or [*(c.name for c in stored), *(c.mask for c in stored if c.mask is not None)]
    features = [*features, *([SAMPLE] if samples and inputs is None else [])]
    labels = [label] if label else [c.name for c in manifest.columns if c.role == "label"]
    if len(labels) > 1:
        raise ValueError(f"model.label: dataset {manifest.name!r} has the labels {labels}; name one")
    if shown := [name for name in labels if name in features]:
        raise ValueError(
            f"model.label = {shown[0]!r}: it is among the model's inputs, which would be shown what they must predict; "
            "leave it out of model.inputs"
        )
    read = dict.fromkeys([*(masks.get(name, name) for name in features), *labels])
    return Columns(features, labels[0] if labels else None, list(read))


def build_model(config: RunConfig, manifest: DatasetManifest) -> nn.Module:
    """The recipe's module, in its master dtype. ValueError where the factory does not take the recipe's args."""
    factory = model_class(config.model.factory)
    try:
        if hasattr(factory, "from_manifest"):
            model: nn.Module = factory.from_manifest(manifest, **config.model.args)
        else:
            model = factory(**config.model.args)
    except TypeError as error:
        raise ValueError(
            f"model.args = {config.model.args}: {config.model.factory} does not take them: {error}"
        ) from error
    return model.to(getattr(torch, config.train.dtype))


def start_model(config: RunConfig, manifest: DatasetManifest) -> InitialModel | Unrecordable:
    """The recipe's module without memory, and its initial values; or why its constructor needs the memory."""
    try:
        return record_model(lambda: build_model(config, manifest), config.train.seed)
    except Unrecordable as error:
        return error


def agreed_model(
    model: InitialModel | Unrecordable, config: RunConfig, manifest: DatasetManifest, ctx: WorkerContext
) -> InitialModel:
    """The model, where every rank has one; else it is made whole, by one rank of a host after the other, and rank 0
    alone keeps its values. Collective."""
    everyone = peers(ctx.world_size, config.checkpoint.timeout_s)
    why = str(model) if isinstance(model, Unrecordable) else ""
    answers = [json.loads(answer) for answer in everyone.gather(json.dumps([why, ctx.local_size]).encode())]
    reasons = [why for why, _ in answers if why]
    if isinstance(model, InitialModel) and not reasons:
        return model
    if ctx.rank == 0:
        log.warning(
            "%s cannot be made without memory, so every host holds it whole before it is cut: %s",
            config.model.factory,
            reasons[0],
        )
    for turn in range(max(local_size for _, local_size in answers)):
        ctx.heartbeat(0, f"build the model, turn {turn}")
        if turn == ctx.local_rank:
            seed_everything(config.train.seed)
            model = eager_model(build_model(config, manifest), reasons[0], keep=ctx.rank == 0)
        everyone.gather(b"done")
    assert isinstance(model, InitialModel)
    return model


def optimizer_factory(config: RunConfig) -> OptimizerFactory:
    return lambda named: build_optimizer(named, config.optim)


def learning_rate_schedule(config: RunConfig, steps: int) -> Callable[[int], float]:
    """Step -> learning rate, with the batch-size rule applied to the peak."""
    peak = scaled_lr(config.optim, config.train.global_batch)
    return lambda step: learning_rate(config.optim, step, steps, peak)


def peers(world: int, timeout_s: float) -> Peers:
    """How the ranks of a checkpoint agree."""
    return torch_peers(timedelta(seconds=timeout_s)) if world > 1 else solo()


def reader_opener(
    config: RunConfig,
    folder: Storage,
    manifest: DatasetManifest,
    columns: Columns,
    strategy: Strategy,
    device: torch.device,
    world: int,
    opened: list[Reader],
    tick: OnProgress,
) -> Callable[[str, bool], Reader]:
    """split, training? -> a reader of this rank's share; evaluation reads every row once, in stored order."""

    asks_others = config.data.on_corrupt == "quarantine" or bool(config.data.filters)
    gather = data_gather(strategy, world, config.checkpoint.timeout_s) if asks_others and world > 1 else gather_alone

    def open_split(split: str, training: bool) -> Reader:
        batch = config.train.global_batch if training else config.train.eval_batch
        request = ReadRequest(folder, manifest, split, columns.read, batch)
        rank = DataRank(strategy.data_rank, strategy.data_size, device, gather, tick)
        reader = make_reader(config.data, request, rank, evaluation=not training)
        opened.append(reader)
        return reader

    return open_split


def data_gather(strategy: Strategy, world: int, timeout_s: float) -> AllGather:
    """All-gather of JSON values between data ranks: one answer for each, whichever of its ranks gave it."""
    everyone = peers(world, timeout_s)

    def gather(value: Any) -> list[Any]:
        answers = everyone.gather(json.dumps([strategy.data_rank, value]).encode())
        by_rank = dict(json.loads(answer) for answer in answers)
        return [by_rank[rank] for rank in range(strategy.data_size)]

    return gather


def open_audit(parts: Parts, reader: Reader) -> AuditLog | None:
    """The record of which rows each data rank consumed, where `data.audit` asks for it."""
    strategy = parts.strategy
    if not parts.config.data.audit or not strategy.is_data_leader:
        return None
    header = AuditHeader(
        format=FORMAT,
        attempt=parts.ctx.attempt,
        rank=strategy.data_rank,
        size=strategy.data_size,
        dataset=parts.ctx.payload["dataset"],
        order_state=reader.order_state(),
    )
    return AuditLog(parts.run.at("audit"), header)


def loop_settings(config: RunConfig) -> LoopSettings:
    train, keep, early = config.train, config.checkpoint, config.train.early_stopping
    return LoopSettings(
        epochs=train.epochs,
        steps=train.steps,
        log_every_steps=train.log_every_steps,
        eval_every_steps=train.eval_every_steps,
        best_metric=train.best_metric,
        best_mode=train.best_mode,
        stop_metric=early.metric if early else None,
        stop_mode=early.mode if early else "min",
        patience=early.patience if early else 1,
        min_delta=early.min_delta if early else 0.0,
        max_skipped_steps=train.max_skipped_steps,
        checkpoint_every_steps=keep.every_steps,
        checkpoint_every_s=keep.every_s,
        checkpoint_on_best=keep.on_improvement,
    )


def restore(
    checkpoints: Checkpointer, info: CheckpointInfo, strategy: Strategy, facts: dict[str, Any], allow_other: bool
) -> TrainerState:
    """Load `info` into the strategy; ValueError where the dataset or an order setting is another, by name."""
    state = strategy.state_dict()
    record = TypeAdapter(LoopRecord)
    restored = checkpoints.load(info, state, check=record.validate_python)
    strategy.load_state_dict(state)
    left = record.validate_python(restored.trainer)
    before = {"dataset": left["dataset"]} | left["order"]
    now = {"dataset": facts["dataset"]} | facts["order"]
    if differences := explain_difference(before, now):
        message = f"{info.uri}: was trained on another order of samples: {'; '.join(differences)}"
        if not allow_other:
            raise ValueError(
                f"{message}. Give the run another name, set checkpoint.resume=false to start anew, "
                "or checkpoint.allow_other_order=true to go on all the same"
            )
        log.warning("%s; going on because checkpoint.allow_other_order is set", message)
    return left["state"]


class Predictions:
    """Collects what this rank scores of a split: `id` (the row's place in it), `prediction`, `label`."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, batch: Batch, outputs: Any) -> None:
        probabilities = self.task.probabilities(outputs)
        labels = self.task.labels(batch.columns)
        if probabilities is None or labels is None:
            return
        real = batch.row_weights().cpu() > 0  # ids are the host's, outputs and weights the device's
        assert batch.ids is not None, "evaluation readers carry ids"
        scores = probabilities.cpu()[real].numpy()
        self.parts.append((batch.ids[real].numpy(), scores, labels.cpu()[real].numpy()))

    def write(self, run: Storage, name: str) -> str | None:
        """One Parquet file below the run folder; its path, None where this rank scored nothing."""
        if not self.parts:
            return None
        ids, scores, labels = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        prediction = (
            pa.array(scores) if scores.ndim == 1 else pa.FixedSizeListArray.from_arrays(scores.ravel(), scores.shape[1])
        )
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": ids, "prediction": prediction, "label": labels}), sink)
        run.put_atomic(name, sink.getvalue().to_pybytes())
        return name
