"""ZeRO-1 (https://arxiv.org/abs/1910.02054, section 5.1) on Horovod's collectives.

Bytes sent per rank and step: (w-1)/w x bytes of the gradients by all-to-all (each rank sums its own shard) and (w-1)/w
x bytes of the weights by all-gather: together 1.0 of the all-reduce's volume. Memory that stays after a step, fp32 with
AdamW: 4 bytes of weights and 8/w of moments per parameter; within it 4 of gradients and a bucket.

Every parameter is cut along dim 0 as a DTensor is, and a rank's shard is a view into its own whole weight: the
optimizer writes in place, and checkpoints load into any other layout. 0-dim parameters are reduced whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from training.parallel.reduce import GradientReducer, local_tensor, plan_buckets
from training.parallel.ring_horovod import HorovodAxis, broadcast_from_first


@dataclass
class Piece:
    """One parameter: whole, this rank's shard of it, and its columns in the bucket (w, columns)."""

    name: str
    whole: nn.Parameter
    shard: nn.Parameter
    start: int
    stop: int


def rows_per_rank(rows: int, ranks: int) -> int:
    """How DTensor cuts dim 0: every rank but the last ones gets this many."""
    return -(-rows // ranks)


def pack(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """(rows, ...) -> (ranks, columns): row r holds rank r's shard, zeros where it has less."""
    rows = rows_per_rank(tensor.shape[0], ranks)
    flat = tensor.reshape(tensor.shape[0], -1)
    padded = nn.functional.pad(flat, (0, 0, 0, ranks * rows - tensor.shape[0]))
    return padded.reshape(ranks, -1)


def unpack(packed: torch.Tensor, into: torch.Tensor) -> None:
    """The inverse of `pack`, into a whole tensor."""
    inner = into.numel() // into.shape[0]
    into.copy_(packed.reshape(-1, inner)[: into.shape[0]].reshape(into.shape))


class HorovodZero1(HorovodAxis):
    """Every rank holds all weights and updates its shard of them."""

    def __init__(self, mesh: DeviceMesh, bucket_bytes: int) -> None:
        super().__init__(mesh.size(), bucket_bytes)
        self.mesh, self.rank = mesh, mesh.get_local_rank()

    def wrap(self, model: nn.Module, stages: list[nn.Module] | None = None) -> nn.Module:
        broadcast_from_first(model)
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.scalars = [(name, p) for name, p in trainable if p.ndim == 0]
        self.reducer = GradientReducer([p for _, p in self.scalars], self.link, self.bucket_bytes)
        cut = [(name, p) for name, p in trainable if p.ndim > 0]
        sizes = [p.numel() * p.element_size() for _, p in cut]
        plans = plan_buckets(sizes, [p.dtype for _, p in cut], self.bucket_bytes)
        self.buckets = [self._pieces([cut[i] for i in indices]) for indices in plans]
        return model

    def _pieces(self, named: list[tuple[str, nn.Parameter]]) -> list[Piece]:
        pieces, start = [], 0
        for name, whole in named:
            rows = rows_per_rank(whole.shape[0], self.size)
            stop = start + rows * math.prod(whole.shape[1:])
            mine = whole.detach()[self.rank * rows : (self.rank + 1) * rows]
            shard = nn.Parameter(self._shard(mine, whole))
            pieces.append(Piece(name, whole, shard, start, stop))
            start = stop
        return pieces

    def _shard(self, local: torch.Tensor, whole: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        shards = [(piece.name, piece.shard) for bucket in self.buckets for piece in bucket]
        order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
        return sorted([*self.scalars, *shards], key=lambda item: order[item[0]])

    def finish(self) -> None:
        """Gradients of this rank's shards, summed over the ranks; whole gradients are freed."""
        self.reducer.finish()
        handles = [self._send(number, bucket) for number, bucket in enumerate(self.buckets)]
        for bucket, handle in zip(self.buckets, handles, strict=True):
            summed = self.link.wait(handle).view(self.size, -1).sum(dim=0)
            for piece in bucket:
                shape = local_tensor(piece.shard).shape
                local = summed[piece.start : piece.stop][: shape.numel()].view(shape)
                piece.shard.grad = self._shard(local, piece.whole)

    def _send(self, number: int, bucket: list[Piece]) -> Any:
        grads = [torch.zeros_like(p.whole) if p.whole.grad is None else p.whole.grad for p in bucket]
        packed = torch.cat([pack(grad, self.size) for grad in grads], dim=1)
        for piece in bucket:
            piece.whole.grad = None
        return self.link.start_all_to_all(f"zero1.{number}", packed)

    def after_step(self) -> None:
        """Every rank's shards to all; also after a load, so that the whole weights are those of the shards."""
        handles = [self._gather(number, bucket) for number, bucket in enumerate(self.buckets)]
        with torch.no_grad():
            for bucket, handle in zip(self.buckets, handles, strict=True):
                packed = self.link.wait(handle).view(self.size, -1)
                for piece in bucket:
                    unpack(packed[:, piece.start : piece.stop], piece.whole)
        super().after_step()

    def _gather(self, number: int, bucket: list[Piece]) -> Any:
        mine = [pack(piece.whole.detach(), self.size)[self.rank] for piece in bucket]
        return self.link.start_all_gather(f"zero1.weights.{number}", torch.cat(mine))
