from __future__ import annotations

import numpy as np
import pytest

from sparkring.conf.tasks import BINARY, TASKS
from sparkring.pipelines.promotion.scores import resampled
from sparkring.training.metrics import task_scores

DRAW = np.random.default_rng(7)
CLASSES = DRAW.integers(0, 7, 300)
SCORED = {
    "binary": ((CLASSES > 3).astype(np.float64), DRAW.random(300)),
    "multiclass": (CLASSES, DRAW.dirichlet(np.ones(7), 300) * 0.5 + 0.5 * np.eye(7)[CLASSES]),
    "poisson": (DRAW.poisson(CLASSES) / 2, np.exp(DRAW.normal(size=300))),
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
    made = resampled(TASKS[task], metric, labels, (scores,), 3)
    random = np.random.default_rng(0)
    for value in made[:, 0]:
        drawn = random.integers(0, 300, 300)
        assert value == pytest.approx(task_scores(TASKS[task], labels[drawn], scores[drawn])[metric], abs=1e-12)


@pytest.mark.parametrize(("task", "metric"), RESAMPLED)
def test_rows_are_drawn_with_their_weights(task: str, metric: str) -> None:
    labels, scores = SCORED[task]
    weights = np.random.default_rng(1).random(300) * (np.arange(300) % 4)
    (value,) = resampled(TASKS[task], metric, labels, (scores,), 1, weights)[:, 0]
    drawn = np.random.default_rng(0).integers(0, 300, 300)
    expected = task_scores(TASKS[task], labels[drawn], scores[drawn], weights[drawn])
    assert value == pytest.approx(expected[metric], rel=1e-9)


def test_resamples_are_paired_and_always_the_same() -> None:
    draw = np.random.default_rng(3)
    labels = (draw.random(400) < 0.4).astype(np.float64)
    scores = np.clip(0.5 * labels + 0.6 * draw.random(400), 0.01, 0.99)
    for metric in ("loss", "auc", "average_precision"):
        made = resampled(BINARY, metric, labels, (scores, scores, scores**2), 50)
        assert (made[:, 0] == made[:, 1]).all(), metric  # one resample for all models
        assert np.array_equal(made, resampled(BINARY, metric, labels, (scores, scores, scores**2), 50))
        whole = task_scores(BINARY, labels, scores)[metric]
        assert made[:, 0].std() > 0 and abs(made[:, 0].mean() - whole) < 0.03, metric
