"""Sum gradients by Horovod's ring all-reduce (https://arxiv.org/abs/1802.05799).

Bytes sent per rank and step: 2 (w-1)/w x 4 bytes per fp32 parameter, once per step whatever the accumulation.
Memory per fp32 parameter with AdamW: 16 bytes (weight 4, gradient 4, moments 8).

Horovod's own DistributedOptimizer is not used: it averages over ranks where rows must be counted, and its
`backward_passes_per_step` requires the same number of passes on every rank. The buckets here are summed by
`hvd.allreduce_async_`, in the background of backward. This is the only module that imports horovod.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from sparkring.conf.blocks.parallel import CompressConfig
from sparkring.training.parallel.data_parallel.compress import Collectives, compressed
from sparkring.training.parallel.data_parallel.reduce import BucketedDataParallel
from sparkring.training.parallel.measure import ring_share
from sparkring.training.waiting import waits_for_ranks

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5e-5, 5e-4  # Horovod itself looks for work once a millisecond


def available(device_type: str) -> str | None:
    """Return why Horovod cannot be used on `device_type` (`cpu` or `cuda`), or None."""
    try:
        import horovod.torch as hvd
    except (ImportError, OSError) as error:
        return f"horovod cannot be imported ({error})"
    if device_type == "cuda" and not hvd.nccl_built():
        return "this Horovod was built for the CPU, and aborts on GPU tensors (`make setup GPU=1` builds it with NCCL)"
    return None


class HorovodCollectives(Collectives):
    """Start and await Horovod's collectives over all ranks, and count the bytes sent.

    A call's name pairs it with the other ranks' calls.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.sent_bytes = 0.0

    def _count(self, share: float, tensor: torch.Tensor) -> None:
        self.sent_bytes += share * tensor.numel() * tensor.element_size()

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        import horovod.torch as hvd

        self._count(2 * ring_share(self.ranks), buffer)
        return hvd.allreduce_async_(buffer, name=name, op=hvd.Sum)

    def start_all_to_all(self, name: str, rows: torch.Tensor) -> Any:
        import horovod.torch as hvd

        self._count(ring_share(self.ranks), rows)
        return hvd.alltoall_async(rows, name=name)

    def start_reduce_scatter(self, name: str, rows: torch.Tensor) -> Any:
        """Send row r of (w, n) to rank r; `wait` returns (1, n), the sum over the ranks of this rank's row."""
        import horovod.torch as hvd

        self._count(ring_share(self.ranks), rows)
        return hvd.reducescatter_async(rows, name=name, op=hvd.Sum)

    def start_all_gather(self, name: str, flat: torch.Tensor) -> Any:
        import horovod.torch as hvd

        self._count(self.ranks - 1, flat)
        return hvd.allgather_async(flat, name=name)

    @waits_for_ranks
    def wait(self, handle: Any) -> torch.Tensor:
        """Poll, sleep, and return the result; `synchronize` alone would spin on a core that other ranks need."""
        import horovod.torch as hvd

        pause_s = FIRST_PAUSE_S
        while not hvd.poll(handle):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        result = hvd.synchronize(handle)
        return result[0] if isinstance(result, tuple) else result

    def close(self) -> None:
        import horovod.torch as hvd

        hvd.shutdown()


def start_horovod(rank: int, world_size: int) -> None:
    """Start Horovod from the launcher's HOROVOD_* environment; RuntimeError for another ring."""
    import horovod.torch as hvd

    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank, world_size):
        raise RuntimeError(
            f"Horovod formed rank {hvd.rank()} of {hvd.size()}, expected rank {rank} of {world_size}: the launcher's "
            f"HOROVOD_RANK and HOROVOD_SIZE did not reach this process"
        )


def broadcast_named(tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite tensors with those of rank 0."""
    import horovod.torch as hvd

    hvd.broadcast_parameters(sorted((name, t.data) for name, t in tensors.items() if t.numel()), root_rank=0)


class HorovodRing(BucketedDataParallel):
    """Whole gradients on every rank, summed by Horovod's all-reduce, or as `compress` says."""

    def __init__(self, rank: int, size: int, bucket_bytes: int, compress: CompressConfig | None = None) -> None:
        self.collectives = HorovodCollectives(rank, size)
        transport = compressed(compress or CompressConfig(), self.collectives)
        super().__init__(size, "horovod", transport, bucket_bytes)

    def after_step(self) -> None:
        super().after_step()
        self.step_bytes, self.collectives.sent_bytes = self.collectives.sent_bytes, 0.0

    def broadcast_buffers(self, buffers: list[torch.Tensor]) -> None:
        if buffers:
            broadcast_named({f"buffer.{number}": buffer for number, buffer in enumerate(buffers)})

    def close(self, failed: bool) -> None:
        super().close(failed)
        if not failed:
            self.collectives.close()
