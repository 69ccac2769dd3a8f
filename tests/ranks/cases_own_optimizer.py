"""Optimizers of users on shards, and their state through a checkpoint into another layout."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import LanguageModelTask
from sparkring.training.parallel.step import MeshStrategy
from tests.ranks.cases_mesh import small_gpt, token_batch
from tests.ranks.problem import full_state, make_strategy, rank_part

STEPS, HALF = 6, 3
OPTIMIZERS = {
    "own": {"name": "tests.training.own_optimizers:SignMomentum"},
    "nadam": {"name": "torch.optim:NAdam"},
}


def prepared(rank: int, world: int, settings: dict[str, Any], optimizer: str) -> MeshStrategy:
    strategy = make_strategy(rank, world, settings)
    config = OptimConfig(weight_decay=0.1, lr=1e-2, **OPTIMIZERS[optimizer])
    sample = rank_part(token_batch(0), strategy)
    strategy.prepare(small_gpt().double(), LanguageModelTask(), lambda named: build_optimizer(named, config), sample)
    return strategy


def run_steps(strategy: MeshStrategy, steps: range) -> None:
    for step in steps:
        strategy.forward_backward(rank_part(token_batch(step), strategy))
        strategy.step(1e-2)


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Final weights by (layout, optimizer): half of the steps, a checkpoint, and the rest by a fresh optimizer."""
    results = {}
    for name, settings in payload["cases"].items():
        for optimizer in OPTIMIZERS:
            folder = f"{payload['tmp']}/{name}-{optimizer}"
            strategy = prepared(rank, world, settings, optimizer)
            run_steps(strategy, range(HALF))
            dcp.save(strategy.state_dict(), checkpoint_id=folder)
            strategy.local.data_parallel.close(failed=True)
            again = prepared(rank, world, settings, optimizer)
            state = again.state_dict()
            dcp.load(state, checkpoint_id=folder)
            again.load_state_dict(state)
            run_steps(again, range(HALF, STEPS))
            results[f"{name} {optimizer}"] = full_state(again)
            again.local.data_parallel.close(failed=True)
    dist.destroy_process_group()
    return results


def one_process(optimizer: str) -> dict[str, Any]:
    strategy = prepared(0, 1, {}, optimizer)
    run_steps(strategy, range(STEPS))
    return full_state(strategy)
