"""Ring, DDP and one process over the same table."""

from __future__ import annotations

from typing import Any

import torch
from problem import Net, SquaredError, make_strategy, table_batch, train


def one_process(optimizer: str = "adamw") -> dict[str, Any]:
    torch.manual_seed(7)
    batches = [table_batch(step, 24) for step in range(10)]
    return train(make_strategy(0, 1, {"accumulate": 2}), Net().double(), SquaredError(), batches, optimizer, lr=1e-2)


def ring(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(7 + rank)  # rank 0's parameters must win
    batches = [table_batch(step, 24) for step in range(10)]
    strategy = make_strategy(rank, world, payload["settings"], local_size=payload.get("local_size"))
    result = train(strategy, Net().double(), SquaredError(), batches, uneven=payload.get("uneven", False), lr=1e-2)
    result["axis"] = type(strategy.axis).__name__
    strategy.close()
    return result
