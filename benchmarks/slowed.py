"""The model of the recipe `fashion`, of which one rank is made slow: for benchmarks/compare.py."""

from __future__ import annotations

import os
import time

import torch

from sparkring.training.models.cnn import SmallCnn


class SlowedCnn(SmallCnn):
    """Sleeps SLOW_S seconds in each forward pass of training on rank SLOW_RANK."""

    def forward(self, image_BHWC: torch.Tensor) -> torch.Tensor:
        if self.training and os.environ.get("RANK") == os.environ.get("SLOW_RANK", "none"):
            time.sleep(float(os.environ["SLOW_S"]))
        return super().forward(image_BHWC)
