"""Predict what a step waits for: bytes sent by axis, and a pipeline's bubble."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sparkring.training.parallel.averaging.rules import RULES
from sparkring.training.parallel.data_parallel.codecs import sent_bytes
from sparkring.training.parallel.data_parallel.reduce import bucket_limit, plan_buckets
from sparkring.training.parallel.measure import ring_share
from sparkring.training.parallel.mesh import shard_groups
from sparkring.training.parallel.model_parallel.schedules import schedule_run
from sparkring.training.planner.trace import Trace
from sparkring.training.planner.workload import RankParameters, Workload
from sparkring.training.tables import sharded


class ScheduleCost(NamedTuple):
    bubble: float  # idle over ideal time
    peak_alive: list[int]  # per pipeline rank, most micro-batch x stage activations alive at once


def schedule_cost(workload: Workload) -> ScheduleCost:
    pp, config = workload.mesh.pp, workload.config
    if pp == 1:
        return ScheduleCost(0.0, [1])
    outcome = schedule_run(config.schedule, pp, config.passes, config.stages_per_rank)
    return ScheduleCost(outcome.bubble, outcome.peak_alive)


class BatchBytes(NamedTuple):
    """Bytes one rank sends over dp x cp per step.

    gathered, regathered: weights for forward, and again for backward. reduced: gradients, within a group of shards.
    between: gradients, to the ranks with the same shard in other groups.
    """

    gathered: float = 0.0
    regathered: float = 0.0
    reduced: float = 0.0
    between: float = 0.0


def batch_axes_bytes(rank: RankParameters, dense: bool = False) -> int:
    """Return bytes one rank sends over dp x cp per step: gradients, gathered weights, reached-flags.

    `dense`: as if there were neither gradient codec nor averaging.
    """
    return int(sum(batch_bytes(rank, dense)))


def batch_bytes(rank: RankParameters, dense: bool = False) -> BatchBytes:
    """Return the bytes of `batch_axes_bytes` by kind."""
    workload, element = rank.workload, rank.workload.element_bytes
    mesh = workload.mesh
    batch_ranks, flags = mesh.dp * mesh.cp, len(rank.trained)
    if not rank.zero and workload.is_coded and not dense:
        return BatchBytes(reduced=coded_bytes(rank))
    if workload.is_averaged and workload.config.averaging.groups == "rank" and not dense:
        return BatchBytes(reduced=averaged_bytes(rank, mesh.dp))
    if workload.is_served and not dense:  # the weights come, the gradients go
        return BatchBytes(reduced=sum(p.numel() for p in rank.parameters.values() if p.requires_grad) * element)
    if not rank.zero:
        return BatchBytes(reduced=int(2 * ring_share(batch_ranks) * (rank.whole_trained + flags) * element))
    # weights are gathered in the precision of compute, gradients reduced in that of the weights
    share, reduced = ring_share(rank.shard), rank.whole_trained * reductions_of(rank) * element
    forward, again = (share * elements * rank.gather_bytes for elements in gathered_elements(rank))
    found = (batch_ranks - 1) * flags * element if rank.on_horovod else 2 * ring_share(batch_ranks) * flags
    return BatchBytes(
        forward, again, share * reduced + found, int(2 * ring_share(rank.replicas) * reduced / rank.shard)
    )


def gathered_elements(rank: RankParameters) -> tuple[float, float]:
    """Count the elements that ZeRO gathers in a step: (for forward, again for backward)."""
    if rank.zero < 3:
        return float(rank.whole), 0.0
    # gathered again in backward, except for the last layer, whose backward comes next
    blocks, passes = rank.workload.block_names, rank.workload.config.passes
    twice = [name for name in rank.units if [name] != rank.layers[-1:] or name in blocks]
    return float(passes * rank.whole), float(passes * sum(rank.numels_of(twice)))


def tables_sent_bytes(workload: Workload) -> int:
    """Return bytes one rank sends per step for rows of sparse tables; server tables are not planned."""
    if workload.is_served:
        return 0
    rows, ranks = workload.rows_per_rank, workload.mesh.dp
    tables = workload.tables
    return int(sum(sharded.sent_bytes(t.replicated, t.distinct(rows), t.sent_bytes, ranks) for t in tables))


def reductions_of(rank: RankParameters) -> int:
    """Count how often ZeRO reduces the gradients in a step."""
    return 1 if rank.workload.mesh.pp > 1 or rank.zero <= 1 else rank.workload.config.passes


def coded_bytes(rank: RankParameters) -> int:
    """Return bytes one rank sends per step through a gradient codec, bucket by bucket."""
    workload, element = rank.workload, rank.workload.element_bytes
    trained = [p for p in rank.parameters.values() if p.requires_grad]
    sizes = [p.numel() * element for p in trained]
    limit = bucket_limit(sum(sizes), workload.config.bucket_bytes)
    buckets = plan_buckets(sizes, [p.dtype for p in trained], limit)
    shapes = [[trained[i].shape for i in bucket] for bucket in buckets]
    ranks = workload.mesh.dp * workload.mesh.cp
    return int(sum(sent_bytes(workload.config.compress, each, ranks, element) for each in shapes))


def averaged_bytes(rank: RankParameters, ranks: int) -> int:
    """Return bytes a replica of `ranks` sends per step to average weights: a window's over its steps."""
    workload, averaging = rank.workload, rank.workload.config.averaging
    trained = sum(p.numel() for p in rank.parameters.values() if p.requires_grad)
    sent = RULES[averaging.kind].sent(averaging, ranks)
    if averaging.inner_state == "averaged":
        sent += 2 * ring_share(ranks) * workload.optimizer_states
    return int(sent * trained * workload.element_bytes / averaging.every)


def activation_bytes(workload: Workload, trace: Trace) -> dict[str, int]:
    """Return bytes one rank sends per step over pp, tp and cp."""
    mesh, kinds = workload.mesh, workload.kinds
    blocks = tuple(f"{name}." for name in workload.block_names)
    # recomputing a block stops once all that backward needs is there: before its last layer's outputs are summed
    last_layers = workload.once("last layers", lambda: {_last_row(kinds, block) for block in blocks})

    def passes(name: str) -> int:
        recomputed = workload.config.activation_checkpointing and name.startswith(blocks)
        return 2 if recomputed and name not in last_layers else 1

    boundaries = [trace.returned[stage[-1]] for stage in workload.stages[:-1]] if mesh.pp > 1 else []
    sent = {"pp": 2 * sum(boundaries) / (mesh.pp * mesh.cp)}
    entered = tuple(f"{n}." for n, kind in kinds.items() if kind == "enter")
    volume = 0.0  # elements that tensor ranks reduce
    for name, kind in kinds.items():
        if kind in ("row", "vocab"):
            volume += passes(name) * trace.returned[name]
        elif kind in ("enter", "vocab_head") or (kind == "column" and not name.startswith(entered)):
            volume += trace.taken[name]
    heads = [name for name, kind in kinds.items() if kind == "vocab_head"]
    tokens = [trace.returned[name] / workload.model.get_parameter(f"{name}.weight").shape[0] for name in heads]
    sent["tp"] = 2 * ring_share(mesh.tp) * (volume + 3 * sum(tokens)) / (mesh.cp * mesh.pp)
    exchanged = sum(
        (1 + passes(name)) * (trace.taken[name] + trace.returned[name]) for name in workload.attention_cores
    )
    sent["cp"] = ring_share(mesh.cp) * exchanged / (mesh.cp * mesh.tp * mesh.pp)
    per_element = workload.compute_bytes * workload.rows_per_pass * workload.config.passes
    return {axis: int(value * per_element) for axis, value in sent.items()}


def _last_row(kinds: Mapping[str, str], block: str) -> str:
    """Return the last layer of a block with summed outputs; "" for a block without one."""
    return next((name for name in reversed([*kinds]) if name.startswith(block) and kinds[name] == "row"), "")


def tied_weight_bytes(workload: Workload) -> int:
    """Return bytes per rank to all-reduce weights shared by two pipeline stages."""
    model, mesh, config = workload.model, workload.mesh, workload.config
    if mesh.pp == 1:
        return 0
    whole = workload.parameters_of([""])
    apart = [name for stage in workload.stages for name in workload.parameters_of(stage) if name not in whole]
    shard = shard_groups(mesh, config.shard)[1] if config.zero else 1
    shared = sum(workload.local_numel(name, model.get_parameter(name)) for name in apart)
    return int(2 * shared / shard / mesh.pp) * workload.element_bytes
