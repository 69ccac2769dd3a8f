"""The user's model of docs/explanation/strategies.md, table and all; it knows nothing of pipelines or tensors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.ranks.problem import SquaredError, make_strategy, table_batch, train

DOCS = Path(__file__).resolve().parent.parent.parent / "docs/explanation/strategies.md"


def documented() -> ModuleType:
    """The first Python block of the page, as a module."""
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None
    module = sys.modules.setdefault("documented", ModuleType("documented"))
    exec(code.group(1), module.__dict__)
    return module


class IdleHead(nn.Sequential):
    """Has a parameter no loss depends on."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_parameter("idle", nn.Parameter(torch.zeros(3)))


def tower(idle: bool = False) -> nn.Module:
    model: nn.Module = documented().Tower()
    if idle:
        model.head = IdleHead(*model.head)
    return model.double()


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name, case in payload["cases"].items():
        torch.manual_seed(7 + rank)  # rank 0's parameters must win
        strategy = make_strategy(rank, world, {"accumulate": 2, **case})
        batches = [table_batch(step, 24) for step in range(10)]
        results[name] = train(strategy, tower(), SquaredError(), batches, lr=1e-2)
        strategy.local.data_parallel.close(failed=True)  # keeps the process groups for the next case
    return results
