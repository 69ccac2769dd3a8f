"""Move batches to the device: on CUDA one ahead, from pinned memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from sparkring.training.data.batch import Batch, Meter, Ragged
from sparkring.training.data.prefetch import Prefetcher

T = TypeVar("T")


def to_device(batches: Iterator[Batch], device: torch.device | None, meter: Meter) -> Iterator[Batch]:
    """Move the tensors of batches to `device`; None and the CPU cost nothing."""
    if device is None or device.type == "cpu":
        return batches
    return _cuda(batches, device, meter) if device.type == "cuda" else _plain(batches, device, meter)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to all tensors of a value: one, the values of a `Ragged`, a list or a dict.

    Offsets stay on the host: rows are cut by them there, and each cut would wait for a device.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Ragged):
        return Ragged(change(value.values), value.offsets)
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [change(v) for v in value]
    return value


def moved(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Apply `change` to the batch's tensors; what the host reads stays on the host."""
    columns, weight = map_tensors(batch.columns, change), map_tensors(batch.weight, change)
    host = batch.columns if batch.host_columns is None else batch.host_columns
    return replace(batch, columns=columns, weight=weight, host_columns=host)  # ids stay: the audit runs on the host


def _plain(batches: Iterator[Batch], device: torch.device, meter: Meter) -> Iterator[Batch]:
    for batch in batches:
        began = time.perf_counter()
        there = moved(batch, lambda t: t.to(device))
        meter.add("transfer", time.perf_counter() - began)
        yield there


def staged(batches: Iterator[Batch], send: Callable[[Batch], T]) -> Generator[T, None, None]:
    """Send each batch one ahead, in another thread, so that the step does not wait."""
    sent = Prefetcher(_each(batches, send), depth=1)
    try:
        yield from sent
    finally:
        sent.close()


def _each(batches: Iterator[Batch], send: Callable[[Batch], T]) -> Generator[T, None, None]:
    with closing(batches) if isinstance(batches, Generator) else nullcontext():
        for batch in batches:
            yield send(batch)


def _cuda(batches: Iterator[Batch], device: torch.device, meter: Meter) -> Iterator[Batch]:
    side = torch.cuda.Stream(device)

    def send(batch: Batch) -> tuple[Batch, Batch, torch.cuda.Event]:
        began = time.perf_counter()
        pinned = replace(moved(batch, lambda t: t.pin_memory()), host_columns=None)  # the pinned ones are kept
        with torch.cuda.device(device), torch.cuda.stream(side):  # set per thread
            there, copied = moved(pinned, lambda t: t.to(device, non_blocking=True)), torch.cuda.Event()
            copied.record(side)
        meter.add("transfer", time.perf_counter() - began)
        return there, pinned, copied

    for there, _, copied in staged(batches, send):
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)

        def mark(tensor: torch.Tensor, stream: torch.cuda.Stream = current) -> torch.Tensor:
            # Allocated on the side stream: the allocator must not reuse it before the computation's stream is done.
            tensor.record_stream(stream)
            return tensor

        yield moved(there, mark)
