from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from pipelines import metrics

# few distinct scores, so that ties are common
rows = st.lists(st.tuples(st.booleans(), st.integers(0, 8)), min_size=2, max_size=60).filter(
    lambda pairs: len({label for label, _ in pairs}) == 2
)


@given(rows)
def test_equal_to_sklearn(pairs: list[tuple[bool, int]]) -> None:
    labels = np.array([label for label, _ in pairs], dtype=np.int8)
    scores = np.array([score / 8 for _, score in pairs])
    ours = metrics.binary_scores(labels, scores)
    assert ours["auc"] == pytest.approx(sklearn.roc_auc_score(labels, scores), abs=1e-12)
    assert ours["average_precision"] == pytest.approx(sklearn.average_precision_score(labels, scores), abs=1e-12)
    clipped = np.clip(scores, metrics.CLIP, 1 - metrics.CLIP)
    assert ours["loss"] == pytest.approx(sklearn.log_loss(labels, clipped), abs=1e-9)
    assert ours["brier"] == pytest.approx(sklearn.brier_score_loss(labels, scores), abs=1e-12)
    assert ours["accuracy"] == pytest.approx(sklearn.accuracy_score(labels, scores > 0.5))
    fpr, tpr = metrics.roc_curve(metrics.confusion(labels, scores))
    theirs = sklearn.roc_curve(labels, scores, drop_intermediate=False)
    assert fpr == pytest.approx(theirs[0]) and tpr == pytest.approx(theirs[1])


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
    assert metrics.roc_auc(metrics.confusion(labels, truth)) == pytest.approx(5 / 6, abs=0.005)


def test_one_class_has_no_auc() -> None:
    assert metrics.binary_scores(np.zeros(3), np.array([0.1, 0.2, 0.3])).keys() == {
        "loss",
        "brier",
        "accuracy",
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
