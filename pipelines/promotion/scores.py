"""Held-out metrics of two models on the same rows, and of paired resamples of these rows. Pure numpy.

labels (N,) float64; scores (N,) probabilities of 1 or predicted values, or (N, classes) probabilities. Of the task
multilabel both are (N, labels).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkring.pipelines.evaluation.binary import CLIP
from sparkring.pipelines.evaluation.multiclass import TOP, class_counts, label_loss, label_ranks
from sparkring.pipelines.evaluation.multilabel import mean_accuracy, mean_loss

Array = NDArray[Any]
RESAMPLES, SEED = 1000, 0


def row_values(task: str, metric: str, labels: Array, scores: Array) -> Array:
    """The metric of each row, (N,), of a metric that is their mean."""
    if task == "regression":
        error = scores - labels
        assert metric in ("loss", "abs_error"), f"{metric} is no mean over rows"
        return np.square(error) if metric == "loss" else np.abs(error)
    if task == "multilabel":
        assert metric in ("loss", "accuracy"), f"{metric} is no mean over rows"
        return mean_loss(labels, scores) if metric == "loss" else mean_accuracy(labels, scores)
    if task == "multiclass":
        if metric == "loss":
            return label_loss(labels, scores)
        if metric == "accuracy":
            return (scores.argmax(axis=1) == labels).astype(np.float64)
        ranks = label_ranks(labels, scores)
        if metric == "top_5_accuracy":
            return (ranks <= TOP).astype(np.float64)
        assert metric == "mean_reciprocal_rank", f"{metric} is no mean over rows"
        return 1 / ranks
    if metric == "loss":
        p = np.clip(scores, CLIP, 1 - CLIP)
        return -(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    if metric == "brier":
        return np.square(scores - labels)
    assert metric == "accuracy", f"{metric} is no mean over rows"
    return ((scores > 0.5) == (labels > 0.5)).astype(np.float64)


def resampled(
    task: str,
    metric: str,
    labels: Array,
    models: tuple[Array, ...],
    resamples: int = RESAMPLES,
    weights: Array | None = None,
) -> Array:
    """The metric of each model on paired resamples of the rows, (resamples, models).

    Every resample draws N of the N rows with replacement (Efron 1979), the same for all models; always the same ones
    for N rows. NaN where a resample has no such metric.

    Args:
        task: of the recipe.
        metric: name.
        labels: (rows,), or (rows, labels).
        models: scores of each model, as many.
        resamples: how many.
        weights: how much each row counts, (rows,); None: all alike.
    """
    of_weights = [_weighted(task, metric, labels, scores) for scores in models]
    random, rows = np.random.default_rng(SEED), len(labels)
    made = np.empty((resamples, len(models)))
    for number in range(resamples):
        times = np.bincount(random.integers(0, rows, rows), minlength=rows)
        made[number] = [of(times if weights is None else times * weights) for of in of_weights]
    return made


def _weighted(task: str, metric: str, labels: Array, scores: Array) -> Callable[[Array], float]:
    """The metric as a function of how often, or how much, each row counts."""
    how, _, of_label = metric.partition("_")
    if task == "multilabel" and how == "micro":
        every = _weighted("binary", of_label, labels.ravel(), scores.ravel())
        return lambda weights: every(np.repeat(weights, labels.shape[1]))
    if task == "multilabel" and how == "macro":
        each = [_weighted("binary", of_label, labels[:, n], scores[:, n]) for n in range(labels.shape[1])]
        predicted = ((labels > 0.5) | (scores > 0.5)).astype(np.float64) if of_label == "f1" else None
        return partial(_mean_of_labels, each, predicted)
    if metric in ("auc", "average_precision"):
        return SortedRows(labels, scores).auc if metric == "auc" else SortedRows(labels, scores).average_precision
    if metric in ("f1", "macro_f1"):
        classes = 2 if task == "binary" else scores.shape[1]
        predicted = (scores > 0.5).astype(np.int64) if task == "binary" else scores.argmax(axis=1)
        return partial(_weighted_f1, metric, labels.astype(np.int64), predicted, classes)
    if metric in ("rmse", "r2"):
        return partial(_weighted_fit, metric, labels, row_values(task, "loss", labels, scores))
    return partial(_weighted_mean, row_values(task, metric, labels, scores))


def _mean_of_labels(each: Sequence[Callable[[Array], float]], known: Array | None, weights: Array) -> float:
    """The mean of a metric over the labels that have it; `known` (N, labels): rows that give a label its metric."""
    found = np.array([of(weights) for of in each])
    has = np.isfinite(found) if known is None else weights @ known > 0
    return float(found[has].mean()) if has.any() else float("nan")


def _weighted_f1(metric: str, labels: Array, predicted: Array, classes: int, weights: Array) -> float:
    """Compute F1 of class 1, or the mean over the classes that occur.

    Args:
        metric: `f1` or `macro_f1`.
        labels, predicted: class numbers, (N,).
        classes: how many there are.
        weights: (N,).
    """
    counts = class_counts(labels, predicted, classes, weights)
    return counts.macro_f1 if metric == "macro_f1" else float(np.nan_to_num(counts.f1[1]))


def _weighted_fit(metric: str, labels: Array, squares: Array, weights: Array) -> float:
    """RMSE or R2 of squared errors (N,); R2 is NaN where all labels are equal."""
    squared = _weighted_mean(squares, weights)
    if metric == "rmse":
        return squared**0.5
    variance = _weighted_mean(np.square(labels - _weighted_mean(labels, weights)), weights)
    return 1 - squared / variance if variance > 0 else float("nan")


def _weighted_mean(values: Array, weights: Array) -> float:
    total = weights.sum()
    return float(values @ weights / total) if total else float("nan")


class SortedRows:
    """Rows sorted by score once, so that a weighting of them costs no sort. Rows of one score are one step."""

    def __init__(self, labels: Array, scores: Array) -> None:
        self._order = np.argsort(scores, kind="stable")
        ordered = scores[self._order]
        self._starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        self._positive = labels[self._order]

    def _steps(self, weights: Array) -> tuple[Array, Array]:
        """Weight of positive and of negative rows at each distinct score (T,), rising."""
        ordered = weights[self._order]
        all_rows = np.add.reduceat(ordered, self._starts)
        positive = np.add.reduceat(ordered * self._positive, self._starts)
        return positive, all_rows - positive

    def auc(self, weights: Array) -> float:
        """Share of pairs of a positive and a negative row that are in the right order; ties count half."""
        positive, negative = self._steps(weights)
        pairs = positive.sum() * negative.sum()
        below = np.cumsum(negative) - negative
        return float(positive @ (below + negative / 2) / pairs) if pairs else float("nan")

    def average_precision(self, weights: Array) -> float:
        """Mean precision over the positive rows, as scikit-learn's."""
        positive, negative = (step[::-1] for step in self._steps(weights))
        found = np.cumsum(positive)
        seen = found + np.cumsum(negative)
        precision = np.divide(found, seen, out=np.zeros_like(found, dtype=np.float64), where=seen > 0)
        return float(positive @ precision / found[-1]) if found[-1] else float("nan")
