"""Measure what one rank's machine gives: matrix products, memory, operators, storage, and the reader's rows."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import Storage, open_storage
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.launch.host.processes import usable_cores, usable_memory
from sparkring.training.models.gpt import GPT

SECONDS = 0.4  # of one measurement
READING_S = 4.0  # of the reader
SIZES = {"cpu": (128, 512, 1024), "cuda": (1024, 4096, 8192)}  # of square matrices
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPIED = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes
STORED = 32 << 20  # bytes
SMALL = 16  # elements, whose operation is all overhead
ROWS = 1024  # rows and columns of what elementwise operations are measured on
MOST_SETS = 256  # operands that are kept
HOST_COPIED = 256 << 20  # bytes of host memory, more than caches hold
STEP_BYTES = 28  # that Adam reads and writes of a parameter in fp32: its gradient, weight and two moments
ATTENTION = (8, 4, 128, 64)  # rows, heads, tokens, width of a head


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
    """Measure operations per second by dtype and width of square matrices, read from memory as in training."""

    def measured(dtype: torch.dtype, size: int) -> Rate:
        sets = rotating(device, 3 * size * size * 4)
        operands = [[torch.randn(size, size, device=device).to(dtype) for _ in range(3)] for _ in range(sets)]
        following = cycle(operands)

        def run() -> None:
            a, b, out = next(following)
            torch.mm(a, b, out=out)
            finish(device)

        return rate(run, 2.0 * size**3)

    return {name: {size: measured(dtype, size) for size in SIZES[device.type]} for name, dtype in DTYPES.items()}


def rotating(device: torch.device, size: int) -> int:
    """Return how many operand sets of `size` bytes exceed a CPU's caches; 1 on a GPU."""
    return max(2, min(MOST_SETS, COPIED["cpu"] // size)) if device.type == "cpu" else 1


def attention_rate(device: torch.device, backward: float) -> Rate:
    """Measure operations per second of fused causal attention. `backward`: work as a multiple of forward's."""
    batch, heads, tokens, width = ATTENTION
    q, k, v = (torch.randn(batch, heads, tokens, width, device=device, requires_grad=True) for _ in range(3))

    def run() -> None:
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        finish(device)

    return rate(run, (1 + backward) * 2.0 * batch * heads * tokens * tokens * width)


def memory_rate(device: torch.device, backward: float) -> Rate:
    """Measure bytes per second that a copy reads and writes; on a CPU, of elementwise operations.

    `backward`: bytes of their backward as a multiple of forward's.
    """
    if device.type == "cpu":
        return elementwise_rate(backward)
    source = torch.zeros(COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)
        finish(device)

    return rate(run, 2.0 * COPIED[device.type])


def host_memory_rate() -> Rate:
    """Measure bytes per second that this rank's threads read and write when copying host memory.

    A step on the host may be faster: a copy writes half of its bytes, of which a CPU reads the lines first.
    """
    source = torch.zeros(HOST_COPIED // 4)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2.0 * HOST_COPIED)


def host_step_rate() -> Rate:
    """Measure bytes per second of an optimizer's step on the host, as offloaded shards take it."""
    from sparkring.training.loop.optim.build import (
        build_optimizer,  # imports DTensor, which a driver that plans does not need
    )

    shard = nn.Parameter(torch.zeros(HOST_COPIED // 4))
    optimizer = build_optimizer([("shard", shard)], OptimConfig(name="adamw"))
    shard.grad = torch.ones_like(shard)
    return rate(optimizer.step, float(STEP_BYTES * shard.numel()))


def host_copy_rates(device: torch.device) -> dict[str, Rate]:
    """Measure bytes per second between pinned host memory and device, by direction; on a CPU within memory."""
    on_host = torch.zeros(HOST_COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(HOST_COPIED, dtype=torch.uint8, device=device)

    def measured(target: torch.Tensor, source: torch.Tensor) -> Rate:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            finish(device)

        return rate(run, float(HOST_COPIED))

    return {"to device": measured(there, on_host), "to host": measured(on_host, there)}


def elementwise_rate(backward: float) -> Rate:
    """Measure bytes per second of sums, activations and softmaxes, forward and backward.

    A pass keeps their outputs, so that these are new pages of memory, which the system clears first.
    """
    inputs = [torch.randn(ROWS, ROWS) for _ in range(rotating(torch.device("cpu"), 4 * ROWS * ROWS))]
    bias = torch.zeros(ROWS, requires_grad=True)

    def run() -> None:
        kept = [functional.log_softmax(functional.silu(x + bias), -1) for x in inputs]
        torch.autograd.backward([each.sum() for each in kept])

    return rate(run, (1 + backward) * (2 + 2 + 2) * 4.0 * ROWS * ROWS * len(inputs))


def operator_seconds(device: torch.device, model_starts: float) -> float:
    """Measure seconds between small operations; on a CPU those of a model, with autograd's overhead.

    `model_starts`: operations of `small_model`, forward and backward.
    """
    x = torch.zeros(SMALL, device=device)

    def run() -> None:
        for _ in range(100):
            x.add_(1.0)
        finish(device)

    if device.type == "cpu":
        model, inputs = small_model()
        return 1 / rate(lambda: model(*inputs).sum().backward(), model_starts).per_s
    return 1 / rate(run, 100).per_s


def small_model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Make a model that is all overhead, and its input."""
    return GPT(vocab=16, width=16, layers=2, heads=2), (torch.zeros(1, SMALL, dtype=torch.int64),)


def storage_rates(folder: Storage) -> tuple[float, float]:
    """Measure bytes per second (read, written) with a file of random bytes, deleted afterwards."""
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
    """Measure the rows per second a reader delivers to one rank, without using them.

    Args:
        dataset: folder of the dataset.
        split: name of the training split.
        columns: columns to read.
        config: settings of the reader.
        batch: rows per step of all ranks together.
        rank: this rank among all ranks.
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
    """Return name, memory in bytes, processors of a rank's device, and the machine's cores and memory."""
    if device.type == "cuda":
        seen = torch.cuda.get_device_properties(device)
        name, memory, processors = seen.name, float(seen.total_memory), seen.multi_processor_count
    else:
        name, memory, processors = processor_name(), usable_memory() / local_size, torch.get_num_threads()
    return {
        "name": name,
        "memory_bytes": memory,
        "processors": processors,
        "cores": usable_cores(),
        "host_bytes": usable_memory(),
    }


def processor_name(path: Path = Path("/proc/cpuinfo")) -> str:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
