from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.pipelines.evaluation.regression import regression_scores

PAIRS = st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=1, max_size=30)


@given(PAIRS)
def test_scores_are_the_exact_ones(pairs: list[tuple[int, int]]) -> None:
    labels, guesses = ([Fraction(value) for value in column] for column in zip(*pairs, strict=True))
    errors, mean = [b - a for a, b in zip(labels, guesses, strict=True)], sum(labels) / len(pairs)
    squared = sum(error * error for error in errors) / len(pairs)
    expected = {
        "loss": float(squared),
        "rmse": math.sqrt(squared),
        "abs_error": float(sum(map(abs, errors)) / len(pairs)),
    }
    if len(set(labels)) > 1:
        expected["r2"] = float(1 - sum(e * e for e in errors) / sum((label - mean) ** 2 for label in labels))
    found = regression_scores(np.array([float(v) for v in labels]), np.array([float(v) for v in guesses]))
    assert list(found) == list(expected) and found == pytest.approx(expected, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize(
    ("labels", "predictions", "rule"),
    [
        ([], [], "at least 1"),
        ([1.0, 2.0], [1.0], "equally many"),
        ([1.0, 2.0], [1.0, math.inf], "1 of 2 labels or predictions are not finite"),
        ([math.nan, 2.0], [1.0, 1.0], "1 of 2 labels or predictions are not finite"),
    ],
)
def test_what_cannot_be_scored_is_refused(labels: list[float], predictions: list[float], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        regression_scores(np.array(labels), np.array(predictions))
