"""A user's own model with the small table docs/strategies.md asks for: nothing in it knows of pipelines or tensors."""

from __future__ import annotations

from typing import Any

import torch
from problem import SquaredError, make_strategy, table_batch, train
from torch import nn

from training.models.plan import ShardingPlan

PLAN = ShardingPlan(
    chain=("inner", "blocks.*", "head"),
    tensor={
        "inner": "replicate",
        "blocks.*": "enter",
        "blocks.*.0": "column",
        "blocks.*.2": "row",
        "head": "replicate",
    },
)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TowerError(SquaredError):
    def loss(self, outputs: torch.Tensor, columns: dict[str, Any]) -> torch.Tensor:
        return super().loss(outputs.squeeze(-1), columns)


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name, case in payload["cases"].items():
        torch.manual_seed(7 + rank)  # rank 0's parameters must win
        strategy = make_strategy(rank, world, {"accumulate": 2, **case})
        batches = [table_batch(step, 24) for step in range(10)]
        results[name] = train(strategy, Tower().double(), TowerError(), batches, lr=1e-2)
        strategy.axis.close(failed=True)  # keeps the process groups for the next case
    return results
