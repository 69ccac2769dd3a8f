"""Measure what an exchange between ranks on CPUs costs a step: in turns with products, as a pass has them.

Gloo's collectives alone are faster than in training, where ranks do not arrive at the same moment, threads are woken,
and buffers are not in caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sparkring.training.parallel.measure import ring_share

WIDTH = 384  # of the product between two exchanges
SMALL, LARGE = 1 << 10, 4 << 20  # bytes of the tensors
FEW, MANY = 12, 40  # repetitions of large and small exchanges


@dataclass(frozen=True)
class ExchangeCost:
    """latency_s: of a collective. bytes_per_s: that a rank sends. busy: share of the time that its core works."""

    latency_s: float
    bytes_per_s: float
    busy: float


def exchange_cost(group: dist.ProcessGroup) -> ExchangeCost:
    """Measure the group's collectives. Collective."""
    a, out = torch.randn(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)

    def spent(exchange: Callable[[], object], times: int) -> tuple[float, float]:
        """Measure mean wall and CPU seconds of an exchange, without the product before it."""
        wall, busy = [], []
        for _ in range(times + 2):
            torch.mm(a, a, out=out)
            began, worked = time.perf_counter(), time.process_time()
            exchange()
            wall.append(time.perf_counter() - began)
            busy.append(time.process_time() - worked)
        return steady_mean(wall[2:]), steady_mean(busy[2:])

    small = torch.zeros(SMALL // 4)
    small_s, _ = spent(lambda: dist.all_reduce(small, group=group), MANY)
    sent, large_s, busy_s = 0.0, 0.0, 0.0
    for exchange, size in _large_exchanges(group):
        wall, busy = spent(exchange, FEW)
        sent, large_s, busy_s = sent + size, large_s + wall, busy_s + busy
    per_byte = max(1e-12, (large_s - 3 * small_s) / sent)
    return ExchangeCost(small_s, 1 / per_byte, min(1.0, busy_s / large_s))


def _large_exchanges(group: dist.ProcessGroup) -> list[tuple[Callable[[], object], float]]:
    """List (collective, bytes that a rank sends in it)."""
    ranks = group.size()
    numel = LARGE // 4 // ranks * ranks
    whole, other, part = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel // ranks)
    sent = ring_share(ranks) * numel * 4
    return [
        (lambda: dist.all_reduce(whole, group=group), 2 * sent),
        (lambda: dist.all_to_all_single(other, whole, group=group), sent),
        (lambda: dist.all_gather_into_tensor(other, part, group=group), sent),
    ]


def steady_mean(seconds: list[float]) -> float:
    """Average without the slowest tenth."""
    return statistics.fmean(sorted(seconds)[: -max(1, len(seconds) // 10)])
