"""Read a tensor that may be distributed: this rank's shard, its place in the whole, and the number of shards."""

from __future__ import annotations

import math

import torch
from torch import nn

from sparkring.training.models.torch_private import is_dtensor, local_shape_and_offset

Box = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and offsets of a piece, one number per dim


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_box(tensor: torch.Tensor) -> Box:
    """Return sizes and offsets of this rank's shard of the whole tensor."""
    if not is_dtensor(tensor):
        return tuple(tensor.shape), (0,) * tensor.ndim
    return local_shape_and_offset(tensor)


def shard_count(tensor: torch.Tensor) -> int:
    """Return over how many ranks the tensor is sharded."""
    if not is_dtensor(tensor):
        return 1
    # not `is_shard()`: that is false for the strided shards of ZeRO over tensor parallelism
    sizes = [tensor.device_mesh.size(dim) for dim, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    return math.prod(sizes)


def finalize_partial_grad(parameter: nn.Parameter) -> None:
    """Bring a DTensor gradient to its parameter's placements, which sums what is partial over the tensor axis."""
    grad = parameter.grad
    if is_dtensor(grad) and is_dtensor(parameter) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)
