"""What becomes of the replicas' weights when a window of steps ends.

`local_sgd` (https://arxiv.org/abs/1805.09767): every replica continues with the mean, x_i' = mean(x).

`diloco` (https://arxiv.org/abs/2311.08105): all continue with an anchor a that follows the mean by Nesterov's momentum,
d = a - mean(x); m' = momentum m + d; a' = a - lr (d + momentum m'); x_i' = a'. It is local_sgd with lr 1, momentum 0.
Within a window, the anchor is evaluated that would be if the window ended there, so it has all rows. Memory: two more
tensors as large as the weights.

`easgd` (https://arxiv.org/abs/1412.6651, with beta = n alpha): each of n replicas and a center c draw each other,
x_i' = x_i + beta / n (c - x_i); c' = c + beta (mean(x) - c), so the sum of all replicas and c stays; the center is
evaluated. Memory: one more tensor.

`gossip` (https://arxiv.org/abs/1705.09056): a replica takes the mean of itself and its peers: both neighbors on a
ring (of two, the other one), or one other replica, drawn again for each window (of an odd number one has none). The
mean over all stays and is evaluated; without gradients, distances to it shrink on a ring by (1 + 2 cos(2 pi / n)) / 3
or more in each window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256

import torch

from sparkring.conf.blocks.parallel import AveragingConfig
from sparkring.training.parallel.averaging.links import Links
from sparkring.training.parallel.measure import ring_share

BETWEEN_HOSTS = "between hosts"  # of a host, where its ranks are one replica
Tensors = Sequence[torch.Tensor]


class AveragingRule(ABC):
    """One way of averaging. Weights are lists of tensors in one order; every method is collective."""

    meets: bool = True  # replicas have the same weights when a window has ended
    evaluates_mean: bool = True  # what is evaluated is the mean of the weights
    carried: int = 0  # tensors as large as the weights in `shared`

    def __init__(self, config: AveragingConfig, links: Links) -> None:
        self.config, self.links = config, links

    def begin(self, weights: Tensors) -> None:
        """Take in the weights that every replica begins with."""
        return None

    @abstractmethod
    def end_window(self, weights: Tensors, window: int) -> None:
        """Change this replica's weights, in place; `window`: number of the one that ends, from 1."""

    @staticmethod
    def sent(config: AveragingConfig, replicas: int) -> float:
        """Return the mean bytes that a rank sends after a window, per byte of the weights."""
        return 2 * ring_share(replicas)

    @abstractmethod
    def evaluated(self, weights: Tensors, in_window: bool) -> Tensors | None:
        """Return the weights to evaluate and export, the same bits on every rank; None: `weights` as they are.

        `in_window`: whether steps were made since the last window ended.
        """

    def shared(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors, shaped as the weights, carried from window to window, equal on all ranks."""
        return {}


class LocalSgd(AveragingRule):
    """Continue with the mean."""

    def end_window(self, weights: Tensors, window: int) -> None:
        copy_into(weights, self.links.mean(weights))

    def evaluated(self, weights: Tensors, in_window: bool) -> Tensors | None:
        return self.links.mean(weights) if in_window else None


class Diloco(AveragingRule):
    """Make an anchor follow the mean."""

    evaluates_mean = False
    carried = 2

    def begin(self, weights: Tensors) -> None:
        self.anchor = [weight.clone() for weight in weights]
        self.momentum = [torch.zeros_like(weight) for weight in weights]

    def end_window(self, weights: Tensors, window: int) -> None:
        for state, values in zip((self.anchor, self.momentum), self._outer_step(weights), strict=True):
            copy_into(state, values)
        copy_into(weights, self.anchor)

    def _outer_step(self, weights: Tensors) -> tuple[Tensors, Tensors]:
        """Compute (anchor, momentum) as if the window ended now."""
        lr, share = self.config.outer_lr, self.config.outer_momentum
        behind = [a - mean for a, mean in zip(self.anchor, self.links.mean(weights), strict=True)]
        momentum = [d.add(m, alpha=share) for d, m in zip(behind, self.momentum, strict=True)]
        steps = [d.add_(m, alpha=share) for d, m in zip(behind, momentum, strict=True)]
        return [a.sub(step, alpha=lr) for a, step in zip(self.anchor, steps, strict=True)], momentum

    def evaluated(self, weights: Tensors, in_window: bool) -> Tensors | None:
        return self._outer_step(weights)[0] if in_window else None

    def shared(self) -> dict[str, list[torch.Tensor]]:
        return {"anchor": self.anchor, "momentum": self.momentum}


class Easgd(AveragingRule):
    """Draw replicas to a center, and it to them."""

    meets = False
    evaluates_mean = False
    carried = 1

    def begin(self, weights: Tensors) -> None:
        self.center = [weight.clone() for weight in weights]

    def end_window(self, weights: Tensors, window: int) -> None:
        share = self.config.elasticity
        for weight, center, mean in zip(weights, self.center, self.links.mean(weights), strict=True):
            weight.lerp_(center, share / self.links.replicas)
            center.lerp_(mean, share)

    def evaluated(self, weights: Tensors, in_window: bool) -> Tensors | None:
        return self.center

    def shared(self) -> dict[str, list[torch.Tensor]]:
        return {"center": self.center}


class Gossip(AveragingRule):
    """Continue with the mean of a few replicas."""

    meets = False

    def end_window(self, weights: Tensors, window: int) -> None:
        peers = peers_of(self.config, window, self.links.replica, self.links.replicas)
        for weight, *theirs in zip(weights, *self.links.exchange(weights, peers), strict=True):
            weight.copy_((weight + sum(theirs)) / (1 + len(peers)))

    def evaluated(self, weights: Tensors, in_window: bool) -> Tensors | None:
        return self.links.mean(weights)

    @staticmethod
    def sent(config: AveragingConfig, replicas: int) -> float:
        return min(2.0, replicas - 1) if config.peers == "ring" else 2 * (replicas // 2) / replicas


def peers_of(config: AveragingConfig, window: int, replica: int, replicas: int) -> list[int]:
    """Return the replicas to exchange weights with after a window; peers list each other."""
    if config.peers == "ring":
        return sorted({(replica - 1) % replicas, (replica + 1) % replicas} - {replica})
    drawn = sorted(range(replicas), key=lambda r: sha256(f"{config.seed} {window} {r}".encode()).digest())
    other = drawn.index(replica) ^ 1
    return [drawn[other]] if other < replicas else []


RULES: dict[str, type[AveragingRule]] = {"local_sgd": LocalSgd, "diloco": Diloco, "easgd": Easgd, "gossip": Gossip}


def copy_into(targets: Tensors, sources: Tensors) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
