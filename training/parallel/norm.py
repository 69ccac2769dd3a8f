"""The global gradient norm over every sharded axis, and clipping by it.

Each rank adds the squares of what it holds, divided by how many ranks hold the same piece; one all-reduce over the
world then gives the same norm everywhere, whatever mixture of replicated and sharded parameters there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from training.parallel.data_parallel.reduce import local_tensor


def pieces(tensor: torch.Tensor) -> int:
    """Over how many ranks the tensor is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    # not `is_shard()`: that is false for the strided shards of ZeRO over tensor parallelism
    sizes = [tensor.device_mesh.size(dim) for dim, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    return math.prod(sizes)


def square_sum(gradients: Sequence[torch.Tensor], device: torch.device, holders: int) -> torch.Tensor:
    """This rank's share of the squared norm, float64 0-dim on `device`, without waiting for it; `holders` ranks hold
    the whole set together."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_pieces: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_pieces.setdefault(pieces(gradient), []).append(local_tensor(gradient))
    for count, tensors in by_pieces.items():
        dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(tensors, 2, dtype))
        total += norms.double().square().sum().to(device) * (count / holders)
    return total


def clip_factor(norm: float, limit: float | None) -> float:
    """What gradients are multiplied by; 1.0 below the limit. torch's `clip_grad_norm_` has the same 1e-6."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def scale_gradients(gradients: Sequence[torch.Tensor], factor: float) -> None:
    if factor != 1.0 and gradients:
        torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor)
