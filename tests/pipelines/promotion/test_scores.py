from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from sparkring.pipelines.promotion.scores import Ranking, held_out_scores, resampled, row_values

LABELS = np.array([0, 1, 1, 0, 1, 0, 0, 1], np.float64)
SCORES = np.array([0.1, 0.9, 0.4, 0.4, 0.7, 0.6, 0.2, 0.4])


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.1, 0.3, 0.5, 0.9]), st.integers(0, 4)), min_size=2))
@settings(max_examples=200, deadline=None)
def test_a_weighted_ranking_is_that_of_the_rows_repeated(rows) -> None:
    labels, scores, weights = (np.array(column) for column in zip(*rows, strict=True))
    repeated = np.repeat(labels, weights), np.repeat(scores, weights)
    ranking = Ranking(labels.astype(np.float64), scores)
    if not 0 < repeated[0].sum() < len(repeated[0]):
        assert math.isnan(ranking.auc(weights))
        return
    assert ranking.auc(weights) == pytest.approx(sklearn.roc_auc_score(*repeated), abs=1e-12)
    expected = sklearn.average_precision_score(*repeated)
    assert ranking.average_precision(weights) == pytest.approx(expected, abs=1e-12)


def test_rows_of_a_metric_have_its_mean() -> None:
    whole = held_out_scores("binary", LABELS, SCORES)
    for metric in ("loss", "brier", "accuracy"):
        assert row_values("binary", metric, LABELS, SCORES).mean() == pytest.approx(whole[metric], abs=1e-12)


def test_scores_of_other_tasks() -> None:
    values = held_out_scores("regression", np.array([1.0, 2.0]), np.array([2.0, 0.0]))
    assert values == {"loss": 2.5, "abs_error": 1.5}
    classes = held_out_scores("multiclass", np.array([0.0, 2.0]), np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]))
    assert classes == {"loss": pytest.approx(1.5 * math.log(2)), "accuracy": 0.5}


def test_resamples_are_paired_and_always_the_same() -> None:
    draw = np.random.default_rng(3)
    labels = (draw.random(400) < 0.4).astype(np.float64)
    scores = np.clip(0.5 * labels + 0.6 * draw.random(400), 0.01, 0.99)
    for metric in ("loss", "auc", "average_precision"):
        made = resampled("binary", metric, labels, (scores, scores, scores**2), 50)
        assert (made[:, 0] == made[:, 1]).all(), metric  # one resample for all models
        assert np.array_equal(made, resampled("binary", metric, labels, (scores, scores, scores**2), 50))
        whole = held_out_scores("binary", labels, scores)[metric]
        assert made[:, 0].std() > 0 and abs(made[:, 0].mean() - whole) < 0.03, metric
