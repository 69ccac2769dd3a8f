"""Averages of the weights (optim.ema) under many layouts, and their naive twin."""

from __future__ import annotations

from typing import Any

import torch

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import LanguageModelTask
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.step import MeshStrategy
from tests.ranks.cases_mesh import small_gpt, token_batch
from tests.ranks.problem import Net, SquaredError, full_state, on_first_rank, rank_device, rank_part, table_batch

DECAY, STEPS, HALF = 0.7, 6, 3


def averaging(rank: int, world: int, settings: dict[str, Any], user: bool) -> MeshStrategy:
    """`user`: the model is a user's module, else a GPT."""
    info = RankInfo(rank, world, rank, world)
    strategy = build_strategy(ParallelConfig(**settings), info, rank_device(rank, world), clip_norm=0.5, ema=DECAY)
    model, task = (Net().double(), SquaredError()) if user else (small_gpt().double(), LanguageModelTask())
    sample = rank_part(batch_of(0, user), strategy)
    strategy.prepare(model, task, lambda named: build_optimizer(named, OptimConfig(weight_decay=0.1)), sample)
    return strategy


def batch_of(step: int, user: bool) -> Any:
    return table_batch(step, 24) if user else token_batch(step)


def run_steps(strategy: MeshStrategy, steps: range, user: bool) -> None:
    for step in steps:
        strategy.forward_backward(rank_part(batch_of(step, user), strategy))
        strategy.step(1e-2)


def observed(strategy: MeshStrategy, user: bool) -> dict[str, Any]:
    """Averages as they are exported, outputs with them, and whether the weights are themselves again afterward."""
    before = full_state(strategy)
    batch = rank_part(batch_of(99, user), strategy)
    plain = strategy.evaluate(batch)
    with strategy.averaged():
        averages, outputs = full_state(strategy), strategy.evaluate(batch)
    again, after = strategy.evaluate(batch), full_state(strategy)
    return {
        "averages": averages,
        "differ": outputs is None or not torch.equal(outputs, plain),
        "restored": (plain is None or torch.equal(plain, again))
        and all(torch.equal(after[n], before[n]) for n in before),
    }


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """By layout: what is observed after some steps, an evaluation between them."""
    results = {}
    for name, settings in payload["cases"].items():
        settings = dict(settings)
        user = settings.pop("user", False)
        torch.manual_seed(7)
        strategy = averaging(rank, world, settings, user)
        run_steps(strategy, range(HALF), user)
        with strategy.averaged():
            strategy.evaluate(rank_part(batch_of(99, user), strategy))
        run_steps(strategy, range(HALF, STEPS), user)
        results[name] = observed(strategy, user)
        strategy.local.data_parallel.close(failed=True)
    strategy.close()
    return results


def naive(user: bool) -> dict[str, torch.Tensor]:
    """One process without averages: the weighted mean of the weights that it had after each step."""
    torch.manual_seed(7)
    strategy = averaging(0, 1, {}, user)
    after: list[dict[str, torch.Tensor]] = []
    for step in range(STEPS):
        run_steps(strategy, range(step, step + 1), user)
        after.append({name: value.clone() for name, value in on_first_rank(*strategy.stream_model()).items()})
    shares = [DECAY ** (STEPS - 1 - step) for step in range(STEPS)]
    return {
        name: sum(share * state[name] for share, state in zip(shares, after, strict=True)) / sum(shares)
        for name in after[0]
    }
