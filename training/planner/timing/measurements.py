"""Measured steps of GPTs as rows of a CSV file, and what each of them does (StepCounts).

A file begins with lines of `#` that say where its rows are from. A row is a step of reference.py's model; `framework`
says by whom it was trained. `megatron`: attention with its scores in memory, blocks cut evenly into stages, a tensor
rank sends its part of what goes to the next stage (https://arxiv.org/abs/2104.04473, section 4.1), and a layer's last
exchange is made again with the rest of it. `torch`: fused attention, and all else as ranks do it here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveFloat, PositiveInt, ValidationError

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.cluster import Precision
from sparkring.conf.errors import ConfigError
from sparkring.conf.load import problem_line
from sparkring.conf.schema import Strict
from sparkring.training.models.sharding_plan import plan_of
from sparkring.training.models.torch_private import meta_device
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.search import TracedModel
from sparkring.training.planner.timing.operations import ModelWork, trace_operations
from sparkring.training.planner.timing.reference import ReferenceGPT
from sparkring.training.planner.timing.step_time import StepCounts, step_counts
from sparkring.training.planner.trace import Trace, trace_model
from sparkring.training.planner.workload import Workload

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


def read_measurements(path: str) -> list[MeasuredStep]:
    """Read a file's rows. ConfigError with the first problems: line, column, value, rule."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(path, [f"cannot be read: {error}"]) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    steps, problems = [], []
    for (number, _), row in zip(numbered[1:], csv.DictReader([line for _, line in numbered]), strict=True):
        try:
            steps.append(MeasuredStep.model_validate({key: _number(value) for key, value in row.items()}))
        except ValidationError as error:
            found = [problem_line(each, {}, {}, MeasuredStep) for each in error.errors(include_url=False)]
            problems += [f"line {number}: {line}" for line in found]
    if problems:
        raise ConfigError(path, problems[:MOST_SHOWN])
    return steps


def _number(text: str | None) -> int | str | None:
    """A whole number as such: pydantic's literals take no text."""
    return int(text) if text and text.isdecimal() else text


def traced_step(step: MeasuredStep) -> TracedModel:
    """The measured step as a workload, and what its model computes and keeps."""
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
    workload = (EvenWorkload if is_megatron else Workload)(
        model=model,
        config=config,
        mesh=Mesh(dp=step.dp, pp=step.pp, tp=step.tp),
        engine="torch",
        inputs=(),
        global_batch=step.global_batch,
        element_bytes=step.gradient_bytes,
    )
    return TracedModel(workload, work, trace)


def counts_of(step: MeasuredStep) -> StepCounts:
    """What the measured step does."""
    traced = traced_step(step)
    counts = step_counts(traced.workload, traced.work, traced.trace)
    return _as_megatron(counts, step) if step.framework == "megatron" else counts


def _as_megatron(counts: StepCounts, step: MeasuredStep) -> StepCounts:
    sent = dict(counts.sent)
    if "pp" in sent:
        sent["pp"] /= step.tp
    if "tp" in sent and step.recompute:
        sent["tp"] *= 6 / 5
    calls = (6 if step.recompute else 4) * step.layers // step.pp
    return replace(counts, framework=step.framework, sent=sent, layer_calls=calls, units=step.layers // step.pp + 1)


class EvenWorkload(Workload):
    """A workload whose stages have equally many blocks; the first has the embedding, too, and the last the head."""

    recomputes_all = True

    @cached_property
    def stages(self) -> list[list[str]]:
        if self.mesh.pp == 1:
            return [[""]]
        blocks, stages = self.block_names, self.mesh.pp * self.config.stages_per_rank
        ends = [round(index * len(blocks) / stages) for index in range(stages + 1)]
        cut = [blocks[start:end] for start, end in pairwise(ends)]
        return [["embed", *cut[0]], *cut[1:-1], [*cut[-1], "norm", "head"]]


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
