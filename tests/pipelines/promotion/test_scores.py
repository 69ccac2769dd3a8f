from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from sparkring.conf.tasks import BINARY, TASKS
from sparkring.pipelines.evaluation.held_out import held_out_scores
from sparkring.pipelines.promotion.scores import SortedRows, resampled, row_values

LABELS = np.array([0, 1, 1, 0, 1, 0, 0, 1], np.float64)
SCORES = np.array([0.1, 0.9, 0.4, 0.4, 0.7, 0.6, 0.2, 0.4])


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.1, 0.3, 0.5, 0.9]), st.integers(0, 4)), min_size=2))
@settings(max_examples=200)
def test_a_weighted_ranking_is_that_of_the_rows_repeated(rows) -> None:
    labels, scores, weights = (np.array(column) for column in zip(*rows, strict=True))
    repeated = np.repeat(labels, weights), np.repeat(scores, weights)
    ranking = SortedRows(labels.astype(np.float64), scores)
    if not 0 < repeated[0].sum() < len(repeated[0]):
        assert math.isnan(ranking.auc(weights))
        return
    assert ranking.auc(weights) == pytest.approx(sklearn.roc_auc_score(*repeated), abs=1e-12)
    expected = sklearn.average_precision_score(*repeated)
    assert ranking.average_precision(weights) == pytest.approx(expected, abs=1e-12)


def test_rows_of_a_metric_have_its_mean() -> None:
    whole = held_out_scores(BINARY, LABELS, SCORES)
    for metric in ("loss", "brier", "accuracy"):
        assert row_values("binary", metric, LABELS, SCORES).mean() == pytest.approx(whole[metric], abs=1e-12)


DRAW = np.random.default_rng(7)
CLASSES = DRAW.integers(0, 7, 300)
SCORED = {
    "binary": ((CLASSES > 3).astype(np.float64), DRAW.random(300)),
    "multiclass": (CLASSES, DRAW.dirichlet(np.ones(7), 300) * 0.5 + 0.5 * np.eye(7)[CLASSES]),
    "regression": (CLASSES * 2.0, CLASSES * 2 + DRAW.normal(size=300)),
    "multilabel": (
        np.stack([CLASSES > 3, CLASSES % 2, CLASSES > 9], axis=1).astype(float),
        DRAW.random((300, 3)) * [1, 1, 0.4],
    ),
}
RESAMPLED = [(t, m) for t in SCORED for m in sorted(TASKS[t].resampled)]


@pytest.mark.parametrize(("task", "metric"), RESAMPLED)
def test_a_resample_has_the_metric_of_the_rows_it_drew(task: str, metric: str) -> None:
    labels, scores = SCORED[task]
    made = resampled(task, metric, labels, (scores,), 3)
    random = np.random.default_rng(0)
    for value in made[:, 0]:
        drawn = random.integers(0, 300, 300)
        assert value == pytest.approx(held_out_scores(TASKS[task], labels[drawn], scores[drawn])[metric], abs=1e-12)


@pytest.mark.parametrize(("task", "metric"), RESAMPLED)
def test_rows_are_drawn_with_their_weights(task: str, metric: str) -> None:
    labels, scores = SCORED[task]
    weights = np.random.default_rng(1).random(300) * (np.arange(300) % 4)
    (value,) = resampled(task, metric, labels, (scores,), 1, weights)[:, 0]
    drawn = np.random.default_rng(0).integers(0, 300, 300)
    expected = held_out_scores(TASKS[task], labels[drawn], scores[drawn], weights[drawn])
    assert value == pytest.approx(expected[metric], rel=1e-9)


def test_resamples_are_paired_and_always_the_same() -> None:
    draw = np.random.default_rng(3)
    labels = (draw.random(400) < 0.4).astype(np.float64)
    scores = np.clip(0.5 * labels + 0.6 * draw.random(400), 0.01, 0.99)
    for metric in ("loss", "auc", "average_precision"):
        made = resampled("binary", metric, labels, (scores, scores, scores**2), 50)
        assert (made[:, 0] == made[:, 1]).all(), metric  # one resample for all models
        assert np.array_equal(made, resampled("binary", metric, labels, (scores, scores, scores**2), 50))
        whole = held_out_scores(BINARY, labels, scores)[metric]
        assert made[:, 0].std() > 0 and abs(made[:, 0].mean() - whole) < 0.03, metric
