"""The scores of pipelines/evaluation/binary.py written out in numpy, without scikit-learn: their oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkring.pipelines.evaluation.binary import CLIP, Bin, Group, calibration_error

Array = np.ndarray


@dataclass(frozen=True)
class Confusion:
    """Cumulative counts at each distinct score, from the highest down: predicted positive are all rows at or above."""

    thresholds: Array  # (T,) falling
    true_positives: Array  # (T,)
    false_positives: Array  # (T,)

    @property
    def positives(self) -> int:
        return int(self.true_positives[-1])

    @property
    def negatives(self) -> int:
        return int(self.false_positives[-1])


def confusion(labels: Array, scores: Array) -> Confusion:
    """Raises ValueError for no rows, other labels than 0 and 1, or scores that are not finite."""
    labels, scores = _checked(labels, scores)
    order = np.argsort(-scores, kind="stable")
    scores, labels = scores[order], labels[order]
    last_of_equals = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    hits = np.cumsum(labels, dtype=np.int64)[last_of_equals]
    return Confusion(scores[last_of_equals], hits, last_of_equals + 1 - hits)


def roc_curve(counts: Confusion) -> tuple[Array, Array]:
    """(false positive rate, true positive rate), each (T + 1,), from (0, 0) to (1, 1). ValueError with one class."""
    if not counts.positives or not counts.negatives:
        raise ValueError("the ROC curve needs rows of both classes")
    fpr = np.concatenate([[0.0], counts.false_positives / counts.negatives])
    return fpr, np.concatenate([[0.0], counts.true_positives / counts.positives])


def roc_auc(counts: Confusion) -> float:
    """Chance that a positive row scores above a negative one, equals counting half."""
    fpr, tpr = roc_curve(counts)
    return float(np.sum(np.diff(fpr) * (tpr[1:] + tpr[:-1]) / 2))


def precision_recall(counts: Confusion) -> tuple[Array, Array]:
    """(precision, recall), each (T,), thresholds falling so recall rising. ValueError without positives."""
    if not counts.positives:
        raise ValueError("precision and recall need at least one positive row")
    precision = counts.true_positives / (counts.true_positives + counts.false_positives)
    return precision, counts.true_positives / counts.positives


def average_precision(counts: Confusion) -> float:
    """Area under the precision-recall steps, without interpolation (Davis and Goadrich 2006 on why not to)."""
    precision, recall = precision_recall(counts)
    return float(np.sum(np.diff(np.concatenate([[0.0], recall])) * precision))


def log_loss(labels: Array, scores: Array) -> float:
    """Mean negative log likelihood in nats."""
    labels, scores = _checked(labels, scores)
    p = np.clip(scores, CLIP, 1 - CLIP)
    return float(-np.mean(np.where(labels, np.log(p), np.log1p(-p))))


def brier(labels: Array, scores: Array) -> float:
    labels, scores = _checked(labels, scores)
    return float(np.mean((scores - labels) ** 2))


def calibration(labels: Array, scores: Array, bins: int = 15) -> list[Bin]:
    """At most `bins` slices of about equally many rows, by rising score; rows of one score never part."""
    labels, scores = _checked(labels, scores)
    order = np.argsort(scores, kind="stable")
    scores, labels = scores[order], labels[order]
    starts = np.unique(np.searchsorted(scores, scores[(np.arange(bins) * len(scores)) // bins], side="left"))
    ends = np.append(starts[1:], len(scores))
    return [
        Bin(int(e - s), float(scores[s:e].mean()), float(labels[s:e].mean()), float(e - s))
        for s, e in zip(starts, ends, strict=True)
    ]


def binary_scores(labels: Array, scores: Array) -> dict[str, float]:
    """Everything the report's table shows; AUC and average precision are left out where only one class occurs."""
    counts = confusion(labels, scores)
    labels, scores = _checked(labels, scores)
    result = {"loss": log_loss(labels, scores), "brier": brier(labels, scores)}
    result["accuracy"] = float(np.mean((scores > 0.5) == (labels > 0.5)))
    right = int(np.sum((scores > 0.5) & (labels > 0.5)))
    either = int(np.sum(scores > 0.5) + np.sum(labels > 0.5))
    result["f1"] = 2 * right / either if either else 0.0
    result["calibration_error"] = calibration_error(calibration(labels, scores))
    if counts.positives and counts.negatives:
        result |= {"auc": roc_auc(counts), "average_precision": average_precision(counts)}
    return result


def share_by(values: Sequence[Any] | Array, labels: Array, scores: Array) -> list[Group]:
    """Positive share and mean prediction per value, numbers in their order and texts in theirs; None is `null`."""
    labels, scores = _checked(labels, scores)
    if len(values) != len(labels):
        raise ValueError(f"{len(values)} values for {len(labels)} rows")
    names = np.array(["null" if v is None or v != v else _name(v) for v in values])
    unique, which = np.unique(names, return_inverse=True)
    rows = np.bincount(which)
    observed, predicted = np.bincount(which, labels) / rows, np.bincount(which, scores) / rows
    groups = [Group(str(unique[i]), int(rows[i]), float(observed[i]), float(predicted[i])) for i in range(len(unique))]
    return sorted(groups, key=lambda g: _order(g.value))


def _name(value: Any) -> str:
    return str(int(value)) if isinstance(value, float | np.floating) and float(value).is_integer() else str(value)


def _order(name: str) -> tuple[int, float, str]:
    try:
        return 0, float(name), name
    except ValueError:
        return (2 if name == "null" else 1), 0.0, name


def _checked(labels: Array, scores: Array) -> tuple[Array, Array]:
    labels, scores = np.asarray(labels, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if labels.shape != scores.shape or labels.ndim != 1 or not len(labels):
        raise ValueError(f"labels {labels.shape} and scores {scores.shape} must be equally many rows, at least one")
    if not np.isin(labels, (0.0, 1.0)).all():
        raise ValueError("labels other than 0 and 1: these metrics are for two classes")
    if not np.isfinite(scores).all():
        raise ValueError(f"{int((~np.isfinite(scores)).sum())} of {len(scores)} scores are not finite")
    return labels, scores
