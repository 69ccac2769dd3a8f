from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sklearn

from sparkring.conf.tasks import BINARY, MULTICLASS, REGRESSION, TABLE_TASKS, TASKS
from sparkring.pipelines.evaluation.held_out import held_out_scores

LABELS = np.arange(12) % 6
PREDICTIONS = {"binary": np.linspace(0, 1, 12), "multiclass": np.eye(6)[LABELS], "regression": LABELS + 0.5,
               "multilabel": np.linspace(0, 1, 24).reshape(12, 2)}  # fmt: skip


@pytest.mark.parametrize("task", TABLE_TASKS)
def test_the_metrics_that_rules_may_name_are_those_a_task_has(task: str) -> None:
    labels = {"binary": LABELS % 2, "multilabel": np.stack([LABELS % 2, LABELS % 3 > 0], axis=1)}.get(task, LABELS)
    assert held_out_scores(TASKS[task], labels, PREDICTIONS[task]).keys() == TASKS[task].directions.keys()


DRAW = np.random.default_rng(5)
CLASSES = DRAW.integers(0, 7, 500)
SCORED = {
    "binary": (CLASSES % 2, DRAW.random(500).round(2)),
    "multiclass": (CLASSES, DRAW.dirichlet(np.ones(7), 500) * 0.5 + 0.5 * np.eye(7)[DRAW.permutation(CLASSES)]),
    "regression": (CLASSES * 2.0, CLASSES * 2 + DRAW.normal(size=500)),
    "multilabel": (np.stack([CLASSES % 2, CLASSES > 4, CLASSES > 9], axis=1), DRAW.random((500, 3)).round(2)),
}


@pytest.mark.parametrize("task", TABLE_TASKS)
def test_a_row_of_weight_n_scores_as_n_rows_do(task: str) -> None:
    """But for calibration, whose slices are of equal counts of rows."""
    labels, scores = SCORED[task]
    weights = DRAW.integers(0, 4, 500)
    found = held_out_scores(TASKS[task], labels, scores, weights / 3)
    expected = held_out_scores(TASKS[task], np.repeat(labels, weights, axis=0), np.repeat(scores, weights, axis=0))
    assert found.keys() == expected.keys()
    for metric in found.keys() - {"calibration_error"}:
        assert found[metric] == pytest.approx(expected[metric], rel=1e-12), metric
    assert found != held_out_scores(TASKS[task], labels, scores)


def test_weighted_scores_are_those_of_scikit_learn() -> None:
    weights = DRAW.random(500) * (np.arange(500) % 3)
    labels, scores = SCORED["binary"]
    found = held_out_scores(BINARY, labels, scores, weights)
    assert found["auc"] == pytest.approx(sklearn.roc_auc_score(labels, scores, sample_weight=weights), rel=1e-12)
    assert found["f1"] == pytest.approx(sklearn.f1_score(labels, scores > 0.5, sample_weight=weights), rel=1e-12)
    classes, chances = SCORED["multiclass"]
    found = held_out_scores(MULTICLASS, classes, chances, weights)
    best = chances.argmax(axis=1)
    assert found["macro_f1"] == pytest.approx(
        sklearn.f1_score(classes, best, average="macro", sample_weight=weights), rel=1e-12
    )
    assert found["loss"] == pytest.approx(sklearn.log_loss(classes, chances, sample_weight=weights), rel=1e-12)
    values, guesses = SCORED["regression"]
    found = held_out_scores(REGRESSION, values, guesses, weights)
    assert found["r2"] == pytest.approx(sklearn.r2_score(values, guesses, sample_weight=weights), rel=1e-12)


def test_calibration_is_of_the_rows_weights() -> None:
    """Two slices of scores: of one half of the weight all labels are 1, and every row is given 0.5."""
    labels, scores, weights = np.array([1, 1, 0, 0]), np.full(4, 0.5), np.array([3.0, 3.0, 1.0, 1.0])
    assert held_out_scores(BINARY, labels, scores, weights)["calibration_error"] == pytest.approx(0.25)


def test_weights_that_are_all_zero_or_too_few_are_refused() -> None:
    for weights in (np.zeros(12), np.ones(11)):
        with pytest.raises(ValueError, match="there must be as many, and one above 0"):
            held_out_scores(REGRESSION, LABELS, LABELS + 0.5, weights)
