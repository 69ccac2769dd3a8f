"""Ranks with a GPU each: NCCL under every data-parallel strategy, and what is left of it when one rank dies."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from sparkring.conf.blocks.launch import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.step import MeshStrategy
from tests.ranks.problem import Net, SquaredError, table_batch, train


def strategy_on_gpu(rank: int, world: int, settings: dict[str, Any]) -> MeshStrategy:
    torch.cuda.set_device(rank)
    return build_strategy(
        ParallelConfig(**settings), RankInfo(rank, world, rank, world), torch.device("cuda", rank), clip_norm=0.5
    )


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """`cases`: parallel settings by name, over the table of cases_ring; results on the CPU."""
    results = {}
    for name, case in payload["cases"].items():
        torch.manual_seed(7 + rank)  # rank 0's parameters must win
        batches = [table_batch(step, 24) for step in range(10)]
        strategy = strategy_on_gpu(rank, world, {"accumulate": 2, "bucket_bytes": 3000, **case})
        found = train(strategy, Net().double(), SquaredError(), batches, lr=1e-2)
        results[name] = tree_map_only(torch.Tensor, lambda t: t.cpu(), found)
        strategy.data_parallel.close(failed=True)  # keeps the process groups for the next case
    strategy.close()
    return results


def abandoned(rank: int, world: int, payload: dict[str, Any]) -> str:
    """Rank 1 ends between two collectives; rank 0 waits in one, and closes."""
    strategy = strategy_on_gpu(rank, world, {"engine": "torch"})
    total = torch.ones(1 << 20, device=strategy.device)
    dist.all_reduce(total)
    if rank == 1:
        torch.cuda.synchronize()
        torch.save(0.0, payload["own_result"])
        os._exit(0)
    time.sleep(1.0)
    dist.all_reduce(total, async_op=True)
    strategy.close(failed=True)
    return "closed"
