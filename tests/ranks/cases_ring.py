"""Ring, DDP, ZeRO and one process over the same table, with a user's own module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.ranks.problem import Net, SquaredError, make_strategy, rank_part, table_batch, train


def one_process() -> dict[str, Any]:
    torch.manual_seed(7)
    batches = [table_batch(step, 24) for step in range(10)]
    return train(make_strategy(0, 1, {"accumulate": 2}), Net().double(), SquaredError(), batches, lr=1e-2)


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """`cases`: parallel settings by name; `uneven` leaves the last rank no rows, `local_size` is ranks per host."""
    results = {}
    for name, case in payload["cases"].items():
        case = {"accumulate": 2, "bucket_bytes": 3000, **case}
        uneven, local_size = case.pop("uneven", False), case.pop("local_size", None)
        torch.manual_seed(7 + rank)  # rank 0's parameters must win
        batches = [table_batch(step, 24) for step in range(10)]
        strategy = make_strategy(rank, world, case, local_size=local_size)
        results[name] = train(strategy, Net().double(), SquaredError(), batches, uneven=uneven, lr=1e-2)
        results[name]["axis"] = type(strategy.local.data_parallel).__name__
        strategy.local.data_parallel.close(failed=True)  # keeps the process groups for the next case
    strategy.close()
    return results


def running_means(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Of the table's columns, after three steps."""
    results = {}
    for name, case in payload["cases"].items():
        strategy = make_strategy(rank, world, case)
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1), nn.Flatten(0)).double()
        strategy.prepare(model, SquaredError(), lambda named: torch.optim.SGD([p for _, p in named]))
        for step in range(3):
            strategy.forward_backward(rank_part(table_batch(step, 24), strategy))
            strategy.step(1e-3)
        results[name] = next(b for key, b in strategy.prepared.module.named_buffers() if key.endswith("running_mean"))
        strategy.local.data_parallel.close(failed=True)
    strategy.close()
    return results
