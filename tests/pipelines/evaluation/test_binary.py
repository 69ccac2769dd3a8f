from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from sparkring.pipelines.evaluation import binary as metrics

# few distinct scores, so that ties are common; certain and impossible ones are among them
PAIRS = st.lists(st.tuples(st.booleans(), st.integers(0, 8)), min_size=1, max_size=60)
rows = PAIRS.filter(lambda pairs: len({label for label, _ in pairs}) == 2)
VALUES = st.sampled_from([None, "a", "10", "9", "null", 2.0, 2.5, 3, float("nan")])


def split(pairs: list[tuple[bool, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([label for label, _ in pairs], dtype=np.int8), np.array([score / 8 for _, score in pairs])


@given(rows)
def test_curves_are_those_of_scikit_learn(pairs: list[tuple[bool, int]]) -> None:
    labels, scores = split(pairs)
    weights = np.arange(len(labels)) % 3 + 0.5
    for by in (None, weights):
        curves = metrics.threshold_curves(labels, scores, by)
        assert curves is not None
        roc = sklearn.roc_curve(labels, scores, sample_weight=by, drop_intermediate=False)
        precision, recall, _ = sklearn.precision_recall_curve(labels, scores, sample_weight=by)
        ours = curves.false_positive_rate, curves.true_positive_rate, curves.precision, curves.recall
        for found, expected in zip(ours, (*roc[:2], precision[-2::-1], recall[-2::-1]), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        assert curves.positive_share == pytest.approx(np.average(labels, weights=by), abs=1e-12)
        assert curves.auc == pytest.approx(sklearn.roc_auc_score(labels, scores, sample_weight=by), abs=1e-12)
        average = sklearn.average_precision_score(labels, scores, sample_weight=by)
        assert curves.average_precision == pytest.approx(average, abs=1e-12)


def test_one_class_has_no_curves() -> None:
    assert metrics.threshold_curves(np.zeros(3), np.array([0.1, 0.2, 0.3])) is None


def shown(value: Any) -> str:
    if value is None or value != value:
        return "null"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


@given(st.lists(st.tuples(VALUES, st.integers(0, 8)), min_size=1))
def test_shares_by_value_are_means_of_its_rows(pairs: list[tuple[Any, int]]) -> None:
    values, scores = [value for value, _ in pairs], np.array([score / 8 for _, score in pairs])
    labels, names = scores > 0.4, np.array([shown(value) for value in values])
    found = metrics.share_by(values, labels, scores)
    assert sorted(group.value for group in found) == sorted({*names})
    for group in found:
        of = names == group.value
        assert (group.rows, group.observed) == (of.sum(), pytest.approx(labels[of].mean()))
        assert group.predicted == pytest.approx(scores[of].mean())


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


@given(rows, st.integers(1, 60), st.integers(0, 8))
def test_what_is_flagged_is_counted_row_by_row(pairs: list[tuple[bool, int]], k: int, eighths: int) -> None:
    labels, scores = split(pairs)
    weights = np.arange(len(labels)) % 3 + 0.5
    top = metrics.top_threshold(scores, min(k, len(scores)))
    assert (scores >= top).sum() >= min(k, len(scores)) > (scores > top).sum()
    for by in (None, weights):
        w = np.ones(len(labels)) if by is None else by
        for found in metrics.flagged_at(labels, scores, [top, eighths / 8, 2.0], by):
            flagged = scores >= found.threshold
            kept = {"sample_weight": by, "zero_division": 0}
            assert found.precision == pytest.approx(sklearn.precision_score(labels, flagged, **kept))
            assert found.recall == pytest.approx(sklearn.recall_score(labels, flagged, **kept))
            assert found.share == pytest.approx(w[flagged].sum() / w.sum()) and found.threshold <= 1
            assert found.lift == pytest.approx(found.precision / np.average(labels, weights=w))


def test_nothing_is_said_of_thresholds_where_only_one_class_occurs() -> None:
    assert metrics.flagged_at(np.ones(3), np.array([0.1, 0.2, 0.3]), [0.0]) == []
