"""Sum gradients by torch's all-reduce, as DistributedDataParallel does (https://arxiv.org/abs/2006.15704).

It uses the buckets of reduce.py, in two levels where ranks share hosts (Gloo; NCCL finds the hosts itself). torch's DDP
is not used: it takes no parameters that are cut over pipeline or tensor axes, and a layer that a step does not reach is
an error to it, or another all-reduce in every step (find_unused_parameters).

Bytes sent per rank and step: 2 (w-1)/w x bytes of the gradients, once per step whatever the accumulation.
Memory per fp32 parameter with AdamW: 16 bytes (weight 4, gradient 4 in the buckets, moments 8).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparkring.conf.rank_info import RankInfo
from sparkring.training.parallel.data_parallel.compress import Collectives, compressed
from sparkring.training.parallel.data_parallel.reduce import BucketedDataParallel, Transport
from sparkring.training.parallel.dtensor import local_tensor
from sparkring.training.parallel.process_groups import RankContext, device_backend


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite tensors with those of the group's first rank."""
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


class GroupTransport(Collectives):
    """torch.distributed's collectives in one process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        super().__init__(dist.get_rank(group), dist.get_world_size(group))

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        return buffer, dist.all_reduce(buffer, group=self.group, async_op=True)

    def start_all_to_all(self, name: str, rows: torch.Tensor) -> Any:
        sent, received = rows.flatten(), torch.empty_like(rows)  # flat, as CommsMeter expects of gradients
        return received, dist.all_to_all_single(received.view(-1), sent, group=self.group, async_op=True)

    def start_all_gather(self, name: str, flat: torch.Tensor) -> Any:
        whole = flat.new_empty(self.ranks * len(flat))
        return whole, dist.all_gather_single(whole, flat, group=self.group, async_op=True)

    def wait(self, handle: Any) -> torch.Tensor:
        result: torch.Tensor
        result, work = handle
        work.wait()
        return result


class HostTransport(Transport):
    """All-reduce in two levels, for ranks that share hosts (https://arxiv.org/abs/1711.04325, section 2.2).

    Sum within the host so that each of its l ranks holds 1/l, sum those over the h hosts, gather within the host.
    Bytes a host sends to others: 2 (h-1)/h x bytes of the gradients, where one ring over all w ranks sends 2 (w-1)/w.
    The first level runs behind backward, the others when the gradients are waited for.
    """

    def __init__(self, inside: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
        self.inside, self.across, self.ranks = inside, across, inside.size()

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        padded = nn.functional.pad(buffer, (0, -len(buffer) % self.ranks))  # (l x n,), n elements per local rank
        received = torch.empty_like(padded)
        return buffer, received, padded, dist.all_to_all_single(received, padded, group=self.inside, async_op=True)

    def wait(self, handle: Any) -> None:
        buffer, received, padded, work = handle
        work.wait()
        mine = received.view(self.ranks, -1).sum(dim=0)  # (l, n) -> (n,)
        dist.all_reduce(mine, group=self.across)
        dist.all_gather_into_tensor(padded, mine, group=self.inside)
        buffer.copy_(padded[: len(buffer)])


def host_transport(info: RankInfo) -> HostTransport | None:
    """Return a two-level transport if all of several hosts have equally many consecutive ranks, 2 or more.

    None otherwise. Collective.
    """
    rank, world, local_rank, local_size = info.rank, info.world_size, info.local_rank, info.local_size
    regular = local_size > 1 and world > local_size and world % local_size == 0 and rank % local_size == local_rank
    agreed = torch.tensor([int(regular), local_size if regular else 0, -local_size if regular else 0])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    if not agreed[0] or agreed[1] != -agreed[2]:
        return None
    hosts = [list(range(first, first + local_size)) for first in range(0, world, local_size)]
    inside = [dist.new_group(ranks) for ranks in hosts]
    across = [dist.new_group(list(peers)) for peers in zip(*hosts, strict=True)]
    return HostTransport(inside[rank // local_size], across[local_rank])


class TorchRing(BucketedDataParallel):
    """Gradients are summed by torch's all-reduce."""

    def __init__(
        self,
        context: RankContext,
        bucket_bytes: int,
        transport: Transport | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Form a ring over torch.distributed.

        Args:
            context: this process among the ranks.
            bucket_bytes: bytes of the largest bucket.
            transport: replacement of the group's all-reduce, for parallel.compress.
            group: ranks with summed gradients; None for all batch ranks.
        """
        self.group = group or context.batch_mesh().get_group()
        super().__init__(
            context.mesh.dp * context.mesh.cp,
            f"torch-{device_backend(context.device)}",
            transport or compressed(context.config.compress, GroupTransport(self.group)),
            bucket_bytes,
            overlap=context.mesh.pp == 1,
        )

    def broadcast_buffers(self, buffers: list[torch.Tensor]) -> None:
        broadcast_tensors(buffers, self.group)
