"""Predict the seconds of a step: what it does (StepCounts, of no hardware), and how long that takes on a cluster.

A step is `micro` passes through a pipeline of p ranks. With f and b seconds of a pass on its slowest rank, its sends
included, and one stage per rank, 1F1B and GPipe take (micro - 1) (f + b) on that rank after the first pass through all
of them (https://arxiv.org/abs/2104.04473, section 2.2); other schedules are simulated by their tables
(training/parallel/model_parallel/schedules.py). Tensor and context ranks exchange inside a pass, where nothing can run
beside it. Gradients, and the weights that ZeRO-3 gathers, are exchanged beside compute: a share 1 - `reached.overlap`
of the hidden seconds is lost to it, and what is longer than compute is waited for. Then the optimizer moves each owned
parameter's state through memory: the device's, or with offload (offload.py) the host's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sparkring.conf.clusters.cluster import MICRO, Cluster
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
from sparkring.training.planner.traffic import activation_bytes, batch_axes_bytes, replica_bytes
from sparkring.training.planner.workload import RankParameters, SparseTable, Workload
from sparkring.training.tables.sharded import sent_bytes

# The loss reads and writes each output a few times: in forward twice and, by backward's factor, three times
LOSS_ELEMENTS = 4.0


@dataclass(frozen=True)
class StageCounts:
    """What one pipeline rank does in a pass. recomputed: the part of it that backward does again."""

    operations: OperationTable
    recomputed: OperationTable
    updated: int  # parameters
    exchanged: int  # bytes that it sends over the batch axes in a step
    between_groups: int = 0  # of them, to the ranks with the same shard in other groups of shards
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
    batch_calls: int  # collectives over the batch axes in one step
    every_pass: bool  # whether these are in every pass (ZeRO-3), not after the last
    state_bytes: int  # that the optimizer reads and writes per owned parameter
    flops: float  # of the model in a step, on all ranks, without what is computed again
    context_calls: int = 0  # exchanges of tokens for heads in one pass
    zero: int = 0  # ZeRO's level: what it exchanges blocks on a CPU
    framework: str = "torch"  # that takes the step
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
    hidden: of exchanges beside compute; no part of the total.
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
    """Put together what a step does.

    Args:
        workload: the step.
        ranks: its pipeline ranks.
        stages: what each does in a pass.
        flops: of one row.
        sent: bytes of one rank and step over tp, cp and pp.
    """
    mesh, config = workload.mesh, workload.config
    micro = config.passes
    units = max(len(rank.units) for rank in ranks) + 1
    in_every_pass = ranks[0].zero == 3
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
        batch_calls=3 * units * micro if in_every_pass else units,
        every_pass=in_every_pass,
        state_bytes=(2 * workload.states + 7) * 4,
        flops=flops * workload.global_batch,
        context_calls=(3 if config.activation_checkpointing else 2) * 4 * len(workload.attention_cores) // mesh.pp,
        zero=ranks[0].zero,
        shard=ranks[0].shard if ranks[0].zero else 0,
        tables=tuple(table_work(table, workload) for table in workload.tables),
    )


def table_work(table: SparseTable, workload: Workload) -> TableWork:
    ids = table.distinct(workload.rows_per_rank)
    sent = sent_bytes(table.replicated, ids, table.sent_bytes, workload.mesh.dp)
    return TableWork(ids, sent, table.replicated, table.lagged)


def stage_counts(rank: RankParameters, tables: tuple[OperationTable, OperationTable]) -> StageCounts:
    return StageCounts(*tables, rank.updated, batch_axes_bytes(rank), replica_bytes(rank), shard_copies(rank))


def stage_tables(rank: RankParameters, work: ModelWork) -> tuple[OperationTable, OperationTable]:
    """(operations of a pass on a pipeline rank, those that backward does again)."""
    workload = rank.workload
    names = [name for name in work.layers if rank.names == [""] or name in rank.names]
    operations = Counter(op for name in names for op in work.layers[name])
    again: Counter[Operation] = Counter()
    if workload.config.activation_checkpointing:
        blocks = set(workload.block_names)
        again = Counter(op for name in names if name in blocks for op in work.layers[name])
    if rank.names == [""] or workload.stages[-1][-1] in rank.names:
        operations[Operation("memory", "column", elements=LOSS_ELEMENTS * output_elements(work))] += 1
    return OperationTable(operations), OperationTable(again)


def output_elements(work: ModelWork) -> int:
    """Elements of one row's output: of the last matrix product."""
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
    """Seconds of a step on a cluster. `kept`: of passes through the same tables, of other calls for this cluster."""
    cluster = cluster.as_trained_by(counts.framework)
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
    """The same work of ranks that take turns."""
    return work._replace(forward=work.forward * times, backward=work.backward * times)


def _stage_seconds(work: PassWork, again: PassWork, inside: float, launch: float, calls: int) -> StageSeconds:
    """Seconds of a pass.

    Args:
        work: of forward and backward.
        again: whose forward backward repeats.
        inside: seconds of exchanges in each of the two.
        launch: seconds to start an operation.
        calls: collectives in both.
    """
    forward, backward = work.forward + inside, work.backward + again.forward + inside
    started = launch * (work.forward_starts + calls / 2)
    started_back = launch * (work.backward_starts + again.forward_starts + calls / 2)
    host = max(0.0, started - forward) + max(0.0, started_back - backward)
    return StageSeconds(max(forward, started), max(backward, started_back), host)


def _pass_exchanges(counts: StepCounts, topology: Topology) -> tuple[float, float, float]:
    """Seconds per pass of tensor ranks, of context ranks, and of one send to the next stage."""
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
    """Seconds per pass that DTensor adds on a CPU."""
    if counts.mesh.tp == 1:
        return 0.0
    roofline = Roofline(cluster, counts.precision)
    tables = [stage.operations for stage in counts.stages]
    starts = max(table.starts for table in tables)
    moved = max(roofline.moved_between(table, counts.cut) for table in tables)
    return own_work_s(cluster, TENSOR_STARTS * starts, TENSOR_PASSES * moved)


def _zero_own_s(counts: StepCounts, topology: Topology, sent: float) -> float:
    """Seconds per step that fully_shard adds on a CPU. `sent`: bytes of one rank."""
    group = RankGroup(counts.mesh.dp * counts.mesh.cp, counts.mesh.tp)
    units = counts.batch_calls / 3 if counts.every_pass else counts.batch_calls
    gathers = 0 if counts.every_pass else units  # batch_calls has the reductions alone
    own = own_work_s(topology.cluster, ZERO_STARTS * units, ZERO_COPIES * whole_bytes(sent, group.size))
    return topology.per_core * own + gathers * topology.latency_s(group)


class BatchExchange(NamedTuple):
    """Seconds of what is exchanged over the batch axes, and of copies from and to the host.

    exchange, offload: as far as it is waited for. hidden: beside compute.
    """

    exchange: float
    offload: float
    hidden: float


def _batch_exchange(counts: StepCounts, topology: Topology, stage: StageSeconds) -> BatchExchange:
    mesh = counts.mesh
    fullest = max(counts.stages, key=lambda each: each.exchanged)
    sent, between = fullest.exchanged, fullest.between_groups
    shard = counts.shard or mesh.dp * mesh.cp
    seconds = topology.sent_s(sent - between, RankGroup(shard, mesh.tp), counts.batch_calls, is_ring=counts.zero > 0)
    seconds += topology.sent_s(between, RankGroup(mesh.dp * mesh.cp // shard, mesh.tp * shard), counts.batch_calls)
    beside = counts.micro * stage.both if counts.every_pass else stage.backward
    if counts.zero and is_cpu(topology.cluster):
        return BatchExchange(seconds + _zero_own_s(counts, topology, sent), 0.0, 0.0)
    first = seconds
    if is_cpu(topology.cluster):  # the last bucket is complete when backward ends
        first -= seconds / counts.batch_calls
    overlap = topology.cluster.reached.overlap
    hidden = min(first, beside) * overlap
    if fullest.copies is None:
        return BatchExchange(seconds - hidden, 0.0, hidden)
    copied, waited = copy_seconds(fullest.copies, topology.cluster, mesh.world)
    hidden_copies = min(copied, max(0.0, beside - first)) * overlap  # in the same streams, one after the other
    return BatchExchange(seconds - hidden, copied + waited - hidden_copies, hidden + hidden_copies)


def pipeline_seconds(counts: StepCounts, stages: list[StageSeconds]) -> float:
    """Seconds until all passes of a step have left the pipeline."""
    micro, slowest = counts.micro, max(stage.both for stage in stages)
    if len(stages) == 1:
        return micro * slowest
    if counts.per_rank == 1 and counts.schedule in ("1f1b", "gpipe"):
        return (micro - 1) * slowest + sum(stage.both for stage in stages)
    return micro * slowest * (1 + schedule_run(counts.schedule, len(stages), micro, counts.per_rank).bubble)
