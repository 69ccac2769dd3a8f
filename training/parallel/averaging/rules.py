"""What becomes of the replicas' weights when a window of steps ends.

`local_sgd` (https://arxiv.org/abs/1805.09767): every replica goes on with the mean, x_i' = mean(x).

`diloco` (https://arxiv.org/abs/2311.08105): all go on with an anchor a that follows the mean by Nesterov's momentum,
d = a - mean(x); m' = momentum m + d; a' = a - lr (d + momentum m'); x_i' = a'. It is local_sgd with lr 1, momentum 0.
Within a window, the anchor is evaluated that would be if the window ended there, so it has all rows. Memory: two more
tensors as large as the weights.
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
    carried: int = 0  # tensors as large as the weights in `shared`

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


class Diloco(Rule):
    """Let an anchor follow the mean."""

    carried = 2

    def begin(self, weights: Tensors) -> None:
        self.anchor = [weight.clone() for weight in weights]
        self.momentum = [torch.zeros_like(weight) for weight in weights]

    def end_window(self, weights: Tensors) -> None:
        for state, values in zip((self.anchor, self.momentum), self._outer_step(weights), strict=True):
            copy_into(state, values)
        copy_into(weights, self.anchor)

    def _outer_step(self, weights: Tensors) -> tuple[Tensors, Tensors]:
        """(anchor, momentum) if the window ended now."""
        lr, share = self.config.outer_lr, self.config.outer_momentum
        behind = [a - mean for a, mean in zip(self.anchor, self.links.mean(weights), strict=True)]
        momentum = [d.add(m, alpha=share) for d, m in zip(behind, self.momentum, strict=True)]
        steps = [d.add_(m, alpha=share) for d, m in zip(behind, momentum, strict=True)]
        return [a.sub(step, alpha=lr) for a, step in zip(self.anchor, steps, strict=True)], momentum

    def evaluated(self, weights: Tensors, in_window: bool) -> Tensors | None:
        return self._outer_step(weights)[0] if in_window else None

    def shared(self) -> dict[str, list[torch.Tensor]]:
        return {"anchor": self.anchor, "momentum": self.momentum}


RULES: dict[str, type[Rule]] = {"local_sgd": LocalSgd, "diloco": Diloco}


def copy_into(targets: Tensors, sources: Tensors) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
