"""Scores of several labels: each alone, and what cannot be scored."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sklearn

from sparkring.pipelines.evaluation.multilabel import multilabel_scores, scores_by_label

DRAW = np.random.default_rng(1)
LABELS, SCORES = DRAW.integers(0, 2, (200, 3)), DRAW.random((200, 3))


def test_loss_and_accuracy_are_means_over_rows_and_labels() -> None:
    weights = DRAW.random(200)
    found = multilabel_scores(LABELS, SCORES, weights)
    each = [sklearn.log_loss(LABELS[:, n], SCORES[:, n], sample_weight=weights) for n in range(3)]
    assert found["loss"] == pytest.approx(np.mean(each), rel=1e-12)
    right = [sklearn.accuracy_score(LABELS[:, n], SCORES[:, n] > 0.5, sample_weight=weights) for n in range(3)]
    assert found["accuracy"] == pytest.approx(np.mean(right), rel=1e-12)


def test_each_label_has_its_positives_and_scores_by_name() -> None:
    labels, weights = LABELS * [1, 1, 0], np.arange(200) % 2 * 1.0
    first, second, third = scores_by_label(["a", "b", "c"], labels, SCORES, weights)
    assert (first.value, second.value) == ("a", "b")
    assert first.rows == labels[1::2, 0].sum() and third.rows == 0, "rows of weight 0 count for nothing"
    assert second.scores["auc"] == pytest.approx(sklearn.roc_auc_score(labels[1::2, 1], SCORES[1::2, 1]))
    assert second.scores["f1"] == pytest.approx(sklearn.f1_score(labels[1::2, 1], SCORES[1::2, 1] > 0.5))
    assert third.scores.keys() == {"f1", "loss"}, "no row has it, so nothing is ranked"
    assert "macro_auc" not in multilabel_scores(labels * 0, SCORES)
    low = SCORES / 2
    low[0] = 0.9  # of weight 0
    missed, _, never = scores_by_label(["a", "b", "c"], labels, low, weights)
    assert never.scores.keys() == {"loss"}, "nor predicted: the mean of F1 leaves it out, and so does the table"
    assert missed.scores["f1"] == 0


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        (LABELS[:, :2], SCORES, "as many rows of as many labels"),
        (LABELS[:, 0], SCORES[:, 0], "as many rows of as many labels"),
        (LABELS * 2, SCORES, "other than 0 and 1"),
        (LABELS, SCORES * np.where(np.arange(3) == 1, np.nan, 1), "200 of 200 scores are not finite"),
    ],
)
def test_what_is_no_score_of_several_labels_is_refused(labels: np.ndarray, scores: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        multilabel_scores(labels, scores)
