"""Measured steps of GPTs as rows of a CSV file, and what each of them does (StepCounts).

A file begins with lines of `#` that say where its rows are from. A row is a step of reference_gpt.py's model;
`framework` says by whom it was trained. `megatron`: attention with its scores in memory, blocks cut evenly into stages,
a tensor rank sends its part of what goes to the next stage (https://arxiv.org/abs/2104.04473, section 4.1), and a
layer's last exchange is made again with the rest of it. `torch`: fused attention, and all else as ranks do it here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveFloat, PositiveInt, ValidationError

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import Cluster, Precision
from sparkring.conf.errors import ConfigError
from sparkring.conf.load import problem_line
from sparkring.conf.schema import Strict
from sparkring.training.models.gpt import GPT
from sparkring.training.models.sharding_plan import plan_of
from sparkring.training.models.torch_private import meta_device
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.search import LayoutCosts, TracedModel, traced_model
from sparkring.training.planner.timing.operations import ModelWork, trace_operations
from sparkring.training.planner.timing.roofline import OperationTable
from sparkring.training.planner.timing.step_time import StepCounts, step_counts, step_time
from sparkring.training.planner.trace import Trace, trace_model
from sparkring.training.planner.workload import RankParameters, Workload
from tests.helpers.reference_gpt import ReferenceGPT

MOST_SHOWN = 5  # problems of a file


class MeasuredStep(Strict):
    """A row: the model, how it was cut, and the seconds of its step."""

    framework: Literal["megatron", "torch"]
    precision: Precision
    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    tokens: PositiveInt
    vocab: PositiveInt
    dp: PositiveInt
    tp: PositiveInt
    pp: PositiveInt
    zero: Literal[0, 1, 2, 3]
    micro_batch: PositiveInt
    global_batch: PositiveInt
    recompute: bool
    gradient_bytes: Literal[2, 4]
    step_s: PositiveFloat
    sequence_parallel: bool = False
    stages_per_rank: PositiveInt = 1

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def passes(self) -> int:
        return max(1, self.global_batch // (self.dp * self.micro_batch))


class MemoryStep(MeasuredStep):
    """A row of a step that ran, or ran out of its devices' memory (step_s: None).

    device_gib: memory of a device. memory_gb: measured, of the fullest. even_ends: to the pipeline an embedding is as
    a layer, at both ends.
    """

    step_s: PositiveFloat | None = None  # type: ignore[assignment]
    device_gib: PositiveFloat
    memory_gb: PositiveFloat | None = None
    even_ends: bool = False


def read_measurements(path: str, row_type: type[MeasuredStep] = MeasuredStep) -> list[Any]:
    """Read a file's rows. ConfigError with the first problems: line, column, value, rule."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(path, [f"cannot be read: {error}"]) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    steps, problems = [], []
    for (number, _), row in zip(numbered[1:], csv.DictReader([line for _, line in numbered]), strict=True):
        try:
            steps.append(row_type.model_validate({key: _number(value) for key, value in row.items() if value}))
        except ValidationError as error:
            found = [problem_line(each, {}, {}, row_type) for each in error.errors(include_url=False)]
            problems += [f"line {number}: {line}" for line in found]
    if problems:
        raise ConfigError(path, problems[:MOST_SHOWN])
    return steps


def _number(text: str | None) -> int | str | None:
    """A whole number as such: pydantic's literals take no text."""
    return int(text) if text and text.isdecimal() else text


def traced_step(step: MeasuredStep, element_bytes: int | None = None) -> TracedModel:
    """The measured step as a workload, and what its model computes and keeps.

    `element_bytes`: of a weight; None: of what is exchanged, which says nothing of memory.
    """
    model, work, trace = _traced(
        step.width, step.layers, step.heads, step.tokens, step.vocab, fused=step.framework == "torch"
    )
    passes = {"micro_batches": step.passes} if step.pp > 1 else {"accumulate": step.passes}
    config = ParallelConfig(
        dp=step.dp,
        tp=step.tp,
        pp=step.pp,
        zero=step.zero,
        precision=step.precision,
        activation_checkpointing=step.recompute,
        sequence_parallel=step.sequence_parallel,
        schedule="interleaved" if step.stages_per_rank > 1 else "1f1b",
        stages_per_rank=step.stages_per_rank,
        engine="torch",
        **passes,
    )
    is_megatron = step.framework == "megatron"
    ends = EvenEnds if getattr(step, "even_ends", False) else EvenWorkload
    workload = (ends if is_megatron else Workload)(
        model=model,
        config=config,
        mesh=Mesh(dp=step.dp, pp=step.pp, tp=step.tp),
        engine="torch",
        inputs=(),
        global_batch=step.global_batch,
        element_bytes=element_bytes or step.gradient_bytes,
    )
    return TracedModel(workload, work, trace)


# Bytes per weight of a rank beside the sharded optimizer's: weights and gradients in 2, and in bf16 gradients in 4 too
MEGATRON_ZERO = {"fp16": 4, "bf16": 8}
MEGATRON_BYTES = 18  # with an optimizer that is not sharded: its master weights and moments, and gradients in 4
MEGATRON_LOSS = 4  # bytes per logit of the loss's copy of them, beside those that a search counts


def memory_bytes(step: MeasuredStep, cluster: Cluster) -> int:
    """What the step holds on the fullest device, in the true bytes of a weight: 4, and those of the framework."""
    traced = traced_step(step, 4)
    workload, config = traced.workload, traced.workload.config
    memory = LayoutCosts(traced, cluster).layout(config, workload.mesh).memory
    if step.framework != "megatron":
        return memory
    whole = max(RankParameters(workload, rank).whole for rank in range(step.pp))
    ours = 6 if step.zero else 16 + 2 + 4 * (step.dp > 1)
    theirs = MEGATRON_ZERO[step.precision] if step.zero else MEGATRON_BYTES
    logits = workload.rows_per_pass * step.tokens * step.vocab // step.tp
    return memory + (theirs - ours) * whole + MEGATRON_LOSS * logits


def counts_of(step: MeasuredStep) -> StepCounts:
    """What the measured step does."""
    traced = traced_step(step)
    counts = step_counts(traced.workload, traced.work, traced.trace)
    return _as_megatron(counts, step, traced) if step.framework == "megatron" else counts


def _as_megatron(counts: StepCounts, step: MeasuredStep, traced: TracedModel) -> StepCounts:
    """The step as Megatron-LM takes it, which repeats a block to its end, and has one buffer of gradients."""
    sent = dict(counts.sent)
    if "pp" in sent:
        sent["pp"] /= step.tp
    if "tp" in sent and step.recompute:
        sent["tp"] *= 6 / 5
    calls = (6 if step.recompute else 4) * step.layers // step.pp
    layers, blocks = traced.work.layers, {name for name in traced.workload.block_names if step.recompute}
    names = [traced.workload.names_on(rank) for rank in range(step.pp)] if step.pp > 1 else [[*blocks]]
    stages = tuple(
        replace(stage, recomputed=OperationTable(op for name in blocks & set(own) for op in layers[name]))
        for stage, own in zip(counts.stages, names, strict=True)
    )
    return replace(counts, stages=stages, sent=sent, layer_calls=calls, units=step.layers // step.pp + 1)


class EvenWorkload(Workload):
    """A workload whose stages have equally many blocks; the first has the embedding, too, and the last the head."""

    @cached_property
    def stages(self) -> list[list[str]]:
        if self.mesh.pp == 1:
            return [[""]]
        blocks, stages = self.block_names, self.mesh.pp * self.config.stages_per_rank
        ends = [round(index * len(blocks) / stages) for index in range(stages + 1)]
        cut = [blocks[start:end] for start, end in pairwise(ends)]
        return [["embed", *cut[0]], *cut[1:-1], [*cut[-1], "norm", "head"]]


class EvenEnds(EvenWorkload):
    """The embedding is as a block to the first stage, and the head to the last one."""

    @cached_property
    def stages(self) -> list[list[str]]:
        every, stages = ["embed", *self.block_names, "norm", "head"], self.mesh.pp * self.config.stages_per_rank
        ends = [round(index * (len(every) - 1) / stages) for index in range(stages)]  # norm and head are one
        return [every[start:end] for start, end in pairwise([*ends, len(every)])]


@cache
def _traced(
    width: int, layers: int, heads: int, tokens: int, vocab: int, fused: bool
) -> tuple[ReferenceGPT, ModelWork, Trace]:
    """The model, what it computes and what it keeps: traced with one block, since all are equal.

    Args:
        width: M.
        layers: blocks.
        heads: of attention.
        tokens: T.
        vocab: V.
        fused: whether attention is one kernel.
    """
    with meta_device():
        model = ReferenceGPT(vocab, width, layers, heads, tokens, fused, dropout=not fused)
        small = ReferenceGPT(vocab, width, 1, heads, tokens, fused, dropout=not fused)
    plan, row = plan_of(small), (torch.zeros(1, tokens, dtype=torch.int64, device="meta"),)
    assert plan is not None
    names, kinds = plan.layer_names(small), plan.kinds(small)
    work = trace_operations(small, row, names, kinds)
    trace = trace_model(small, row, {*kinds, *names, *(f"{name}.core" for name in plan.attention_names(small))}, kinds)
    return (
        model,
        ModelWork(dict(_repeated(work.layers, layers))),
        Trace(
            dict(_repeated(trace.taken, layers)),
            dict(_repeated(trace.returned, layers)),
            dict(_repeated(trace.kept, layers)),
        ),
    )


def _repeated(named: dict[str, Any], layers: int) -> Iterator[tuple[str, Any]]:
    """The entries of one block as those of all."""
    for name, value in named.items():
        if not name.startswith("blocks.0"):
            yield name, value
            continue
        for layer in range(layers):
            yield name.replace("blocks.0", f"blocks.{layer}", 1), value


def pick_regret(seconds: NDArray[Any], steps: Sequence[MeasuredStep]) -> float:
    """How much slower the layouts predicted to be fastest are than the measured best, the mean over models."""
    regrets = []
    for same in _same_models(steps):
        measured = np.array([steps[index].step_s for index in same])
        picked = measured[int(np.argmin(seconds[same]))]
        regrets.append(float(picked / measured.min() - 1))
    return float(np.mean(regrets)) if regrets else 0.0


def _same_models(steps: Sequence[MeasuredStep]) -> list[list[int]]:
    """Indices of the steps that train the same model with the same batch on as many devices."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, step in enumerate(steps):
        key = (step.width, step.layers, step.tokens, step.global_batch, step.devices)
        groups.setdefault(key, []).append(index)
    return [same for same in groups.values() if len(same) > 1]


@dataclass(frozen=True)
class ShardedStep:
    """A published step of a Llama by FSDP. cluster: its devices and network. step_s: measured."""

    name: str
    workload: Workload
    cluster: Cluster
    step_s: float

    def predicted_s(self) -> float:
        traced = traced_model(self.workload)
        return step_time(step_counts(self.workload, traced.work, traced.trace), self.cluster).total

    def error(self) -> float:
        """Predicted over measured seconds, less one."""
        return self.predicted_s() / self.step_s - 1


def read_sharded(path: Path, reduced_bytes: int = 2) -> list[ShardedStep]:
    """Read fms-fsdp's rows. `reduced_bytes`: of a gradient's element on the wire (bfSixteen of mixed_precision.py)."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [_sharded(row, reduced_bytes) for row in csv.DictReader(lines)]


def _sharded(row: dict[str, str], reduced_bytes: int) -> ShardedStep:
    sizes = {name: int(row[name]) for name in ("vocab", "width", "layers", "heads", "kv_heads", "hidden")}
    devices, group, tokens = (int(row[name]) for name in ("devices", "sharded_over", "seq_len"))
    with meta_device():
        model = GPT(**sizes, tied=False)
    config = ParallelConfig(
        dp=devices,
        zero=3,
        shard=group if group < devices else 0,
        precision="bf16",
        engine="torch",
        activation_checkpointing=row["activation_checkpointing"] == "true",
    )
    inputs = (torch.zeros(1, tokens, dtype=torch.int64, device="meta"),)
    rows = int(row["rows_per_device"])
    workload = Workload(model, config, Mesh(dp=devices), "torch", inputs, devices * rows, element_bytes=reduced_bytes)
    cluster = load_cluster(f"{row['gpu']}-infiniband")
    network = cluster.network.model_copy(update={"gbit_per_s": float(row["network_gbit_s"])})
    name = f"{row['model']} on {devices} {row['gpu']}, {row['network_gbit_s']} Gbit, {row['sharding']}"
    seconds = rows * tokens / float(row["tokens_per_s_per_gpu"])
    return ShardedStep(name, workload, cluster.model_copy(update={"network": network}), seconds)
