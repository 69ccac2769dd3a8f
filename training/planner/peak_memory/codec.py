"""Trace on the meta device what a gradient codec holds while it codes and sends a bucket."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from sparkring.training.parallel.data_parallel.compress import CodecTransport, Collectives, compressed
from sparkring.training.parallel.data_parallel.reduce import Bucket, GradientReducer, Transport
from sparkring.training.parallel.memory.meters import MemoryMeter
from sparkring.training.planner.workload import RankParameters


class BucketCoding(NamedTuple):
    """Bytes beyond the bucket itself and its residuals."""

    last: str  # parameter whose gradient completes the bucket
    starting: int  # the most that is held while it is coded
    sending: int  # held from then on, until its sum is there
    ending: int  # the most that is held while it is decoded


class NoCollectives(Collectives):
    """Allocate what collectives over `ranks` return, and send nothing."""

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        return buffer

    def start_all_to_all(self, name: str, rows: torch.Tensor) -> Any:
        return torch.empty_like(rows), rows.flatten()

    def start_all_gather(self, name: str, flat: torch.Tensor) -> Any:
        return flat.new_empty(self.ranks * len(flat)), flat

    def wait(self, handle: Any) -> torch.Tensor:
        received: torch.Tensor = handle[0] if isinstance(handle, tuple) else handle
        return received


def there_before(bucket: Bucket, transport: Transport) -> list[torch.Tensor]:
    assert isinstance(transport, CodecTransport)
    feedback = transport.feedback[bucket.name]
    return [bucket.buffer, feedback.residual, feedback.pending]


def trace_codec(rank: RankParameters) -> list[BucketCoding]:
    """Trace the memory of each bucket's coding, in the order of sending."""
    workload = rank.workload
    ranks = workload.mesh.dp * workload.mesh.cp
    transport = compressed(workload.config.compress, NoCollectives(0, ranks))
    names = {nn.Parameter(rank.parameters[name].detach().to("meta")): name for name in rank.trained}
    buckets = GradientReducer([*names], transport, workload.config.bucket_bytes).buckets
    transport.plan(buckets, names)
    with MemoryMeter() as meter, torch.no_grad():
        meter.count_existing(tensor for bucket in buckets for tensor in there_before(bucket, transport))
        found, handles = [], []
        for bucket in buckets:
            before = meter.mark()
            handles.append(transport.start(bucket.name, bucket.buffer))
            found.append((names[bucket.parameters[-1]], meter.peak - before, meter.live - before))
        ending = []
        for _ in buckets:
            before = meter.mark()
            transport.wait(handles.pop(0))
            ending.append(meter.peak - before)
    return [BucketCoding(*start, end) for start, end in zip(found, ending, strict=True)]
