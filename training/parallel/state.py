"""Name and collect the tensors of model and optimizer for checkpoints.

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

from sparkring.training.models.torch_private import CHECKPOINT_PREFIX, COMPILE_PREFIX, is_dtensor
from sparkring.training.parallel.dtensor import Box, local_box, local_tensor


def plain_name(name: str) -> str:
    """Strip wrappers' prefixes: `module.blocks.0._checkpoint_wrapped_module.w` -> `blocks.0.w`."""
    return name.removeprefix("module.").replace(CHECKPOINT_PREFIX, "").replace(COMPILE_PREFIX, "")


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers in the state dict, which drops wrappers' prefixes that buffer names keep."""
    persistent = {plain_name(name) for name in model.state_dict(keep_vars=True)}
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if plain_name(name) in persistent}


def model_tensors(model: nn.Module, aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, detached, by canonical name."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]:
        name = plain_name(name)
        found.setdefault(aliases.get(name, name), tensor.detach())
    return found


def fill_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state of parameters that were never stepped.

    TRICK: one step of learning rate 0 on zero gradients makes them, and the step count is set back to 0
    (tests/training/test_optim.py). A user's optimizer may move weights all the same; they are put back.
    """
    gradients = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
    new = [p for p in gradients if not optimizer.state.get(p)]
    if not new:
        return
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0  # SGD's decay goes into its momentum whatever the rate
    for parameter in gradients:
        parameter.grad = None
    kept = [parameter.detach().clone() for parameter in new]
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, value in zip(new, kept, strict=True):
        parameter.detach().copy_(value)
    for state in (optimizer.state[parameter] for parameter in new):
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0
    for group, (rate, decay) in zip(optimizer.param_groups, settings, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    for parameter, grad in gradients.items():
        parameter.grad = grad


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]], aliases: Mapping[str, str]
) -> dict[str, Any]:
    """Return `<parameter>.<key>` -> state tensor: moments sharded as the parameter, the step count whole."""
    fill_optimizer_state(optimizer)
    found: dict[str, Any] = {}
    for name, parameter in named:
        name = plain_name(name)
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found.setdefault(f"{aliases.get(name, name)}.{key}", value)
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, nn.Parameter]],
    aliases: Mapping[str, str],
    saved: Mapping[str, Any],
) -> None:
    """Copy the result of `optimizer_tensors` into an optimizer. The KeyError names what is missing.

    Args:
        optimizer: optimizer with the state to replace.
        named: the parameters that it steps.
        aliases: further names of shared parameters.
        saved: `<parameter>.<key>` -> tensor or number.
    """
    named = list(named)
    load_tensors(optimizer_tensors(optimizer, named, aliases), saved, "optimizer")
    for name, parameter in named:
        name = plain_name(name)
        state = optimizer.state.get(parameter, {})
        for key in [key for key, value in state.items() if isinstance(value, int | float | bool)]:
            state[key] = saved[f"{aliases.get(name, name)}.{key}"]


def load_tensors(into: Mapping[str, Any], saved: Mapping[str, Any], what: str) -> None:
    """Copy by name; KeyError names what is missing. Tensors that were loaded in place are left as they are."""
    missing = sorted(set(into) - set(saved))
    if missing:
        raise KeyError(f"the checkpoint's {what} lacks {missing[:5]}{' and more' if len(missing) > 5 else ''}")
    with torch.no_grad():
        for name, target in into.items():
            source = saved[name]
            if isinstance(target, torch.Tensor) and target is not source:
                _copy(target, source)


def _copy(target: torch.Tensor, source: Any) -> None:
    if not is_dtensor(target):
        target.copy_(torch.as_tensor(source))
    elif is_dtensor(source):
        target.to_local().copy_(source.to_local())
    else:
        from torch.distributed.tensor import distribute_tensor  # with sympy: a second

        whole = distribute_tensor(source.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(whole.to_local())


@dataclass(frozen=True)
class TensorInfo:
    """Name, dtype and shape of a tensor of the whole model."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stream_tensors(
    tensors: Mapping[str, torch.Tensor], order: Sequence[str], rank: int, world: int
) -> tuple[list[TensorInfo], Iterator[torch.Tensor | None]]:
    """List the tensors that all ranks hold, and stream them to rank 0, one by one.

    Values are on rank 0's CPU; the other ranks send their pieces and get None. Collective: every rank exhausts the
    iterator. A value may share the tensor's own memory: it must be read before the next one is taken.

    Args:
        tensors: what this rank holds, by name.
        order: names that come first, in this order.
        rank: number of this process.
        world: number of processes.
    """
    mine = {name: (t.dtype, tuple(t.shape), local_box(t)) for name, t in tensors.items()}
    found: list[dict[str, Any]] = [mine] * world
    if world > 1:
        dist.gather_object(mine, found if rank == 0 else None, dst=0)
    holders: dict[str, dict[Box, int]] = {}  # name -> box -> the first rank that holds it
    infos: dict[str, TensorInfo] = {}
    for holder, part in enumerate(found):
        for name, (dtype, shape, box) in part.items():
            infos.setdefault(name, TensorInfo(name, dtype, shape))
            if math.prod(box[0]):
                holders.setdefault(name, {}).setdefault(box, holder)
    names = [*(name for name in order if name in infos), *(name for name in infos if name not in set(order))]
    listed: list[Any] = [[infos[name] for name in names]]
    to_send: list[Any] = [set()]
    if world > 1:
        by_rank: list[set[str]] = [set() for _ in range(world)]
        for name, boxes in holders.items():
            for holder in boxes.values():
                by_rank[holder].add(name)
        dist.broadcast_object_list(listed, src=0)
        dist.scatter_object_list(to_send, by_rank if rank == 0 else None, src=0)
    if rank == 0:
        return listed[0], _gathered_values(tensors, listed[0], holders, world)
    return listed[0], _sent_values(tensors, listed[0], to_send[0])


def _sent_values(
    tensors: Mapping[str, torch.Tensor], listed: list[TensorInfo], to_send: set[str]
) -> Iterator[torch.Tensor | None]:
    """Send this rank's pieces to rank 0, each when it is due; yields None for each tensor."""
    turn = torch.zeros(1)
    for info in listed:
        dist.broadcast(turn, src=0)  # else a send would wait for as long as rank 0 takes for all tensors before
        if info.name in to_send:
            dist.send(as_bytes(local_tensor(tensors[info.name]).detach().cpu().contiguous()), dst=0)
        yield None


def _gathered_values(
    tensors: Mapping[str, torch.Tensor],
    listed: list[TensorInfo],
    holders: Mapping[str, Mapping[Box, int]],
    world: int,
) -> Iterator[torch.Tensor | None]:
    """Assemble each tensor from its shards, on rank 0."""
    turn = torch.zeros(1)
    largest = max((math.prod(info.shape) * info.dtype.itemsize for info in listed), default=0)
    room, strided = torch.empty(2, largest, dtype=torch.uint8)  # reused: malloc would keep what is freed
    for info in listed:
        if world > 1:
            dist.broadcast(turn, src=0)
        boxes = holders.get(info.name, {})
        if list(boxes.values()) == [0]:
            yield local_tensor(tensors[info.name]).detach().cpu().contiguous()
            continue
        whole = shaped(room, info.shape, info.dtype)
        for (sizes, offsets), holder in boxes.items():
            piece = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            if holder == 0:
                piece.copy_(local_tensor(tensors[info.name]).detach())
                continue
            received = piece if piece.is_contiguous() else shaped(strided, sizes, info.dtype)
            dist.recv(as_bytes(received), src=holder)
            if received is not piece:
                piece.copy_(received)
        yield whole


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a contiguous tensor as (n,) uint8: Gloo does not send every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def shaped(memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """View the start of `memory`, (n,) uint8, as a tensor."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
