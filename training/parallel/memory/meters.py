"""Measure what a rank holds, under the planner's names.

Memory is that of the storages at the optimizer's step; of those that the model's forward passes keep for backward, at
their peak; of the weights and gradients a ZeRO pass holds whole (not the buffers its collectives send from and
receive into); and of all storages of the device together, of batches this step's rows alone, at the fullest moment of
a step, and of an evaluation's first batch.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    tree_flatten,
    waited_tensor,
    without_modes,
)
from sparkring.training.parallel.dtensor import local_tensor

RISE = 1.0005  # a peak that is higher by less is not looked at


class MemoryMeter(TorchDispatchMode):
    """While active, follow the bytes of all storages that torch's calls make; `peak` counts those of before too.

    May be entered several times: a storage that is freed outside is seen too.
    """

    def __init__(self, resized: Callable[[], Iterable[torch.Tensor]] = lambda: ()) -> None:
        """Start measuring. `resized`: tensors with resizable storages, such as fully_shard's gathered weights."""
        super().__init__()
        self.resized = resized
        self.sizes: dict[int, int] = {}  # storage -> bytes
        self.references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live, self.peak = 0, 0  # bytes

    def count_existing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages that exist already."""
        for tensor in filter(self.counts, tensors):
            self._add(storage_of(tensor))

    def count_rows(self, rows: Iterable[torch.Tensor]) -> None:
        """Count the rows of this step, and not the chunk that they are views of."""
        for tensor in filter(self.counts, rows):
            self._follow(storage_of(tensor))
            self._grow(int(storage_of(tensor)._cdata), tensor.numel() * tensor.element_size())

    def mark(self) -> int:
        """Start to track a peak; returns the bytes that are held now."""
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
        """Return whether a new tensor is looked at."""
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
        """Handle the growth of a storage by `size` bytes."""


class RankMemoryMeter(MemoryMeter):
    """The device memory of a rank that trains.

    What a GPU's rank holds on the host (offloaded shards, columns) is not in it. Tensors of a trace, as torch makes to
    see how a DTensor is sharded, have no memory there.
    """

    def __init__(self, device: torch.device, resized: Callable[[], Iterable[torch.Tensor]] = lambda: ()) -> None:
        """Start measuring. `resized`: see MemoryMeter."""
        super().__init__(resized)
        self.device_type = device.type

    def counts(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_type and has_memory(tensor)


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
        """Measure a forward pass of `model` on `inputs`, which belong to the batch."""
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
            return SavedTensor(tensor.detach(), address, self)  # else a node would keep itself by what it saves

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
    """Return every tensor with memory that an object holds, at any depth.

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
    """Sum the bytes of the distinct storages behind the tensors: the memory allocated on this rank."""
    storages = [storage_of(tensor) for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def memory_bytes(
    model: nn.Module, owned: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, means: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Measure bytes at the optimizer's step by kind; `means` count as the optimizer's."""
    states = [*means] + [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return {
        "weights_bytes": storage_bytes(model.parameters()),
        "gradients_bytes": storage_bytes(p.grad for p in owned if p.grad is not None),
        "optimizer_bytes": storage_bytes(states),
    }
