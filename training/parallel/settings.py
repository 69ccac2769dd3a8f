"""What a recipe's `parallel` block becomes once it is inside: plain values, no defaults hidden elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["auto", "horovod", "torch"]
Precision = Literal["fp32", "bf16", "fp16"]
Balance = Literal["estimated", "measured"]


@dataclass(frozen=True)
class ParallelSettings:
    """Sizes of the axes (-1 once for the rest) and how each is run. Field meanings: conf/schema_parallel.py."""

    dp: int = -1
    cp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0
    shard: int = 0
    engine: Engine = "auto"
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    balance: Balance = "estimated"
    micro_batches: int = 1
    accumulate: int = 1
    offload: bool = False
    activation_checkpointing: bool = False
    precision: Precision = "fp32"
    sequence_parallel: bool = False
    bucket_bytes: int = 25 * 2**20
