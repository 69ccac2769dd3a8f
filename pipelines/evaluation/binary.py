"""Curves over thresholds and shares by value, of held-out predictions of 0 and 1.

labels (N,) of 0 and 1, scores (N,) probabilities of 1, in any order. Equal scores are one threshold, so no result
depends on the order of rows. Other labels, and scores that are not finite, are a ValueError. weights (N,): how much a
row counts, at least 0; None: all equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import LabelForm
from sparkring.training.metrics import checked_rows

Array = np.ndarray


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
    """Compute the curves; None if only one class occurs."""
    rows, weights = checked_rows(LabelForm.FLAG, labels, scores, weights)
    counts = np.ones(len(rows.labels), np.int64) if weights is None else weights
    positive, negative = (step[::-1] for step in rows.by_score.steps(counts))
    hits, false_alarms = np.cumsum(positive), np.cumsum(negative)
    if not hits[-1] or not false_alarms[-1]:
        return None
    return ThresholdCurves(
        np.append(0.0, false_alarms / false_alarms[-1]),
        np.append(0.0, hits / hits[-1]),
        hits / hits[-1],
        hits / (hits + false_alarms),
        auc=rows.by_score.auc(counts),
        average_precision=rows.by_score.average_precision(counts),
        positive_share=float(hits[-1] / (hits[-1] + false_alarms[-1])),
    )


@dataclass(frozen=True)
class Flagged:
    """The rows with the highest scores: those of at least `threshold`."""

    threshold: float
    share: float  # of all rows that are flagged
    precision: float
    recall: float
    lift: float  # precision over the share of positive rows


def flagged_at(
    labels: Array, scores: Array, thresholds: Sequence[float], weights: Array | None = None
) -> list[Flagged]:
    """Describe what each threshold that flags a row flags; [] if only one class occurs."""
    rows, weights = checked_rows(LabelForm.FLAG, labels, scores, weights)
    w = np.ones(len(rows.labels)) if weights is None else weights
    positives, total = w @ rows.labels, w.sum()
    if not 0 < positives < total:
        return []
    found = []
    for threshold in thresholds:
        flagged = rows.scores >= threshold
        size, hits = w @ flagged, (w * flagged) @ rows.labels
        if size:
            values = (size / total, hits / size, hits / positives, hits / size * total / positives)
            found.append(Flagged(float(threshold), *map(float, values)))
    return found


def top_threshold(scores: Array, k: int) -> float:
    """Return the lowest score among the k rows with the highest."""
    return float(np.partition(scores, -k)[-k])


@dataclass(frozen=True)
class Group:
    """Rows of one value of a column."""

    value: str
    rows: int
    observed: float
    predicted: float


def share_by(values: Sequence[Any] | Array, labels: Array, scores: Array) -> list[Group]:
    """Compute positive share and mean prediction per value, in order of values; None is `null`."""
    checked, _ = checked_rows(LabelForm.FLAG, labels, scores, None)
    labels, scores = checked.labels, checked.scores
    if len(values) != len(labels):
        raise ValueError(f"{count_of(len(values), 'value')} for {count_of(len(labels), 'row')}")
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
