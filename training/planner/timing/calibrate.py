"""Fit what a cluster reaches of its hardware to measured steps.

Least squares of log(predicted / measured), with a loss that grows linearly for outliers, and a weak pull to the values
that the cluster has: a parameter that the rows say nothing about stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparkring.conf.clusters.cluster import Cluster
from sparkring.conf.plain_text import count_of
from sparkring.training.planner.timing.step_time import StepCounts, step_time

Array = NDArray[Any]
# What is physically possible; between them the fit is free
BOUNDS: dict[str, tuple[float, float]] = {
    "matmul": (0.2, 0.95),
    "attention": (0.1, 0.9),
    "memory": (0.4, 0.95),
    "link": (0.2, 0.95),
    "network": (0.2, 0.95),
    "contention": (0.0, 0.9),
    "kernel_us": (0.0, 12.0),
    "launch_us": (1.0, 150.0),
    "depth": (0.0, 1000.0),
}
CPU_BOUNDS = {"kernel_us": (0.0, 200.0)}  # with what autograd and Python add to an operation
OUTLIER = 0.03  # |log(predicted / measured)| from which the loss grows linearly
FAR = 0.3  # median |log(predicted / measured)| before, from which a fit without that loss comes first
UNEXPLAINED = 0.3  # the same after it, from which the steps are none of this hardware's
PULL = 0.1  # to the values before, against the rows' errors
MOST = 0.9  # share of the steps that a cluster's `error` holds for
MOST_ROWS, MOST_ROUNDS = 400, 25  # rows of a fit, drawn evenly


class TimedStep(Protocol):
    """What a fit looks at of a measured step, whatever model it trains."""

    @property
    def dp(self) -> int: ...
    @property
    def devices(self) -> int: ...
    @property
    def step_s(self) -> float: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True)
class FitErrors:
    """How far predictions are from measurements."""

    rows: int
    mean: float  # of |predicted / measured - 1|
    worst: float
    rank: float  # correlation of the ranks of predicted and measured samples per device and second

    def __str__(self) -> str:
        return f"mean error {self.mean:.1%}, worst {self.worst:.0%}, rank correlation {self.rank:.2f}"


def fitted(
    cluster: Cluster,
    counts: Sequence[StepCounts],
    steps: Sequence[TimedStep],
    data: str,
    fixed: Sequence[str] = (),
) -> Cluster:
    """Return the cluster with the parameters that the rows determine.

    ValueError for too few rows, or times impossible on this hardware.

    Args:
        cluster: cluster with the initial parameters.
        counts: work of each step.
        steps: steps as measured.
        data: name of the rows, for the cluster's file.
        fixed: names of parameters to keep.
    """
    from scipy.optimize import least_squares  # takes a second, which other commands do not spend

    if not steps:
        raise ValueError("no measured steps: the file needs a header and a row per step")
    names = [name for name in determined(cluster, steps) if name not in fixed]
    reached = cluster.reached
    if len(steps) < 2 * len(names):
        raise ValueError(
            f"{count_of(len(steps), 'measured step')} cannot determine {count_of(len(names), 'parameter')} "
            f"({', '.join(names)}): measure at least {2 * len(names)}, of different models, batches and layouts"
        )
    bounds = BOUNDS | (CPU_BOUNDS if cluster.device.type == "cpu" else {})
    low, high = (np.array([bounds[name][end] for name in names]) for end in (0, 1))
    before = np.clip([(getattr(reached, name)) for name in names], low, high)
    start = np.clip((before - low) / (high - low), 0.01, 0.99)
    every = max(1, len(steps) // MOST_ROWS)
    some, seconds = list(counts)[::every], np.array([step.step_s for step in steps])[::every]

    def with_values(values: Array) -> Cluster:
        found = dict(zip(names, (low + values * (high - low)).round(4).tolist(), strict=True))
        return cluster.model_copy(update={"reached": reached.model_copy(update=found)})

    def residuals(values: Array) -> Array:
        errors = np.log(predicted(some, with_values(values)) / seconds)
        return np.concatenate([errors, PULL * np.sqrt(len(seconds)) * (values - start)])

    near = start
    if np.median(np.abs(residuals(start)[: len(seconds)])) > FAR:  # the loss of outliers is too flat to lead from there
        near = least_squares(residuals, start, bounds=(0, 1), diff_step=1e-2, max_nfev=MOST_ROUNDS).x
    found = least_squares(
        residuals, near, bounds=(0, 1), loss="soft_l1", f_scale=OUTLIER, diff_step=1e-2, max_nfev=MOST_ROUNDS
    )
    errors = residuals(found.x)[: len(seconds)]
    _check_explained(np.median(errors), cluster)
    found_on = {
        "fitted_on": f"{count_of(len(steps), 'step')} of {data}",
        "error": most_errors(np.expm1(np.abs(errors))),
    }
    return with_values(found.x).model_copy(update=found_on)


def most_errors(errors: Array) -> float:
    """Return the bound of nine of ten errors, in whole percents."""
    return min(1.0, math.ceil(100 * float(np.quantile(np.abs(errors), MOST))) / 100)


def _check_explained(error: float, cluster: Cluster) -> None:
    """Raise ValueError if no share of the hardware explains `error`, the median log(predicted / measured)."""
    if abs(error) > UNEXPLAINED:
        raise ValueError(
            f"fitted, {cluster.device.name} takes {np.exp(error):,.3g} times the seconds measured, in the median: "
            "these are steps of other machines, or step_s is not in seconds; name their cluster with --cluster"
        )


def determined(cluster: Cluster, steps: Sequence[TimedStep]) -> list[str]:
    """List the parameters that such rows determine."""
    names = ["matmul", "memory", "kernel_us", "launch_us", "depth", "attention"]
    if any(step.devices > 1 for step in steps):
        names.append("link")
    if any(step.devices > cluster.node.devices for step in steps):
        names.append("network")
    if any(step.dp > 1 for step in steps):
        names.append("contention")
    return names


def predicted(counts: Sequence[StepCounts], cluster: Cluster) -> Array:
    """Return seconds of each step."""
    return np.array([step_time(each, cluster).total for each in counts])


def fit_errors(seconds: Array, steps: Sequence[TimedStep]) -> FitErrors:
    """Return errors of predicted seconds (steps,), and rank correlation of rates per device."""
    measured = np.array([step.step_s for step in steps])
    work = np.array([step.global_batch * step.tokens / step.devices for step in steps])
    errors = np.abs(seconds / measured - 1)
    return FitErrors(
        len(steps), float(errors.mean()), float(errors.max()), rank_correlation(work / seconds, work / measured)
    )


def rank_correlation(first: Array, second: Array) -> float:
    """Compute Spearman's rank correlation; 1 for fewer than two values."""
    if len(first) < 2:
        return 1.0
    ranks = np.stack([np.argsort(np.argsort(values)).astype(float) for values in (first, second)])
    return float(np.corrcoef(ranks)[0, 1])
