"""The recipe's `parallel` block: how ranks share a step."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator

from sparkring.conf.schema import Strict, refuse_fp8

Axis = Annotated[int, Field(ge=-1)]


class CompressConfig(Strict):
    """How gradients are made smaller between data ranks. What a step does not send is added to the next gradient."""

    codec: Literal["none", "fp16", "bf16", "int8", "int4", "onebit", "topk", "powersgd"] = Field(
        "none", description="what carries a gradient; none: its own dtype, and every step sends all of it"
    )
    share: float = Field(0.01, description="of `topk`: share of a bucket's elements that a step sends, the largest")
    rank: PositiveInt = Field(4, description="of `powersgd`: columns of the two factors that a matrix is sent as")

    @field_validator("share")
    @classmethod
    def _is_a_share(cls, share: float) -> float:
        if not 0 < share <= 1:
            raise ValueError("top-k sends k = share x n of n elements: must be above 0 and at most 1 (k = n)")
        return share


class AveragingConfig(Strict):
    """Ranks that train weights of their own, and average these at times instead of gradients in every step."""

    kind: Literal["none", "local_sgd", "diloco", "easgd", "gossip"] = Field(
        "none", description="what happens when a window of steps ends; none: gradients are summed in every step"
    )
    every: PositiveInt = Field(10, description="steps of a window, the same on every rank")
    inner_state: Literal["local", "averaged"] = Field(
        "local", description="whether a rank's optimizer keeps its own moments when a window ends, or gets their mean"
    )
    groups: Literal["rank", "host"] = Field(
        "rank", description="who trains weights of its own: each rank, or each host, whose ranks sum their gradients"
    )
    outer_lr: PositiveFloat = Field(0.7, description="of `diloco`: rate at which the anchor follows the ranks' mean")
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="of `diloco`: Nesterov momentum of the anchor; 0: none"
    )
    elasticity: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="of `easgd`: share of the way to the ranks' mean that the center goes when a window ends"
    )
    peers: Literal["ring", "random"] = Field(
        "ring", description="of `gossip`: whom a rank averages with: both neighbors, or one other rank, drawn by `seed`"
    )
    seed: int = Field(0, description="of `gossip` with random peers: the pairs are a function of it and the window")


class ServersConfig(Strict):
    """Servers that hold the weights, so that ranks need not wait for each other (docs/explanation/asynchronous.md)."""

    per_host: Annotated[int, Field(ge=0)] = Field(
        0, description="server processes on each host of ranks; 0: ranks hold the weights, and sum their gradients"
    )
    bound: int | None = Field(
        0, description="steps that a rank may be ahead of the slowest; 0: none, all make one step; null: any number"
    )
    max_lag: Annotated[int, Field(ge=0)] | None = Field(
        None, description="a gradient older than so many updates of a server is computed again; null: none is"
    )
    damp: bool = Field(False, description="the rate of a gradient falls with its age (arXiv:1511.05950)")
    backup: Annotated[int, Field(ge=0)] = Field(
        0, description="ranks that a step does not wait for: the first gradients make it, and no row is lost"
    )

    @field_validator("bound")
    @classmethod
    def _is_a_bound(cls, bound: int | None) -> int | None:
        if bound is not None and bound < 0:
            raise ValueError("no rank can be ahead by fewer than 0 steps: must be 0 or more, or null for no bound")
        return bound


PLANNED = (
    *("dp", "cp", "pp", "tp", "zero", "shard", "offload", "schedule", "stages_per_rank", "micro_batches"),
    *("activation_checkpointing", "sequence_parallel"),
)
"""Keys that `layout: auto` chooses; `accumulate` too, unless the model has batch normalization."""


class ParallelConfig(Strict):
    """Sizes of the mesh's axes multiply to launch.world; -1 stands once for the rest."""

    layout: Literal["given", "auto"] = Field(
        "given",
        description="what decides the axes, zero, schedule, passes and recomputation: the keys below, or, with auto, a "
        "plan at launch for the ranks that are there, on `launch.cluster`; `parallel: auto` is short for it",
    )
    dp: Axis = Field(-1, description="data ranks: each reads its own rows")
    cp: Axis = Field(1, description="context ranks: each holds a part of every sequence (all-to-all attention)")
    pp: Axis = Field(1, description="pipeline ranks: each holds consecutive blocks of the model")
    tp: Axis = Field(1, description="tensor ranks: each holds a part of every matrix")
    zero: Literal[0, 1, 2, 3] = Field(
        0, description="shard over data ranks: 1 optimizer state, 2 and gradients, 3 and parameters"
    )
    shard: Annotated[int, Field(ge=0)] = Field(
        0, description="ranks per ZeRO shard group (hybrid sharding); 0: all data ranks are one group"
    )
    engine: Literal["auto", "horovod", "torch"] = Field(
        "auto", description="what carries the gradients; auto: Horovod where it can and is there, else torch"
    )
    schedule: str = Field("1f1b", description="pipeline schedule: gpipe, 1f1b, interleaved, zero-bubble")
    stages_per_rank: PositiveInt = Field(1, description="pipeline stages per rank, of the schedules that interleave")
    balance: Literal["estimated", "measured"] = Field(
        "estimated", description="cost of a block by which stages are cut: its weights, or its time on a first batch"
    )
    micro_batches: PositiveInt = Field(1, description="parts a pipeline cuts each pass into")
    accumulate: PositiveInt = Field(1, description="passes per step; gradients are communicated once per step")
    offload: bool = Field(False, description="keep shards and optimizer state in host memory (needs zero >= 1)")
    activation_checkpointing: bool = Field(False, description="recompute each block's activations in backward")
    precision: Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(refuse_fp8)] = Field(
        "fp32",
        description="dtype of compute; fp32 is the model's own dtype, without TF32 on GPUs; fp16 scales the loss",
    )
    sequence_parallel: bool = Field(False, description="also cut norms and residuals along the sequence (needs tp > 1)")
    sync_batch_norm: bool = Field(
        True, description="batch normalization over the rows of all data ranks in a pass, not of each by itself"
    )
    bucket_bytes: PositiveInt = Field(25 * 2**20, description="gradients are sent in buckets of at most this size")
    compress: CompressConfig = CompressConfig()
    averaging: AveragingConfig = AveragingConfig()
    servers: ServersConfig = ServersConfig()

    @property
    def passes(self) -> int:
        """Passes that a step is cut into; a pipeline folds its accumulation into its micro-batches."""
        return self.accumulate * self.micro_batches
