"""Give this rank's shard of a model its memory and initial values.

Peak above the rank's own part: a block of rows, or one parameter if it cannot be made by rows or comes from rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from sparkring.training.models.initial import (
    InitialModel,
    InitialValue,
    named_tensors,
    preserved_random_state,
    replace_tensors,
)
from sparkring.training.models.torch_private import is_dtensor
from sparkring.training.parallel.dtensor import local_box, local_tensor
from sparkring.training.parallel.state import as_bytes, plain_name

CPU = torch.device("cpu")


def initialize_parameters(
    module: nn.Module, initial: InitialModel, device: torch.device, offload: bool, world: int
) -> None:
    """Allocate parameters and buffers and fill them. Collective. ValueError if ranks have made different models.

    Args:
        module: model on the meta device, sharded or whole.
        initial: initial values of the whole model.
        device: device of the memory.
        offload: put shards (DTensors) in the CPU's memory instead.
        world: number of ranks.
    """
    with preserved_random_state():
        shards = CPU if offload else device
        replace_tensors(module, lambda t: torch.empty_like(t, device=shards if is_dtensor(t) else device))
        mine: dict[str, torch.Tensor] = {}
        for name, tensor in named_tensors(module).items():
            name = plain_name(name)
            mine.setdefault(initial.aliases.get(name, name), tensor)
        sent = names_from_rank0(initial, world)
        for name, value in initial.values.items():
            if name in sent:
                whole = value_of_rank0(value, world)
                if name in mine:
                    fill(mine[name], iter([(0, whole)]))
            elif name in mine:
                _, offsets = local_box(mine[name])
                start = offsets[0] if offsets else 0
                local = local_tensor(mine[name])
                fill(mine[name], value.pieces(start, start + (local.shape[0] if local.ndim else 1)))


def names_from_rank0(initial: InitialModel, world: int) -> set[str]:
    """List the values that every rank takes from rank 0.

    All of a model that was not recorded, else those that the ranks would make differently: what a constructor takes
    from the clock, or from its own generator.
    """
    if world == 1:
        return set()
    digests = {name: value.digest for name, value in initial.values.items()}
    shapes = [(name, value.size, value.dtype) for name, value in initial.values.items()]
    own = [hashlib.sha256(repr(each).encode()).hexdigest() for each in (shapes, digests)]
    everyone: list[tuple[bool, list[str]]] = [(False, own)] * world
    dist.all_gather_object(everyone, (bool(initial.not_recorded), own))
    if len({shape for _, (shape, _) in everyone}) > 1:
        raise ValueError("model.factory: made models of other parameters on other ranks; it must make the same on all")
    if any(not_recorded for not_recorded, _ in everyone):
        return set(digests)
    if len({digest for _, (_, digest) in everyone}) == 1:
        return set()
    by_rank = [digests] * world
    dist.all_gather_object(by_rank, digests)
    return {name for name in digests if len({digests[name] for digests in by_rank}) > 1}


def value_of_rank0(value: InitialValue, world: int) -> torch.Tensor:
    """Copy rank 0's whole value to the CPU of every rank."""
    if world == 1 or dist.get_rank() == 0:
        pieces = [piece for _, piece in value.pieces(0, value.size[0] if value.size else 1)]
        whole = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).to(CPU).contiguous()
    else:
        whole = torch.empty(value.size, dtype=value.dtype)
    if world > 1 and whole.numel():
        dist.broadcast(as_bytes(whole), src=0)
    return whole


def fill(tensor: torch.Tensor, pieces: Iterator[tuple[int, torch.Tensor]]) -> None:
    """Copy this rank's shard of `pieces`, (first row, rows), into a plain or distributed tensor."""
    into = local_tensor(tensor.detach())
    sizes, offsets = local_box(tensor)
    if not into.numel():
        return
    for first, piece in pieces:  # piece: (rows, ...) of the whole tensor from row `first`
        if not sizes:
            into.copy_(piece)
            continue
        start, stop = max(first, offsets[0]), min(first + piece.shape[0], offsets[0] + sizes[0])
        rows = piece[start - first : stop - first]
        for dim in range(1, len(sizes)):
            rows = rows.narrow(dim, offsets[dim], sizes[dim])
        into[start - offsets[0] : stop - offsets[0]].copy_(rows)
