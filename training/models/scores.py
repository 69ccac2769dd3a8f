"""Scores of all rows of a split together, which are no sum over rows: exact, and the same in any order of the rows.

They are counted in integers where they are counts, so a split that is cut over ranks otherwise has the same bits; with
`weights_N` (N,) in float64, in the order of the rows. NaN where there is nothing to divide by.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor
MULTILABEL_SCORES = tuple(f"{mean}_{of}" for of in ("auc", "average_precision", "f1") for mean in ("macro", "micro"))


def ranking_scores(scores_N: Tensor, labels_N: Tensor, weights_N: Tensor | None = None) -> dict[str, float]:
    """`auc` and `average_precision` of labels 0 and 1; equal scores are one threshold."""
    distinct, which_N = torch.unique(scores_N, return_inverse=True)  # rising
    positive_T = _summed(which_N, labels_N > 0.5, weights_N, len(distinct))
    negative_T = _summed(which_N, labels_N <= 0.5, weights_N, len(distinct))
    positives, negatives = positive_T.sum().item(), negative_T.sum().item()
    if not positives or not negatives:
        return {"auc": math.nan, "average_precision": math.nan}
    below_T = negative_T.cumsum(0) - negative_T
    twice_in_order = (positive_T * (2 * below_T + negative_T)).sum().item()  # pairs; equal ones count half
    found_T, seen_T = positive_T.flip(0).cumsum(0), (positive_T + negative_T).flip(0).cumsum(0)
    precision_T = (found_T.double() / seen_T).nan_to_num()  # 0 / 0 above the first row that has a weight
    precision = float((positive_T.flip(0) * precision_T).sum()) / positives
    return {"auc": twice_in_order / (2 * positives * negatives), "average_precision": precision}


def class_f1(labels_N: Tensor, predicted_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """F1 of each class up to the highest that occurs, (classes,) float64; NaN of one that does not occur."""
    classes = int(torch.stack([labels_N.max(), predicted_N.max()]).max()) + 1
    right = _summed(labels_N, labels_N == predicted_N, weights_N, classes)
    either = torch.bincount(labels_N, weights_N, classes) + torch.bincount(predicted_N, weights_N, classes)
    return 2.0 * right.double() / either


def macro_f1(labels_N: Tensor, predicted_N: Tensor, weights_N: Tensor | None = None) -> float:
    """Mean F1 of the classes that occur, as labels or as predictions."""
    return float(class_f1(labels_N, predicted_N, weights_N).nanmean())


def multilabel_means(scores_NL: Tensor, labels_NL: Tensor, weights_N: Tensor | None = None) -> dict[str, float]:
    """MULTILABEL_SCORES: of all pairs of row and label together (micro), and means over labels (macro).

    Labels without a score, of which all rows are, or none, have no part in a mean; NaN where none has one.
    """
    rows, labels = labels_NL.shape
    every = None if weights_N is None else weights_N[:, None].expand(rows, labels).flatten()
    micro = _label_scores(scores_NL.flatten(), labels_NL.flatten(), every)
    each = [_label_scores(scores_NL[:, n], labels_NL[:, n], weights_N) for n in range(labels)]
    found = {f"micro_{name}": value for name, value in micro.items()}
    for name in micro:
        known = [scores[name] for scores in each if not math.isnan(scores[name])]
        found[f"macro_{name}"] = math.fsum(known) / len(known) if known else math.nan
    return {name: found[name] for name in MULTILABEL_SCORES}


def _label_scores(scores_N: Tensor, labels_N: Tensor, weights_N: Tensor | None) -> dict[str, float]:
    """`auc`, `average_precision` and `f1` of labels 0 and 1; F1 is NaN where 1 is neither there nor predicted."""
    f1 = class_f1((labels_N > 0.5).long(), (scores_N > 0.5).long(), weights_N)
    return ranking_scores(scores_N, labels_N, weights_N) | {"f1": float(f1[1]) if len(f1) > 1 else math.nan}


def fit_scores(predicted_N: Tensor, labels_N: Tensor, weights_N: Tensor | None = None) -> dict[str, float]:
    """`rmse` in the label's unit, and `r2`."""
    squared = float(_mean((predicted_N - labels_N).square(), weights_N))
    spread = float(_mean((labels_N - _mean(labels_N, weights_N)).square(), weights_N))
    return {"rmse": math.sqrt(squared), "r2": 1 - squared / spread if spread else math.nan}


def _summed(which_N: Tensor, chosen_N: Tensor, weights_N: Tensor | None, size: int) -> Tensor:
    """The chosen rows, or their weights, by what each is of, (size,)."""
    return torch.bincount(which_N[chosen_N], None if weights_N is None else weights_N[chosen_N], size)


def _mean(values_N: Tensor, weights_N: Tensor | None) -> Tensor:
    return values_N.mean() if weights_N is None else (values_N * weights_N).sum() / weights_N.sum()
