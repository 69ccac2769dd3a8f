from __future__ import annotations

import math

import numpy as np
import pytest

from sparkring.conf.blocks.promotion import COMPARED_TASKS, HIGHER_IS_BETTER
from sparkring.pipelines.evaluation.held_out import held_out_scores, is_better

LABELS = np.arange(12) % 6
PREDICTIONS = {"binary": np.linspace(0, 1, 12), "multiclass": np.eye(6)[LABELS], "regression": LABELS + 0.5}


@pytest.mark.parametrize("task", COMPARED_TASKS)
def test_the_metrics_that_rules_may_name_are_those_a_task_has(task: str) -> None:
    labels = LABELS % 2 if task == "binary" else LABELS
    assert held_out_scores(task, labels, PREDICTIONS[task]).keys() == HIGHER_IS_BETTER[task].keys()


@pytest.mark.parametrize(
    ("metric", "one", "other", "better"),
    [
        ("rmse", 1.0, 2.0, True), ("r2", 1.0, 2.0, False), ("auc", 0.8, 0.7, True), ("brier", 0.2, 0.1, False),
        ("macro_f1", 0.5, 0.5, False), ("loss", math.nan, 1.0, False), ("auc", math.nan, 0.1, False),
    ],
)  # fmt: skip
def test_less_is_better_of_errors_and_more_of_scores(metric: str, one: float, other: float, better: bool) -> None:
    assert is_better(metric, one, other) is better
