"""From a model without memory to this rank's part of it, one parameter at a time.

Peak above the rank's own part: a block of rows, or one parameter where it is not made by rows or comes from rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from training.models.initial import InitialModel, Value, named_tensors, own_random_state, replace_tensors
from training.parallel.state import as_bytes, local_box, local_tensor, plain_name

CPU = torch.device("cpu")


def materialize(module: nn.Module, initial: InitialModel, device: torch.device, offload: bool, world: int) -> None:
    """Give the parameters and buffers of `module`, cut or whole, memory on `device` and the values of `initial`; shards
    on the CPU where `offload` is set. Collective. ValueError where ranks have made different models."""
    with own_random_state():
        shards = CPU if offload else device
        replace_tensors(module, lambda t: torch.empty_like(t, device=shards if isinstance(t, DTensor) else device))
        mine: dict[str, torch.Tensor] = {}
        for name, tensor in named_tensors(module).items():
            name = plain_name(name)
            mine.setdefault(initial.aliases.get(name, name), tensor)
        sent = from_first_rank(initial, world)
        for name, value in initial.values.items():
            if name in sent:
                whole = first_ranks(value, world)
                if name in mine:
                    fill(mine[name], iter([(0, whole)]))
            elif name in mine:
                _, offsets = local_box(mine[name])
                start = offsets[0] if offsets else 0
                fill(mine[name], value.pieces(start, start + rows_of(local_tensor(mine[name]))))


def from_first_rank(initial: InitialModel, world: int) -> set[str]:
    """Names of values that are rank 0's on every rank: of a model that was made whole all of them, else those that the
    ranks would make differently (what a constructor takes from the clock or a generator of its own)."""
    if world == 1:
        return set()
    digests = {name: value.digest for name, value in initial.values.items()}
    shapes = [(name, value.size, value.dtype) for name, value in initial.values.items()]
    own = [hashlib.sha256(repr(each).encode()).hexdigest() for each in (shapes, digests)]
    everyone: list[tuple[bool, list[str]]] = [(False, own)] * world
    dist.all_gather_object(everyone, (bool(initial.whole), own))
    if len({shape for _, (shape, _) in everyone}) > 1:
        raise ValueError("model.factory: made models of other parameters on other ranks; it must make the same on all")
    if any(whole for whole, _ in everyone):
        return set(digests)
    if len({digest for _, (_, digest) in everyone}) == 1:
        return set()
    by_rank = [digests] * world
    dist.all_gather_object(by_rank, digests)
    return {name for name in digests if len({digests[name] for digests in by_rank}) > 1}


def first_ranks(value: Value, world: int) -> torch.Tensor:
    """Rank 0's whole value, on the CPU of every rank."""
    if world == 1 or dist.get_rank() == 0:
        whole = torch.cat([piece for _, piece in pieces]) if len(pieces := every_piece(value)) > 1 else pieces[0][1]
        whole = whole.to(CPU).contiguous()
    else:
        whole = torch.empty(value.size, dtype=value.dtype)
    if world > 1 and whole.numel():
        dist.broadcast(as_bytes(whole), src=0)
    return whole


def every_piece(value: Value) -> list[tuple[int, torch.Tensor]]:
    return list(value.pieces(0, value.size[0] if value.size else 1))


def fill(tensor: torch.Tensor, pieces: Iterator[tuple[int, torch.Tensor]]) -> None:
    """Copy this rank's part of the rows into `tensor`, a plain or distributed one."""
    into = local_tensor(tensor.detach())
    sizes, offsets = local_box(tensor)
    if not into.numel():
        return
    for first, piece in pieces:
        if not sizes:
            into.copy_(piece)
            continue
        start, stop = max(first, offsets[0]), min(first + piece.shape[0], offsets[0] + sizes[0])
        rows = piece[start - first : stop - first]
        for dim in range(1, len(sizes)):
            rows = rows.narrow(dim, offsets[dim], sizes[dim])
        into[start - offsets[0] : stop - offsets[0]].copy_(rows)


def rows_of(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1
