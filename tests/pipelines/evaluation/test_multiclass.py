from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.pipelines.evaluation import multiclass

ROWS = st.integers(2, 7).flatmap(
    lambda classes: st.lists(
        st.tuples(st.integers(0, classes - 1), st.lists(st.integers(1, 3), min_size=classes, max_size=classes)),
        min_size=1,
        max_size=40,
    )
)


def split(rows: list[tuple[int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    scores = np.array([weights for _, weights in rows], float)
    return np.array([label for label, _ in rows]), scores / scores.sum(axis=1, keepdims=True)


def by_hand(rows: list[tuple[int, list[int]]]) -> dict[str, float]:
    """Every score, row by row in plain Python, of rows (label, weights of the classes)."""
    labels, guesses = [label for label, _ in rows], [weights.index(max(weights)) for _, weights in rows]
    f1s, ranks = [], []
    for one in {*labels, *guesses}:
        right = sum(a == b == one for a, b in zip(labels, guesses, strict=True))
        f1s.append(2 * right / (labels.count(one) + guesses.count(one)))
    for label, weights in rows:
        higher, equal = (sum(w > weights[label] for w in weights), weights.count(weights[label]))
        ranks.append(1 + higher + (equal - 1) / 2)
    found = {
        "loss": -sum(math.log(weights[label] / sum(weights)) for label, weights in rows) / len(rows),
        "accuracy": sum(a == b for a, b in zip(labels, guesses, strict=True)) / len(rows),
        "macro_f1": sum(f1s) / len(f1s),
    }
    if len(rows[0][1]) > 5:
        found["top_5_accuracy"] = sum(rank <= 5 for rank in ranks) / len(rows)
        found["mean_reciprocal_rank"] = sum(1 / rank for rank in ranks) / len(rows)
    return found


@given(ROWS)
def test_scores_are_those_counted_by_hand_with_ties_and_classes_without_rows(rows: list[tuple[int, list[int]]]) -> None:
    found = multiclass.multiclass_scores(*split(rows))
    assert 0 <= found.pop("calibration_error") <= 1
    assert found == pytest.approx(by_hand(rows), abs=1e-12)


@given(ROWS)
def test_confusion_and_counts_agree_with_a_loop(rows: list[tuple[int, list[int]]]) -> None:
    labels, scores = split(rows)
    expected = np.zeros((scores.shape[1],) * 2, int)
    for label, row in zip(labels, scores, strict=True):
        expected[label, list(row).index(max(row))] += 1
    assert np.array_equal(multiclass.confusion(labels, scores), expected)
    counts = multiclass.class_counts(labels, scores.argmax(axis=1), scores.shape[1])
    for one in range(len(expected)):
        right, rows_of, guessed = expected[one, one], expected[one].sum(), expected[:, one].sum()
        assert counts.precision[one] == (
            pytest.approx(right / guessed) if guessed else pytest.approx(np.nan, nan_ok=True)
        )
        assert counts.recall[one] == (pytest.approx(right / rows_of) if rows_of else pytest.approx(np.nan, nan_ok=True))


def test_calibration_compares_the_highest_probability_with_the_share_that_is_right() -> None:
    scores = np.array([[0.9, 0.05, 0.05]] * 10 + [[0.2, 0.6, 0.2]] * 10)
    labels = np.array([0] * 9 + [1] + [1] * 3 + [0] * 7)
    low, high = multiclass.top_calibration(labels, scores)
    assert (low.rows, low.predicted, low.observed) == (10, pytest.approx(0.6), pytest.approx(0.3))
    assert (high.predicted, high.observed) == (pytest.approx(0.9), pytest.approx(0.9))
    assert multiclass.multiclass_scores(labels, scores)["calibration_error"] == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("labels", "scores", "rule"),
    [
        ([], np.zeros((0, 2)), "at least one"),
        ([0, 1], np.zeros(2), "equally many rows"),
        ([0, 2], np.full((2, 2), 0.5), "labels other than 0 to 1: the model has 2 classes"),
        ([0, 0.5], np.full((2, 2), 0.5), "labels other than 0 to 1"),
        ([0, 1], np.array([[0.5, 0.5], [math.nan, 1]]), "1 of 2 scores are not finite"),
    ],
)
def test_what_cannot_be_scored_is_refused(labels: list[float], scores: np.ndarray, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        multiclass.multiclass_scores(np.array(labels), scores)
