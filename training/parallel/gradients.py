"""Check, measure and clip the gradients of one step.

The global norm: each rank adds the squares of the pieces it holds, divided by how many ranks hold the same piece; one
all-reduce over the world then gives the same norm everywhere, whatever mixture of replicated and sharded parameters
there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from sparkring.training.models.sparse_embedding import sparse_embeddings
from sparkring.training.models.torch_private import foreach_multiply_, foreach_norm
from sparkring.training.parallel.dtensor import local_tensor, shard_count

REACH_STEPS = 10  # a gradient must reach every trainable parameter within so many steps


def square_sum(gradients: Sequence[torch.Tensor], device: torch.device, holders: int) -> torch.Tensor:
    """Sum this rank's share of the squared norm, float64 0-dim on `device`, without waiting for it.

    Args:
        gradients: plain tensors or DTensors that this rank holds.
        device: device of the sum.
        holders: ranks that together hold the whole set once or several times.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_count: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_count.setdefault(shard_count(gradient), []).append(local_tensor(gradient))
    for count, tensors in by_count.items():
        dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(foreach_norm(tensors, dtype))  # (tensors,)
        total += norms.double().square().sum().to(device) * (count / holders)
    return total


def clip_factor(norm: float, limit: float | None) -> float:
    """Return the factor on gradients, 1.0 below the limit. torch's `clip_grad_norm_` has the same 1e-6."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def scale_gradients(gradients: Sequence[torch.Tensor], factor: float) -> None:
    if factor != 1.0 and gradients:
        foreach_multiply_([local_tensor(gradient) for gradient in gradients], factor)


def check_trainable(model: nn.Module) -> None:
    """Raise ValueError if nothing is trainable, or a gradient cannot be summed by strategies.

    Rows of sparse tables are trained too, and are no parameters.
    """
    if not any(p.requires_grad for p in model.parameters()) and not sparse_embeddings(model):
        raise ValueError("the model has no trainable parameters (requires_grad): nothing to train")
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if sparse:
        raise ValueError(
            f"{sparse[0]!r} is {type(model.get_submodule(sparse[0])).__name__}(sparse=True): its gradient is a sparse "
            f"tensor, which no strategy sums and clips; make it with sparse=False"
        )


class UnreachedParameters:
    """Refuse parameters that no gradient reaches in the first steps on any rank.

    A single step need not reach every parameter, nor, where ranks average weights, the rows of every rank.
    """

    def __init__(self, names: Iterable[str], world: int) -> None:
        self.names, self.world = set(names), world
        self.reached: set[str] = set()
        self.batches = 0

    def after_backward(self, reached: Iterable[str]) -> None:
        """Record the parameters that have a gradient now. Collective in the last of the REACH_STEPS steps."""
        self.reached |= set(reached)
        self.batches += 1
        if self.batches != REACH_STEPS:
            return
        own = (self.names, self.reached)
        everyone: list[tuple[set[str], set[str]]] = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, own)
        names, found = (set().union(*each) for each in zip(*everyone, strict=True))
        missing = sorted(names - found)
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(
                f"no gradient reached {missing[:5]}{more} in the first {REACH_STEPS} steps: the loss does not depend "
                f"on them. Use them in forward, remove them, or freeze them with requires_grad_(False)"
            )
