"""A small GPT in float64 under many layouts, all in one launch."""

from __future__ import annotations

from typing import Any

import torch
from problem import make_strategy, train

from training.data.batch import Batch
from training.models.gpt import GPT, LanguageModelTask

VOCAB, ROWS, TOKENS = 40, 16, 16


def small_gpt(tied: bool = True, kv_heads: int = 8) -> GPT:
    """Weights larger than usual, so that clipping acts and every path matters."""
    torch.manual_seed(3)
    gpt = GPT(VOCAB, width=32, layers=2, heads=8, kv_heads=kv_heads, hidden=48, tied=tied)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return gpt


def token_batch(step: int, rows: int = ROWS) -> Batch:
    """Row 3 is padding."""
    make = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (rows, TOKENS + 1), generator=make)
    weight = torch.ones(rows)
    weight[3] = 0
    return Batch({"tokens": tokens}, rows, rows - 1, (step + 1) * rows, weight)


def run_case(rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    """`case`: parallel settings, and tied, kv_heads, steps, spoil, dtype, optimizer of the problem."""
    options = {"tied": True, "kv_heads": 8, "steps": 10, "spoil": 0.0, "dtype": "float64", "optimizer": "adamw", **case}
    problem = {key: options.pop(key) for key in ("tied", "kv_heads", "steps", "spoil", "dtype", "optimizer")}
    strategy = make_strategy(rank, world, {"engine": "torch", "accumulate": 2, **options}, clip=0.5)
    model = small_gpt(problem["tied"], problem["kv_heads"]).to(getattr(torch, problem["dtype"]))
    batches = [token_batch(step) for step in range(problem["steps"])]
    result = train(
        strategy, model, LanguageModelTask(), batches, optimizer=problem["optimizer"], spoil=problem["spoil"]
    )
    strategy.axis.close(failed=True)  # keeps the process groups for the next case
    return result


def one_process(case: dict[str, Any]) -> dict[str, Any]:
    """The same problem without any parallelism."""
    problem = ("tied", "kv_heads", "steps", "dtype", "precision", "optimizer", "accumulate")
    return run_case(0, 1, {key: value for key, value in case.items() if key in problem})


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    results = {name: run_case(rank, world, case) for name, case in payload["cases"].items()}
    torch.distributed.destroy_process_group()
    return results
