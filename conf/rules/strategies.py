"""What the strategies, engines and devices go with, as data: read by the driver, by the strategies when they are built,
and by tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SPLIT_BACKWARD = ("zero-bubble",)


@dataclass(frozen=True)
class Facts:
    """The parallel block, the resolved mesh (dp, cp, pp, tp), and the device type."""

    parallel: Mapping[str, Any]
    mesh: Mapping[str, int]
    device: str  # cpu, cuda


@dataclass(frozen=True)
class Rule:
    """Refuse a combination, or log that a setting has no effect."""

    name: str
    applies: Callable[[Facts], bool]
    why: str  # formatted with the parallel block's and mesh's values
    refused: bool = True  # else it can run, and `why` is logged


def _sharded(facts: Facts) -> bool:
    return int(facts.parallel["zero"]) > 0


def _coded(facts: Facts) -> bool:
    return bool(facts.parallel["compress"]["codec"] != "none")


def _averaged(facts: Facts) -> bool:
    return bool(facts.parallel["averaging"]["kind"] != "none")


def _served(facts: Facts) -> bool:
    return int(facts.parallel["servers"]["per_host"]) > 0


def _backed(facts: Facts) -> bool:
    return int(facts.parallel["servers"]["backup"]) > 0


def _late(facts: Facts) -> int:
    """The least parallel.servers.max_lag that a gradient which is computed again can keep to."""
    return facts.mesh["dp"] - 1


# What Horovod's collectives cannot carry, in one place: with parallel.engine=horovod each limit is a refusal (RULES),
# with engine=auto it is the reason why torch.distributed carries the gradients (training/parallel/compose.py).
HOROVOD_LIMITS: tuple[Rule, ...] = (
    Rule(
        "horovod-pipeline",
        lambda f: f.mesh["pp"] > 1,
        "pp({pp}): Horovod has no send and receive between ranks",
    ),
    Rule(
        "horovod-groups",
        lambda f: f.mesh["tp"] * f.mesh["cp"] > 1,
        "tp({tp}) * cp({cp}): tensor and context parallelism run on torch's process groups",
    ),
    Rule(
        "horovod-zero",
        lambda f: f.parallel["zero"] > 1,
        "parallel.zero={zero}: Horovod's collectives carry zero 0 and 1 here",
    ),
    Rule(
        "horovod-hybrid",
        lambda f: f.parallel["shard"] not in (0, f.mesh["dp"]),
        "parallel.shard={shard}: ZeRO-1 on Horovod shards over all ranks (shard=0)",
    ),
    Rule(
        "horovod-offload",
        lambda f: f.parallel["offload"] and _sharded(f),
        "parallel.offload=true: only the shards of torch's fully_shard can be offloaded",
    ),
    Rule(
        "horovod-hosts",
        lambda f: _averaged(f) and f.parallel["averaging"]["groups"] == "host",
        "parallel.averaging.groups=host: Horovod's collectives are between all ranks here",
    ),
    Rule(
        "horovod-gossip",
        lambda f: f.parallel["averaging"]["kind"] == "gossip",
        "parallel.averaging.kind=gossip: Horovod has no send and receive between ranks",
    ),
)


def _refused_on_horovod(limit: Rule) -> Rule:
    return Rule(
        limit.name,
        lambda f: f.parallel["engine"] == "horovod" and limit.applies(f),
        f"parallel.engine=horovod with {limit.why}; use parallel.engine=torch",
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "zero3-split-backward",
        lambda f: f.parallel["zero"] == 3 and f.mesh["pp"] > 1 and f.parallel["schedule"] in SPLIT_BACKWARD,
        "parallel.zero=3 with parallel.schedule={schedule!r}: a backward split in two frees gathered weights before "
        "their half is done and trains silently wrong (near pytorch#164756); use zero 1 or 2, or 1f1b or interleaved",
    ),
    *map(_refused_on_horovod, HOROVOD_LIMITS),
    Rule(
        "offload-needs-zero",
        lambda f: f.parallel["offload"] and not _sharded(f),
        "parallel.offload=true with parallel.zero=0: what is offloaded is the shards of fully_shard; use zero 1, 2 or "
        "3 with parallel.engine=torch",
    ),
    Rule(
        "zero-needs-data",  # not refused: recovery may go on with one data rank of several
        lambda f: _sharded(f) and f.mesh["dp"] * f.mesh["cp"] == 1,
        "parallel.zero={zero}, parallel.offload={offload} with dp({dp}) * cp({cp}): have no effect, since there is one "
        "data rank and nothing to shard over; every rank holds all of its weights and optimizer state",
        refused=False,
    ),
    Rule(
        "shard-needs-zero",
        lambda f: bool(f.parallel["shard"]) and not _sharded(f),
        "parallel.shard={shard} with parallel.zero=0: nothing is sharded; set parallel.zero or leave shard at 0",
    ),
    Rule(
        "shard-divides",
        lambda f: bool(f.parallel["shard"]) and (f.mesh["dp"] % f.parallel["shard"] != 0 or f.mesh["cp"] > 1),
        "parallel.shard={shard}: must divide dp({dp}) and needs cp(1), here cp({cp})",
    ),
    Rule(
        "sequence-needs-tensor",
        lambda f: f.parallel["sequence_parallel"] and f.mesh["tp"] == 1,
        "parallel.sequence_parallel=true with tp(1): there is no tensor axis to cut the sequence over; set parallel.tp",
    ),
    Rule(
        "sequence-and-context",
        lambda f: f.parallel["sequence_parallel"] and f.mesh["cp"] > 1,
        "parallel.sequence_parallel=true with cp({cp}): both cut the sequence; use one",
    ),
    Rule(
        "stages-need-pipeline",
        lambda f: f.mesh["pp"] == 1 and f.parallel["stages_per_rank"] > 1,
        "parallel.stages_per_rank={stages_per_rank} with pp(1): there is no pipeline; set parallel.pp",
    ),
    Rule(
        "balance-needs-pipeline",
        lambda f: f.mesh["pp"] == 1 and f.parallel["balance"] == "measured",
        "parallel.balance=measured with pp(1): there are no stages to balance; set parallel.pp",
    ),
    Rule(
        "micro-batches-need-pipeline",
        lambda f: f.mesh["pp"] == 1 and f.parallel["micro_batches"] > 1,
        "parallel.micro_batches={micro_batches} with pp(1): only pipelines have micro-batches; use parallel.accumulate",
    ),
    Rule(
        "checkpoint-split-backward",
        lambda f: (
            f.parallel["activation_checkpointing"] and f.mesh["pp"] > 1 and f.parallel["schedule"] in SPLIT_BACKWARD
        ),
        "parallel.activation_checkpointing=true with parallel.schedule={schedule!r}: a backward split in two would "
        "recompute twice; use 1f1b or interleaved",
    ),
    Rule(
        "compress-zero3",
        lambda f: _coded(f) and f.parallel["zero"] == 3,
        "parallel.compress.codec={compress[codec]} with parallel.zero=3: two thirds of what it sends are gathered "
        "weights, which no gradient codec makes smaller, and a residual is a whole gradient on every rank, more memory "
        "than it saves; leave codec at none, or zero at 0",
    ),
    Rule(
        "compress-zero",
        lambda f: _coded(f) and f.parallel["zero"] in (1, 2),
        "parallel.compress.codec={compress[codec]} with parallel.zero={zero}: a residual is a whole gradient on every "
        "rank, the memory that ZeRO takes away; leave codec at none, or zero at 0",
    ),
    Rule(
        "compress-tensor",
        lambda f: _coded(f) and f.mesh["tp"] > 1,
        "parallel.compress.codec={compress[codec]} with tp({tp}): a block of values would hold parts of sharded and of "
        "replicated parameters, so tensor ranks would round the replicated ones differently; leave codec at none",
    ),
    Rule(
        "compress-pipeline",
        lambda f: _coded(f) and f.mesh["pp"] > 1,
        "parallel.compress.codec={compress[codec]} with pp({pp}): a weight that two stages share would have two "
        "residuals under one name of a checkpoint; leave codec at none",
    ),
    Rule(
        "compress-needs-data",  # not refused: recovery may go on with one rank
        lambda f: _coded(f) and f.mesh["dp"] * f.mesh["cp"] == 1,
        "parallel.compress.codec={compress[codec]} with dp({dp}) * cp({cp}): has no effect, since there is one data "
        "rank and nothing is sent",
        refused=False,
    ),
    Rule(
        "averaging-zero",
        lambda f: _averaged(f) and _sharded(f),
        "parallel.averaging.kind={averaging[kind]} with parallel.zero={zero}: ranks whose weights differ have no state "
        "in common to shard; leave kind at none, or zero at 0",
    ),
    Rule(
        "averaging-model",
        lambda f: _averaged(f) and f.mesh["tp"] * f.mesh["pp"] * f.mesh["cp"] > 1,
        "parallel.averaging.kind={averaging[kind]} with tp({tp}), pp({pp}), cp({cp}): a rank must have the whole model "
        "to train it by itself; use data ranks only, or leave kind at none",
    ),
    Rule(
        "averaging-inner-state",
        lambda f: (
            f.parallel["averaging"]["inner_state"] == "averaged"
            and f.parallel["averaging"]["kind"] in ("easgd", "gossip")
        ),
        "parallel.averaging.inner_state=averaged with parallel.averaging.kind={averaging[kind]}: moments that are the "
        "mean over all ranks would not be of weights that are not; leave inner_state at local",
    ),
    Rule(
        "averaging-gossip-hosts",
        lambda f: f.parallel["averaging"]["kind"] == "gossip" and f.parallel["averaging"]["groups"] == "host",
        "parallel.averaging.groups=host with parallel.averaging.kind=gossip: its messages are between single ranks; "
        "leave groups at rank",
    ),
    Rule(
        "averaging-codec",
        lambda f: _averaged(f) and _coded(f),
        "parallel.averaging.kind={averaging[kind]} with parallel.compress.codec={compress[codec]}: codecs make the "
        "gradients smaller that ranks exchange, and here they exchange none; leave one of the two at none",
    ),
    Rule(
        "averaging-needs-data",  # not refused: recovery may go on with one rank
        lambda f: _averaged(f) and f.mesh["dp"] == 1,
        "parallel.averaging.kind={averaging[kind]} with dp({dp}): has no effect, since there is one data rank and "
        "nothing to average with",
        refused=False,
    ),
    Rule(
        "servers-zero",
        lambda f: _served(f) and _sharded(f),
        "parallel.servers.per_host={servers[per_host]} with parallel.zero={zero}: servers hold weights and optimizer "
        "state, so ranks have none to shard; leave zero at 0",
    ),
    Rule(
        "servers-model",
        lambda f: _served(f) and f.mesh["tp"] * f.mesh["pp"] * f.mesh["cp"] > 1,
        "parallel.servers.per_host={servers[per_host]} with tp({tp}), pp({pp}), cp({cp}): ranks that need not be at "
        "the same step cannot share one; use data ranks only, or leave per_host at 0",
    ),
    Rule(
        "servers-averaging",
        lambda f: _served(f) and _averaged(f),
        "parallel.servers.per_host={servers[per_host]} with parallel.averaging.kind={averaging[kind]}: the weights are "
        "the servers', and ranks have none of their own to average; leave one of the two at its default",
    ),
    Rule(
        "servers-codec",
        lambda f: _served(f) and _coded(f),
        "parallel.servers.per_host={servers[per_host]} with parallel.compress.codec={compress[codec]}: codecs make the "
        "gradients smaller that ranks exchange, and here servers get them; leave codec at none",
    ),
    Rule(
        "servers-fp16",
        lambda f: _served(f) and f.parallel["precision"] == "fp16",
        "parallel.servers.per_host={servers[per_host]} with parallel.precision=fp16: ranks at other steps would scale "
        "their losses differently; use bf16",
    ),
    Rule(
        "servers-horovod",
        lambda f: _served(f) and f.parallel["engine"] == "horovod",
        "parallel.servers.per_host={servers[per_host]} with parallel.engine=horovod: there is no ring; leave engine at "
        "auto",
    ),
    Rule(
        "servers-late",
        lambda f: (
            _served(f)
            and f.parallel["servers"]["max_lag"] is not None
            and (f.parallel["servers"]["max_lag"] < _late(f))
        ),
        "parallel.servers.max_lag={servers[max_lag]} with dp({dp}): a gradient that is computed again may meet one "
        "push of each other rank, so it must be at least dp - 1; raise it, or set it to null",
    ),
    Rule(
        "servers-backup-bound",
        lambda f: _served(f) and _backed(f) and f.parallel["servers"]["bound"] != 0,
        "parallel.servers.backup={servers[backup]} with bound={servers[bound]}: ranks that may be ahead wait for no "
        "other in a step, so a backup has no rank to replace; leave bound at 0, or backup",
    ),
    Rule(
        "servers-backup-alone",  # not refused: recovery may go on with one rank
        lambda f: _served(f) and _backed(f) and f.mesh["dp"] == 1,
        "parallel.servers.backup={servers[backup]} with dp({dp}): has no effect, since there is no other rank",
        refused=False,
    ),
    Rule(
        "servers-lag-bound",
        lambda f: (
            _served(f)
            and f.parallel["servers"]["max_lag"] is not None
            and (
                f.parallel["servers"]["bound"] is not None
                and f.parallel["servers"]["max_lag"] >= (2 * f.parallel["servers"]["bound"] + 1) * _late(f) >= _late(f)
            )
        ),
        "parallel.servers.max_lag={servers[max_lag]} with bound={servers[bound]} and dp({dp}): has no effect, since no "
        "push is older than (2 bound + 1) (dp - 1) updates",
        refused=False,
    ),
    Rule(
        "half-messages-on-cpu",
        lambda f: f.parallel["precision"] == "fp16" and f.device == "cpu" and f.mesh["pp"] * f.mesh["tp"] > 1,
        "parallel.precision=fp16 on CPU with pp({pp}) * tp({tp}): half-precision messages are not tested there; "
        "use bf16",
    ),
    Rule(
        "nccl-pipelines-side-by-side",
        lambda f: f.device == "cuda" and f.mesh["pp"] > 1 and f.mesh["dp"] * f.mesh["cp"] * f.mesh["tp"] > 1,
        "parallel.pp={pp} on CUDA with dp({dp}) * cp({cp}) * tp({tp}): over NCCL this project has run pipelines alone; "
        "use pp={pp} on {pp} ranks, or tp, zero or cpu",
    ),
)


def strategy_problems(parallel: Mapping[str, Any], mesh: Mapping[str, int], device: str = "cpu") -> list[str]:
    """One line per rule that refuses the combination; empty when it can run."""
    return _lines((rule for rule in RULES if rule.refused), Facts(parallel, mesh, device))


def strategy_notes(parallel: Mapping[str, Any], mesh: Mapping[str, int], device: str = "cpu") -> list[str]:
    """One line per setting that has no effect in a combination that can run."""
    return _lines((rule for rule in RULES if not rule.refused), Facts(parallel, mesh, device))


def horovod_limits(parallel: Mapping[str, Any], mesh: Mapping[str, int]) -> list[str]:
    """One line per part of the combination that Horovod's collectives cannot carry, whatever the engine."""
    return _lines(HOROVOD_LIMITS, Facts(parallel, mesh, "cpu"))


def _lines(rules: Iterable[Rule], facts: Facts) -> list[str]:
    return [rule.why.format(**{**facts.parallel, **facts.mesh}) for rule in rules if rule.applies(facts)]


def batch_problem(global_batch: int, dp: int, pp: int, micro_batches: int, accumulate: int) -> str | None:
    """Why the global batch cannot be cut, or None.

    A pipeline's micro-batches are equal; elsewhere parts may be uneven, but never more than there are rows.

    Args:
        global_batch: rows per step.
        dp, pp: ranks on these axes.
        micro_batches, accumulate: of the parallel block.
    """
    parts = dp * accumulate * (micro_batches if pp > 1 else 1)
    factors = f"dp({dp}) * accumulate({accumulate})" + (f" * micro_batches({micro_batches})" if pp > 1 else "")
    if pp > 1 and global_batch % parts:
        return f"train.global_batch = {global_batch} is not divisible by {factors} = {parts}"
    if global_batch < parts:
        return f"train.global_batch = {global_batch} is less than {factors} = {parts}: some parts would always be empty"
    return None


def table_problem(tp: int, pp: int, cp: int, ema: float | None, averaging: str = "none") -> str | None:
    """Why a model with sparse tables cannot be trained so, or None.

    Args:
        tp, pp, cp: ranks on these axes.
        ema: optim.ema.
        averaging: parallel.averaging.kind.
    """
    if averaging != "none":
        return (
            f"sparse tables with parallel.averaging.kind={averaging}: a row has one owner and is stepped by all ranks' "
            "gradients together, so ranks cannot train rows of their own; leave kind at none"
        )
    if (tp, pp, cp) != (1, 1, 1):
        return (
            f"sparse tables with tp({tp}), pp({pp}), cp({cp}): rows are pulled for a data rank's batch, which these "
            "axes cut; use data ranks only, with parallel.zero for what the dense part does not fit in"
        )
    if ema is not None:
        return (
            f"sparse tables with optim.ema = {ema:g}: rows are not averaged, so averages of the other weights would "
            "not fit them; remove optim.ema"
        )
    return None
