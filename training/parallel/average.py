"""Average the weights over the steps (optim.ema)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from sparkring.training.parallel.dtensor import local_tensor
from sparkring.training.parallel.state import plain_name


class WeightAverage:
    """Exponential mean of the weights after each step, of what this rank owns and trains.

    mean_t = sum_i d^(t-i) w_i / sum_i d^(t-i), i = 1 .. t: debiased as Adam's moments are
    (https://arxiv.org/abs/1412.6980, section 3), so initial weights have no share in it. It is by element, so shards
    are averaged where they are. 1 more tensor per parameter.
    """

    def __init__(self, decay: float, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.decay, self.named = decay, named
        self.means = [parameter.detach().clone() for _, parameter in named]
        self.steps = torch.zeros((), dtype=torch.int64)  # in the mean

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each mean with its weight, as this rank's shards."""
        weights = [parameter.detach() for _, parameter in self.named]
        return [(local_tensor(m), local_tensor(w)) for m, w in zip(self.means, weights, strict=True)]

    def update(self) -> None:
        """Take in the weights of a step."""
        self.steps += 1
        share = (1 - self.decay) / (1 - self.decay ** int(self.steps))
        for mean, weight in self._pairs():
            mean.lerp_(weight, share)

    def swap(self) -> None:
        """Exchange means and weights; twice restores every bit. Needs room for one parameter more."""
        for mean, weight in self._pairs():
            kept = weight.clone()
            weight.copy_(mean)
            mean.copy_(kept)

    def tensors(self, aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return the mean of each parameter, by canonical name."""
        names = [plain_name(name) for name, _ in self.named]
        found: dict[str, torch.Tensor] = {}
        for name, mean in zip(names, self.means, strict=True):
            found.setdefault(aliases.get(name, name), mean)
        return found
