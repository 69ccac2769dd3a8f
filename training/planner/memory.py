"""Predict one rank's memory: weights, gradients, optimizer state, activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sparkring.training.planner.trace import Trace
from sparkring.training.planner.workload import RankParameters, Workload
from sparkring.training.tables.size import table_bytes


@dataclass(frozen=True)
class StageMemory:
    """One rank's memory in bytes; `parameters` is a count, before any sharding.

    Weights, gradients and optimizer are on the host, and not on the device, where `offloaded` is not 0.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    start: int  # peak while weights are initialized: this rank's, and one whole parameter
    gathered: int  # peak of the whole weights and gradients that a ZeRO pass holds beyond its shards
    # kept by the model for backward at the schedule's fullest moment (without the loss's own); None: not traced
    activations: int | None
    residuals: int = 0  # what a gradient codec has not sent, before and after a step
    offloaded: int = 0  # host memory of offloaded shards and their optimizer state
    peak: int | None = None  # the most that is held at a moment of a step, all of it together; None: not traced
    at_peak: Mapping[str, int] = field(default_factory=dict)  # by kind
    evaluation: int | None = None  # the most that is held while a batch is evaluated; None: none is, or not traced

    @property
    def on_device(self) -> int:
        """What the device holds without activations: shards or whole tensors, and what a pass gathers."""
        kept = 0 if self.offloaded else self.weights + self.gradients + self.optimizer
        return kept + self.gathered + self.residuals


def stage_memory(rank: RankParameters, activations: int | None) -> StageMemory:
    element = rank.workload.element_bytes
    weights = rank.whole if rank.on_horovod else rank.owned
    return StageMemory(
        parameters=sum(rank.sizes),
        weights=weights * element,
        gradients=rank.updated * element,
        optimizer=0 if rank.workload.is_served else rank.workload.states * rank.updated * element,
        start=((0 if rank.is_offloaded else weights) + max(rank.sizes, default=0)) * element,
        gathered=gathered_bytes(rank) if rank.zero else 0,
        activations=activations,
        residuals=2 * rank.updated * element if rank.workload.is_coded else 0,
        offloaded=offloaded_bytes(rank) if rank.is_offloaded else 0,
    )


def offloaded_bytes(rank: RankParameters) -> int:
    """Return the host memory of a rank's shards, their gradients and optimizer state, in bytes.

    torch allocates pinned memory, of weights and of the gradients copied to them, in powers of two
    (ATen/core/CachingHostAllocator.h).
    """
    workload = rank.workload

    def make() -> tuple[int, int]:
        shards = [math.ceil(numel / rank.shard) * workload.element_bytes for numel in rank.local.values()]
        return sum(1 << (size - 1).bit_length() for size in shards if size), sum(shards)

    pinned, needed = workload.once(("offloaded", rank.key, workload.mesh.tp, rank.shard), make)
    return int(2 * pinned + workload.states * needed)


def tables_bytes(workload: Workload) -> int:
    """Return the most host bytes of sparse tables on a rank; ids are spread evenly over data ranks."""
    ranks = workload.mesh.dp
    return sum(
        table_bytes(each.most_rows, each.row_bytes, 1 if each.replicated else ranks, each.bucket_rows)
        for each in workload.tables
        if each.most_rows
    )


def gathered_bytes(rank: RankParameters) -> int:
    """Return the peak bytes of the weights and gradients ZeRO holds whole.

    Horovod's: gradients, the buckets they are copied into, and what its exchange returns. fully_shard's are most in
    backward of the largest unit (all weights, or with ZeRO-3 that unit's and those of no unit; the gradients of that
    unit and of those after the first unit that are in none), or at its end (weights and gradients of no unit).
    Gradients of several passes that add up before they are reduced are there all the time. Of an offloaded unit the
    shard is copied to the device before it is gathered, and its reduced gradient is there until it is copied back.
    """
    workload, whole, sizes = rank.workload, rank.whole, rank.numels_of(rank.units)
    mesh, element = workload.mesh, workload.element_bytes
    if rank.on_horovod:
        return element * (2 * whole + (whole // 2 if mesh.dp * mesh.cp == 2 else whole))
    rest, unit = whole - sum(sizes), max(sizes, default=0)
    size = rank.gather_bytes
    copied = 2 * element * math.ceil(max(rest, unit) / rank.shard) if rank.is_offloaded else 0  # in and out
    weights = size * (rest + unit if rank.zero == 3 else whole)
    gradients = size * (_after_first_unit(rank) + unit)
    if workload.config.passes > 1 and (rank.zero == 1 or mesh.pp > 1):
        # added to in place, unless they need to be converted first
        return copied + weights + element * whole + (gradients if size != element else 0)
    return copied + max(weights + gradients, 2 * size * rest)


def _after_first_unit(rank: RankParameters) -> int:
    """Count elements of no unit after the first unit: their gradients come before a unit's."""
    inside = tuple(f"{name}." for name in rank.units)

    def make() -> int:
        names = list(rank.local)
        first = next((i for i, name in enumerate(names) if name.startswith(inside)), len(names))
        return sum(rank.local[name] for name in names[first:] if not name.startswith(inside))

    return int(rank.workload.once(("after first unit", rank.key, inside, rank.workload.mesh.tp), make))


class KeptElements(NamedTuple):
    """Elements that one row's pass keeps for backward.

    alive: from its forward to its backward. once: by a block that is computed again, in the one pass that is in it.
    """

    alive: float
    once: float = 0.0

    def of_passes(self, alive: float) -> float:
        """Return the elements per row kept with `alive` passes alive."""
        return self.alive * alive + self.once


def kept_elements(workload: Workload, trace: Trace, names: list[str]) -> KeptElements:
    """Return what one row's pass keeps in the named modules on one tensor rank.

    With activation checkpointing: the blocks' inputs while the pass is alive, and all of one block at a time.
    """
    config, tp = workload.config, workload.mesh.tp
    between = 1 / tp if config.sequence_parallel else 1.0
    share = {"inner": 1 / tp, "entered": 1.0, "between": between}
    # attention's output is kept by attention and, exchanged for whole heads, again by the layer after it
    exchanged = workload.attention_cores if workload.mesh.cp > 1 else ()

    def kept(name: str) -> float:
        twice = sum(trace.returned[core] for core in exchanged if name == "" or core.startswith(f"{name}."))
        return twice / tp + sum(share[place] * numel for place, numel in trace.kept.get(name, {}).items())

    if not config.activation_checkpointing:
        return KeptElements(sum(kept(name) for name in names))
    blocks = [b for b in workload.block_names if any(n in ("", b) or b.startswith(f"{n}.") for n in names)]
    rest = sum(kept(n) for n in names) - sum(kept(b) for b in blocks)
    inputs = between * sum(trace.taken.get(b, 0) for b in blocks)
    return KeptElements(rest + inputs, max(map(kept, blocks), default=0.0))
