"""Checkpoints across layouts, and steps that must be skipped or refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import LanguageModelTask
from sparkring.training.parallel.gradients import REACH_STEPS
from sparkring.training.parallel.step import MeshStrategy
from tests.ranks.cases_mesh import small_gpt, token_batch
from tests.ranks.cases_tower import tower
from tests.ranks.problem import Net, SquaredError, full_state, make_strategy, on_device, rank_part, table_batch

HALF = 4


def prepared(rank: int, world: int, settings: dict[str, Any]) -> MeshStrategy:
    strategy = make_strategy(rank, world, settings)
    strategy.prepare(
        small_gpt().double(), LanguageModelTask(), lambda named: build_optimizer(named, OptimConfig(weight_decay=0.1))
    )
    return strategy


def run_steps(strategy: MeshStrategy, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = token_batch(step)
        value = strategy.forward_backward(rank_part(batch, strategy))
        strategy.step(1e-3)
        losses.append(float(strategy.meeting.sum_over_data(value.reshape(1).double()).sum()) / batch.global_rows)
    return losses


def save_half(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Train half of the steps under each layout and save."""
    for name, settings in payload["cases"].items():
        strategy = prepared(rank, world, settings)
        run_steps(strategy, range(HALF))
        dcp.save(strategy.state_dict(), checkpoint_id=f"{payload['tmp']}/{name}")
        strategy.local.data_parallel.close(failed=True)
    dist.destroy_process_group()
    return {}


def load_half(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Load every checkpoint under each layout and train on."""
    losses: dict[str, list[float]] = {}
    for name, settings in payload["cases"].items():
        for saved in payload["saved"]:
            strategy = prepared(rank, world, settings)
            state = strategy.state_dict()
            dcp.load(state, checkpoint_id=f"{payload['tmp']}/{saved}")
            strategy.load_state_dict(state)
            losses[f"{saved} -> {name}"] = run_steps(strategy, range(HALF, 2 * HALF))
            strategy.local.data_parallel.close(failed=True)
    dist.destroy_process_group()
    return losses


def not_a_number(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Step 1 has a NaN in the rows of the last data rank."""
    results = {}
    for name, settings in payload["cases"].items():
        strategy = prepared(rank, world, settings)
        infos = []
        for step in range(3):
            batch = token_batch(step)
            if step == 1:
                batch.weight[-2] = float("nan")
            before = full_state(strategy)
            strategy.forward_backward(rank_part(batch, strategy))
            infos.append(asdict(strategy.step(1e-2)))
            after = full_state(strategy)
            infos[-1]["moved"] = not before or any(not torch.equal(before[k], after[k]) for k in before)
        results[name] = infos
        strategy.local.data_parallel.close(failed=True)
    dist.destroy_process_group()
    return results


class Idle(Net):
    """Has a parameter no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)


def unreached(rank: int, world: int, payload: dict[str, Any]) -> dict[str, str]:
    messages = {}
    for name, settings in payload["cases"].items():
        strategy = make_strategy(rank, world, settings)
        cut = settings.get("pp", 1) * settings.get("tp", 1) > 1
        try:
            model = tower(idle=True) if cut else Idle().double()
            strategy.prepare(model, SquaredError(), lambda named: build_optimizer(named, OptimConfig()))
            for step in range(REACH_STEPS):
                strategy.forward_backward(rank_part(table_batch(step, 24), strategy))
                strategy.step(1e-3)
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
        strategy.local.data_parallel.close(failed=True)
    dist.barrier()  # an early exit would end the other's ring before it has looked
    return messages


def evaluated(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Outputs of `evaluate` on 5 rows, before and after a step, and whether they are given at all."""
    found = {}
    for name, settings in payload["cases"].items():
        strategy = prepared(rank, world, settings)
        rows = on_device(token_batch(99, rows=5), strategy)
        first = strategy.evaluate(rows)
        run_steps(strategy, range(1))
        found[name] = (first, strategy.evaluate(rows), strategy.is_output_rank)
        strategy.local.data_parallel.close(failed=True)
    if world > 1:
        dist.destroy_process_group()
    return found
