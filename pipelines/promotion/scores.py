"""Held-out metrics of two models on the same rows, and of paired resamples of these rows. Pure numpy.

labels (N,) float64; scores (N,) probabilities of 1 or predicted values, or (N, classes) probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkring.pipelines.metrics import CLIP, binary_scores

Array = NDArray[Any]
RESAMPLES, SEED = 1000, 0


def held_out_scores(task: str, labels: Array, scores: Array) -> dict[str, float]:
    """Every metric of a task of conf/promotion.py that is made of predictions."""
    if task == "binary":
        return binary_scores(labels, scores)
    names = {"multiclass": ("loss", "accuracy"), "regression": ("loss", "abs_error")}[task]
    return {name: float(row_values(task, name, labels, scores).mean()) for name in names}


def row_values(task: str, metric: str, labels: Array, scores: Array) -> Array:
    """The metric of each row, (N,), of a metric that is their mean."""
    if task == "regression":
        error = scores - labels
        return np.square(error) if metric == "loss" else np.abs(error)
    if task == "multiclass":
        if metric == "accuracy":
            return (scores.argmax(axis=1) == labels).astype(np.float64)
        of_label = np.take_along_axis(scores, labels.astype(np.int64)[:, None], axis=1)[:, 0]
        loss: Array = -np.log(np.clip(of_label, CLIP, 1.0))
        return loss
    if metric == "loss":
        p = np.clip(scores, CLIP, 1 - CLIP)
        return -(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    if metric == "brier":
        return np.square(scores - labels)
    assert metric == "accuracy", f"{metric} is no mean over rows"
    return ((scores > 0.5) == (labels > 0.5)).astype(np.float64)


def resampled(task: str, metric: str, labels: Array, models: tuple[Array, ...], resamples: int = RESAMPLES) -> Array:
    """The metric of each model on paired resamples of the rows, (resamples, models).

    Every resample draws N of the N rows with replacement (Efron 1979), the same for all models; always the same ones
    for N rows. NaN where a resample has no such metric.

    Args:
        task: of the recipe.
        metric: name.
        labels: (rows,).
        models: scores of each model, (rows,).
        resamples: how many.
    """
    of_weights = [_weighted(task, metric, labels, scores) for scores in models]
    random, rows = np.random.default_rng(SEED), len(labels)
    made = np.empty((resamples, len(models)))
    for number in range(resamples):
        weights = np.bincount(random.integers(0, rows, rows), minlength=rows)
        made[number] = [of(weights) for of in of_weights]
    return made


def _weighted(task: str, metric: str, labels: Array, scores: Array) -> Callable[[Array], float]:
    """The metric as a function of how often each row occurs."""
    if metric in ("auc", "average_precision"):
        return Ranking(labels, scores).auc if metric == "auc" else Ranking(labels, scores).average_precision
    return partial(_weighted_mean, row_values(task, metric, labels, scores))


def _weighted_mean(values: Array, weights: Array) -> float:
    return float(values @ weights / weights.sum())


class Ranking:
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
