"""Messages between ranks that train apart.

Bytes that one of n replicas sends for a mean: 2 (n-1)/n x bytes of the tensors, by the engine's all-reduce; for an
exchange: those of the tensors to each peer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from sparkring.training.parallel.data_parallel.compress import Collectives
from sparkring.training.parallel.data_parallel.ddp import broadcast_tensors
from sparkring.training.parallel.data_parallel.reduce import plan_buckets
from sparkring.training.parallel.measure import ring_share
from sparkring.training.waiting import waits_for_ranks


class Links:
    """Collectives between replicas. Every method is called by all ranks in the same order."""

    def __init__(self, collectives: Collectives, bucket_bytes: int) -> None:
        """Connect replicas by the engine's collectives between them. `bucket_bytes`: most bytes to send at once."""
        self.collectives, self.bucket_bytes = collectives, bucket_bytes
        self.replica, self.replicas = collectives.rank, collectives.ranks
        self.sent_bytes = 0.0  # by this rank so far

    @waits_for_ranks
    def mean(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Average each tensor over the replicas, into new memory; the same bits on every rank."""
        sizes = [t.numel() * t.element_size() for t in tensors]
        plans = plan_buckets(sizes, [(t.dtype, t.device) for t in tensors], self.bucket_bytes)
        flats = [torch.cat([tensors[i].detach().flatten() for i in plan]) for plan in plans]
        handles = [self.collectives.start(f"average.{number}", flat) for number, flat in enumerate(flats)]
        means: dict[int, torch.Tensor] = {}
        for plan, flat, handle in zip(plans, flats, handles, strict=True):
            summed = self.collectives.wait(handle).div_(self.replicas)
            pieces = summed.split([tensors[i].numel() for i in plan])
            means |= {i: piece.view(tensors[i].shape) for i, piece in zip(plan, pieces, strict=True)}
            self.sent_bytes += 2 * ring_share(self.replicas) * flat.numel() * flat.element_size()
        return [means[i] for i in range(len(tensors))]

    @waits_for_ranks
    def exchange(self, tensors: Sequence[torch.Tensor], peers: Sequence[int]) -> list[list[torch.Tensor]]:
        """Exchange tensors with peers, which must list each other. Not on Horovod."""
        sizes = [t.numel() * t.element_size() for t in tensors]
        received: list[dict[int, torch.Tensor]] = [{} for _ in peers]
        for plan in plan_buckets(sizes, [(t.dtype, t.device) for t in tensors], self.bucket_bytes):
            mine = torch.cat([tensors[i].detach().flatten() for i in plan])
            theirs = [torch.empty_like(mine) for _ in peers]
            calls = [dist.P2POp(dist.isend, mine, peer) for peer in peers]
            calls += [dist.P2POp(dist.irecv, each, peer) for each, peer in zip(theirs, peers, strict=True)]
            for work in dist.batch_isend_irecv(calls) if calls else []:
                work.wait()
            for found, flat in zip(received, theirs, strict=True):
                pieces = flat.split([tensors[i].numel() for i in plan])
                found |= {i: piece.view(tensors[i].shape) for i, piece in zip(plan, pieces, strict=True)}
            self.sent_bytes += len(peers) * mine.numel() * mine.element_size()
        return [[found[i] for i in range(len(tensors))] for found in received]

    @waits_for_ranks
    def of_first(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy rank 0's values to every rank."""
        values = [tensor.detach().clone() for tensor in tensors]
        broadcast_tensors(values, None)
        return values

    @waits_for_ranks
    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Return the largest value of each number over the ranks."""
        found = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        values: list[float] = found.tolist()
        return values

    @waits_for_ranks
    def total(self, number: int) -> int:
        """Sum a number over the replicas."""
        found = torch.tensor(number if self.collectives.leads else 0)
        dist.all_reduce(found)
        return int(found)

    def close(self) -> None:
        self.collectives.close()
