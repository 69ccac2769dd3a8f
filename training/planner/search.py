"""Find the layouts of a model on a cluster: every one that can run, pruned by memory, by time, cost or memory.

What can run is decided by the rules (training/parallel/check.py). Layouts of fewer devices are tried too (`worlds`), so
that more devices do not make the best plan slower. Everything is found out about the model once; what layouts
have in common is computed once.

Offload makes a step slower and takes memory of the host in place of the device's, so that it is tried only where the
same layout does not fit without it, or where memory is what counts. Precision changes what is learned: a search takes
the recipe's, unless it is asked for any; then the others are tried where the fastest one does not fit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.cluster import Cluster, Precision
from sparkring.conf.plain_text import count_of
from sparkring.training.parallel.check import layout_problems
from sparkring.training.parallel.engine import decide_engine
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.parallel.precision import DTYPES
from sparkring.training.planner.equal_blocks import lengthened, shortened, stand_ins
from sparkring.training.planner.memory import KeptElements, StageMemory, kept_elements, stage_memory
from sparkring.training.planner.peak_memory.play import batch_columns, row_evaluation_bytes
from sparkring.training.planner.peak_memory.timeline import loss_bytes
from sparkring.training.planner.timing.operations import ModelWork, trace_operations
from sparkring.training.planner.timing.step_time import (
    StepCounts,
    StepTime,
    counts_of_stages,
    output_elements,
    stage_counts,
    stage_tables,
    step_time,
)
from sparkring.training.planner.trace import Trace, Untraceable, repeated, trace_model
from sparkring.training.planner.traffic import activation_bytes, batch_axes_bytes, schedule_cost
from sparkring.training.planner.workload import RankParameters, Workload

Objective = Literal["time", "cost", "memory"]
LOSS_BYTES = 8  # of an output beyond its own, where its loss is not traced: a copy in fp32, and its gradient
USABLE = 0.94  # share of a device's memory: the rest is the context's, the collectives' and the allocator's
USABLE_HOST = 0.8  # share of a machine's memory for offloaded shards: the rest is the readers', tables' and Spark's
MOST_PARTS = 64  # passes of a step
MOST_DEVICES = 1 << 17  # beyond any cluster: a mistyped number is named, not searched
EVERY_WORLD = 16  # devices up to which all numbers of them are tried, and not powers of two only


@dataclass(frozen=True)
class TracedModel:
    """A workload, whatever its layout, with what its model computes and keeps."""

    workload: Workload
    work: ModelWork
    trace: Trace


def traced_model(workload: Workload) -> TracedModel:
    """Trace the workload's model. Untraceable if that cannot be done."""
    if isinstance(workload.inputs, Untraceable):
        raise workload.inputs
    trace = trace_of(workload)  # first: its error names the module
    layers = traced_layers(workload)
    return TracedModel(workload, trace_operations(workload.model, workload.inputs, layers, workload.kinds), trace)


def traceable(trace: Callable[[], Any]) -> Any:
    """Return a trace; None if the model, its loss or its metrics need values."""
    try:
        return trace()
    except Untraceable:
        return None


def traced_layers(workload: Workload) -> Sequence[str]:
    return workload.sharding.layer_names(workload.model) or workload.block_names


def trace_of(workload: Workload, precision: str = "fp32") -> Trace:
    """Trace a model with as many rows as in a pass: what is made of weights alone is kept once."""
    assert not isinstance(workload.inputs, Untraceable)
    names = {*workload.kinds, *traced_layers(workload), *workload.attention_cores, *workload.block_names, ""}
    return trace_model(
        workload.model, workload.inputs, names, workload.kinds, workload.rows_per_pass, workload.device_type, precision
    )


@dataclass(frozen=True)
class PlannedLayout:
    """One way to train. memory: bytes of the fullest rank's device. host: that it has offloaded. machines: paid for.

    Its seconds are computed when they are asked for: most layouts do not fit.
    """

    config: ParallelConfig
    mesh: Mesh
    memory: int
    host: int
    machines: int
    costs: LayoutCosts = field(repr=False, compare=False)

    @cached_property
    def counts(self) -> StepCounts:
        return self.costs.counts(self.config, self.mesh)

    @cached_property
    def time(self) -> StepTime:
        return self.costs.time(self.counts)

    @property
    def machine_seconds(self) -> float:
        """What a step costs, in seconds of one machine."""
        return self.time.total * self.machines


@dataclass(frozen=True)
class AskedLayout:
    """Layouts that are asked about: of a mesh, and in a precision, offloaded or not, where these are not None."""

    mesh: Mesh
    offload: bool | None = None
    precision: Precision | None = None

    def includes(self, config: ParallelConfig) -> bool:
        """Return whether the question covers a configuration of the mesh."""
        return self.offload in (None, config.offload) and self.precision in (None, config.precision)


@dataclass(frozen=True)
class StateLayout:
    """One way to train a model that cannot be traced.

    memory: bytes of the fullest rank's weights, gradients and optimizer, and what ZeRO gathers. host: of these, those
    that are offloaded. sent: bytes of the rank that sends most, of gradients and weights in a step.
    """

    config: ParallelConfig
    mesh: Mesh
    memory: int
    host: int
    sent: int


class LayoutCosts:
    """The costs of a model's layouts on a cluster; what several have in common is kept."""

    def __init__(self, traced: TracedModel, cluster: Cluster) -> None:
        self.traced, self.cluster = traced, cluster
        self._kept: dict[Any, Any] = {}

    @property
    def limit(self) -> float:
        """Bytes of a device that a layout may take."""
        return self.cluster.device.memory_bytes * USABLE

    def host_limit(self, world: int) -> float:
        """Return host memory each rank may offload to, in bytes; 0 if unknown, and on CPUs."""
        node = self.cluster.node
        is_known = self.cluster.device.type != "cpu"
        return is_known * node.memory_bytes * USABLE_HOST / min(world, node.devices)

    def fits(self, layout: PlannedLayout | StateLayout) -> bool:
        return layout.memory <= self.limit and self.has_host_for(layout)

    def has_host_for(self, layout: PlannedLayout | StateLayout) -> bool:
        """Return whether a machine's memory has room for what its ranks have offloaded."""
        return layout.host <= self.host_limit(layout.mesh.world)

    @classmethod
    def without_trace(cls, workload: Workload, cluster: Cluster) -> LayoutCosts:
        """Return the costs of an untraceable model, with only `state` and the problems known."""
        return cls(TracedModel(workload, ModelWork({}), Trace()), cluster)

    def problems(self, config: ParallelConfig, mesh: Mesh) -> list[str]:
        """List why a layout cannot run."""
        batch, device = self.traced.workload.global_batch, self.cluster.device.type
        found = self.mesh_problems(config, mesh) or layout_problems(config, mesh.world, batch, device)
        if found or config.stages_per_rank == 1:
            return found
        stages = mesh.pp * config.stages_per_rank
        layers = len(self.traced.workload.sharding.layer_names(self.traced.workload.model))
        return [f"{count_of(stages, 'stage')}, of {count_of(layers, 'layer')}"] if stages > layers else []

    def mesh_problems(self, config: ParallelConfig, mesh: Mesh) -> list[str]:
        """List why no layout of a mesh can run: its ranks, the model's heads and widths, the rows."""
        found: list[str] = self._once(("mesh", mesh, config.engine), lambda: self._plain_problems(config, mesh, None))
        for axes in (Mesh(tp=mesh.tp, cp=mesh.cp), Mesh(pp=mesh.pp)):  # the model knows nothing of data ranks
            found = found or self._once(
                ("model", axes), partial(self._plain_problems, config, axes, self.traced.workload.model)
            )
        return found

    def _plain_problems(self, config: ParallelConfig, mesh: Mesh, model: nn.Module | None) -> list[str]:
        """List problems of a mesh alone, or with a model on it."""
        plain = ParallelConfig(dp=mesh.dp, cp=mesh.cp, pp=mesh.pp, tp=mesh.tp, engine=config.engine)
        batch, device = self.traced.workload.global_batch, self.cluster.device.type
        return layout_problems(plain, mesh.world, batch, device, model)

    def layout(self, config: ParallelConfig, mesh: Mesh) -> PlannedLayout:
        """Return a layout with its memory; its seconds are computed when requested."""
        workload = self._workload(config, mesh)
        alive = zip(self._ranks(workload), schedule_cost(workload).peak_alive, strict=True)
        memory, host = (max(each) for each in zip(*(self._memory(rank, most) for rank, most in alive), strict=True))
        return PlannedLayout(config, mesh, memory, host, -(-mesh.world // self.cluster.node.devices), self)

    def state(self, config: ParallelConfig, mesh: Mesh) -> StateLayout:
        """Return what is known of a layout without a trace of the model."""
        ranks = self._ranks(self._workload(config, mesh))
        states = [self._state(rank) for rank in ranks]
        memory, host = max(each.on_device for each in states), max(each.offloaded for each in states)
        return StateLayout(config, mesh, memory, host, max(map(batch_axes_bytes, ranks)))

    def counts(self, config: ParallelConfig, mesh: Mesh) -> StepCounts:
        """Count what a step in a layout does."""
        workload = self._workload(config, mesh)
        ranks = self._ranks(workload)
        stages = tuple(stage_counts(rank, self._tables(rank)) for rank in ranks)
        flops = self._once("flops", self.traced.work.flops)
        return counts_of_stages(workload, ranks, stages, flops, self._sent(workload))

    def time(self, counts: StepCounts) -> StepTime:
        return step_time(counts, self.cluster, self._kept)

    def _workload(self, config: ParallelConfig, mesh: Mesh) -> Workload:
        engine = self._once(
            ("engine", mesh, config.zero, config.offload, config.engine),
            lambda: decide_engine(config, mesh, self.cluster.device.type)[0],
        )
        workload = self._once("workload", lambda: self.traced.workload.on_device(self.cluster.device.type))
        found: Workload = workload.with_layout(config, mesh, engine)
        return found

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _ranks(self, workload: Workload) -> list[RankParameters]:
        """Return the pipeline ranks' parameters, cached over passes, recomputing and the like."""
        config, mesh = workload.config, workload.mesh
        key = ("ranks", mesh, config.zero, config.shard, config.stages_per_rank, workload.engine)
        known = self._once(key, lambda: [RankParameters(workload, rank) for rank in range(mesh.pp)])
        ranks = [copy.copy(rank) for rank in known]
        for rank in ranks:
            rank.workload = workload
        workload.__dict__["stages"] = known[0].workload.stages
        return ranks

    def _tables(self, rank: RankParameters) -> Any:
        config = rank.workload.config
        key = ("tables", tuple(rank.names), config.activation_checkpointing)
        return self._once(key, lambda: stage_tables(rank, self.traced.work))

    def _state(self, rank: RankParameters) -> StageMemory:
        """Return what a rank holds without activations, and what ZeRO gathers."""
        workload, config = rank.workload, rank.workload.config
        cut = (workload.mesh, config.zero, config.shard, config.offload, config.precision, config.stages_per_rank)
        key = ("state", cut, rank.names[0], config.passes > 1)
        found: StageMemory = self._once(key, lambda: stage_memory(rank, None))
        return found

    def _memory(self, rank: RankParameters, alive: int) -> tuple[int, int]:
        """Return (peak bytes of a rank's device, bytes of the host)."""
        workload = rank.workload
        config, mesh = workload.config, workload.mesh
        state = self._state(rank)
        trace, cast = self._trace(workload, may_fit=state.on_device <= self.limit)
        kept_key = (tuple(rank.names), mesh.tp, mesh.cp, config.sequence_parallel, config.activation_checkpointing)
        kept: KeptElements = self._once(("kept", cast, kept_key), lambda: kept_elements(workload, trace, rank.names))
        element = workload.compute_bytes * workload.rows_per_pass / mesh.cp
        # a block is computed again when the loss has freed what it held
        loss = self._loss(workload) if rank.stages[-1] == workload.stages[-1] else 0.0
        held = kept.alive * alive / config.stages_per_rank * element + max(kept.once * element, loss)
        if not config.zero:  # a ring's buckets, and weights as autocast casts them
            held += state.gradients * (mesh.dp * mesh.cp > 1) + rank.whole * 2 * (config.precision != "fp32")
        evaluated = self._evaluated(rank)
        return state.on_device + int(max(held, evaluated)), state.offloaded

    def _trace(self, workload: Workload, may_fit: bool) -> tuple[Trace, str]:
        """Return the trace and its autocast precision; ZeRO gathers weights in the dtype of compute instead.

        `may_fit`: if False the existing trace will do, since another takes seconds of a large model.
        """
        config, base = workload.config, self.traced.workload
        if config.zero or config.precision == "fp32" or not may_fit:
            return self.traced.trace, ""

        def under_autocast() -> Trace:
            short = shortened(base.on_device(self.cluster.device.type), self.traced.trace)
            return lengthened(trace_of(short, config.precision), stand_ins(base.model, self.traced.trace))

        key = ("trace", config.precision, self.cluster.device.type)
        found: Trace | None = self._once(key, lambda: traceable(under_autocast))
        return (self.traced.trace, "") if found is None else (found, config.precision)

    def _loss(self, workload: Workload) -> float:
        """Return bytes of the outputs and of the loss's other tensors, on one tensor and context rank."""
        rows, mesh, precision = workload.rows_per_pass, workload.mesh, workload.config.precision
        outputs = rows * self._once("outputs", lambda: output_elements(self.traced.work)) / mesh.cp
        is_cut = mesh.tp > 1 and self._once("head", lambda: "vocab_head" in workload.kinds.values())
        shape, task = self.traced.trace.output, workload.task
        untraced = outputs * (LOSS_BYTES + workload.compute_bytes) / (mesh.tp if is_cut else 1)
        if is_cut or shape is None or task is None:
            return untraced

        def beside() -> int:
            dtype = DTYPES.get(precision, torch.float32)
            columns = {name: repeated(column, rows) for name, column in batch_columns(workload).items()}
            return loss_bytes(
                task, columns, torch.empty(rows, *shape, dtype=dtype, device="meta"), precision, workload.device_type
            )

        found: int | None = self._once(("loss", rows, precision), lambda: traceable(beside))
        return untraced if found is None else outputs * workload.compute_bytes + found / mesh.cp

    def _evaluated(self, rank: RankParameters) -> float:
        """Return bytes that a pipeline's last rank, which has the outputs, holds in evaluation beyond its state."""
        workload, config = rank.workload, rank.workload.config
        if not workload.evaluated_rows or rank.stages[-1] != workload.stages[-1]:
            return 0.0
        rows, mesh = workload.evaluated_rows, workload.mesh
        key = ("evaluated", rows, mesh.tp, mesh.cp, config.sequence_parallel, config.precision)
        of_row: float | None = self._once(
            key, lambda: traceable(lambda: row_evaluation_bytes(workload, self.traced.trace))
        )
        if of_row is None:
            return 0.0
        cast = 0 if config.zero or config.precision == "fp32" else 2 * rank.whole
        return of_row * rows + cast

    def _sent(self, workload: Workload) -> dict[str, int]:
        """Return bytes over tp, cp and pp, which grow with the rows of a rank."""
        mesh, config = workload.mesh, workload.config
        rows = workload.rows_per_pass * config.passes
        key = (mesh, config.activation_checkpointing, config.stages_per_rank, config.precision)
        known, of_rows = self._once(("sent", key), lambda: (activation_bytes(workload, self.traced.trace), rows))
        return {axis: int(size / of_rows * rows) for axis, size in known.items()}


def meshes(world: int) -> Iterator[Mesh]:
    for tp in _divisors(world):
        for cp in _divisors(world // tp):
            for pp in _divisors(world // tp // cp):
                yield Mesh(dp=world // tp // cp // pp, cp=cp, pp=pp, tp=tp)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def mesh_layouts(base: ParallelConfig, mesh: Mesh, global_batch: int, per_machine: int) -> Iterator[ParallelConfig]:
    """Yield the configurations of a mesh, possible or not, in the base's precision, without offload.

    Args:
        base: values that are not searched.
        mesh: sizes of the axes.
        global_batch: rows of a step.
        per_machine: devices per machine.
    """
    rows = global_batch // mesh.dp
    parts = [1 << power for power in range(MOST_PARTS.bit_length()) if 1 << power <= max(1, rows)]
    axes = {"dp": mesh.dp, "cp": mesh.cp, "pp": mesh.pp, "tp": mesh.tp}
    plain = {**axes, "schedule": "1f1b", "stages_per_rank": 1, "micro_batches": 1, "accumulate": 1, "shard": 0}
    for zero in (0, 1, 2, 3) if mesh.dp * mesh.cp > 1 else (0,):
        for recompute in (False, True):
            for sequence in (False, True) if mesh.tp > 1 and mesh.cp == 1 else (False,):
                cut = {"zero": zero, "activation_checkpointing": recompute, "sequence_parallel": sequence}
                for shard in shard_sizes(mesh, per_machine) if zero else (0,):
                    for count in parts:
                        for schedule in _schedules(mesh.pp):
                            passes = {"micro_batches": count, **schedule} if mesh.pp > 1 else {"accumulate": count}
                            changed = {**plain, "offload": False, **cut, "shard": shard, **passes}
                            yield base.model_copy(update=changed)


def shard_sizes(mesh: Mesh, per_machine: int) -> list[int]:
    """List values of `parallel.shard` worth trying: all ranks, or the ranks of 1, 2, 4... machines."""
    if mesh.cp > 1 or per_machine % mesh.tp:
        return [0]
    sizes = [per_machine // mesh.tp << power for power in range(mesh.dp.bit_length())]
    return [0, *(size for size in sizes if 1 < size < mesh.dp and mesh.dp % size == 0)]


def _schedules(pp: int) -> list[dict[str, Any]]:
    if pp == 1:
        return [{}]
    return [
        {"schedule": "1f1b"},
        {"schedule": "zero-bubble"},
        {"schedule": "interleaved", "stages_per_rank": 2},
    ]


def worlds(cluster: Cluster, devices: int) -> list[int]:
    """List numbers of devices to try: all, 1 to EVERY_WORLD, machines by powers of two. ValueError if none."""
    if devices > MOST_DEVICES:
        raise ValueError(f"{count_of(devices, 'device is')} more than the {MOST_DEVICES} that a search takes")
    cluster.nodes(devices)  # whole machines
    per_machine = cluster.node.devices
    machines = [per_machine << power for power in range(devices.bit_length())]
    whole = [each for each in range(1, EVERY_WORLD + 1) if each <= per_machine or each % per_machine == 0]
    return sorted({devices, *(each for each in [*machines, *whole] if each < devices)}, reverse=True)


@dataclass(frozen=True)
class SearchResult:
    """The layouts that fit, best first, and what was tried."""

    best: tuple[PlannedLayout, ...]
    tried: int  # layouts that can run
    smallest: PlannedLayout | None  # the one that needs least memory, whether it fits or not


def search(
    costs: LayoutCosts,
    base: ParallelConfig,
    devices: int,
    objective: Objective = "time",
    precisions: Sequence[Precision] = (),
) -> SearchResult:
    """Rank every layout of at most `devices` devices.

    Args:
        costs: costs of the model on the cluster.
        base: values that are not searched.
        devices: most devices to use.
        objective: quantity to optimize.
        precisions: precisions of compute to choose from; empty for the base's.
    """
    found: list[PlannedLayout] = []
    smallest: PlannedLayout | None = None
    tried = 0
    for world in worlds(costs.cluster, devices):
        if least_bytes(costs.traced.workload, world) > max(costs.limit, costs.host_limit(world)):
            continue
        for layout in possible_layouts(costs, base, world, precisions, is_every=objective == "memory"):
            tried += 1
            if smallest is None or layout.memory < smallest.memory:
                smallest = layout
            if costs.fits(layout):
                found.append(layout)
    return SearchResult(tuple(sorted(found, key=order(objective))), tried, smallest)


def any_precision(cluster: Cluster) -> tuple[Precision, ...]:
    """List the precisions to choose from on a cluster, the fastest first.

    fp16 costs what bf16 does, and scales the loss, so it is one only where its peak is higher.
    """
    peak = cluster.device.peak_flops
    known = [each for each in get_args(Precision) if each != "fp16" or peak(each) > peak("bf16")]
    return tuple(sorted(known, key=lambda each: (-peak(each), each == "fp32")))


def possible_layouts(
    costs: LayoutCosts,
    base: ParallelConfig,
    world: int,
    precisions: Sequence[Precision] = (),
    is_every: bool = False,
) -> Iterator[PlannedLayout]:
    """Yield the possible layouts of `world` ranks, without those neither faster nor cheaper.

    Args:
        costs: costs of the model on the cluster.
        base: values that are not searched.
        world: number of ranks.
        precisions: precisions to choose from, see `search`.
        is_every: yield layouts that are neither faster nor cheaper, too.
    """
    for mesh in meshes(world):
        if costs.mesh_problems(base, mesh):
            continue
        for config in mesh_layouts(base, mesh, costs.traced.workload.global_batch, costs.cluster.node.devices):
            for layout in layout_variants(costs, config, mesh, precisions):
                yield layout
                if not is_every and is_fastest(layout, precisions, costs.cluster) and costs.fits(layout):
                    break


def layout_variants(
    costs: LayoutCosts, config: ParallelConfig, mesh: Mesh, precisions: Sequence[Precision] = ()
) -> Iterator[PlannedLayout]:
    """Yield a layout in each precision, then offloaded, if possible and within host memory."""
    for variant in config_variants(costs, config, mesh, precisions):
        layout = costs.layout(variant, mesh)
        if costs.has_host_for(layout):
            yield layout


def config_variants(
    costs: LayoutCosts, config: ParallelConfig, mesh: Mesh, precisions: Sequence[Precision] = ()
) -> Iterator[ParallelConfig]:
    """Yield the configurations of `layout_variants`, regardless of memory."""
    for offload in (False, True) if config.zero and costs.host_limit(mesh.world) else (False,):
        for precision in precisions or (config.precision,):
            variant = config.model_copy(update={"precision": precision, "offload": offload})
            if not costs.problems(variant, mesh):
                yield variant


def is_fastest(layout: PlannedLayout, precisions: Sequence[Precision], cluster: Cluster) -> bool:
    """Return whether no variant of a layout is faster: fastest products and smallest tensors."""
    config, peak = layout.config, cluster.device.peak_flops
    is_smallest = config.precision != "fp32" or set(precisions) <= {"fp32"}
    return not config.offload and is_smallest and all(peak(config.precision) >= peak(each) for each in precisions)


def state_layouts(costs: LayoutCosts, devices: int) -> list[StateLayout]:
    """List possible layouts of an untraceable model, with all devices first, by bytes sent.

    Passes, schedules and recomputation, whose effect is unknown, stay as they are.
    """
    workload, cluster = costs.traced.workload, costs.cluster
    base, found = workload.config, dict[Any, StateLayout]()
    for world in worlds(cluster, devices):
        for mesh in meshes(world):
            if costs.mesh_problems(base, mesh):
                continue
            for config in mesh_layouts(base, mesh, workload.global_batch, cluster.node.devices):
                for variant in config_variants(costs, config, mesh):
                    cut = mesh, variant.zero, variant.shard, variant.offload
                    if cut not in found:
                        found[cut] = costs.state(variant, mesh)
                    if costs.fits(found[cut]):
                        break
    return sorted(found.values(), key=lambda each: (-each.mesh.world, each.sent, each.memory, each.mesh.pp))


def least_bytes(workload: Workload, world: int) -> float:
    """Return bytes of weights, gradients and optimizer state of one rank, spread over all."""
    parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    return parameters * workload.element_bytes * (2 + workload.states) / world


def order(objective: Objective) -> Callable[[PlannedLayout], tuple[float, ...]]:
    """Return a sort key, smaller is better; among equally good layouts the simpler one."""

    def simple(layout: PlannedLayout) -> tuple[float, ...]:
        config, mesh = layout.config, layout.mesh
        return (
            mesh.world,
            mesh.pp,
            mesh.cp,
            mesh.tp,
            config.zero,
            config.offload,
            config.shard,
            config.activation_checkpointing,
            layout.counts.micro,
            config.precision != "fp32",
        )

    if objective == "memory":
        return lambda layout: (layout.memory, layout.time.total, *simple(layout))
    if objective == "cost":
        return lambda layout: (layout.machine_seconds, layout.time.total, *simple(layout))
    return lambda layout: (layout.time.total, *simple(layout))


def distinct(layouts: tuple[PlannedLayout, ...], count: int) -> list[PlannedLayout]:
    """Return the best layout per kind: axes, what ZeRO shards, offload and precision on as many ranks.

    ZeRO 1 and 2 are one kind, which keeps whole weights. All else makes variants.
    """
    best: dict[Any, PlannedLayout] = {}
    seen: set[Any] = set()
    for layout in layouts:
        if (same := (layout.mesh, layout.time.total)) in seen:
            continue  # ZeRO 1 and 2 are one where a step has one pass
        seen.add(same)
        config = layout.config
        axes = tuple(size > 1 for size in layout.mesh.shape)
        cut = config.zero and (3 if config.zero == 3 else 1)
        best.setdefault((layout.mesh.world, axes, cut, config.offload, config.precision), layout)
        if len(best) == count:
            break
    return list(best.values())
