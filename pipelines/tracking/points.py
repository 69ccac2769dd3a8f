"""Which points of metrics MLflow gets, and under which names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

PLUMBING = {"perf", "data", "launch", "time", "cost"}  # first words of metrics


def shown_name(metric: str) -> str:
    """Return the metric's name in MLflow; what is not about the model is a system metric, on a separate tab."""
    return f"system/{metric}" if metric.partition("/")[0] in PLUMBING else metric


def split_finite(values: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Split off the values that are NaN or infinite, by name: MLflow stores inf as 1.8e308."""
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    return finite, sorted(values.keys() - finite.keys())


def new_points(
    points: Iterable[tuple[str, float, int, int]], last: dict[str, int]
) -> list[tuple[str, float, int, int]]:
    """Return points (name, value, step, time in ms) beyond the last step of their name; update `last`.

    After a resume the steps since the checkpoint come a second time: they are the same numbers, logged already.
    """
    fresh = []
    for point in points:
        name, _, step, _ = point
        if step > last.get(name, -1):
            last[name] = step
            fresh.append(point)
    return fresh
