"""What is left of NCCL when one rank dies."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.problem import make_strategy


def abandoned(rank: int, world: int, payload: dict[str, Any]) -> str:
    """Rank 1 ends between two collectives; rank 0 waits in one, and closes."""
    strategy = make_strategy(rank, world, {"engine": "torch"})
    total = torch.ones(1 << 20, device=strategy.local.device)
    dist.all_reduce(total)
    if rank == 1:
        torch.cuda.synchronize()
        torch.save(0.0, payload["own_result"])
        os._exit(0)
    time.sleep(1.0)
    dist.all_reduce(total, async_op=True)
    strategy.close(failed=True)
    return "closed"
