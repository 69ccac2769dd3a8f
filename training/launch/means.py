"""Means over all ranks, made by the driver of the parts that each reports, so that no rank waits for another."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from functools import reduce

from sparkring.training.launch.messages import RankMetrics


class MeanMerger:
    """Holds rank 0's metrics of a step until every rank's parts of their means have come."""

    def __init__(self, world: int):
        self._world = world
        self._open: dict[int, dict[int, RankMetrics]] = {}  # step -> rank -> its report
        self._merged = -math.inf  # last step that was complete

    def add(self, metrics: RankMetrics) -> list[RankMetrics]:
        """Return what can be shown now; rank 0's with the means among its values. Steps come in order from a rank."""
        if not metrics.means:
            return [metrics]
        shown = [metrics] if metrics.rank != 0 else []
        if metrics.step <= self._merged:  # a replaced rank repeats it
            return shown
        reports = self._open.setdefault(metrics.step, {})
        reports[metrics.rank] = metrics
        if len(reports) < self._world:
            return shown
        self._merged = metrics.step
        del self._open[metrics.step]
        return [*shown, merged([reports[rank] for rank in range(self._world)])]


def merged(reports: list[RankMetrics]) -> RankMetrics:
    """Make rank 0's metrics, with the means. `reports`: of all ranks at one step, added up in rank order.

    Not by `sum`, which rounds in another way from Python 3.12 on.
    """
    first, values = reports[0], dict[str, float]()
    for name in first.means:
        parts = [report.means[name] for report in reports if name in report.means]
        count = sum(part.count for part in parts)
        values[name] = reduce(operator.add, (part.total for part in parts)) / count if count else math.nan
    return replace(first, values=values | first.values, means={})
