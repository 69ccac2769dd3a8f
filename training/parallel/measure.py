"""What a step really holds, sends and waits for, under the planner's names.

Bytes sent are counted by axis of the mesh, from the calls torch really makes. A rank of w sends, for an argument of n
bytes: all-reduce 2 (w-1)/w n, all-to-all and reduce-scatter (w-1)/w n (twice that on Gloo, pytorch#118911), all-gather
(w-1) n of its own part, send n. DDP, fully_shard, DTensor and the pipelines all end in these calls; Horovod's do not
pass through torch, so its link counts them itself. Memory is that of the storages at the optimizer's step, and of those
the model's forward passes keep for backward, when they are most, and of the weights and gradients a ZeRO pass holds
whole (not the buffers its collectives send from and receive into); the bubble is the time a pipeline takes beyond its
busiest rank's work, over that work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.parallel.backend import device_backend
from training.parallel.data_parallel.reduce import local_tensor


def ring_share(ranks: int) -> float:
    """Share of the data each rank sends in a reduce-scatter, an all-to-all or an all-gather."""
    return (ranks - 1) / ranks


def twice(ranks: int) -> float:
    return 2 * ring_share(ranks)


SENT: dict[str, Callable[[int], float]] = {  # call -> ranks of the group -> bytes sent per byte of its input
    "allreduce_": twice,
    "all_reduce": twice,
    "alltoall_base_": ring_share,
    "all_to_all_single": ring_share,
    "allgather_": lambda ranks: ranks - 1,
    "_allgather_base_": lambda ranks: ranks - 1,
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "_reduce_scatter_base_": ring_share,
    "reduce_scatter_tensor": ring_share,
    "send": lambda ranks: 1,
}
SECOND = {"alltoall_base_", "allgather_", "_allgather_base_", "_reduce_scatter_base_"}  # the output comes first


class WireMeter(TorchDispatchMode):
    """While active, adds the bytes this rank sends to `sent`, by the planner's axes.

    `groups`: name of a process group -> its axis. Of the others, messages between two ranks are the pipeline's,
    all-to-alls that keep the shape of activations context parallelism's; flat buffers are gradients and weights.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        super().__init__()
        self.groups = groups
        self.sent: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: what it does to its local tensors comes here again
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._count(func._overloadpacket.__name__, [*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _count(self, call: str, arguments: list[Any]) -> None:
        if call not in SENT:
            return
        group = process_group(arguments)
        tensors = flat_list(arguments[1 if call in SECOND else 0])
        share = SENT[call](group.size())
        if "reduce_scatter" in call and device_backend(tensors[0].device, group) == "gloo":
            share *= 2
        axis = self.groups.get(group.group_name, "dp x cp")
        if call == "send":
            axis = "pp"
        elif call in ("alltoall_base_", "all_to_all_single") and tensors[0].dim() > 1:
            axis = "cp"
        self.sent[axis] = self.sent.get(axis, 0.0) + share * sum(t.numel() * t.element_size() for t in tensors)


def process_group(arguments: list[Any]) -> dist.ProcessGroup:
    """A call's process group, which it is given as an object or, last, by name."""
    for value in arguments:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.distributed_c10d._resolve_process_group(dist.ProcessGroup.unbox(value).group_name)
    name = [value for value in arguments if isinstance(value, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def flat_list(tensors: Any) -> list[torch.Tensor]:
    """The tensors of an argument that is one, or lists of them."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [each for inner in tensors for each in flat_list(inner)]


class Kept:
    """A tensor saved for backward, which autograd holds until then; its storage is counted as long."""

    def __init__(self, tensor: torch.Tensor, storage: int, meter: ActivationMeter) -> None:
        self.tensor, self.storage, self.meter = tensor, storage, meter

    def __del__(self) -> None:
        self.meter.release(self.storage)


class ActivationMeter:
    """Bytes of the distinct storages that autograd keeps for backward, now and at most; weights and batch aside."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}  # storage -> how many saved tensors lie in it
        self.sizes: dict[int, int] = {}
        self.alive, self.peak = 0, 0

    @contextmanager
    def watching(self, model: nn.Module, batch: Iterable[Any]) -> Iterator[None]:
        """Around a forward pass of `model` on what it is given of the batch."""
        given = {storage_of(x).data_ptr() for x in batch if isinstance(x, torch.Tensor)}

        def keep(saved: torch.Tensor) -> torch.Tensor | Kept:
            storage = storage_of(saved)
            address = storage.data_ptr()
            if address not in self.holders:
                # looked up each time: fully_shard puts gathered weights in place of the shards while a block runs
                if address in given or address in {storage_of(p).data_ptr() for p in model.parameters()}:
                    return saved
                self.sizes[address] = storage.nbytes()
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
            self.holders[address] = self.holders.get(address, 0) + 1
            return Kept(saved, address, self)

        def give(kept: torch.Tensor | Kept) -> torch.Tensor:
            return kept.tensor if isinstance(kept, Kept) else kept

        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            yield

    def release(self, storage: int) -> None:
        self.holders[storage] -= 1
        if not self.holders[storage]:
            del self.holders[storage]
            self.alive -= self.sizes.pop(storage)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch.no_grad():
        local = local_tensor(tensor)
    if isinstance(local, AsyncCollectiveTensor):  # what a collective has yet to fill wraps its storage
        local = local.elem
    return local.untyped_storage()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors: what is really allocated on this rank."""
    storages = [storage_of(tensor) for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def held_bytes(model: nn.Module, owned: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Bytes of the storages that exist at the optimizer's step, by kind."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return {
        "weights_bytes": storage_bytes(model.parameters()),
        "gradients_bytes": storage_bytes(p.grad for p in owned if p.grad is not None),
        "optimizer_bytes": storage_bytes(states),
    }


def combined(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """All ranks' measurements as the planner's quantities: bytes sent averaged over the ranks, memory and seconds the
    largest, and the bubble from the seconds of a pipeline's whole passes and of the work in them."""
    names = dict.fromkeys(name for each in found for name in each)
    by_name = {name: [each.get(name, 0.0) for each in found] for name in names}
    table = {n: sum(v) / len(v) if n.startswith("sent_bytes") else max(v) for n, v in by_name.items()}
    pass_s, work_s = table.pop("pass_s", 0.0), table.pop("work_s", 0.0)
    return table | ({"bubble_share": pass_s / work_s - 1} if work_s else {})
