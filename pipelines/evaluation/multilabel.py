"""Scores of each of several labels of 0 and 1, over all held-out rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparkring.conf.tasks import BINARY, LabelForm
from sparkring.training.metrics import checked_rows, task_scores
from sparkring.training.worker.result import GroupScores

Array = np.ndarray
OF_LABEL = ("auc", "average_precision", "f1", "loss")  # in the table of labels


def scores_by_label(
    names: Sequence[str], labels: Array, scores: Array, weights: Array | None = None
) -> list[GroupScores]:
    """Score each label alone; `rows` are those that have it and count for something.

    There is no F1 of a label that no row has and none is predicted to have.

    Args:
        names: names of the labels.
        labels: (N, L) of 0 and 1.
        scores: (N, L) probabilities of 1.
        weights: (N,) weight of each row, at least 0; None for equal weights.
    """
    rows, weights = checked_rows(LabelForm.FLAGS, labels, scores, weights)
    found = []
    for name, label in zip(names, rows.each_label, strict=True):
        of_label = task_scores(BINARY, label.labels, label.scores, weights, OF_LABEL)
        if not label.actual.any() and not label.predicted.any():
            del of_label["f1"]
        shown = {metric: of_label[metric] for metric in OF_LABEL if metric in of_label}
        positives = int(np.count_nonzero(label.actual))
        found.append(GroupScores(column="label", value=name, rows=positives, scores=shown))
    return found
