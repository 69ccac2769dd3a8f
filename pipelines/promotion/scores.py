"""Resample held-out metrics of several models on the same rows. Pure numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkring.conf.tasks import TaskKind
from sparkring.training.metrics import Rows, weighing

Array = NDArray[Any]
RESAMPLES, SEED = 1000, 0


def resampled(
    kind: TaskKind,
    metric: str,
    labels: Array,
    models: tuple[Array, ...],
    resamples: int = RESAMPLES,
    weights: Array | None = None,
) -> Array:
    """Compute the metric of each model on paired resamples of the rows, (resamples, models).

    Every resample draws N of the N rows with replacement (Efron 1979), the same for all models; always the same ones
    for N rows. NaN where a resample has no such metric.

    Args:
        kind: kind of the task.
        metric: name of the metric.
        labels: (rows,), or (rows, labels).
        models: scores of each model, as `task_scores` takes them.
        resamples: number of resamples.
        weights: weight of each row, (rows,); None for equal weights.
    """
    of_weights = [weighing(kind.metric(metric), Rows(kind.form, labels, scores)) for scores in models]
    random, rows = np.random.default_rng(SEED), len(labels)
    made = np.empty((resamples, len(models)))
    for number in range(resamples):
        times = np.bincount(random.integers(0, rows, rows), minlength=rows)
        made[number] = [of(times if weights is None else times * weights) for of in of_weights]
    return made
