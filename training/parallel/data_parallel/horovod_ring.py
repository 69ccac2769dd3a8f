"""Ring all-reduce by Horovod (https://arxiv.org/abs/1802.05799).

Bytes sent per rank and step: 2 (w-1)/w x 4 bytes per fp32 parameter, once per step whatever the accumulation.
Memory per fp32 parameter with AdamW: 16 bytes (weight 4, gradient 4, moments 8).

Horovod's own DistributedOptimizer is not used: it averages over ranks where rows must be counted, and its
`backward_passes_per_step` asks every rank for the same number of passes. The buckets here are summed by
`hvd.allreduce_async_`, in the background of backward. This is the only module that imports horovod.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from training.parallel.data_parallel.base import DataAxis
from training.parallel.data_parallel.reduce import GradientReducer
from training.parallel.measure import ring_share
from training.waiting import waits_for_ranks

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5e-5, 5e-4  # Horovod itself looks for work once a millisecond


def available() -> str | None:
    """None when Horovod can be used, else the reason why not."""
    try:
        import horovod.torch  # noqa: F401
    except (ImportError, OSError) as error:
        return f"horovod cannot be imported ({error})"
    return None


class HorovodLink:
    """Horovod's collectives over all ranks; a call's name pairs it with the other ranks'. Counts the bytes sent."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.sent_bytes = 0.0

    def _count(self, share: float, tensor: torch.Tensor) -> None:
        self.sent_bytes += share * tensor.numel() * tensor.element_size()

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        """A sum over the ranks, in place (reduce.Transport)."""
        import horovod.torch as hvd

        self._count(2 * ring_share(self.ranks), buffer)
        return hvd.allreduce_async_(buffer, name=name, op=hvd.Sum)

    def start_all_to_all(self, name: str, rows: torch.Tensor) -> Any:
        """Row r of (w, n) goes to rank r; `wait` gives (w, n), row r from rank r."""
        import horovod.torch as hvd

        self._count(ring_share(self.ranks), rows)
        return hvd.alltoall_async(rows, name=name)

    def start_reduce_scatter(self, name: str, rows: torch.Tensor) -> Any:
        """Row r of (w, n) goes to rank r; `wait` gives (1, n), the sum of what came and its own."""
        import horovod.torch as hvd

        self._count(ring_share(self.ranks), rows)
        return hvd.reducescatter_async(rows, name=name, op=hvd.Sum)

    def start_all_gather(self, name: str, flat: torch.Tensor) -> Any:
        """(n,) on each rank; `wait` gives (w x n,)."""
        import horovod.torch as hvd

        self._count(self.ranks - 1, flat)
        return hvd.allgather_async(flat, name=name)

    @waits_for_ranks
    def wait(self, handle: Any) -> torch.Tensor:
        """`synchronize` alone would spin until then, and keep a core from the ranks and threads it waits for."""
        import horovod.torch as hvd

        pause_s = FIRST_PAUSE_S
        while not hvd.poll(handle):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        result = hvd.synchronize(handle)
        return result[0] if isinstance(result, tuple) else result


def start_horovod(rank: int, world_size: int) -> None:
    """hvd.init() from the HOROVOD_* environment the launcher made; RuntimeError when it formed another ring."""
    import horovod.torch as hvd

    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank, world_size):
        raise RuntimeError(
            f"Horovod formed rank {hvd.rank()} of {hvd.size()}, expected rank {rank} of {world_size}: the launcher's "
            f"HOROVOD_RANK and HOROVOD_SIZE did not reach this process"
        )


def broadcast_named(tensors: Mapping[str, torch.Tensor]) -> None:
    """They become those of rank 0."""
    import horovod.torch as hvd

    hvd.broadcast_parameters(sorted((name, t.data) for name, t in tensors.items() if t.numel()), root_rank=0)


class HorovodAxis(DataAxis):
    """What the two have in common: a link, and a reducer for what is summed whole."""

    engine = "horovod"
    reducer: GradientReducer

    def __init__(self, size: int, bucket_bytes: int) -> None:
        self.size, self.bucket_bytes = size, bucket_bytes
        self.link = HorovodLink(size)

    @contextmanager
    def scope(self, last: bool) -> Iterator[None]:
        if last:
            self.reducer.arm()
        yield

    def after_step(self) -> None:
        self.step_bytes, self.link.sent_bytes = self.link.sent_bytes, 0.0

    def share_buffers(self, buffers: list[torch.Tensor]) -> None:
        if buffers:
            broadcast_named({f"buffer.{number}": buffer for number, buffer in enumerate(buffers)})

    def close(self, failed: bool) -> None:
        self.reducer.close()
        if not failed:
            import horovod.torch as hvd

            hvd.shutdown()


class HorovodRing(HorovodAxis):
    """Every rank holds everything; gradients are summed."""

    def wrap(self, model: nn.Module) -> nn.Module:
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.reducer = GradientReducer(trainable, self.link, self.bucket_bytes)
        return model

    def finish(self) -> None:
        self.reducer.finish()
