"""Ring all-reduce by torch, as DistributedDataParallel does it (https://arxiv.org/abs/2006.15704), in the buckets of
reduce.py; in two levels where ranks share hosts (Gloo; NCCL finds the hosts itself).

torch's own DDP is not used: it takes no parameters that are cut over pipeline or tensor axes, and a layer that a step
does not reach is an error to it, or another all-reduce in every step (find_unused_parameters).

Bytes sent per rank and step: 2 (w-1)/w x bytes of the gradients, once per step whatever the accumulation.
Memory per fp32 parameter with AdamW: 16 bytes (weight 4, gradient 4 in the buckets, moments 8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training.parallel.data_parallel.base import DataAxis
from training.parallel.data_parallel.reduce import GradientReducer, Transport, local_tensor


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """They become those of the group's first rank."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_meta:
                continue
            piece = local_tensor(tensor.detach())
            whole = piece.contiguous()
            dist.broadcast(whole, src=source, group=group)
            if whole is not piece:
                piece.copy_(whole)


class GroupTransport:
    """Sums by torch.distributed's all-reduce in one process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        return dist.all_reduce(buffer, group=self.group, async_op=True)

    def wait(self, handle: Any) -> None:
        handle.wait()


class HostTransport:
    """All-reduce in two levels, for ranks that share hosts: sum within the host so that each of its l ranks holds 1/l,
    sum those over the h hosts, gather within the host (https://arxiv.org/abs/1711.04325, section 2.2).

    Bytes a host sends to others: 2 (h-1)/h x bytes of the gradients, where one ring over all w ranks sends 2 (w-1)/w.
    The first level runs behind backward, the others when the gradients are waited for.
    """

    def __init__(self, inside: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
        self.inside, self.across, self.ranks = inside, across, inside.size()

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        padded = nn.functional.pad(buffer, (0, -len(buffer) % self.ranks))
        received = torch.empty_like(padded)
        return buffer, received, padded, dist.all_to_all_single(received, padded, group=self.inside, async_op=True)

    def wait(self, handle: Any) -> None:
        buffer, received, padded, work = handle
        work.wait()
        mine = received.view(self.ranks, -1).sum(dim=0)
        dist.all_reduce(mine, group=self.across)
        dist.all_gather_into_tensor(padded, mine, group=self.inside)
        buffer.copy_(padded[: len(buffer)])


def host_groups(rank: int, world: int, local_rank: int, local_size: int) -> HostTransport | None:
    """The two levels where every host has the same number of consecutive ranks, more than one, and there is more than
    one host; else None. Collective."""
    regular = local_size > 1 and world > local_size and world % local_size == 0 and rank % local_size == local_rank
    agreed = torch.tensor([int(regular), local_size if regular else 0, -local_size if regular else 0])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    if not agreed[0] or agreed[1] != -agreed[2]:
        return None
    hosts = [list(range(first, first + local_size)) for first in range(0, world, local_size)]
    inside = [dist.new_group(ranks) for ranks in hosts]
    across = [dist.new_group(list(peers)) for peers in zip(*hosts, strict=True)]
    return HostTransport(inside[rank // local_size], across[local_rank])


class TorchRing(DataAxis):
    """Gradients are summed by torch's all-reduce."""

    def __init__(
        self,
        size: int,
        group: dist.ProcessGroup | None,
        bucket_bytes: int,
        overlap: bool,
        engine: str,
        transport: Transport | None = None,
    ) -> None:
        """`overlap` sends buckets while backward runs; not under a pipeline, where no hook knows the last backward."""
        self.size, self.group, self.bucket_bytes, self.overlap = size, group, bucket_bytes, overlap
        self.transport = transport or GroupTransport(group)
        self.engine = engine

    def wrap(self, model: nn.Module) -> nn.Module:
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.reducer = GradientReducer(trainable, self.transport, self.bucket_bytes)
        return model

    @contextmanager
    def scope(self, last: bool) -> Iterator[None]:
        if last and self.overlap:
            self.reducer.arm()
        yield

    def finish(self) -> None:
        self.reducer.finish()

    def share_buffers(self, buffers: list[torch.Tensor]) -> None:
        broadcast_tensors(buffers, self.group)

    def close(self, failed: bool) -> None:
        self.reducer.close()
