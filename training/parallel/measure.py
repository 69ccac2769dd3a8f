"""Measure what a step holds, sends and waits for, under the planner's names.

Bytes sent are counted by axis of the mesh, from the calls torch makes. A rank of w sends, for an argument of n bytes:
all-reduce 2 (w-1)/w n, all-to-all and reduce-scatter (w-1)/w n (twice that on Gloo, pytorch#118911), all-gather (w-1)
n of its own part, send n. Rings, fully_shard, DTensor and the pipelines all end in these calls; Horovod's do not pass
through torch, so HorovodCollectives counts them itself. The bubble is the
time a pipeline takes beyond its busiest rank's work, over that work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparkring.training.models.torch_private import (
    TorchDispatchMode,
    call_name,
    dtensor_types,
    process_group_of,
)
from sparkring.training.parallel.process_groups import device_backend


def ring_share(ranks: int) -> float:
    """Return the share of the data each rank sends in a reduce-scatter, an all-to-all or an all-gather."""
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
        """Count sent bytes by axis. `groups`: name of a process group -> its axis.

        In other groups, messages between two ranks are the pipeline's, and all-to-alls that keep the shape of
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
    """Flatten an argument, a tensor or nested lists of tensors, to a list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [each for inner in tensors for each in flat_list(inner)]


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
