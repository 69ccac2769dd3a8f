"""Ring all-reduce by Horovod (https://arxiv.org/abs/1802.05799).

Bytes sent per rank and step: 2 (w-1)/w x 4 bytes per fp32 parameter, once per step whatever the accumulation.
Memory per fp32 parameter with AdamW: 16 bytes (weight 4, gradient 4, moments 8).

Horovod's own DistributedOptimizer is not used: it averages over ranks where rows must be counted, and its
`backward_passes_per_step` asks every rank for the same number of passes. The buckets here are summed by
`hvd.allreduce_async_`, in the background of backward. This is the only module that imports horovod.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from training.parallel.axis import DataAxis
from training.parallel.reduce import GradientReducer


def available() -> str | None:
    """None when Horovod can be used, else the reason why not."""
    try:
        import horovod.torch  # noqa: F401
    except (ImportError, OSError) as error:
        return f"horovod cannot be imported ({error})"
    return None


class HorovodTransport:
    """Sums by Horovod's all-reduce; the tensor's name pairs the calls of the ranks."""

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        import horovod.torch as hvd

        return hvd.allreduce_async_(buffer, name=name, op=hvd.Sum)

    def wait(self, handle: Any) -> None:
        import horovod.torch as hvd

        hvd.synchronize(handle)


def start_horovod(rank: int, world_size: int) -> None:
    """hvd.init() from the HOROVOD_* environment the launcher made; RuntimeError when it formed another ring."""
    import horovod.torch as hvd

    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank, world_size):
        raise RuntimeError(
            f"Horovod formed rank {hvd.rank()} of {hvd.size()}, expected rank {rank} of {world_size}: the launcher's "
            f"HOROVOD_RANK and HOROVOD_SIZE did not reach this process"
        )


def broadcast_from_first(model: nn.Module) -> None:
    """Parameters and buffers become those of rank 0."""
    import horovod.torch as hvd

    tensors = {**dict(model.named_parameters()), **{f"buffer.{n}": b for n, b in model.named_buffers()}}
    hvd.broadcast_parameters(sorted((name, t.data) for name, t in tensors.items() if t.numel()), root_rank=0)


def all_to_all_start(rows: torch.Tensor, name: str) -> Any:
    """Row r of (w, n) goes to rank r; `wait` gives (w, n), row r from rank r."""
    import horovod.torch as hvd

    return hvd.alltoall_async(rows, name=name)


def wait(handle: Any) -> torch.Tensor:
    import horovod.torch as hvd

    result = hvd.synchronize(handle)
    return result[0] if isinstance(result, tuple) else result


def all_gather(flat: torch.Tensor, name: str) -> torch.Tensor:
    """(n,) on each rank -> (w x n,)."""
    import horovod.torch as hvd

    gathered: torch.Tensor = hvd.allgather(flat, name=name)
    return gathered


def shut_down() -> None:
    import horovod.torch as hvd

    hvd.shutdown()


class HorovodRing(DataAxis):
    """Every rank holds everything; gradients are summed."""

    engine = "horovod"
    forward_is_collective = False

    def __init__(self, size: int, bucket_bytes: int) -> None:
        self.size, self.bucket_bytes = size, bucket_bytes

    def wrap(self, model: nn.Module, stages: list[nn.Module] | None = None) -> nn.Module:
        broadcast_from_first(model)
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.reducer = GradientReducer(trainable, HorovodTransport(), self.bucket_bytes)
        return model

    @contextmanager
    def scope(self, last: bool) -> Iterator[None]:
        if last:
            self.reducer.arm()
        yield

    def finish(self) -> None:
        self.reducer.finish()

    def close(self, failed: bool) -> None:
        self.reducer.close()
        if not failed:
            shut_down()
