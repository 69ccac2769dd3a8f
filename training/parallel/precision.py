"""Autocast, and scale fp16's loss (https://arxiv.org/abs/1710.03740, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return autocast for bf16 and fp16; nothing for fp32, which means the model's own dtype.

    Weights and optimizer stay in the model's own dtype under all three.
    """
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


@dataclass
class LossScale:
    """Halve the scale at a skipped step, double it after `patience` good ones."""

    scale: float = 2.0**16
    patience: int = 2000
    good_steps: int = 0
    fixed: bool = False

    def update(self, skipped: bool) -> None:
        if self.fixed:
            return
        self.good_steps = 0 if skipped else self.good_steps + 1
        if skipped:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.patience == 0:
            self.scale = min(self.scale * 2, 2.0**24)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state for checkpoints; a fixed scale is 0, so that a run can change precision."""
        scale = torch.tensor(0.0 if self.fixed else self.scale, dtype=torch.float64)
        return {"scale": scale, "good_steps": torch.tensor(self.good_steps)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        if not self.fixed and state["scale"] > 0:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def loss_scale(precision: str) -> LossScale:
    return LossScale() if precision == "fp16" else LossScale(scale=1.0, fixed=True)
