"""Seconds of a device's operations: a roofline (https://doi.org/10.1145/1498765.1498785) whose roof depends on shapes.

A matrix product m x k by k x n is computed in tiles of t x u outputs, as many at once as the device has processors, so
its time is that of whole waves of tiles (https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication);
a tile's loop over k has a beginning and an end, which cost as much as `reached.depth` of k; small tiles load more than
they compute. The library takes the best tile. No operation is faster than its bytes through the memory.

`depth` and `attention` are of one dtype (`Device.reached_flops`). What they stand for besides products takes as long in
any other: a loop begins and ends by waiting for memory, and the exponentials of attention's softmax are computed in
fp32 by units of their own (https://arxiv.org/abs/2407.08608, section 3.2). So only products follow the dtype's peak.

A device waits for the host where starting the operations takes longer than they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkring.conf.clusters.cluster import MICRO, Cluster
from sparkring.training.planner.timing.operations import Operation

Array = NDArray[Any]
TILES = ((256, 128, 1.0), (128, 128, 0.94))  # outputs, and share of the best tile's rate
CPU_TILES = ((16, 16, 1.0),)  # a core's kernels lose little to shapes
BACKWARD_MEMORY, BACKWARD_ATTENTION = 1.5, 2.5  # times forward's; operations.py says why


class RankShare(NamedTuple):
    """What one rank computes of a pass: rows of it, and ranks that share each row."""

    rows: int
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False


class PassWork(NamedTuple):
    """Seconds of one rank's forward and backward on its device, and operations that its host starts in each."""

    forward: float = 0.0
    backward: float = 0.0
    forward_starts: float = 0.0
    backward_starts: float = 0.0


@dataclass(frozen=True)
class Roofline:
    """The seconds of operations on one device of a cluster, in one dtype of compute."""

    cluster: Cluster
    precision: str

    @property
    def element(self) -> int:
        return 4 if self.precision == "fp32" else 2

    def pass_work(self, table: OperationTable, cut: RankShare) -> PassWork:
        """Compute forward and backward of a pass through these operations."""
        if not len(table.count):
            return PassWork()
        batch, m, k, n, elements = table.shapes(cut)
        attention, memory = self._attention(batch, m, k, n), self.memory_s(elements)
        once = self._products(batch, m, k, n, elements)
        twice = self._products(batch, m, n, k, elements) + self._products(batch, k, m, n, elements)
        forward = np.where(table.is_product, once, np.where(table.is_attention, attention, memory))
        others = np.where(table.is_attention, BACKWARD_ATTENTION * attention, BACKWARD_MEMORY * memory)
        backward = np.where(table.is_product, twice, others)
        fixed = self.cluster.reached.kernel_us * MICRO
        return PassWork(
            float(table.count @ (forward + fixed)),
            float(table.count @ (backward * table.has_backward + table.backward_starts * fixed)),
            float(table.count.sum()),
            float(table.count @ table.backward_starts),
        )

    def moved_between(self, table: OperationTable, cut: RankShare) -> float:
        """Return bytes per pass that norms, sums and the loss move, which tensor ranks do not cut by heads."""
        elements = table.shapes(cut)[-1]
        counted = ~(table.is_product | table.is_attention | table.is_inner)
        return float(table.count @ (elements * counted)) * (1 + BACKWARD_MEMORY) * self.element

    def memory_s(self, elements: Any) -> Any:
        """Return seconds to move elements of the dtype of compute."""
        return elements * self.element / (self.cluster.device.memory_bytes_per_s * self.cluster.reached.memory)

    def _products(self, batch: Array, m: Array, k: Array, n: Array, elements: Array) -> Array:
        """Return seconds of products m x k by k x n.

        Args:
            batch: products of that shape.
            m: number of rows.
            k: length of the products.
            n: number of columns.
            elements: elements of activations read and written.
        """
        device, reached = self.cluster.device, self.cluster.reached
        peak = device.peak_flops(self.precision)
        rate = peak * reached.matmul / device.processors  # of one processor
        depth = reached.depth * peak / device.reached_flops
        times = []
        for rows, columns, share in CPU_TILES if device.type == "cpu" else TILES:
            tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
            waves = np.ceil(tiles / device.processors)
            times.append(waves * 2.0 * rows * columns * (k + depth) / (rate * share))
        moved = np.minimum(elements, batch * (m * k + m * n)) + batch * k * n
        return np.maximum(np.min(times, axis=0), self.memory_s(moved))

    def _attention(self, batch: Array, m: Array, k: Array, n: Array) -> Array:
        device, reached = self.cluster.device, self.cluster.reached
        share = max(reached.matmul, reached.attention)
        slower = 1 / device.peak_flops(self.precision) - 1 / device.reached_flops  # of one operation of a product
        return 2.0 * batch * m * k * n * (1 / (device.reached_flops * reached.attention) + slower / share)


class OperationTable:
    """Operations as columns, equal ones once."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        counts = Counter(operations)
        self.operations = list(counts)
        self.count = np.array(list(counts.values()), dtype=float)
        kinds, places = [op.kind for op in self.operations], [op.place for op in self.operations]
        self.is_matmul, self.is_attention = (_are(kinds, each) for each in ("matmul", "attention"))
        self.is_product = self.is_matmul | _are(kinds, "product")
        self.is_column, self.is_row, self.is_inner = (_are(places, each) for each in ("column", "row", "inner"))
        self.per_row = np.array([op.per_row for op in self.operations], dtype=bool)
        self.has_backward = np.array([op.has_backward for op in self.operations], dtype=bool)
        self.backward_starts = np.where(self.is_product, 2.0, 1.0) * self.has_backward
        self.sizes = np.array([op[2:7] for op in self.operations], dtype=float).reshape(-1, 5)

    @property
    def starts(self) -> float:
        """Operations of forward and backward."""
        return float(self.count @ (1 + self.backward_starts))

    def shapes(self, cut: RankShare) -> tuple[Array, Array, Array, Array, Array]:
        """Return (batch, m, k, n, elements) of each operation on one rank."""
        batch, m, k, n, elements = self.sizes.T
        # of tokens; whole sequences of fewer heads are as many
        share = np.where(self.per_row, cut.rows / cut.cp, 1.0)
        is_cut = self.is_column | self.is_inner
        if cut.sequence_parallel:
            is_cut = is_cut | ~self.is_row
        part = np.where(is_cut, 1 / cut.tp, 1.0)
        return (
            np.where(self.is_matmul, batch, batch * share * np.where(self.is_inner, 1 / cut.tp, 1.0)),
            np.where(self.is_matmul, m * share, m),
            np.where(self.is_matmul & self.is_row, k / cut.tp, k),
            np.where(self.is_matmul & self.is_column, n / cut.tp, n),
            elements * share * np.where(self.is_matmul, 1.0, part),
        )


def _are(names: list[str], name: str) -> Array:
    return np.array([each == name for each in names], dtype=bool)
