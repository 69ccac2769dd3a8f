"""Scores of predicted values, over all held-out rows."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def regression_scores(labels: Array, predictions: Array) -> dict[str, float]:
    """Mean squared error (`loss`), its root, mean absolute error in the label's unit, and R2.

    labels, predictions (N,). Without R2 where all labels are equal. ValueError for values that are not finite.
    """
    labels, predictions = np.asarray(labels, dtype=np.float64), np.asarray(predictions, dtype=np.float64)
    if labels.shape != predictions.shape or labels.ndim != 1 or not len(labels):
        raise ValueError(f"labels {labels.shape} and predictions {predictions.shape}: must be equally many, at least 1")
    if bad := int(np.count_nonzero(~np.isfinite(labels) | ~np.isfinite(predictions))):
        raise ValueError(f"{bad} of {len(labels)} labels or predictions are not finite")
    errors = predictions - labels
    squared = float(np.mean(np.square(errors)))
    scores = {"loss": squared, "rmse": squared**0.5, "abs_error": float(np.mean(np.abs(errors)))}
    variance = float(np.var(labels))
    return scores | ({"r2": 1 - squared / variance} if labels.min() < labels.max() else {})
