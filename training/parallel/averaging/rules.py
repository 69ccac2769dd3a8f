"""What becomes of the replicas' weights when a window of steps ends.

`local_sgd` (https://arxiv.org/abs/1805.09767): every replica goes on with the mean, x_i' = mean(x).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from sparkring.conf.blocks.launch import AveragingConfig
from sparkring.training.parallel.averaging.links import Links

Tensors = Sequence[torch.Tensor]


class Rule(ABC):
    """One way of averaging. Weights are lists of tensors in one order; every method is collective."""

    meets: bool = True  # replicas have the same weights when a window has ended

    def __init__(self, config: AveragingConfig, links: Links) -> None:
        self.config, self.links = config, links

    def begin(self, weights: Tensors) -> None:
        """Take in the weights that every replica begins with."""
        return None

    @abstractmethod
    def end_window(self, weights: Tensors) -> None:
        """Change this replica's weights, in place."""

    @abstractmethod
    def evaluated(self, weights: Tensors, in_window: bool) -> Tensors | None:
        """What is evaluated and exported, the same bits on every rank; None: `weights` as they are.

        `in_window`: steps were made since the last window ended.
        """

    def shared(self) -> dict[str, list[torch.Tensor]]:
        """Tensors shaped as the weights that are carried from window to window, alike on all ranks."""
        return {}


class LocalSgd(Rule):
    """Go on with the mean."""

    def end_window(self, weights: Tensors) -> None:
        copy_into(weights, self.links.mean(weights))

    def evaluated(self, weights: Tensors, in_window: bool) -> Tensors | None:
        return self.links.mean(weights) if in_window else None


RULES: dict[str, type[Rule]] = {"local_sgd": LocalSgd}


def copy_into(targets: Tensors, sources: Tensors) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
