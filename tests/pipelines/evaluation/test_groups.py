"""Scores by value of a column: the most frequent ones, then the others together; none of few rows."""

from __future__ import annotations

import numpy as np
import pytest

from sparkring.conf.tasks import BINARY
from sparkring.pipelines.evaluation.groups import MOST_VALUES, group_scores
from sparkring.training.metrics import task_scores
from sparkring.training.worker.result import GroupScores, plain_name
from tests.pipelines.results import train_result

DRAW = np.random.default_rng(2)
SIZES = [40, 90, 10, *[20] * 10]
VALUES = DRAW.permutation(np.repeat([f"v{n:02}" for n in range(len(SIZES))], SIZES))
LABELS, SCORES = (DRAW.random(len(VALUES)) < 0.5).astype(float), DRAW.random(len(VALUES))


def found(min_rows: int, counted: np.ndarray | None = None) -> list[GroupScores]:
    def score(rows: np.ndarray) -> dict[str, float]:
        return task_scores(BINARY, LABELS[rows], SCORES[rows])

    return group_scores("c", VALUES, np.ones(len(VALUES), bool) if counted is None else counted, min_rows, score)


def test_the_most_frequent_values_are_scored_and_the_others_together() -> None:
    groups = found(min_rows=20)
    names = ["v01", "v00", *(f"v{n:02}" for n in range(3, 11))]
    assert [group.value for group in groups] == [*names, "all others (3)"] and len(names) == MOST_VALUES
    assert sum(group.rows for group in groups) == len(VALUES)
    rows = VALUES == "v00"
    assert groups[1].rows == 40 and groups[1].scores == task_scores(BINARY, LABELS[rows], SCORES[rows])
    rest = np.isin(VALUES, ["v02", "v11", "v12"])
    assert groups[-1].scores == task_scores(BINARY, LABELS[rest], SCORES[rest])


def test_values_of_few_rows_are_among_the_others_and_too_few_others_are_left_out() -> None:
    assert [(group.value, group.rows) for group in found(min_rows=41)] == [("v01", 90), ("all others (12)", 250)]
    assert [group.value for group in found(min_rows=91)] == ["all others (13)"]
    assert found(min_rows=len(VALUES) + 1) == []


def test_rows_of_weight_0_are_in_no_group() -> None:
    groups = found(20, counted=VALUES != "v01")
    assert groups[0].value == "v00" and sum(group.rows for group in groups) == len(VALUES) - 90


def test_two_metrics_of_each_group_are_in_mlflow_by_names_that_are_unique() -> None:
    scores = {"loss": 0.5, "auc": 0.7, "brier": 0.2}
    groups = [
        GroupScores(column="home town", value=value, rows=1, scores=scores) for value in ("UA", "a b", "a.b", "../..")
    ]
    names = train_result(groups=groups).group_metrics()
    assert len(names) == 8 and names[f"test/by_{plain_name('home town')}/UA/auc"] == pytest.approx(0.7)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzUA0123456789_-/") for name in names)
