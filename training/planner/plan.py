"""Put the predictions of a workload together into one plan."""

from __future__ import annotations

from dataclasses import dataclass

from sparkring.training.parallel.averaging.rules import BETWEEN_HOSTS
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.memory import StageMemory, kept_elements, stage_memory, tables_bytes
from sparkring.training.planner.peak_memory.play import with_peaks
from sparkring.training.planner.trace import Trace, Untraceable, trace_model
from sparkring.training.planner.traffic import (
    activation_bytes,
    averaged_bytes,
    batch_axes_bytes,
    schedule_cost,
    tables_sent_bytes,
    tied_weight_bytes,
)
from sparkring.training.planner.workload import RankParameters, Workload

MANY_HOSTS = 10**6  # how ranks are packed is known when they are started: the most that a host sends


@dataclass(frozen=True)
class CostPlan:
    """The predicted cost of a workload."""

    mesh: Mesh
    engine: str
    parameters: int
    export: int  # bytes rank 0 holds at once besides its own shard: one whole parameter; the other ranks hold less
    stages: tuple[StageMemory, ...]  # by pipeline rank
    sent_bytes: dict[str, int]  # axis -> per rank and step
    bubble: float  # idle over ideal time
    micro_batches: int
    measured_cut: bool = False  # training will cut the stages by measured costs, here they are cut by estimated ones
    fewer_bytes_by: str = ""  # what makes dp x cp send less than whole gradients in every step: codec, averaging
    dense_bytes: int = 0  # what it would send without
    reader: int | None = None  # the most that a rank's reader holds, on the host; None: not known
    tables: int = 0  # the same of its share of sparse tables
    evaluated_rows: int = 0  # that a rank evaluates at a time; 0: none, or not known
    untraced: str = ""  # why activations, and the bytes sent because of them, are not planned


def make_plan(workload: Workload, peaks: bool = True) -> CostPlan:
    """Predict memory, bytes sent and bubble; activations only if there is a trace.

    `peaks`: the step's peak of memory too, for which whole passes are traced (tenths of a second).
    """
    mesh = workload.mesh
    trace, untraced = _try_trace(workload)
    schedule = schedule_cost(workload)
    ranks = [RankParameters(workload, rank) for rank in range(mesh.pp)]
    stages = [
        stage_memory(rank, _activations(workload, trace, rank.names, schedule.peak_alive[number]))
        for number, rank in enumerate(ranks)
    ]
    if trace is not None and peaks:
        stages, unpeaked = _try_peaks(ranks, stages)
        untraced = untraced or unpeaked
    sent = {"dp x cp": sum(batch_axes_bytes(rank) for rank in ranks) // mesh.pp + tables_sent_bytes(workload)}
    if trace is not None:
        sent |= activation_bytes(workload, trace)
    if workload.is_averaged and workload.config.averaging.groups == "host":
        sent[BETWEEN_HOSTS] = averaged_bytes(ranks[0], MANY_HOSTS)
    sent["pp tied weights"] = tied_weight_bytes(workload)
    sizes = [p.numel() for p in workload.model.parameters()]
    return CostPlan(
        mesh=mesh,
        engine=workload.engine,
        parameters=sum(sizes),
        export=max(sizes, default=0) * workload.element_bytes,
        stages=tuple(stages),
        sent_bytes={axis: size for axis, size in sent.items() if size},
        bubble=schedule.bubble,
        micro_batches=workload.config.passes,
        measured_cut=workload.config.balance == "measured",
        fewer_bytes_by=workload.fewer_bytes_by,
        dense_bytes=sum(batch_axes_bytes(rank, dense=True) for rank in ranks) // mesh.pp,
        reader=workload.reader_bytes,
        tables=tables_bytes(workload),
        evaluated_rows=workload.evaluated_rows,
        untraced=untraced,
    )


def _try_peaks(ranks: list[RankParameters], stages: list[StageMemory]) -> tuple[list[StageMemory], str]:
    """Return (memory with the step's peak, ""), or (the memory unchanged, reason)."""
    try:
        return with_peaks(ranks, stages), ""
    except Untraceable as error:
        return stages, str(error)


def _activations(workload: Workload, trace: Trace | None, names: list[str], alive: int) -> int | None:
    """Return bytes kept for backward on a pipeline rank with `alive` micro-batches x stages."""
    if trace is None:
        return None
    per_pass = workload.rows_per_pass * workload.compute_bytes
    kept = kept_elements(workload, trace, names).of_passes(alive / workload.config.stages_per_rank)
    return int(kept * per_pass / workload.mesh.cp)


def _try_trace(workload: Workload) -> tuple[Trace | None, str]:
    """Return (trace, ""), or (None, reason)."""
    try:
        if isinstance(workload.inputs, Untraceable):
            raise workload.inputs
        layers = [name for stage in workload.stages for name in stage]
        names = {*workload.kinds, *layers, *workload.attention_cores, *workload.block_names}
        trace = trace_model(
            workload.model, workload.inputs, names, workload.kinds, workload.rows_per_pass, workload.device_type
        )
        return trace, ""
    except Untraceable as error:
        return None, str(error)
