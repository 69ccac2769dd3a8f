"""Measure what a step holds, sends and waits for, under the planner's names.

Bytes sent are counted by axis of the mesh, from the calls torch makes. A rank of w sends, for an argument of n bytes:
all-reduce 2 (w-1)/w n, all-to-all and reduce-scatter (w-1)/w n (twice that on Gloo, pytorch#118911), all-gather (w-1)
n of its own part, send n. Rings, fully_shard, DTensor and the pipelines all end in these calls; Horovod's do not pass
through torch, so HorovodCollectives counts them itself. Memory is that of the storages at the optimizer's step; of
those that the model's forward passes keep for backward, at their peak; of the weights and gradients a ZeRO pass holds
whole (not the buffers its collectives send from and receive into); and of all storages together, of batches this step's
rows alone, at the fullest moment of a step. The bubble is the time a pipeline takes beyond its busiest rank's work,
over that work.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from sparkring.training.models.torch_private import (
    TorchDispatchMode,
    call_name,
    dtensor_types,
    has_memory,
    process_group_of,
    tree_flatten,
    waited_tensor,
    without_modes,
)
from sparkring.training.parallel.dtensor import local_tensor
from sparkring.training.parallel.process_groups import device_backend


def ring_share(ranks: int) -> float:
    """Share of the data each rank sends in a reduce-scatter, an all-to-all or an all-gather."""
    return (ranks - 1) / ranks


SENT: dict[str, Callable[[int], float]] = {  # call -> ranks of the group -> bytes sent per byte of its input
    "allreduce_": lambda ranks: 2 * ring_share(ranks),
    "all_reduce": lambda ranks: 2 * ring_share(ranks),
    "alltoall_base_": ring_share,
    "all_to_all_single": ring_share,
    "allgather_": lambda ranks: ranks - 1,
    "_allgather_base_": lambda ranks: ranks - 1,
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "_reduce_scatter_base_": ring_share,
    "reduce_scatter_tensor": ring_share,
    "send": lambda ranks: 1,
}
OUTPUT_FIRST = {"alltoall_base_", "allgather_", "_allgather_base_", "_reduce_scatter_base_"}  # input is the second


class CommsMeter(TorchDispatchMode):
    """While active, add the bytes this rank sends to `sent`, by axis."""

    def __init__(self, groups: Mapping[str, str]) -> None:
        """`groups`: name of a process group -> its axis.

        Of the other groups, messages between two ranks are the pipeline's, and all-to-alls that keep the shape of
        activations are context parallelism's; flat buffers are gradients and weights.
        """
        super().__init__()
        self.groups = groups
        self.sent: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, dtensor_types()) for kind in types):
            return NotImplemented  # DTensor first: its calls on local tensors come here again
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._count(call_name(func), [*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _count(self, call: str, arguments: list[Any]) -> None:
        if call not in SENT:
            return
        group = process_group_of(arguments)
        tensors = flat_list(arguments[1 if call in OUTPUT_FIRST else 0])
        share = SENT[call](group.size())
        if "reduce_scatter" in call and device_backend(tensors[0].device, group) == "gloo":
            share *= 2
        axis = self.groups.get(group.group_name, "dp x cp")
        if call == "send":
            axis = "pp"
        elif call in ("alltoall_base_", "all_to_all_single") and tensors[0].dim() > 1:
            axis = "cp"
        self.sent[axis] = self.sent.get(axis, 0.0) + share * sum(t.numel() * t.element_size() for t in tensors)


def flat_list(tensors: Any) -> list[torch.Tensor]:
    """The tensors of an argument: a tensor, or nested lists of them."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [each for inner in tensors for each in flat_list(inner)]


RISE = 1.0005  # a peak that is higher by less is not looked at


class MemoryMeter(TorchDispatchMode):
    """While active, follow the bytes of all storages that torch's calls make; `peak` counts those of before too.

    May be entered several times: a storage that is freed outside is seen too.
    """

    def __init__(self, resized: Callable[[], Iterable[torch.Tensor]] = lambda: ()) -> None:
        """`resized`: tensors whose storages shrink and grow, as fully_shard's gathered weights do."""
        super().__init__()
        self.resized = resized
        self.sizes: dict[int, int] = {}  # storage -> bytes
        self.references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live, self.peak = 0, 0  # bytes

    def count_existing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages that are there before."""
        for tensor in tensors:
            self._add(storage_of(tensor))

    def count_rows(self, rows: Iterable[torch.Tensor]) -> None:
        """Count the rows of this step, and not the chunk that they are views of."""
        for tensor in rows:
            self._follow(storage_of(tensor))
            self._grow(int(storage_of(tensor)._cdata), tensor.numel() * tensor.element_size())

    def mark(self) -> int:
        """Look for a peak from here on; returns the bytes that are held now."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, dtensor_types()) for kind in types):
            return NotImplemented
        if func.namespace in ("fsdp", "c10d", "_c10d_functional") or call_name(func) == "empty":
            self._count_resized()  # nothing tells when a storage is resized; this is what comes after
        returned = func(*args, **(kwargs or {}))
        for each in tree_flatten(returned)[0]:
            if isinstance(each, torch.Tensor) and each.layout == torch.strided and self.counts(each):
                self._add(waited_tensor(each).untyped_storage())
        return returned

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a new tensor is looked at."""
        return True

    def _count_resized(self) -> None:
        with without_modes():  # this is within one of torch's calls, which may be one of a trace
            for tensor in self.resized():
                self._resize(storage_of(tensor))

    def _add(self, storage: torch.UntypedStorage) -> None:
        if self._follow(storage):
            self._resize(storage)

    def _follow(self, storage: torch.UntypedStorage) -> bool:
        """See when a storage is freed, of which nothing is counted yet; False: it is followed."""
        key = int(storage._cdata)
        if key in self.sizes:
            return False
        self.sizes[key] = 0
        self.references[key] = weakref.ref(storage, lambda _: self._free(key))
        return True

    def _resize(self, storage: torch.UntypedStorage) -> None:
        key = int(storage._cdata)
        if key in self.sizes and (size := storage.nbytes() - self.sizes[key]):
            self._grow(key, size)

    def _grow(self, key: int, size: int) -> None:
        self.sizes[key] += size
        self._change(key, size)

    def _free(self, key: int) -> None:
        del self.references[key]
        self._change(key, -self.sizes.pop(key))

    def _change(self, key: int, size: int) -> None:
        self.live += size
        self.changed(key, size)
        if self.live > RISE * self.peak:
            self._count_resized()
            self.peak = max(self.peak, self.live)

    def changed(self, key: int, size: int) -> None:
        """A storage grew by `size` bytes."""


class RankMemoryMeter(MemoryMeter):
    """Of a rank that trains. Tensors of a trace, as torch makes to see how a DTensor is cut, have no memory there."""

    def counts(self, tensor: torch.Tensor) -> bool:
        return has_memory(tensor)


class SavedTensor:
    """A tensor saved for backward, alive until autograd frees this object."""

    def __init__(self, tensor: torch.Tensor, storage: int, meter: ActivationMeter) -> None:
        self.tensor, self.storage, self.meter = tensor, storage, meter

    def __del__(self) -> None:
        self.meter.release(self.storage)


class ActivationMeter:
    """Count bytes that autograd keeps for backward, without weights and batch."""

    def __init__(self) -> None:
        self.saved: dict[int, int] = {}  # storage address -> how many saved tensors are in it
        self.sizes: dict[int, int] = {}  # storage address -> bytes
        self.alive, self.peak = 0, 0  # bytes

    @contextmanager
    def measuring(self, model: nn.Module, inputs: Iterable[Any]) -> Iterator[None]:
        """Around a forward pass of `model` on `inputs`, which belong to the batch."""
        batch = {storage_of(x).data_ptr() for x in inputs if isinstance(x, torch.Tensor)}

        def pack(tensor: torch.Tensor) -> torch.Tensor | SavedTensor:
            storage = storage_of(tensor)
            address = storage.data_ptr()
            if address not in self.saved:
                # looked up each time: fully_shard puts gathered weights in place of the shards while a block runs
                if address in batch or address in {storage_of(p).data_ptr() for p in model.parameters()}:
                    return tensor
                self.sizes[address] = storage.nbytes()
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
            self.saved[address] = self.saved.get(address, 0) + 1
            return SavedTensor(tensor, address, self)

        def unpack(saved: torch.Tensor | SavedTensor) -> torch.Tensor:
            return saved.tensor if isinstance(saved, SavedTensor) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def release(self, storage: int) -> None:
        self.saved[storage] -= 1
        if not self.saved[storage]:
            del self.saved[storage]
            self.alive -= self.sizes.pop(storage)


NO_HOLDERS = (type, ModuleType, CodeType, FrameType, str, bytes, int, float, logging.Logger, threading.Thread)


def held_tensors(holder: object) -> list[torch.Tensor]:
    """Every tensor with memory of its own that an object holds, at any depth.

    Not by gc.get_objects: CPython cannot grow a tuple that another thread makes while someone else refers to it.
    """
    found, seen, ahead = [], dict[int, object](), [holder]
    while ahead:
        each = ahead.pop()
        if id(each) in seen or isinstance(each, NO_HOLDERS):
            continue
        seen[id(each)] = each
        if isinstance(each, torch.Tensor):
            ahead += [*gc.get_referents(each), each.grad if each.is_leaf else None]
            if not isinstance(each, dtensor_types()) and each.layout == torch.strided and has_memory(each):
                found.append(each)
        elif isinstance(each, FunctionType):  # its globals are not its own
            ahead += [each.__closure__, each.__defaults__]
        else:
            ahead += gc.get_referents(each)
    return found


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch.no_grad():
        return waited_tensor(local_tensor(tensor)).untyped_storage()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors: the memory allocated on this rank."""
    storages = [storage_of(tensor) for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def memory_bytes(
    model: nn.Module, owned: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, means: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Bytes of the storages that exist at the optimizer's step, by kind; `means` count as the optimizer's."""
    states = [*means] + [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return {
        "weights_bytes": storage_bytes(model.parameters()),
        "gradients_bytes": storage_bytes(p.grad for p in owned if p.grad is not None),
        "optimizer_bytes": storage_bytes(states),
    }


def combined(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine all ranks' measurements into the planner's quantities.

    Bytes sent are averaged over the ranks; of memory and seconds the largest is taken. The bubble comes from the
    seconds of a pipeline's whole passes and of the work in them.
    """
    names = dict.fromkeys(name for each in found for name in each)
    by_name = {name: [each.get(name, 0.0) for each in found] for name in names}
    table = {n: sum(v) / len(v) if n.startswith("sent_bytes") else max(v) for n, v in by_name.items()}
    pass_s, work_s = table.pop("pass_s", 0.0), table.pop("work_s", 0.0)
    return table | ({"bubble_share": pass_s / work_s - 1} if work_s else {})
