"""A model with batch normalization of the columns of tests/training/test_worker.py."""

from __future__ import annotations

import torch
from torch import nn


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        numbers = torch.stack([x, y], dim=1).to(self.head.weight.dtype)
        logits: torch.Tensor = self.head(self.norm(numbers))
        return logits.squeeze(1)
