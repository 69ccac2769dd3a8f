"""Tasks as recipes, ranks, report and gates see them."""

from __future__ import annotations

from typing import get_args

import pytest

from sparkring.conf.tasks import BINARY, IN_VERDICT, TASKS, LabelForm, TaskName, is_better, task_kind


def test_recipes_may_name_exactly_the_tasks_that_are_described() -> None:
    assert {*get_args(TaskName)} == {*TASKS} and all(name == kind.name for name, kind in TASKS.items())


@pytest.mark.parametrize("name", TASKS)
def test_a_task_names_each_metric_once_and_its_baselines_have_some_of_them(name: str) -> None:
    names = [metric.name for metric in TASKS[name].metrics]
    assert len(names) == len(set(names)) and {*TASKS[name].baseline_metrics} <= {*names}
    assert {*TASKS[name].resampled} <= TASKS[name].directions.keys() <= {*names}


def test_a_metric_has_one_direction_in_all_tasks() -> None:
    for name in {metric.name for kind in TASKS.values() for metric in kind.metrics}:
        assert (
            len({metric.higher_is_better for k in TASKS.values() for metric in k.metrics if metric.name == name}) == 1
        )


def test_a_users_task_is_described_by_its_class_alone() -> None:
    own = task_kind("my.tasks:Own")
    assert own.is_own and not own.is_table and not own.is_text and own.directions == own.outputs([], []) == {}
    assert own.score_columns(["a", "b"], []) == ["class_a", "class_b"] and own.score_columns([], [], 2)[1] == "class_1"


def test_the_built_in_model_starts_at_the_mean_of_a_number() -> None:
    assert TASKS["regression"].initial_outputs(3.0, 2.0) == {"output_center": 3.0, "output_scale": 2.0}
    assert TASKS["poisson"].initial_outputs(1.0, 2.0) == {"output_center": 0.0}, "its outputs are logarithms"
    assert TASKS["poisson"].initial_outputs(0.0, 0.0) == TASKS["binary"].initial_outputs(0.5, 0.5) == {}


def test_the_share_of_positive_rows_judges_no_model() -> None:
    assert "positive_share" not in BINARY.directions and BINARY.metric("positive_share").on_ranks
    assert "positive_share" not in IN_VERDICT


@pytest.mark.parametrize(
    ("metric", "one", "other", "better"),
    [
        ("rmse", 1.0, 2.0, True), ("r2", 1.0, 2.0, False), ("auc", 0.8, 0.7, True), ("brier", 0.2, 0.1, False),
        ("macro_f1", 0.5, 0.5, False), ("loss", float("nan"), 1.0, False), ("auc", float("nan"), 0.1, False),
        ("ndcg_at_10", 0.2, 0.1, True),
    ],
)  # fmt: skip
def test_less_is_better_of_errors_and_more_of_scores(metric: str, one: float, other: float, better: bool) -> None:
    assert is_better(metric, one, other) is better


def test_predictions_are_named_by_what_the_label_is() -> None:
    assert TASKS["regression"].outputs([], []) == TASKS["binary"].outputs([], []) == {"prediction": "double"}
    assert TASKS["multiclass"].outputs(["a", "b"], []) == {
        "prediction": "string",
        "class_a": "double",
        "class_b": "double",
    }
    assert TASKS["multiclass"].outputs([], []) == {}, "as many as the model has outputs"
    assert TASKS["multilabel"].outputs([], ["k"]) == {"label_k": "double"}
    assert {kind.form for kind in TASKS.values()} == {*LabelForm} - {LabelForm.OWN}
