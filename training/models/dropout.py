"""Dropout by row: any world and micro-batching drop the same units.

`nn.Dropout` draws from each rank's own generator, so another number of ranks drops other units. Here a row's mask is a
hash of (the layer's seed, the row's number in the run), counter-based as in Salmon et al. 2011
(https://doi.org/10.1145/2063384.2063405); differs in using two multiplications of 32 bits per element, which is random
enough to drop units.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from sparkring.training.data.batch import SAMPLE

GOLDEN = 0x9E3779B97F4A7C15  # of splitmix64 (Steele et al. 2014), with its two multipliers
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Dropout(nn.Module):
    """Zero elements with probability `p` in training, scale others by 1 / (1 - p).

    Takes x (B, ...) whose dimensions after the first are whole on every rank: not for activations that tensor or
    context parallelism cuts. Its seed is drawn where weights are, from torch's generator when it is made.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout p = {p}: must be at least 0 and less than 1")
        self.p = p
        self.seed = int(torch.randint(2**62, (), device="cpu"))

    def forward(self, x: torch.Tensor, sample_B: torch.Tensor | None) -> torch.Tensor:
        """Drop elements. `sample_B` (B,) int64: column `SAMPLE`. ValueError if missing while training."""
        if not self.training or self.p == 0:
            return x
        if sample_B is None:
            raise ValueError(
                f"dropout while training needs the rows' numbers: the column {SAMPLE!r} of the columns' dict"
            )
        return torch.where(keep_mask(sample_B, x.shape[1:], self.p, self.seed), x / (1 - self.p), 0.0)


def draws_masks(model: nn.Module) -> bool:
    """Return whether the model needs the column `SAMPLE`."""
    return any(isinstance(module, Dropout) and module.p > 0 for module in model.modules())


def keep_mask(sample_B: torch.Tensor, shape: torch.Size, p: float, seed: int) -> torch.Tensor:
    """Return (B, *shape) bool, true with probability 1 - p: a hash of row number, element and seed."""
    rows_B = _mixed(sample_B * _signed(GOLDEN) + seed).to(torch.int32)
    element_E = torch.arange(1, math.prod(shape) + 1, device=sample_B.device)
    columns_E = _mixed(element_E * _signed(GOLDEN) - seed).to(torch.int32)
    bits_BE = (rows_B[:, None] ^ columns_E) * _signed(0x7FEB352D, 32)  # of Wellons' lowbias32
    bits_BE = (bits_BE ^ (bits_BE >> 15)) * _signed(0x846CA68B, 32)
    return (bits_BE >= round(p * 2**32) - 2**31).reshape(len(sample_B), *shape)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's finalizer to int64; shifts are arithmetic, which mixes as well."""
    x = (x ^ (x >> 30)) * _signed(MIX[0])
    x = (x ^ (x >> 27)) * _signed(MIX[1])
    return (x ^ (x >> 31)) >> 16


def _signed(value: int, bits: int = 64) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
