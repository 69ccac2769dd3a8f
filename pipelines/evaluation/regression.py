"""Scores of predicted values, over all held-out rows."""

from __future__ import annotations

import numpy as np

from sparkring.pipelines.evaluation.binary import weighed

Array = np.ndarray


def regression_scores(labels: Array, predictions: Array, weights: Array | None = None) -> dict[str, float]:
    """Mean squared error (`loss`), its root, mean absolute error in the label's unit, and R2.

    labels, predictions (N,); weights (N,): how much a row counts, at least 0, None: all alike. Without R2 where all
    labels are equal. ValueError for values that are not finite.
    """
    labels, predictions = np.asarray(labels, dtype=np.float64), np.asarray(predictions, dtype=np.float64)
    if labels.shape != predictions.shape or labels.ndim != 1 or not len(labels):
        raise ValueError(f"labels {labels.shape} and predictions {predictions.shape}: must be equally many, at least 1")
    if bad := int(np.count_nonzero(~np.isfinite(labels) | ~np.isfinite(predictions))):
        raise ValueError(f"{bad} of {len(labels)} labels or predictions are not finite")
    labels, predictions, weights = weighed(labels, predictions, weights)
    errors = predictions - labels
    squared = float(np.average(np.square(errors), weights=weights))
    scores = {"loss": squared, "rmse": squared**0.5, "abs_error": float(np.average(np.abs(errors), weights=weights))}
    variance = float(np.average(np.square(labels - np.average(labels, weights=weights)), weights=weights))
    return scores | ({"r2": 1 - squared / variance} if labels.min() < labels.max() else {})
