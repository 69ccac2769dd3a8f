"""Scores of several labels: each alone, and what cannot be scored."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sklearn

from sparkring.pipelines.evaluation.multilabel import scores_by_label

DRAW = np.random.default_rng(1)
LABELS, SCORES = DRAW.integers(0, 2, (200, 3)), DRAW.random((200, 3))


def test_each_label_has_its_positives_and_scores_by_name() -> None:
    labels, weights = LABELS * [1, 1, 0], np.arange(200) % 2 * (1.0 + np.arange(200) % 3)
    by = {"sample_weight": weights[1::2]}
    first, second, third = scores_by_label(["a", "b", "c"], labels, SCORES, weights)
    assert (first.value, second.value) == ("a", "b")
    assert first.rows == labels[1::2, 0].sum() and third.rows == 0, "rows of weight 0 count for nothing"
    assert second.scores["auc"] == pytest.approx(sklearn.roc_auc_score(labels[1::2, 1], SCORES[1::2, 1], **by))
    assert second.scores["f1"] == pytest.approx(sklearn.f1_score(labels[1::2, 1], SCORES[1::2, 1] > 0.5, **by))
    assert third.scores.keys() == {"f1", "loss"}, "no row has it, so nothing is ranked"
    low = SCORES / 2
    low[0] = 0.9  # of weight 0
    missed, _, never = scores_by_label(["a", "b", "c"], labels, low, weights)
    assert never.scores.keys() == {"loss"}, "nor predicted: the mean of F1 leaves it out, and so does the table"
    assert missed.scores["f1"] == 0


def test_scores_of_other_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many rows of equally many labels"):
        scores_by_label(["a", "b", "c"], LABELS[:, :2], SCORES)
