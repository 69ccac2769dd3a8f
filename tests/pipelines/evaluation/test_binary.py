from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparkring.pipelines.evaluation import binary as metrics

from . import binary_oracle as oracle

# few distinct scores, so that ties are common; certain and impossible ones are among them
PAIRS = st.lists(st.tuples(st.booleans(), st.integers(0, 8)), min_size=1, max_size=60)
rows = PAIRS.filter(lambda pairs: len({label for label, _ in pairs}) == 2)
VALUES = st.sampled_from([None, "a", "10", "9", "null", 2.0, 2.5, 3, float("nan")])


def split(pairs: list[tuple[bool, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([label for label, _ in pairs], dtype=np.int8), np.array([score / 8 for _, score in pairs])


@given(PAIRS)
@example([(True, 8)])
@example([(False, 8), (False, 0)])
def test_scores_equal_the_oracle_with_ties_and_with_one_class(pairs: list[tuple[bool, int]]) -> None:
    labels, scores = split(pairs)
    expected = oracle.binary_scores(labels, scores)
    found = metrics.binary_scores(labels, scores)
    assert list(found) == list(expected) and found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(rows)
def test_curves_equal_the_oracle(pairs: list[tuple[bool, int]]) -> None:
    labels, scores = split(pairs)
    counts, curves = oracle.confusion(labels, scores), metrics.threshold_curves(labels, scores)
    assert curves is not None
    roc, (precision, recall) = oracle.roc_curve(counts), oracle.precision_recall(counts)
    for found, expected in zip(
        (curves.false_positive_rate, curves.true_positive_rate, curves.precision, curves.recall),
        (*roc, precision, recall),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert curves.positive_share == pytest.approx(counts.positives / len(labels), abs=1e-12)


def test_a_large_sample_scores_as_the_oracle_does() -> None:
    generator = np.random.default_rng(1)
    scores = generator.beta(2, 6, 100_000)
    labels = generator.uniform(size=scores.size) < scores
    assert metrics.binary_scores(labels, scores) == pytest.approx(oracle.binary_scores(labels, scores), rel=1e-12)
    found, expected = metrics.calibration(labels, scores), oracle.calibration(labels, scores)
    assert [vars(each) for each in found] == [pytest.approx(vars(each), rel=1e-12) for each in expected]


@given(st.lists(st.tuples(VALUES, st.integers(0, 8)), min_size=1))
def test_shares_by_value_equal_the_oracle(pairs: list[tuple[Any, int]]) -> None:
    values, scores = [value for value, _ in pairs], np.array([score / 8 for _, score in pairs])
    labels = scores > 0.4
    found, expected = metrics.share_by(values, labels, scores), oracle.share_by(values, labels, scores)
    assert [group.value for group in found] == [group.value for group in expected]
    for one, other in zip(found, expected, strict=True):
        numbers = {name: value for name, value in vars(one).items() if name != "value"}
        assert numbers == pytest.approx({name: vars(other)[name] for name in numbers}, rel=1e-12)


@given(rows, st.randoms())
def test_the_order_of_rows_does_not_matter(pairs: list[tuple[bool, int]], random: Any) -> None:
    shuffled = list(pairs)
    random.shuffle(shuffled)

    def of(some: list[tuple[bool, int]]) -> dict[str, float]:
        return metrics.binary_scores(np.array([float(a) for a, _ in some]), np.array([b / 8 for _, b in some]))

    assert of(pairs) == pytest.approx(of(shuffled), rel=1e-12, abs=1e-15)


@given(rows, st.integers(1, 20))
def test_calibration_covers_every_row_once(pairs: list[tuple[bool, int]], bins: int) -> None:
    labels = np.array([float(label) for label, _ in pairs])
    scores = np.array([score / 8 for _, score in pairs])
    found = metrics.calibration(labels, scores, bins)
    assert 1 <= len(found) <= bins and sum(b.rows for b in found) == len(pairs)
    assert sum(b.rows * b.observed for b in found) == pytest.approx(labels.sum())
    assert sum(b.rows * b.predicted for b in found) == pytest.approx(scores.sum())
    assert [b.predicted for b in found] == sorted(b.predicted for b in found)


def test_calibration_of_a_calibrated_and_an_overconfident_model() -> None:
    generator = np.random.default_rng(0)
    truth = generator.uniform(size=200_000)
    labels = (generator.uniform(size=truth.size) < truth).astype(float)
    assert metrics.calibration_error(metrics.calibration(labels, truth)) < 0.01
    assert metrics.calibration_error(metrics.calibration(labels, np.round(truth))) > 0.2
    assert metrics.binary_scores(labels, truth)["auc"] == pytest.approx(5 / 6, abs=0.005)


def test_one_class_has_no_auc() -> None:
    assert metrics.threshold_curves(np.zeros(3), np.array([0.1, 0.2, 0.3])) is None
    assert metrics.binary_scores(np.zeros(3), np.array([0.1, 0.2, 0.3])).keys() == {
        "loss",
        "brier",
        "accuracy",
        "f1",
        "calibration_error",
    }


@pytest.mark.parametrize(
    ("labels", "scores", "rule"),
    [
        ([], [], "at least one"),
        ([1, 0], [0.5], "equally many"),
        ([1, 2], [0.5, 0.5], "other than 0 and 1"),
        ([1, 0], [0.5, math.nan], "1 of 2 scores are not finite"),
    ],
)
def test_what_cannot_be_scored_is_refused(labels: list[float], scores: list[float], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        metrics.binary_scores(np.array(labels), np.array(scores))


def test_share_by_value() -> None:
    groups = metrics.share_by(
        ["10", "9", None, "UA", "9"], np.array([1, 0, 1, 1, 1]), np.array([0.5, 0.2, 0.9, 0.4, 0.4])
    )
    assert [(g.value, g.rows, g.observed) for g in groups] == [
        ("9", 2, 0.5),
        ("10", 1, 1.0),
        ("UA", 1, 1.0),
        ("null", 1, 1.0),
    ]
    assert groups[0].predicted == pytest.approx(0.3)
    assert [g.value for g in metrics.share_by(np.array([10.0, np.nan, 2.0]), np.ones(3), np.ones(3))] == [
        "2",
        "10",
        "null",
    ]
