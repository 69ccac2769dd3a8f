"""Scores of predicted classes, over all held-out rows.

labels (N,) are class numbers from 0, scores (N, classes) probabilities. The predicted class is the most probable one,
of equal ones the first. weights (N,): how much a row counts, at least 0; None: all alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparkring.pipelines.evaluation.binary import CLIP, Bin, calibration, calibration_error, weighed

Array = np.ndarray
TOP = 5  # classes among which `top_5_accuracy` looks for the label


def multiclass_scores(labels: Array, scores: Array, weights: Array | None = None) -> dict[str, float]:
    """Every score of the report's table; those of the label's rank only where there are more than TOP classes."""
    labels, scores, weights = weighed(*_checked(labels, scores), weights)
    counts = class_counts(labels, scores.argmax(axis=1), scores.shape[1], weights)
    result = {
        "loss": float(np.average(label_loss(labels, scores), weights=weights)),
        "accuracy": float(counts.right.sum() / counts.rows.sum()),
        "macro_f1": counts.macro_f1,
        "calibration_error": calibration_error(top_calibration(labels, scores, weights)),
    }
    if scores.shape[1] <= TOP:
        return result
    ranks = label_ranks(labels, scores)
    return result | {
        "top_5_accuracy": float(np.average(ranks <= TOP, weights=weights)),
        "mean_reciprocal_rank": float(np.average(1 / ranks, weights=weights)),
    }


def label_loss(labels: Array, scores: Array) -> Array:
    """Log loss of each row in nats, (N,)."""
    loss: Array = -np.log(np.clip(_of_label(labels, scores), CLIP, 1.0))
    return loss


def label_ranks(labels: Array, scores: Array) -> Array:
    """Rank of the label's class among the classes, (N,), 1 for the most probable; the mean rank of equal ones."""
    own = _of_label(labels, scores)[:, None]
    ranks: Array = 1 + (scores > own).sum(axis=1) + ((scores == own).sum(axis=1) - 1) / 2
    return ranks


def confusion(labels: Array, scores: Array) -> Array:
    """Rows by class and by predicted class, (classes, classes) int64."""
    labels, scores = _checked(labels, scores)
    classes = scores.shape[1]
    pairs = labels * classes + scores.argmax(axis=1)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def top_calibration(labels: Array, scores: Array, weights: Array | None = None) -> list[Bin]:
    """Slices of equal counts by the probability of the predicted class; observed: the share that is right.

    Guo 2017, with slices of equal counts: https://arxiv.org/abs/1706.04599.
    """
    labels, scores = _checked(labels, scores)
    return calibration(scores.argmax(axis=1) == labels, scores.max(axis=1), weights=weights)


@dataclass(frozen=True)
class ClassCounts:
    """Rows of each class, or their weights, each (classes,); not a matrix: of 50,000 classes it would have 20 GB."""

    right: Array  # of the class and predicted to be
    rows: Array  # of the class
    predicted: Array  # predicted to be

    @property
    def precision(self) -> Array:
        """Share of the rows predicted to be of a class that are, (classes,); NaN where no row is."""
        return _divided(self.right, self.predicted)

    @property
    def recall(self) -> Array:
        """Share of the rows of a class that are predicted to be, (classes,); NaN where there are none."""
        return _divided(self.right, self.rows)

    @property
    def f1(self) -> Array:
        """Harmonic mean of both, (classes,); NaN of a class that occurs neither as label nor as prediction."""
        return _divided(2 * self.right, self.rows + self.predicted)

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that occur, as labels or as predictions."""
        return float(np.nanmean(self.f1))


def class_counts(labels: Array, predicted: Array, classes: int, weights: Array | None = None) -> ClassCounts:
    """Count the rows of each class.

    Args:
        labels: (N,) class numbers.
        predicted: (N,) class numbers.
        classes: how many there are.
        weights: (N,) how often each row counts; None: once.
    """
    right = labels == predicted
    own = right if weights is None else right * weights
    return ClassCounts(
        np.bincount(labels, own, classes),
        np.bincount(labels, weights, classes),
        np.bincount(predicted, weights, classes),
    )


def _divided(ones: Array, others: Array) -> Array:
    """ones / others; NaN where others is 0."""
    found: Array = np.divide(ones, others, out=np.full(len(ones), np.nan), where=others > 0)
    return found


def _of_label(labels: Array, scores: Array) -> Array:
    """Probability of the label's class, (N,)."""
    found: Array = np.take_along_axis(scores, labels.astype(np.int64)[:, None], axis=1)[:, 0]
    return found


def _checked(labels: Array, scores: Array) -> tuple[Array, Array]:
    labels, scores = np.asarray(labels), np.asarray(scores, dtype=np.float64)
    if scores.ndim != 2 or labels.shape != scores.shape[:1] or not len(labels):
        raise ValueError(f"labels {labels.shape} and scores {scores.shape} must be equally many rows, at least one")
    if not np.isin(labels, np.arange(scores.shape[1])).all():
        raise ValueError(f"labels other than 0 to {scores.shape[1] - 1}: the model has {scores.shape[1]} classes")
    if not np.isfinite(scores).all():
        raise ValueError(f"{int((~np.isfinite(scores)).any(axis=1).sum())} of {len(scores)} scores are not finite")
    return labels.astype(np.int64), scores
