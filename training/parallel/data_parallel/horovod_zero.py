"""ZeRO-1 (https://arxiv.org/abs/1910.02054, section 5.1) on Horovod's collectives.

Bytes sent per rank and step: (w-1)/w x bytes of the gradients by all-to-all (each rank sums its own shard) and (w-1)/w
x bytes of the weights by all-gather: together 1.0 of the all-reduce's volume. Memory that stays after a step, fp32 with
AdamW: 4 bytes of weights and 8/w of moments per parameter; within it 4 of gradients and 4 of buckets.

Every parameter is cut along dim 0 as a DTensor is, and a rank's shard is a view into its own whole weight: the
optimizer writes in place, and checkpoints load into any other layout. 0-dim parameters are reduced whole.

With two ranks a reduce-scatter takes the gradients. Gloo's all-to-all and all-gather post what they send before what
they receive, and two ranks share one connection: the later rank's "ready to receive" waits behind all its data, the
link carries one direction after the other, and the exchange takes twice as long whenever the ranks are further apart
than the link's latency. Gloo's reduce-scatter knows its buffers beforehand. With three ranks and more it would send
more than (w-1)/w, and there an all-to-all has other connections to fill.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from sparkring.training.models.torch_private import foreach_copy_
from sparkring.training.parallel.data_parallel.horovod_ring import HorovodCollectives, HorovodRing
from sparkring.training.parallel.data_parallel.reduce import Bucket, GradientReducer, Transport


def rows_per_rank(rows: int, ranks: int) -> int:
    """Return the rows of dim 0 on every rank but the last ones, as DTensor shards it."""
    return -(-rows // ranks)


def pack(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Pack (rows, ...) as (ranks, columns): row r holds rank r's shard, padded with zeros."""
    missing = ranks * rows_per_rank(tensor.shape[0], ranks) - tensor.shape[0]
    flat = tensor.reshape(tensor.shape[0], -1)
    return (nn.functional.pad(flat, (0, 0, 0, missing)) if missing else flat).reshape(ranks, -1)


def unpack(packed: torch.Tensor, into: torch.Tensor) -> None:
    """Unpack into a whole tensor, the inverse of `pack`."""
    ranks = packed.shape[0]
    if into.shape[0] % ranks == 0:
        into.view(ranks, -1).copy_(packed)
    else:
        into.copy_(packed.reshape(-1, into.numel() // into.shape[0])[: into.shape[0]].view(into.shape))


class ShardTransport(Transport):
    """Send each row of a bucket (w, columns) to its rank; two ranks' are summed."""

    def __init__(self, collectives: HorovodCollectives) -> None:
        self.collectives = collectives

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        if self.collectives.ranks == 2:
            return self.collectives.start_reduce_scatter(name, buffer)
        return self.collectives.start_all_to_all(name, buffer)

    def wait(self, handle: Any) -> torch.Tensor:
        return self.collectives.wait(handle)


class ShardReducer(GradientReducer):
    """Reduce buckets of (w, columns), whose row r has rank r's shards, while backward runs."""

    def __init__(self, parameters: list[nn.Parameter], collectives: HorovodCollectives, bucket_bytes: int) -> None:
        self.ranks = collectives.ranks
        super().__init__(parameters, ShardTransport(collectives), bucket_bytes)

    def _bucket(self, name: str, parameters: list[nn.Parameter]) -> Bucket:
        widths = [rows_per_rank(p.shape[0], self.ranks) * math.prod(p.shape[1:]) for p in parameters]
        buffer = parameters[0].new_empty(self.ranks, sum(widths) + len(widths))
        *views, reached = buffer.split([*widths, len(widths)], dim=1)
        return Bucket(f"shards.{name}", parameters, buffer, views, reached)

    def _fill(self, bucket: Bucket, index: int) -> None:
        grad = bucket.parameters[index].grad
        if grad is None:
            bucket.views[index].zero_()
            bucket.missing.add(index)
        else:
            bucket.views[index].copy_(pack(grad, self.ranks))
        bucket.filled.add(index)

    def _reached_by(self, bucket: Bucket) -> torch.Tensor:
        return bucket.result.view(-1, bucket.buffer.shape[1])[:, -len(bucket.parameters) :].sum(dim=0)


class OwnedShards:
    """This rank's shards of one bucket's parameters.

    `weights` and `sent` are the same elements: views into the whole weights, and into this rank's row of the bucket.
    `gradients` are views into `summed`, as DTensors.
    """

    def __init__(self, bucket: Bucket, mesh: DeviceMesh) -> None:
        rank, ranks = mesh.get_local_rank(), mesh.size()
        self.bucket, self.row = bucket, bucket.buffer[rank, : -len(bucket.parameters)]
        self.widths = [view.shape[1] for view in bucket.views]
        self.summed = torch.zeros_like(self.row)
        self.weights, self.sent, self.parameters, self.gradients = [], [], [], []
        for whole, row, grad in zip(
            bucket.parameters, self.row.split(self.widths), self.summed.split(self.widths), strict=True
        ):
            rows = rows_per_rank(whole.shape[0], ranks)
            local = whole.detach()[rank * rows : (rank + 1) * rows]
            self.weights.append(local)
            self.sent.append(row[: local.numel()].view(local.shape))
            self.parameters.append(nn.Parameter(self._dtensor(local, whole, mesh)))
            self.gradients.append(self._dtensor(grad[: local.numel()].view(local.shape), whole, mesh))

    @staticmethod
    def _dtensor(local: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    def reduce(self) -> None:
        """Sum the ranks' rows and free the whole gradients."""
        received = self.bucket.result.view(-1, self.bucket.buffer.shape[1])
        torch.sum(received[:, : len(self.row)], dim=0, out=self.summed)
        self.bucket.result = None
        unreached = set(self.bucket.unreached)
        for whole, parameter, gradient in zip(self.bucket.parameters, self.parameters, self.gradients, strict=True):
            whole.grad, parameter.grad = None, None if whole in unreached else gradient

    def gather(self, collectives: HorovodCollectives) -> Any:
        """Start sending this rank's weights to all."""
        foreach_copy_(self.sent, self.weights)
        return collectives.start_all_gather(f"weights.{self.bucket.name}", self.row)

    def fill(self, gathered: torch.Tensor) -> None:
        """Write the whole weights from `gathered`, (w x columns,), every rank's shards."""
        pieces = gathered.view(-1, len(self.row)).split(self.widths, dim=1)
        for whole, piece in zip(self.bucket.parameters, pieces, strict=True):
            unpack(piece, whole.detach())


class HorovodZero1(HorovodRing):
    """Every rank holds all weights and updates its shard of them."""

    def __init__(self, mesh: DeviceMesh, bucket_bytes: int) -> None:
        super().__init__(mesh.get_local_rank(), mesh.size(), bucket_bytes)
        self.mesh = mesh
        self.shards: list[OwnedShards] = []

    def make_reducers(self, trainable: list[nn.Parameter]) -> list[GradientReducer]:
        scalars = GradientReducer([p for p in trainable if p.ndim == 0], self.collectives, self.bucket_bytes)
        sharded = ShardReducer([p for p in trainable if p.ndim > 0], self.collectives, self.bucket_bytes)
        self.shards = [OwnedShards(bucket, self.mesh) for bucket in sharded.buckets]
        return [scalars, sharded]

    def owned_parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        owned = {p: shard for s in self.shards for p, shard in zip(s.bucket.parameters, s.parameters, strict=True)}
        return [(name, owned.get(p, p)) for name, p in model.named_parameters() if p.requires_grad]

    def gathered_parameters(self) -> Iterable[nn.Parameter]:
        return [p for shards in self.shards for p in shards.bucket.parameters]

    def gathered_tensors(self) -> Iterable[torch.Tensor]:
        """Return gradients, their buckets and received tensors; weights are always whole."""
        found = [p.grad for p in self.gathered_parameters()]
        for shards in self.shards:
            found += [shards.bucket.buffer, shards.bucket.result]
        return [tensor for tensor in found if tensor is not None]

    def finish_reduction(self) -> None:
        super().finish_reduction()
        self.count_gathered()
        for shards in self.shards:
            shards.reduce()

    def after_step(self) -> None:
        self._send_shards()
        super().after_step()

    def share_weights(self) -> None:
        sent = self.collectives.sent_bytes
        self._send_shards()
        self.collectives.sent_bytes = sent  # no step has sent them

    def _send_shards(self) -> None:
        """Send every rank's shards to all, so that the whole weights are those of the shards."""
        handles = [shards.gather(self.collectives) for shards in self.shards]
        for shards, handle in zip(self.shards, handles, strict=True):
            shards.fill(self.collectives.wait(handle))
