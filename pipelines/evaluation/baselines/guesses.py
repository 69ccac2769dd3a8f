"""Scores of guesses that look at no feature, and what baselines of every kind share. Pure functions of counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import BINARY
from sparkring.training.metrics import class_counts, negative_log, task_scores, weighted_mean
from sparkring.training.worker.result import Scores

MOST_LABELS = 20  # of which each is fitted in turn: some seconds
MOST_COEFFICIENTS = 5_000_000  # of a multinomial regression: its solvers keep several copies of them


@dataclass(frozen=True)
class Fitted:
    """A baseline that was fitted. predictions: of the test rows that count, (N,), (N, C) or (N, L).

    rows: training rows that it was fitted on.
    """

    scores: Scores
    predictions: np.ndarray | None = None  # None: the driver does not have them
    rows: int = 0


def check_labels(labels: int) -> None:
    """Raise ValueError where there are more than MOST_LABELS."""
    if labels > MOST_LABELS:
        raise ValueError(f"{count_of(labels, 'label')}, more than {MOST_LABELS}: each would be fitted in turn")


def check_coefficients(coefficients: int) -> None:
    """Raise ValueError where there are more than MOST_COEFFICIENTS."""
    if coefficients > MOST_COEFFICIENTS:
        raise ValueError(f"{count_of(coefficients, 'coefficient', ',')}, more than {MOST_COEFFICIENTS:,}")


def flag_scores(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None) -> Scores:
    """Score a baseline for one label of 0 and 1; it has no AUC where one class occurs."""
    found = task_scores(BINARY, labels, scores, weights, BINARY.baseline_metrics)
    return {name: found[name] for name in ("loss", "auc", "accuracy") if name in found}


def constant_scores(guess: float, truth: float) -> Scores:
    """Scores of one guess for every row, where a share `truth` of them is positive."""
    return flag_scores(np.array([1.0, 0.0]), np.array([guess, guess]), np.array([truth, 1 - truth]))


def mean_of_labels(scores: Sequence[Scores], truths: Sequence[float]) -> Scores:
    """Mean loss and accuracy, and mean AUC of the labels that some test rows have, not all. `truths`: their shares."""
    found = {name: math.fsum(each[name] for each in scores) / len(scores) for name in ("loss", "accuracy")}
    known = [each["auc"] for each, truth in zip(scores, truths, strict=True) if 0 < truth < 1]
    return found | ({"macro_auc": math.fsum(known) / len(known)} if known else {})


def class_rates(trained: Mapping[int, float], tested: Mapping[int, float]) -> Scores:
    """Scores of the shares of `trained` (class -> rows, or their weight) as probabilities of every row of `tested`."""
    rows, guess = sum(trained.values()), min(trained, key=lambda label: (-trained[label], label))
    losses = negative_log(np.array([trained.get(label, 0) / rows for label in tested]))
    loss = weighted_mean(losses, np.array([*tested.values()]))
    return {"loss": loss} | class_metrics([(label, guess, n) for label, n in tested.items()])


def class_metrics(groups: Sequence[tuple[int, int, float]]) -> Scores:
    """Accuracy and macro F1 of groups of (class, predicted class, rows or their weight)."""
    labels, predicted = np.array([group[:2] for group in groups], dtype=np.int64).T
    rows = np.array([group[2] for group in groups])
    counts = class_counts(labels, predicted, int(max(labels.max(), predicted.max())) + 1, rows)
    return {"accuracy": float(counts.right.sum() / rows.sum()), "macro_f1": counts.macro_f1}
