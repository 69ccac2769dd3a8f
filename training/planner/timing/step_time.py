"""Predict the seconds of a step: what it does (StepCounts, of no hardware), and how long that takes on a cluster.

A step is `micro` passes through a pipeline of p ranks. With f and b seconds of a pass on its slowest rank, its sends
included, and one stage per rank, 1F1B and GPipe take (micro - 1) (f + b) on that rank after the first pass through all
of them (https://arxiv.org/abs/2104.04473, section 2.2); other schedules are simulated by their tables
(training/parallel/model_parallel/schedules.py). Tensor and context ranks exchange inside a pass, where nothing can run
next to it. Gradients, and the weights that ZeRO gathers, are exchanged parallel to compute: C seconds of compute and X
of exchange take max(X, C + `reached.contention` X) together. Then the optimizer moves the state of each owned parameter
through memory: the device's, or with offload (offload.py) the host's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sparkring.conf.clusters.cluster import MICRO, Cluster
from sparkring.training.parallel.data_parallel.reduce import bucket_limit
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.parallel.model_parallel.schedules import schedule_run
from sparkring.training.planner.timing.collectives import RankGroup, Topology
from sparkring.training.planner.timing.offload import ShardCopies, copy_seconds, host_bytes_per_s, shard_copies
from sparkring.training.planner.timing.operations import ModelWork, Operation
from sparkring.training.planner.timing.roofline import OperationTable, PassWork, RankShare, Roofline
from sparkring.training.planner.timing.shared_cores import (
    CONTEXT_COPIES,
    TENSOR_ENDS,
    TENSOR_PASSES,
    TENSOR_STARTS,
    ZERO_COPIES,
    ZERO_STARTS,
    is_cpu,
    message_waits_s,
    own_work_s,
    ranks_per_core,
    shared_pipeline_s,
    whole_bytes,
)
from sparkring.training.planner.timing.sparse_tables import TableWork, tables_s
from sparkring.training.planner.trace import Trace
from sparkring.training.planner.traffic import BatchBytes, activation_bytes, batch_bytes, reductions_of
from sparkring.training.planner.workload import RankParameters, SparseTable, Workload
from sparkring.training.tables.sharded import sent_bytes

# fully_shard copies what it gathers out of the collective's buffer, and gradients into one: read and written once
ZERO_COPIED = 2.0
# The loss reads and writes each output a few times: in forward twice and, by backward's factor, three times
LOSS_ELEMENTS = 4.0


@dataclass(frozen=True)
class StageCounts:
    """What one pipeline rank does in a pass. recomputed: the part of it that backward does again."""

    operations: OperationTable
    recomputed: OperationTable
    updated: int  # parameters
    exchanged: BatchBytes  # that it sends over the batch axes in a step
    copies: ShardCopies | None = None  # between host and device; None: nothing is offloaded


@dataclass(frozen=True)
class StepCounts:
    """What a step does, whatever the hardware."""

    mesh: Mesh
    precision: str
    stages: tuple[StageCounts, ...]
    cut: RankShare
    micro: int  # passes
    schedule: str
    per_rank: int  # pipeline stages
    sent: dict[str, float]  # bytes of one rank and step over tp, cp and pp
    layer_calls: int  # collectives of tensor or context ranks in one pass
    units: int  # parts of a stage that are gathered, and whose gradients are reduced, separately
    reductions: int  # times that gradients are reduced in a step
    state_bytes: int  # that the optimizer reads and writes per owned parameter
    flops: float  # of the model in a step, on all ranks, without what is computed again
    context_calls: int = 0  # exchanges of tokens for heads in one pass
    zero: int = 0  # ZeRO's level: what it exchanges blocks on a CPU
    shard: int = 0  # ranks of the batch axes that hold the shards of a weight together; 0: no ZeRO
    tables: tuple[TableWork, ...] = ()  # of one rank in a step


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause.

    compute: forward and backward of the slowest pipeline rank. recompute: what activation checkpointing does again.
    host: the device waits for operations to be started. tensor, context, pipeline: exchanges inside passes. bubble: a
    pipeline rank waits for others. exchange: over the batch axes, as far as it is waited for. optimizer: its step.
    offload: shards are copied between host and device, as far as it is waited for.
    tables: rows of sparse tables are fetched and updated.
    hidden: of exchanges parallel to compute; not in the total.
    """

    compute: float = 0.0
    recompute: float = 0.0
    host: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    exchange: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    tables: float = 0.0
    hidden: float = 0.0

    @property
    def causes(self) -> dict[str, float]:
        """Seconds that add up to a step."""
        return {name: seconds for name, seconds in asdict(self).items() if name != "hidden"}

    @property
    def total(self) -> float:
        return sum(self.causes.values())


def step_counts(workload: Workload, work: ModelWork, trace: Trace) -> StepCounts:
    """Count what a step of the workload does."""
    ranks = [RankParameters(workload, rank) for rank in range(workload.mesh.pp)]
    stages = tuple(stage_counts(rank, stage_tables(rank, work)) for rank in ranks)
    return counts_of_stages(workload, ranks, stages, work.flops(), activation_bytes(workload, trace))


def counts_of_stages(
    workload: Workload, ranks: list[RankParameters], stages: tuple[StageCounts, ...], flops: float, sent: dict[str, int]
) -> StepCounts:
    """Combine the counts of a step.

    Args:
        workload: step to describe.
        ranks: its pipeline ranks.
        stages: counts of each rank in a pass.
        flops: operations of one row.
        sent: bytes of one rank and step over tp, cp and pp.
    """
    mesh, config = workload.mesh, workload.config
    micro = config.passes
    return StepCounts(
        mesh=mesh,
        precision=config.precision,
        stages=stages,
        cut=RankShare(workload.rows_per_pass, mesh.tp, mesh.cp, config.sequence_parallel),
        micro=micro,
        schedule=config.schedule,
        per_rank=config.stages_per_rank,
        sent={axis: float(size) for axis, size in sent.items()},
        layer_calls=(5 if config.activation_checkpointing else 4) * len(workload.block_names) // mesh.pp,
        units=max(exchanged_parts(rank) for rank in ranks),
        reductions=reductions_of(ranks[0]) if ranks[0].zero else 1,
        state_bytes=(2 * workload.states + 7) * 4,
        flops=flops * workload.global_batch,
        context_calls=(3 if config.activation_checkpointing else 2) * 4 * len(workload.attention_cores) // mesh.pp,
        zero=ranks[0].zero,
        shard=ranks[0].shard if ranks[0].zero else 0,
        tables=tuple(table_work(table, workload) for table in workload.tables),
    )


def exchanged_parts(rank: RankParameters) -> int:
    """Count the units that ZeRO gathers and reduces separately, or buckets of a ring's gradients."""
    if rank.zero:
        return len(rank.units) + 1
    size = rank.whole_trained * rank.workload.element_bytes
    return max(1, math.ceil(size / bucket_limit(size, rank.workload.config.bucket_bytes)))


def table_work(table: SparseTable, workload: Workload) -> TableWork:
    ids = table.distinct(workload.rows_per_rank)
    sent = sent_bytes(table.replicated, ids, table.sent_bytes, workload.mesh.dp)
    return TableWork(ids, sent, table.replicated, table.lagged)


def stage_counts(rank: RankParameters, tables: tuple[OperationTable, OperationTable]) -> StageCounts:
    return StageCounts(*tables, rank.updated, batch_bytes(rank), shard_copies(rank))


def stage_tables(rank: RankParameters, work: ModelWork) -> tuple[OperationTable, OperationTable]:
    """Return (operations of a pass on a pipeline rank, those that backward repeats)."""
    workload = rank.workload
    names = [name for name in work.layers if rank.names == [""] or name in rank.names]
    operations = Counter(op for name in names for op in work.layers[name])
    again: Counter[Operation] = Counter()
    if workload.config.activation_checkpointing:
        blocks = set(workload.block_names)
        again = Counter(op for name in names if name in blocks for op in recomputed(work.layers[name]))
    if rank.names == [""] or workload.stages[-1][-1] in rank.names:
        operations[Operation("memory", "column", elements=LOSS_ELEMENTS * output_elements(work))] += 1
    return OperationTable(operations), OperationTable(again)


def recomputed(operations: Sequence[Operation]) -> Sequence[Operation]:
    """Return a block's operations that backward repeats, up to a last product with an unneeded output.

    torch.utils.checkpoint, `early_stop`, of 2.1 and later. A mask of dropout after the product needs it.
    """
    last = max((index for index, op in enumerate(operations) if op.kind == "matmul"), default=0)
    is_needed = not all(op.has_backward for op in operations[last:])
    return operations if is_needed else operations[:last]


def output_elements(work: ModelWork) -> int:
    """Count the elements of one row's output: of the last matrix product."""
    products = [op for operations in work.layers.values() for op in operations if op.kind == "matmul"]
    return products[-1].batch * products[-1].m * products[-1].n if products else 0


class StageSeconds(NamedTuple):
    """Seconds of a pass on one pipeline rank, exchanges included, and what of them is waiting for the host."""

    forward: float
    backward: float
    host: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def step_time(counts: StepCounts, cluster: Cluster, kept: dict[Any, Any] | None = None) -> StepTime:
    """Return seconds of a step on a cluster. `kept`: cache of passes through equal tables on this cluster."""
    mesh, micro = counts.mesh, counts.micro
    roofline, topology = Roofline(cluster, counts.precision), Topology(cluster, mesh.world)
    known = {} if kept is None else kept

    def work_of(table: OperationTable) -> PassWork:
        key = (id(table), counts.cut, counts.precision)
        if key not in known:
            known[key] = roofline.pass_work(table, counts.cut)
        found: PassWork = known[key]
        return found

    per_core = ranks_per_core(cluster, mesh.world)
    alone = per_core if mesh.pp == 1 else 1.0  # a pipeline's ranks use each other's idle time
    works = [_slower(work_of(stage.operations), alone) for stage in counts.stages]
    again = [_slower(work_of(stage.recomputed), alone) for stage in counts.stages]
    tensor, context, send = _pass_exchanges(counts, topology)
    is_beside = is_cpu(cluster)  # messages to the next rank travel while this one computes
    inside = (tensor + context) / 2 + (0.0 if is_beside else send)  # of forward, and of backward
    launch = cluster.reached.launch_us * MICRO
    stages = [
        _stage_seconds(work, more, inside, launch, counts.layer_calls) for work, more in zip(works, again, strict=True)
    ]
    slowest = max(range(mesh.pp), key=lambda rank: stages[rank].both)
    exchanges = _batch_exchange(counts, topology, stages[slowest])
    passes, busy = pipeline_seconds(counts, stages), [stage.both for stage in stages]
    waits = message_waits_s(busy, send, micro) if is_beside else 0.0
    if mesh.pp > 1:
        passes = shared_pipeline_s(passes, [micro * each for each in busy], per_core)
    fullest = max(counts.stages, key=lambda stage: stage.updated)
    rate = cluster.device.memory_bytes_per_s * cluster.reached.memory / per_core
    if fullest.copies is not None:
        rate = host_bytes_per_s(cluster, mesh.world)
    return StepTime(
        compute=micro * (works[slowest].forward + works[slowest].backward),
        recompute=micro * again[slowest].forward,
        host=micro * stages[slowest].host,
        tensor=micro * tensor,
        context=micro * context,
        pipeline=waits if is_beside else micro * 2 * send,
        bubble=passes - micro * stages[slowest].both,
        exchange=exchanges.exchange,
        optimizer=fullest.updated * counts.state_bytes / rate,
        offload=exchanges.offload,
        tables=tables_s(counts.tables, topology, RankGroup(mesh.dp, mesh.tp)),
        hidden=exchanges.hidden,
    )


def _slower(work: PassWork, times: float) -> PassWork:
    """Scale the work of ranks that share a core."""
    return work._replace(forward=work.forward * times, backward=work.backward * times)


def _stage_seconds(work: PassWork, again: PassWork, inside: float, launch: float, calls: int) -> StageSeconds:
    """Return the seconds of a pass.

    Args:
        work: work of forward and backward.
        again: work of the forward that backward repeats.
        inside: seconds of exchanges in each direction.
        launch: seconds to start an operation.
        calls: collectives in both.
    """
    forward, backward = work.forward + inside, work.backward + again.forward + inside
    started = launch * (work.forward_starts + calls / 2)
    started_back = launch * (work.backward_starts + again.forward_starts + calls / 2)
    host = max(0.0, started - forward) + max(0.0, started_back - backward)
    return StageSeconds(max(forward, started), max(backward, started_back), host)


def _pass_exchanges(counts: StepCounts, topology: Topology) -> tuple[float, float, float]:
    """Return seconds per pass of tensor ranks, of context ranks, and of one send to the next stage."""
    mesh, micro, sent = counts.mesh, counts.micro, counts.sent
    cluster, exchanged = topology.cluster, sent.get("cp", 0.0) / micro
    ends = TENSOR_ENDS if is_cpu(cluster) else 0
    tensor = topology.sent_s(sent.get("tp", 0.0) / micro, RankGroup(mesh.tp, 1), counts.layer_calls + ends)
    context = topology.sent_s(exchanged, RankGroup(mesh.cp, mesh.tp), counts.context_calls)
    copied = own_work_s(cluster, 0, CONTEXT_COPIES * whole_bytes(exchanged, mesh.cp))
    tensor += topology.per_core * _tensor_own_s(counts, cluster)
    context += topology.per_core * copied
    send = 0.0
    if mesh.pp > 1:  # sent bytes are means: all ranks but the last send forward, all but the first backward
        size = sent.get("pp", 0.0) / micro / 2 * mesh.pp / (mesh.pp - 1)
        send = topology.send_s(size, mesh.world // mesh.pp)
    return tensor, context, send


def _tensor_own_s(counts: StepCounts, cluster: Cluster) -> float:
    """Return the seconds per pass that DTensor adds on a CPU."""
    if counts.mesh.tp == 1:
        return 0.0
    roofline = Roofline(cluster, counts.precision)
    tables = [stage.operations for stage in counts.stages]
    starts = max(table.starts for table in tables)
    moved = max(roofline.moved_between(table, counts.cut) for table in tables)
    return own_work_s(cluster, TENSOR_STARTS * starts, TENSOR_PASSES * moved)


class BatchExchange(NamedTuple):
    """Seconds of what is exchanged over the batch axes, and of copies from and to the host.

    exchange, offload: by which they make the step longer. hidden: the rest of the exchange.
    """

    exchange: float
    offload: float
    hidden: float


def _batch_exchange(counts: StepCounts, topology: Topology, stage: StageSeconds) -> BatchExchange:
    """Return the exchanges of a stage with this compute time.

    Units are gathered and reduced while their neighbors compute (implicit and explicit prefetching of fully_shard). So
    of each pass nothing hides the first gather and the last reduction.
    """
    mesh, cluster, units = counts.mesh, topology.cluster, counts.units
    fullest = max(counts.stages, key=lambda each: sum(each.exchanged))
    sent, shard = fullest.exchanged, counts.shard or mesh.dp * mesh.cp
    inside, between = RankGroup(shard, mesh.tp), RankGroup(mesh.dp * mesh.cp // shard, mesh.tp * shard)
    passes, is_ring = counts.micro if counts.zero == 3 else 1, counts.zero > 0
    gathered, again = (
        topology.sent_s(each, inside, units * passes, is_ring) for each in (sent.gathered, sent.regathered)
    )
    reduced = topology.sent_s(sent.reduced, inside, units * counts.reductions, is_ring)
    reduced += topology.sent_s(sent.between, between, units * counts.reductions)
    seconds = gathered + again + reduced
    if counts.zero and is_cpu(cluster):
        own = own_work_s(cluster, ZERO_STARTS * units * passes, ZERO_COPIES * whole_bytes(sum(sent), mesh.dp * mesh.cp))
        return BatchExchange(seconds + topology.per_core * own, 0.0, 0.0)
    copies, contention = copy_seconds(fullest.copies, cluster, mesh.world), cluster.reached.contention
    first, last = gathered / units, reduced / units
    waited, offload = first + last, copies.waited + (copies.forward + copies.backward) / units
    for compute_s, sent_s, copied_s in (
        (passes * stage.forward, gathered - first, copies.forward),
        (max(passes, counts.reductions) * stage.backward, again + reduced - last, copies.backward),
    ):
        longer = longer_by_s(compute_s, sent_s, contention)
        waited += longer
        offload += max(0.0, sent_s + copied_s * (1 - 1 / units) - compute_s - longer)  # in the same streams
    copied = whole_bytes(sum(sent) - sent.between, shard) * (counts.zero > 0)
    own = ZERO_COPIED * copied / (cluster.device.memory_bytes_per_s * cluster.reached.memory)
    return BatchExchange(waited + own, offload, max(0.0, seconds - waited))


def longer_by_s(compute_s: float, sent_s: float, contention: float) -> float:
    """Return by how many seconds an exchange prolongs simultaneous compute.

    While both run the exchange takes a share of the device from compute. Compute that ends first waits.
    """
    return max(sent_s - compute_s, contention * sent_s)


def pipeline_seconds(counts: StepCounts, stages: list[StageSeconds]) -> float:
    """Return the seconds until all passes of a step have left the pipeline."""
    micro, slowest = counts.micro, max(stage.both for stage in stages)
    if len(stages) == 1:
        return micro * slowest
    if counts.per_rank == 1 and counts.schedule in ("1f1b", "gpipe"):
        return (micro - 1) * slowest + sum(stage.both for stage in stages)
    return micro * slowest * (1 + schedule_run(counts.schedule, len(stages), micro, counts.per_rank).bubble)
