"""Measure what one rank's machine gives: matrix products, memory, operators, storage, and the reader's rows."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import Storage, open_storage
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.launch.host.processes import usable_cores, usable_memory

SECONDS = 0.4  # of one measurement
READING_S = 4.0  # of the reader
SIZES = {"cpu": (128, 512, 1024), "cuda": (1024, 4096, 8192)}  # of square matrices
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPIED = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes
STORED = 32 << 20  # bytes
SMALL = 16  # elements, whose operation is all overhead


@dataclass(frozen=True)
class Rate:
    """Work per second, the median of several times, and the middle half's width over it."""

    per_s: float
    spread: float


def rate(run: Callable[[], object], work: float, seconds: float = SECONDS) -> Rate:
    """Run something again and again; `work` is what one time does."""
    run()  # the first sets up
    found: list[float] = []
    ends = time.perf_counter() + seconds
    while len(found) < 5 or (time.perf_counter() < ends and len(found) < 1000):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
        if time.perf_counter() > ends + 5 * seconds:
            break
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else (found[0],) * 3
    return Rate(work / middle, (high - low) / middle)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def product_rates(device: torch.device) -> dict[str, dict[int, Rate]]:
    """Operations per second by dtype and width of square matrices."""

    def measured(dtype: torch.dtype, size: int) -> Rate:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

        def run() -> None:
            torch.mm(a, b)
            finish(device)

        return rate(run, 2.0 * size**3)

    return {name: {size: measured(dtype, size) for size in SIZES[device.type]} for name, dtype in DTYPES.items()}


def memory_rate(device: torch.device) -> Rate:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)
        finish(device)

    return rate(run, 2.0 * COPIED[device.type])


def operator_seconds(device: torch.device) -> float:
    """Seconds from one small operation to the next."""
    x = torch.zeros(SMALL, device=device)

    def run() -> None:
        for _ in range(100):
            x.add_(1.0)
        finish(device)

    return 1 / rate(run, 100).per_s


def storage_rates(folder: Storage) -> tuple[float, float]:
    """Bytes per second (read, written) of a file of random bytes, which is deleted."""
    data, name = os.urandom(STORED), f".sparkring-measure-{os.getpid()}"
    try:
        began = time.perf_counter()
        folder.put_atomic(name, data)
        written = time.perf_counter()
        folder.read_bytes(name)
        return STORED / (time.perf_counter() - written), STORED / (written - began)
    finally:
        folder.delete(name)


def reader_rows_per_s(
    dataset: str, split: str, columns: list[str], config: DataConfig, batch: int, rank: DataRank
) -> float:
    """Rows per second that a reader gives one rank, with nothing done to them.

    Args:
        dataset: its folder.
        split: that is trained on.
        columns: that are read.
        config: how they are read.
        batch: rows of all ranks together.
        rank: this one among them.
    """
    storage = open_storage(dataset)
    own = config.model_copy(update={"verify": "off", "on_corrupt": "fail", "filters": []})
    reader = make_reader(own, ReadRequest(storage, read_manifest(storage), split, columns, batch), rank)
    rows, began = 0, 0.0
    try:
        for number, each in enumerate(reader.batches()):
            if number == 0:  # the first waits for files to be opened
                began = time.perf_counter()
                continue
            rows += each.rows
            if time.perf_counter() - began > READING_S:
                break
        return rows / max(time.perf_counter() - began, 1e-9) if rows else 0.0
    finally:
        reader.close()


def device_facts(device: torch.device, local_size: int) -> dict[str, str | float]:
    """Name, memory in bytes, and processors of one rank's device."""
    if device.type == "cuda":
        seen = torch.cuda.get_device_properties(device)
        return {"name": seen.name, "memory_bytes": float(seen.total_memory), "processors": seen.multi_processor_count}
    processors = max(1, usable_cores() // local_size)
    return {"name": processor_name(), "memory_bytes": usable_memory() / local_size, "processors": processors}


def processor_name(path: Path = Path("/proc/cpuinfo")) -> str:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
