"""What the strategies, engines and devices go with: checked by the driver, and by each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rules.rule import Rule, refuse, warn

SPLIT_BACKWARD = ("zero-bubble",)


@dataclass(frozen=True)
class Layout:
    """How ranks share a step: the parallel block, ranks on each axis, the device type, rows per step (None: any)."""

    parallel: ParallelConfig
    dp: int = 1
    cp: int = 1
    pp: int = 1
    tp: int = 1
    device: str = "cpu"  # cpu, cuda
    global_batch: int | None = None

    @property
    def beside_pipeline(self) -> str:
        """The axes of more than one rank besides the pipeline's."""
        axes = {"dp": self.dp, "cp": self.cp, "tp": self.tp}
        return " * ".join(f"{name}({size})" for name, size in axes.items() if size > 1)


def _sharded(layout: Layout) -> bool:
    return layout.parallel.zero > 0


def _coded(layout: Layout) -> bool:
    return layout.parallel.compress.codec != "none"


def _averaged(layout: Layout) -> bool:
    return layout.parallel.averaging.kind != "none"


def _served(layout: Layout) -> bool:
    return layout.parallel.servers.per_host > 0


def _backed(layout: Layout) -> bool:
    return layout.parallel.servers.backup > 0


def _late(layout: Layout) -> int:
    """Return the smallest parallel.servers.max_lag under which gradients can be recomputed."""
    return layout.dp - 1


def _batch_problems(layout: Layout) -> Iterator[str]:
    """Yield why the global batch cannot be cut.

    A pipeline's micro-batches are equal; elsewhere parts may be uneven, but never more than there are rows.
    """
    batch, pp, config = layout.global_batch, layout.pp, layout.parallel
    if batch is None:
        return
    parts = layout.dp * config.passes
    factors = f"dp({layout.dp}) * accumulate({config.accumulate})"
    factors += f" * micro_batches({config.micro_batches})" if config.micro_batches > 1 or pp > 1 else ""
    if pp > 1 and batch % parts:
        yield f"train.global_batch = {batch} is not divisible by {factors} = {parts}"
    elif batch < parts:
        yield f"train.global_batch = {batch} is less than {factors} = {parts}: some parts would always be empty"


# What Horovod's collectives cannot carry, in one place: with parallel.engine=horovod each limit is a refusal (LAYOUT),
# with engine=auto it is the reason why torch.distributed carries the gradients (training/parallel/engine.py).
HOROVOD_LIMITS: tuple[Rule[Layout], ...] = (
    refuse(
        ("parallel.pp",),
        lambda f: f.pp > 1,
        "pp({0.pp}): Horovod has no send and receive between ranks",
    ),
    refuse(
        ("parallel.tp", "parallel.cp"),
        lambda f: f.tp * f.cp > 1,
        "tp({0.tp}) * cp({0.cp}): tensor and context parallelism run on torch's process groups",
    ),
    refuse(
        ("parallel.zero",),
        lambda f: f.parallel.zero > 1,
        "parallel.zero={0.parallel.zero}: Horovod's collectives carry zero 0 and 1 here",
    ),
    refuse(
        ("parallel.shard", "parallel.dp"),
        lambda f: f.parallel.shard not in (0, f.dp),
        "parallel.shard={0.parallel.shard}: ZeRO-1 on Horovod shards over all ranks (shard=0)",
    ),
    refuse(
        ("parallel.offload", "parallel.zero"),
        lambda f: f.parallel.offload and _sharded(f),
        "parallel.offload=true: only the shards of torch's fully_shard can be offloaded",
    ),
    refuse(
        ("parallel.averaging.groups", "parallel.averaging.kind"),
        lambda f: _averaged(f) and f.parallel.averaging.groups == "host",
        "parallel.averaging.groups=host: Horovod's collectives are between all ranks here",
    ),
    refuse(
        ("parallel.averaging.kind",),
        lambda f: f.parallel.averaging.kind == "gossip",
        "parallel.averaging.kind=gossip: Horovod has no send and receive between ranks",
    ),
)


def _refused_on_horovod(limit: Rule[Layout]) -> Rule[Layout]:
    def find(layout: Layout) -> list[str]:
        lines = limit.find(layout) if layout.parallel.engine == "horovod" else []
        return [f"parallel.engine=horovod with {line}; use parallel.engine=torch" for line in lines]

    return Rule(("parallel.engine", *limit.keys), find)


LAYOUT: tuple[Rule[Layout], ...] = (
    refuse(
        ("parallel.zero", "parallel.schedule", "parallel.pp"),
        lambda f: f.parallel.zero == 3 and f.pp > 1 and f.parallel.schedule in SPLIT_BACKWARD,
        "parallel.zero=3 with parallel.schedule={0.parallel.schedule!r}: a backward split in two frees gathered "
        "weights before their half is done and trains silently wrong (near pytorch#164756)",
        "use zero 1 or 2, or 1f1b or interleaved",
    ),
    *map(_refused_on_horovod, HOROVOD_LIMITS),
    refuse(
        ("parallel.offload", "parallel.zero", "parallel.engine"),
        lambda f: f.parallel.offload and not _sharded(f),
        "parallel.offload=true with parallel.zero=0: what is offloaded is the shards of fully_shard",
        "use zero 1, 2 or 3 with parallel.engine=torch",
    ),
    warn(  # recovery may continue with fewer ranks
        ("parallel.zero", "parallel.offload", "parallel.dp", "parallel.cp"),
        lambda f: _sharded(f) and f.dp * f.cp == 1,
        "parallel.zero={0.parallel.zero}, parallel.offload={0.parallel.offload} with dp({0.dp}) * cp({0.cp}): have no "
        "effect, since there is one data rank and nothing to shard over; every rank holds all of its weights and "
        "optimizer state",
    ),
    refuse(
        ("parallel.shard", "parallel.zero"),
        lambda f: f.parallel.shard > 0 and not _sharded(f),
        "parallel.shard={0.parallel.shard} with parallel.zero=0: nothing is sharded",
        "set parallel.zero or leave shard at 0",
    ),
    refuse(
        ("parallel.shard", "parallel.dp", "parallel.cp"),
        lambda f: f.parallel.shard > 0 and (f.dp % f.parallel.shard != 0 or f.cp > 1),
        "parallel.shard={0.parallel.shard}: must divide dp({0.dp}) and needs cp(1), here cp({0.cp})",
    ),
    refuse(
        ("parallel.sequence_parallel", "parallel.tp"),
        lambda f: f.parallel.sequence_parallel and f.tp == 1,
        "parallel.sequence_parallel=true with tp(1): there is no tensor axis to cut the sequence over",
        "set parallel.tp",
    ),
    refuse(
        ("parallel.sequence_parallel", "parallel.cp"),
        lambda f: f.parallel.sequence_parallel and f.cp > 1,
        "parallel.sequence_parallel=true with cp({0.cp}): both cut the sequence",
        "use one",
    ),
    refuse(
        ("parallel.stages_per_rank", "parallel.pp"),
        lambda f: f.pp == 1 and f.parallel.stages_per_rank > 1,
        "parallel.stages_per_rank={0.parallel.stages_per_rank} with pp(1): there is no pipeline",
        "set parallel.pp",
    ),
    refuse(
        ("parallel.balance", "parallel.pp"),
        lambda f: f.pp == 1 and f.parallel.balance == "measured",
        "parallel.balance=measured with pp(1): there are no stages to balance",
        "set parallel.pp",
    ),
    refuse(
        ("parallel.micro_batches", "parallel.accumulate", "parallel.pp"),
        lambda f: f.pp == 1 and f.parallel.micro_batches > 1,
        "parallel.micro_batches={0.parallel.micro_batches} with pp(1): only pipelines have micro-batches",
        "use parallel.accumulate",
    ),
    refuse(
        ("parallel.activation_checkpointing", "parallel.schedule", "parallel.pp"),
        lambda f: f.parallel.activation_checkpointing and f.pp > 1 and f.parallel.schedule in SPLIT_BACKWARD,
        "parallel.activation_checkpointing=true with parallel.schedule={0.parallel.schedule!r}: a backward split in "
        "two would recompute twice",
        "use 1f1b or interleaved",
    ),
    refuse(
        ("parallel.compress.codec", "parallel.zero"),
        lambda f: _coded(f) and f.parallel.zero == 3,
        "parallel.compress.codec={0.parallel.compress.codec} with parallel.zero=3: two thirds of what it sends are "
        "gathered weights, which no gradient codec makes smaller, and a residual is a whole gradient on every rank, "
        "more memory than it saves",
        "leave codec at none, or zero at 0",
    ),
    refuse(
        ("parallel.compress.codec", "parallel.zero"),
        lambda f: _coded(f) and f.parallel.zero in (1, 2),
        "parallel.compress.codec={0.parallel.compress.codec} with parallel.zero={0.parallel.zero}: a residual is a "
        "whole gradient on every rank, the memory that ZeRO takes away",
        "leave codec at none, or zero at 0",
    ),
    refuse(
        ("parallel.compress.codec", "parallel.tp"),
        lambda f: _coded(f) and f.tp > 1,
        "parallel.compress.codec={0.parallel.compress.codec} with tp({0.tp}): a block of values would hold parts of "
        "sharded and of replicated parameters, so tensor ranks would round the replicated ones differently",
        "leave codec at none",
    ),
    refuse(
        ("parallel.compress.codec", "parallel.pp"),
        lambda f: _coded(f) and f.pp > 1,
        "parallel.compress.codec={0.parallel.compress.codec} with pp({0.pp}): a weight that two stages share would "
        "have two residuals under one name of a checkpoint",
        "leave codec at none",
    ),
    warn(  # recovery may continue with fewer ranks
        ("parallel.compress.codec", "parallel.dp", "parallel.cp"),
        lambda f: _coded(f) and f.dp * f.cp == 1,
        "parallel.compress.codec={0.parallel.compress.codec} with dp({0.dp}) * cp({0.cp}): has no effect, since there "
        "is one data rank and nothing is sent",
    ),
    refuse(
        ("parallel.averaging.kind", "parallel.zero"),
        lambda f: _averaged(f) and _sharded(f),
        "parallel.averaging.kind={0.parallel.averaging.kind} with parallel.zero={0.parallel.zero}: ranks whose "
        "weights differ have no state in common to shard",
        "leave kind at none, or zero at 0",
    ),
    refuse(
        ("parallel.averaging.kind", "parallel.tp", "parallel.pp", "parallel.cp"),
        lambda f: _averaged(f) and f.tp * f.pp * f.cp > 1,
        "parallel.averaging.kind={0.parallel.averaging.kind} with tp({0.tp}), pp({0.pp}), cp({0.cp}): a rank must "
        "have the whole model to train it by itself",
        "use data ranks only, or leave kind at none",
    ),
    refuse(
        ("parallel.averaging.inner_state", "parallel.averaging.kind"),
        lambda f: f.parallel.averaging.inner_state == "averaged" and f.parallel.averaging.kind in ("easgd", "gossip"),
        "parallel.averaging.inner_state=averaged with parallel.averaging.kind={0.parallel.averaging.kind}: moments "
        "that are the mean over all ranks would not be of weights that are not",
        "leave inner_state at local",
    ),
    refuse(
        ("parallel.averaging.groups", "parallel.averaging.kind"),
        lambda f: f.parallel.averaging.kind == "gossip" and f.parallel.averaging.groups == "host",
        "parallel.averaging.groups=host with parallel.averaging.kind=gossip: its messages are between single ranks",
        "leave groups at rank",
    ),
    refuse(
        ("parallel.averaging.kind", "parallel.compress.codec"),
        lambda f: _averaged(f) and _coded(f),
        "parallel.averaging.kind={0.parallel.averaging.kind} with "
        "parallel.compress.codec={0.parallel.compress.codec}: codecs make the gradients smaller that ranks exchange, "
        "and here they exchange none",
        "leave one of the two at none",
    ),
    warn(  # recovery may continue with fewer ranks
        ("parallel.averaging.kind", "parallel.dp"),
        lambda f: _averaged(f) and f.dp == 1,
        "parallel.averaging.kind={0.parallel.averaging.kind} with dp({0.dp}): has no effect, since there is one data "
        "rank and nothing to average with",
    ),
    refuse(
        ("parallel.servers.per_host", "parallel.zero"),
        lambda f: _served(f) and _sharded(f),
        "parallel.servers.per_host={0.parallel.servers.per_host} with parallel.zero={0.parallel.zero}: servers hold "
        "weights and optimizer state, so ranks have none to shard",
        "leave zero at 0",
    ),
    refuse(
        ("parallel.servers.per_host", "parallel.tp", "parallel.pp", "parallel.cp"),
        lambda f: _served(f) and f.tp * f.pp * f.cp > 1,
        "parallel.servers.per_host={0.parallel.servers.per_host} with tp({0.tp}), pp({0.pp}), cp({0.cp}): ranks that "
        "need not be at the same step cannot share one",
        "use data ranks only, or leave per_host at 0",
    ),
    refuse(
        ("parallel.servers.per_host", "parallel.averaging.kind"),
        lambda f: _served(f) and _averaged(f),
        "parallel.servers.per_host={0.parallel.servers.per_host} with "
        "parallel.averaging.kind={0.parallel.averaging.kind}: the weights are the servers', and ranks have none of "
        "their own to average",
        "leave one of the two at its default",
    ),
    refuse(
        ("parallel.servers.per_host", "parallel.compress.codec"),
        lambda f: _served(f) and _coded(f),
        "parallel.servers.per_host={0.parallel.servers.per_host} with "
        "parallel.compress.codec={0.parallel.compress.codec}: codecs make the gradients smaller that ranks exchange, "
        "and here servers get them",
        "leave codec at none",
    ),
    refuse(
        ("parallel.servers.per_host", "parallel.precision"),
        lambda f: _served(f) and f.parallel.precision == "fp16",
        "parallel.servers.per_host={0.parallel.servers.per_host} with parallel.precision=fp16: ranks at other steps "
        "would scale their losses differently",
        "use bf16",
    ),
    refuse(
        ("parallel.servers.per_host", "parallel.engine"),
        lambda f: _served(f) and f.parallel.engine == "horovod",
        "parallel.servers.per_host={0.parallel.servers.per_host} with parallel.engine=horovod: there is no ring",
        "leave engine at auto",
    ),
    refuse(
        ("parallel.servers.max_lag", "parallel.servers.per_host"),
        lambda f: _served(f) and f.parallel.servers.max_lag is not None and (f.parallel.servers.max_lag < _late(f)),
        "parallel.servers.max_lag={0.parallel.servers.max_lag} with dp({0.dp}): a gradient that is computed again may "
        "meet one push of each other rank, so it must be at least dp - 1",
        "raise it, or set it to null",
    ),
    refuse(
        ("parallel.servers.backup", "parallel.servers.bound", "parallel.servers.per_host"),
        lambda f: _served(f) and _backed(f) and f.parallel.servers.bound != 0,
        "parallel.servers.backup={0.parallel.servers.backup} with bound={0.parallel.servers.bound}: ranks that may be "
        "ahead wait for no other in a step, so a backup has no rank to replace",
        "leave bound at 0, or backup",
    ),
    warn(  # recovery may continue with fewer ranks
        ("parallel.servers.backup", "parallel.servers.per_host", "parallel.dp"),
        lambda f: _served(f) and _backed(f) and f.dp == 1,
        "parallel.servers.backup={0.parallel.servers.backup} with dp({0.dp}): has no effect, since there is no other "
        "rank",
    ),
    warn(
        ("parallel.servers.max_lag", "parallel.servers.bound", "parallel.servers.per_host"),
        lambda f: (
            _served(f)
            and f.parallel.servers.max_lag is not None
            and (
                f.parallel.servers.bound is not None
                and f.parallel.servers.max_lag >= (2 * f.parallel.servers.bound + 1) * _late(f) >= _late(f)
            )
        ),
        "parallel.servers.max_lag={0.parallel.servers.max_lag} with bound={0.parallel.servers.bound} and dp({0.dp}): "
        "has no effect, since no push is older than (2 bound + 1) (dp - 1) updates",
    ),
    refuse(
        ("parallel.precision", "parallel.pp", "parallel.tp"),
        lambda f: f.parallel.precision == "fp16" and f.device == "cpu" and f.pp * f.tp > 1,
        "parallel.precision=fp16 on CPU with pp({0.pp}) * tp({0.tp}): half-precision messages are not tested there",
        "use bf16",
    ),
    refuse(
        ("parallel.pp", "parallel.dp", "parallel.cp", "parallel.tp"),
        lambda f: f.device == "cuda" and f.pp > 1 and f.dp * f.cp * f.tp > 1,
        "parallel.pp={0.pp} on CUDA with {0.beside_pipeline}: over NCCL this project has run pipelines alone",
        "use pp={0.pp} on {0.pp} ranks, or tp, zero or cpu",
    ),
    Rule(
        ("train.global_batch", "parallel.dp", "parallel.pp", "parallel.accumulate", "parallel.micro_batches"),
        _batch_problems,
    ),
)


@dataclass(frozen=True)
class TableLayout:
    """What a model with sparse tables is trained in: ranks on the axes that cut a batch, and what averages weights."""

    tp: int
    pp: int
    cp: int
    ema: float | None  # optim.ema
    averaging: str  # parallel.averaging.kind


SPARSE_TABLES: tuple[Rule[TableLayout], ...] = (
    refuse(
        ("parallel.averaging.kind",),
        lambda t: t.averaging != "none",
        "sparse tables with parallel.averaging.kind={0.averaging}: a row has one owner and is stepped by all ranks' "
        "gradients together, so ranks cannot train rows of their own",
        "leave kind at none",
    ),
    refuse(
        ("parallel.tp", "parallel.pp", "parallel.cp"),
        lambda t: (t.tp, t.pp, t.cp) != (1, 1, 1),
        "sparse tables with tp({0.tp}), pp({0.pp}), cp({0.cp}): rows are pulled for a data rank's batch, which these "
        "axes cut",
        "use data ranks only, with parallel.zero for what the dense part does not fit in",
    ),
    refuse(
        ("optim.ema",),
        lambda t: t.ema is not None,
        "sparse tables with optim.ema = {0.ema:g}: rows are not averaged, so averages of the other weights would "
        "not fit them",
        "remove optim.ema",
    ),
)
