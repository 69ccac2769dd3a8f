"""The `parallel` block: how one step is spread over ranks. What goes with what is in capabilities.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from conf.strict import Strict

Axis = Annotated[int, Field(ge=-1)]


class ParallelConfig(Strict):
    """Sizes of the mesh's axes multiply to launch.world; -1 stands once for the rest."""

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
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="dtype of compute; fp32 is the model's own dtype; fp16 scales the loss"
    )
    sequence_parallel: bool = Field(False, description="also cut norms and residuals along the sequence (needs tp > 1)")
    bucket_bytes: PositiveInt = Field(25 * 2**20, description="gradients are sent in buckets of at most this size")
