"""Scores of all rows of a split together, which are no sum over rows: exact, and the same in any order of the rows.

They are counted in integers where they are counts, so a split that is cut over ranks otherwise has the same bits. NaN
where there is nothing to divide by.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


def ranking_scores(scores_N: Tensor, labels_N: Tensor) -> dict[str, float]:
    """`auc` and `average_precision` of labels 0 and 1; equal scores are one threshold."""
    distinct, which_N = torch.unique(scores_N, return_inverse=True)  # rising
    positive_T = torch.bincount(which_N[labels_N > 0.5], minlength=len(distinct))
    negative_T = torch.bincount(which_N[labels_N <= 0.5], minlength=len(distinct))
    positives, negatives = int(positive_T.sum()), int(negative_T.sum())
    if not positives or not negatives:
        return {"auc": math.nan, "average_precision": math.nan}
    below_T = negative_T.cumsum(0) - negative_T
    twice_in_order = int((positive_T * (2 * below_T + negative_T)).sum())  # pairs; equal ones count half
    found_T, seen_T = positive_T.flip(0).cumsum(0), (positive_T + negative_T).flip(0).cumsum(0)
    precision = float((positive_T.flip(0) * (found_T.double() / seen_T)).sum()) / positives
    return {"auc": twice_in_order / (2 * positives * negatives), "average_precision": precision}


def class_f1(labels_N: Tensor, predicted_N: Tensor) -> Tensor:
    """F1 of each class up to the highest that occurs, (classes,) float64; NaN of one that does not occur."""
    classes = int(torch.stack([labels_N.max(), predicted_N.max()]).max()) + 1
    right = torch.bincount(labels_N[labels_N == predicted_N], minlength=classes)
    either = torch.bincount(labels_N, minlength=classes) + torch.bincount(predicted_N, minlength=classes)
    return 2.0 * right.double() / either


def macro_f1(labels_N: Tensor, predicted_N: Tensor) -> float:
    """Mean F1 of the classes that occur, as labels or as predictions."""
    return float(class_f1(labels_N, predicted_N).nanmean())


def fit_scores(predicted_N: Tensor, labels_N: Tensor) -> dict[str, float]:
    """`rmse` in the label's unit, and `r2`."""
    squared = float((predicted_N - labels_N).square().mean())
    spread = float((labels_N - labels_N.mean()).square().mean())
    return {"rmse": math.sqrt(squared), "r2": 1 - squared / spread if spread else math.nan}
