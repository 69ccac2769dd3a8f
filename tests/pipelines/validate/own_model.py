"""A user's module, with and without mistakes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sparkring.training.tasks import Task

NOT_A_MODEL = 5


class Small(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(2, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(torch.stack([x, z], dim=1))).squeeze(1)
        return out


class Own(Task):
    """Its one metric is `gini`."""

    def __init__(self, features: list[str], label: str, inputs: list[str] | None) -> None:
        assert {"x", "z"} <= set(features) and label == "y", "made with the recipe's columns, as it will be"
        self.features, self.label = features, label

    def inputs(self, columns: Any) -> tuple[Any, ...]:
        return tuple(columns[name] for name in self.features)

    def loss(self, outputs: torch.Tensor, columns: Any) -> torch.Tensor:
        return (outputs - columns[self.label]).square()

    def metric_names(self) -> tuple[str, ...]:
        return ("gini",)


class Refuses(Own):
    def __init__(self, features: list[str], label: str, inputs: list[str] | None) -> None:
        raise RuntimeError("I want a licence")


class WithoutLabel(Own):
    def __init__(self, features: list[str]) -> None:
        super().__init__(features, "y", None)


def rows(tables: dict[str, Any]) -> Any:
    return tables["points"]
