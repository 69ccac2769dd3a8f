"""Scores of several labels of 0 and 1, over all held-out rows.

labels (N, L) are 0 or 1, scores (N, L) probabilities of 1; a label is predicted above 0.5. weights (N,): how much a row
counts, at least 0; None: all alike. Micro scores are those of all pairs of row and label together, macro ones the means
over the labels that have the score: AUC and average precision need a row of each value, F1 one that is or is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from sparkring.pipelines.evaluation.binary import CLIP, binary_scores, weighed
from sparkring.training.models.scores import multilabel_means
from sparkring.training.result import GroupScores

Array = np.ndarray
OF_LABEL = ("auc", "average_precision", "f1", "loss")  # of binary_scores, in the table of labels


def multilabel_scores(labels: Array, scores: Array, weights: Array | None = None) -> dict[str, float]:
    """Log loss in nats and accuracy, means over rows and labels, and the macro and micro scores that there are."""
    labels, scores, weights = weighed(*_checked(labels, scores), weights)
    tensors = [None if each is None else torch.from_numpy(each) for each in (scores, labels, weights)]
    means = multilabel_means(*tensors)  # type: ignore[arg-type]
    found = {
        "loss": float(np.average(mean_loss(labels, scores), weights=weights)),
        "accuracy": float(np.average(mean_accuracy(labels, scores), weights=weights)),
    }
    return found | {name: value for name, value in means.items() if not math.isnan(value)}


def scores_by_label(
    names: Sequence[str], labels: Array, scores: Array, weights: Array | None = None
) -> list[GroupScores]:
    """Score each label alone; `rows` are those that have it and count for something.

    There is no F1 of a label that no row has and none is predicted to have.
    """
    labels, scores = _checked(labels, scores)
    counted = np.ones(len(labels), bool) if weights is None else weights > 0
    found = []
    for n, name in enumerate(names):
        of_label = binary_scores(labels[:, n], scores[:, n], weights)
        positives = int(np.count_nonzero(labels[counted, n]))
        if not positives and not (scores[counted, n] > 0.5).any():
            del of_label["f1"]
        shown = {metric: of_label[metric] for metric in OF_LABEL if metric in of_label}
        found.append(GroupScores(column="label", value=name, rows=positives, scores=shown))
    return found


def mean_loss(labels: Array, scores: Array) -> Array:
    """Log loss of each row in nats, the mean over its labels, (N,)."""
    p = np.clip(scores, CLIP, 1 - CLIP)
    loss: Array = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).mean(axis=1)
    return loss


def mean_accuracy(labels: Array, scores: Array) -> Array:
    """Share of each row's labels that are predicted, (N,)."""
    share: Array = ((scores > 0.5) == (labels > 0.5)).mean(axis=1)
    return share


def _checked(labels: Array, scores: Array) -> tuple[Array, Array]:
    labels, scores = np.asarray(labels, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if scores.ndim != 2 or labels.shape != scores.shape or not len(labels):
        raise ValueError(f"labels {labels.shape} and scores {scores.shape} must be as many rows of as many labels")
    if not np.isin(labels, (0.0, 1.0)).all():
        raise ValueError("labels other than 0 and 1")
    if not np.isfinite(scores).all():
        raise ValueError(f"{int((~np.isfinite(scores)).any(axis=1).sum())} of {len(scores)} scores are not finite")
    return labels, scores
