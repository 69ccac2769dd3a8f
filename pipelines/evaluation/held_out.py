"""The scores of a task's held-out predictions."""

from __future__ import annotations

import numpy as np

from sparkring.conf.tasks import TaskKind
from sparkring.pipelines.evaluation.binary import binary_scores
from sparkring.pipelines.evaluation.multiclass import multiclass_scores
from sparkring.pipelines.evaluation.multilabel import multilabel_scores
from sparkring.pipelines.evaluation.regression import regression_scores

SCORES = {
    "binary": binary_scores,
    "multiclass": multiclass_scores,
    "multilabel": multilabel_scores,
    "regression": regression_scores,
}


def held_out_scores(
    kind: TaskKind, labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None
) -> dict[str, float]:
    """Every metric of a table task. ValueError for what cannot be scored.

    Args:
        kind: the task.
        labels: (N,) 0 or 1, class numbers, or values; (N, labels) 0 or 1.
        scores: (N,) probabilities of 1, or predicted values; (N, classes) or (N, labels) probabilities.
        weights: (N,) how much each row counts, at least 0; None: all alike.
    """
    return SCORES[kind.name](labels, scores, weights)
