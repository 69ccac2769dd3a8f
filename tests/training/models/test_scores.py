from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.training.models.scores import class_f1, fit_scores, macro_f1, ranking_scores

PAIRS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=30)
CLASSES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)


def columns(rows: list[tuple[int, int]], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.tensor(rows, dtype=dtype).T
    return first, second


@settings(deadline=None)
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


@settings(deadline=None)
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


@settings(deadline=None)
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


@settings(deadline=None)
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
