"""The scores of a task's held-out predictions, and which of two is better."""

from __future__ import annotations

import numpy as np

from sparkring.conf.blocks.promotion import HIGHER_IS_BETTER
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
BEST_IS_LOW = {name for known in HIGHER_IS_BETTER.values() for name, is_higher in known.items() if not is_higher}


def held_out_scores(
    task: str, labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None
) -> dict[str, float]:
    """Every metric of a task of COMPARED_TASKS (conf/blocks/promotion.py). ValueError for what cannot be scored.

    Args:
        task: one of SCORES.
        labels: (N,) 0 or 1, class numbers, or values; (N, labels) 0 or 1.
        scores: (N,) probabilities of 1, or predicted values; (N, classes) or (N, labels) probabilities.
        weights: (N,) how much each row counts, at least 0; None: all alike.
    """
    return SCORES[task](labels, scores, weights)


def is_better(metric: str, one: float, other: float) -> bool:
    """Whether `one` beats `other` in the metric of that name; a value that is not a number beats nothing."""
    return one < other if metric in BEST_IS_LOW else one > other
