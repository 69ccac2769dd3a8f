"""Exact scores of held-out predictions, over all their rows. By scikit-learn where it has them.

labels (N,) of 0 and 1, scores (N,) probabilities of 1, in any order. Equal scores are one threshold, so no result
depends on the order of rows. Other labels, and scores that are not finite, are a ValueError. weights (N,): how much a
row counts, at least 0; None: all alike.

scikit-learn is imported where it is used, after training: its import takes seconds, and sets KMP_* variables of the
process, which ranks would inherit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

Array = np.ndarray
CLIP = 1e-15  # of probabilities in the log loss, as in Spark's


@dataclass(frozen=True)
class ThresholdCurves:
    """ROC and precision-recall curves over the distinct scores, from the highest down, and their areas."""

    false_positive_rate: Array  # (T + 1,), from 0 to 1
    true_positive_rate: Array  # (T + 1,)
    recall: Array  # (T,), rising
    precision: Array  # (T,)
    auc: float
    average_precision: float
    positive_share: float


def threshold_curves(labels: Array, scores: Array, weights: Array | None = None) -> ThresholdCurves | None:
    """The curves; None where only one class occurs."""
    from sklearn import metrics as sklearn

    labels, scores, weights = _checked(labels, scores, weights)
    if labels.min() == labels.max():
        return None
    false_positive_rate, true_positive_rate, _ = sklearn.roc_curve(
        labels, scores, sample_weight=weights, drop_intermediate=False
    )
    precision, recall, _ = sklearn.precision_recall_curve(
        labels, scores, sample_weight=weights
    )  # recall falls, to a last point at 0
    return ThresholdCurves(
        false_positive_rate,
        true_positive_rate,
        recall[-2::-1],
        precision[-2::-1],
        auc=float(sklearn.roc_auc_score(labels, scores, sample_weight=weights)),
        average_precision=float(sklearn.average_precision_score(labels, scores, sample_weight=weights)),
        positive_share=float(np.average(labels, weights=weights)),
    )


def binary_scores(labels: Array, scores: Array, weights: Array | None = None) -> dict[str, float]:
    """Every score of the report's table; where only one class occurs, without AUC and average precision."""
    from sklearn import metrics as sklearn

    labels, scores, weights = _checked(labels, scores, weights)
    by = {"sample_weight": weights}
    result = {
        "loss": float(sklearn.log_loss(labels, np.clip(scores, CLIP, 1 - CLIP), labels=[0, 1], **by)),  # nats
        "brier": float(sklearn.brier_score_loss(labels, scores, labels=[0, 1], **by)),
        "accuracy": float(sklearn.accuracy_score(labels > 0.5, scores > 0.5, **by)),
        "f1": float(sklearn.f1_score(labels > 0.5, scores > 0.5, zero_division=0.0, **by)),
        "calibration_error": calibration_error(calibration(labels, scores, weights=weights)),
    }
    curves = threshold_curves(labels, scores, weights)
    return result if curves is None else result | {"auc": curves.auc, "average_precision": curves.average_precision}


@dataclass(frozen=True)
class Bin:
    """Rows whose score is in one slice of equal counts."""

    rows: int
    predicted: float  # mean score
    observed: float  # positive share
    weight: float  # of its rows together


def calibration(labels: Array, scores: Array, bins: int = 15, weights: Array | None = None) -> list[Bin]:
    """At most `bins` slices of about equally many rows, by rising score; rows of one score are never parted.

    Ours: sklearn.calibration_curve interpolates its quantiles, gives no counts, and knows no error over the slices.
    """
    labels, scores, weights = _checked(labels, scores, weights)
    order = np.argsort(scores, kind="stable")
    scores, labels = scores[order], labels[order]
    weights = np.ones(len(labels)) if weights is None else weights[order]
    # starts: (slices,) row of the first of the scores equal to the one at each quantile
    starts = np.unique(np.searchsorted(scores, scores[(np.arange(bins) * len(scores)) // bins], side="left"))
    rows = np.diff(np.append(starts, len(scores)))
    weight = np.add.reduceat(weights, starts)
    predicted = np.add.reduceat(scores * weights, starts) / weight
    observed = np.add.reduceat(labels * weights, starts) / weight
    return [Bin(int(n), *map(float, found)) for n, *found in zip(rows, predicted, observed, weight, strict=True)]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Mean distance of predicted from observed share, by the rows' weight (ECE, Naeini 2015, equal-count bins)."""
    weight = sum(b.weight for b in bins)
    return sum(b.weight * abs(b.predicted - b.observed) for b in bins) / weight


@dataclass(frozen=True)
class Group:
    """Rows of one value of a column."""

    value: str
    rows: int
    observed: float
    predicted: float


def share_by(values: Sequence[Any] | Array, labels: Array, scores: Array) -> list[Group]:
    """Positive share and mean prediction per value, numbers in their order and texts in theirs; None is `null`."""
    labels, scores, _ = _checked(labels, scores, None)
    if len(values) != len(labels):
        raise ValueError(f"{len(values)} values for {len(labels)} rows")
    # codes: (N,) index into the distinct values, several of which may have one name (None and NaN)
    codes, distinct = pd.factorize(np.asarray(values, dtype=object), use_na_sentinel=False)
    names, name_of = np.unique([_name(value) for value in distinct], return_inverse=True)
    which = name_of[codes]
    rows = np.bincount(which)
    observed, predicted = np.bincount(which, labels) / rows, np.bincount(which, scores) / rows
    groups = [Group(str(names[i]), int(rows[i]), float(observed[i]), float(predicted[i])) for i in range(len(names))]
    return sorted(groups, key=lambda group: _order(group.value))


def _name(value: Any) -> str:
    if value is None or value != value:
        return "null"
    return str(int(value)) if isinstance(value, float | np.floating) and float(value).is_integer() else str(value)


def _order(name: str) -> tuple[int, float, str]:
    try:
        return 0, float(name), name
    except ValueError:
        return (2 if name == "null" else 1), 0.0, name


def weighed(labels: Array, scores: Array, weights: Array | None) -> tuple[Array, Array, Array | None]:
    """The rows that count for something, and their weights; ValueError where none does."""
    if weights is None:
        return labels, scores, None
    counts = weights > 0
    if weights.shape != labels.shape[:1] or not counts.any():
        raise ValueError(f"weights {weights.shape} of {len(labels)} rows: there must be as many, and one above 0")
    return labels[counts], scores[counts], weights[counts]


def _checked(labels: Array, scores: Array, weights: Array | None) -> tuple[Array, Array, Array | None]:
    labels, scores = np.asarray(labels, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if labels.shape != scores.shape or labels.ndim != 1 or not len(labels):
        raise ValueError(f"labels {labels.shape} and scores {scores.shape} must be equally many rows, at least one")
    if not np.isin(labels, (0.0, 1.0)).all():
        raise ValueError("labels other than 0 and 1: these metrics are for two classes")
    if not np.isfinite(scores).all():
        raise ValueError(f"{int((~np.isfinite(scores)).sum())} of {len(scores)} scores are not finite")
    return weighed(labels, scores, weights)
