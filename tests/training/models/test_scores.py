from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from sparkring.training.models.scores import class_f1, fit_scores, macro_f1, multilabel_means, ranking_scores

PAIRS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=30)
CLASSES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)


def columns(rows: list[tuple[int, int]], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.tensor(rows, dtype=dtype).T
    return first, second


@given(PAIRS)
def test_auc_is_the_share_of_pairs_in_order_and_average_precision_the_mean_over_positives(
    rows: list[tuple[int, int]],
) -> None:
    found = ranking_scores(*columns(rows))
    positive, negative = ([score for score, label in rows if label == one] for one in (1, 0))
    if not positive or not negative:
        assert all(math.isnan(value) for value in found.values())
        return
    pairs = [Fraction(2 * (p > n) + (p == n), 2) for p in positive for n in negative]
    assert found["auc"] == float(sum(pairs) / len(pairs)), "counted, so equal to the last bit"
    precisions = [Fraction(sum(p >= at for p in positive), sum(score >= at for score, _ in rows)) for at in positive]
    assert found["average_precision"] == pytest.approx(float(sum(precisions) / len(positive)), rel=1e-12)


@given(CLASSES)
def test_f1_is_counted_by_class_over_the_classes_that_occur(rows: list[tuple[int, int]]) -> None:
    labels, predicted = columns(rows, torch.int64)
    occurring, f1s = {one for row in rows for one in row}, class_f1(labels, predicted)
    expected = {}
    for one in occurring:
        right = sum(a == b == one for a, b in rows)
        expected[one] = 2 * right / sum((a == one) + (b == one) for a, b in rows)
    assert {one: float(f1s[one]) for one in occurring} == pytest.approx(expected, abs=1e-12)
    assert all(math.isnan(f1s[one]) for one in range(len(f1s)) if one not in occurring)
    assert macro_f1(labels, predicted) == pytest.approx(sum(expected.values()) / len(expected), abs=1e-12)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=30))
def test_fit_is_judged_by_the_root_of_squares_and_the_share_of_variance(rows: list[tuple[int, int]]) -> None:
    found = fit_scores(*columns(rows))
    squares, mean = sum(Fraction(a - b) ** 2 for a, b in rows), Fraction(sum(b for _, b in rows), len(rows))
    spread = sum((b - mean) ** 2 for _, b in rows)
    assert found["rmse"] == pytest.approx(math.sqrt(squares / len(rows)), rel=1e-12)
    if spread:
        assert found["r2"] == pytest.approx(float(1 - squares / spread), rel=1e-9, abs=1e-9)
    else:
        assert math.isnan(found["r2"])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=30))
def test_a_row_of_weight_n_counts_as_n_rows_do(rows: list[tuple[int, int, int]]) -> None:
    scores, labels, weights = torch.tensor(rows, dtype=torch.float64).T
    repeated = [torch.repeat_interleave(values, weights.long()) for values in (scores, labels)]
    if not len(repeated[0]):
        return
    assert ranking_scores(scores, labels, weights) == pytest.approx(ranking_scores(*repeated), rel=1e-12, nan_ok=True)
    assert fit_scores(scores, labels, weights) == pytest.approx(fit_scores(*repeated), rel=1e-9, abs=1e-9, nan_ok=True)
    found, expected = macro_f1(scores.long(), labels.long(), weights), macro_f1(*(r.long() for r in repeated))
    assert found == pytest.approx(expected, rel=1e-12)


def test_means_of_several_labels_are_those_of_scikit_learn_over_the_labels_that_have_them() -> None:
    draw = np.random.default_rng(3)
    labels, scores = draw.integers(0, 2, (60, 4)), draw.random((60, 4)).round(1)
    labels[:, 2], scores[:, 2] = 0, 0.2  # neither there nor predicted
    labels[:, 3] = 1
    for weights in (None, draw.random(60)):
        of = {"sample_weight": weights}
        given = [None if each is None else torch.from_numpy(each.astype(float)) for each in (scores, labels, weights)]
        found = multilabel_means(*given)
        auc = sklearn.roc_auc_score(labels[:, :2], scores[:, :2], **of)
        assert found["macro_auc"] == pytest.approx(auc, rel=1e-12), "of the labels that some rows have"
        average = sklearn.average_precision_score(labels[:, :2], scores[:, :2], **of)
        assert found["macro_average_precision"] == pytest.approx(average, rel=1e-12)
        f1 = sklearn.f1_score(labels[:, [0, 1, 3]], scores[:, [0, 1, 3]] > 0.5, average="macro", **of)
        assert found["macro_f1"] == pytest.approx(f1, rel=1e-12)
        assert found["micro_auc"] == pytest.approx(sklearn.roc_auc_score(labels, scores, average="micro", **of))
        micro = sklearn.average_precision_score(labels, scores, average="micro", **of)
        assert found["micro_average_precision"] == pytest.approx(micro, rel=1e-12)
        assert found["micro_f1"] == pytest.approx(sklearn.f1_score(labels, scores > 0.5, average="micro", **of))
    nothing = multilabel_means(torch.zeros(3, 2), torch.zeros(3, 2))
    assert all(math.isnan(value) for value in nothing.values())
