"""Names and tensors of model and optimizer for checkpoints, the same under every layout.

Keys are the plain module's parameter names; values are plain tensors or DTensors, which torch.distributed.checkpoint
saves by shard and loads into any other sharding. A tied weight has one key: the first of its names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from training.parallel.data_parallel.reduce import local_tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]

WRAPPERS = ("module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """`module.blocks.0._checkpoint_wrapped_module.w` -> `blocks.0.w`."""
    if name.startswith("module."):
        name = name.removeprefix("module.")
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    kept = set(model.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in kept}


def model_tensors(model: nn.Module, aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Canonical name -> parameter or persistent buffer, detached."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]:
        name = plain_name(name)
        found.setdefault(aliases.get(name, name), tensor.detach())
    return found


def fill_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give what was never stepped its state tensors by one step of learning rate 0 on zero gradients, counted as no
    step: all of it in a fresh optimizer, else parameters that no gradient has reached so far."""
    kept = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
    new = [p for p in kept if not optimizer.state.get(p)]
    if not new:
        return
    kept_settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0  # SGD's decay goes into its momentum whatever the rate
    for parameter in kept:
        parameter.grad = None
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state in (optimizer.state[parameter] for parameter in new):
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0
    for group, (rate, decay) in zip(optimizer.param_groups, kept_settings, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    for parameter, grad in kept.items():
        parameter.grad = grad


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]], aliases: Mapping[str, str]
) -> dict[str, Any]:
    """`<parameter>.<key>` -> state tensor (moments as the parameter is sharded, the step count as it is)."""
    fill_optimizer_state(optimizer)
    found: dict[str, Any] = {}
    for name, parameter in named:
        name = plain_name(name)
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found.setdefault(f"{aliases.get(name, name)}.{key}", value)
    return found


def load_tensors(into: Mapping[str, Any], saved: Mapping[str, Any], what: str) -> None:
    """Copy by name; KeyError names what is missing. Tensors that were loaded in place copy onto themselves."""
    missing = sorted(set(into) - set(saved))
    if missing:
        raise KeyError(f"the checkpoint's {what} lacks {missing[:5]}{' and more' if len(missing) > 5 else ''}")
    with torch.no_grad():
        for name, target in into.items():
            source = saved[name]
            if isinstance(target, torch.Tensor) and target is not source:
                _copy(target, source)


def _copy(target: torch.Tensor, source: Any) -> None:
    if not isinstance(target, DTensor):
        target.copy_(torch.as_tensor(source))
    elif isinstance(source, DTensor):
        target.to_local().copy_(source.to_local())
    else:
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(source.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(whole.to_local())


def local_box(tensor: torch.Tensor) -> Box:
    """Sizes and offsets of this rank's piece in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.ndim
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


@dataclass(frozen=True)
class Described:
    """A tensor of the whole model: all there is to know of it but its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stream_tensors(
    tensors: Mapping[str, torch.Tensor], order: Sequence[str], rank: int, world: int
) -> tuple[list[Described], Iterator[torch.Tensor | None]]:
    """What all ranks together hold, by name, and its values one tensor at a time: whole, on rank 0's CPU; None on the
    other ranks, which send their pieces. Collective: every rank exhausts the iterator. A value may be the tensor's own
    memory, to be read before the next one is asked for.

    `order`: names that come first, in this order.
    """
    mine = {name: (t.dtype, tuple(t.shape), local_box(t)) for name, t in tensors.items()}
    found: list[dict[str, Any]] = [mine] * world
    if world > 1:
        dist.gather_object(mine, found if rank == 0 else None, dst=0)
    held: dict[str, dict[Box, int]] = {}  # name -> box -> the first rank that holds it
    about: dict[str, Described] = {}
    for holder, part in enumerate(found):
        for name, (dtype, shape, box) in part.items():
            about.setdefault(name, Described(name, dtype, shape))
            if math.prod(box[0]):
                held.setdefault(name, {}).setdefault(box, holder)
    names = [*(name for name in order if name in about), *(name for name in about if name not in set(order))]
    plan: list[Any] = [[about[name] for name in names]]
    asked: list[Any] = [set()]
    if world > 1:
        by_rank: list[set[str]] = [set() for _ in range(world)]
        for name, boxes in held.items():
            for holder in boxes.values():
                by_rank[holder].add(name)
        dist.broadcast_object_list(plan, src=0)
        dist.scatter_object_list(asked, by_rank if rank == 0 else None, src=0)
    return plan[0], _values(tensors, plan[0], held, asked[0], rank, world)


def _values(
    tensors: Mapping[str, torch.Tensor],
    described: list[Described],
    held: Mapping[str, Mapping[Box, int]],
    asked: set[str],
    rank: int,
    world: int,
) -> Iterator[torch.Tensor | None]:
    turn = torch.zeros(1)
    largest = max((math.prod(each.shape) * each.dtype.itemsize for each in described), default=0)
    room, spare = torch.empty(2, largest if rank == 0 else 0, dtype=torch.uint8)  # malloc keeps what is freed
    for each in described:
        if world > 1:  # so that no rank waits in a send for as long as rank 0 takes for all tensors before
            dist.broadcast(turn, src=0)
        if rank != 0:
            if each.name in asked:
                dist.send(as_bytes(local_tensor(tensors[each.name]).detach().cpu().contiguous()), dst=0)
            yield None
            continue
        boxes = held.get(each.name, {})
        if list(boxes.values()) == [0]:
            yield local_tensor(tensors[each.name]).detach().cpu().contiguous()
            continue
        whole = shaped(room, each.shape, each.dtype)
        for (sizes, offsets), holder in boxes.items():
            piece = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            if holder == 0:
                piece.copy_(local_tensor(tensors[each.name]).detach())
                continue
            received = piece if piece.is_contiguous() else shaped(spare, sizes, each.dtype)
            dist.recv(as_bytes(received), src=holder)
            if received is not piece:
                piece.copy_(received)
        yield whole


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: what is sent has bits, whatever its dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def shaped(memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor at the beginning of `memory`, (n,) uint8."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
