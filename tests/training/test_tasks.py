"""Tasks by name and by reference, and what their losses and scores are."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparkring.conf.references import load_setting
from sparkring.training.tasks import Task, build_task, check_takes_weights, model_class


class OwnTask(Task):
    def __init__(self, features: list[str], label: str, inputs: list[str] | None) -> None:
        self.given = (features, label, inputs)

    def inputs(self, columns):
        return ()

    def loss(self, outputs, columns):
        return outputs


def test_inputs_are_one_dict_of_features_or_the_named_columns() -> None:
    columns = {"a": torch.ones(2), "b": torch.zeros(2), "y": torch.ones(2)}
    assert list(build_task("binary", ["a", "b"], "y", None).inputs(columns)[0]) == ["a", "b"]
    assert build_task("binary", ["a", "b"], "y", ["b"]).inputs(columns) == (columns["b"],)


@pytest.mark.parametrize(
    ("kind", "outputs", "label", "loss", "scores"),
    [
        ("binary", [0.0, 0.0], [0, 1], [math.log(2)] * 2, [0.5, 0.5]),
        ("regression", [1.0, 5.0], [1.0, 2.0], [0.0, 9.0], [1.0, 5.0]),
        (
            "poisson",
            [math.log(2), 0.0, 1.0],
            [2.0, 0.0, 3.0],
            [0.0, 2.0, 2 * (3 * math.log(3) - 6 + math.e)],
            [2.0, 1.0, math.e],
        ),
        ("multiclass", [[0.0, 0.0], [0.0, 0.0]], [0, 1], [math.log(2)] * 2, [[0.5, 0.5], [0.5, 0.5]]),
    ],
)
def test_losses_are_per_row_and_scores_are_probabilities(kind, outputs, label, loss, scores) -> None:
    task, columns = build_task(kind, ["x"], "y", None), {"y": torch.tensor(label)}
    assert task.loss(torch.tensor(outputs), columns).tolist() == pytest.approx(loss, abs=1e-6)
    assert task.probabilities(torch.tensor(outputs)).flatten().tolist() == pytest.approx(torch.tensor(scores).flatten())
    assert task.labels(columns) is columns["y"]
    assert set(task.metric_sums(torch.tensor(outputs), columns)) == set(task.metric_names())


def test_several_labels_have_a_loss_that_is_their_mean_and_are_columns_or_one_of_tags() -> None:
    columns = {"a": torch.tensor([0, 1]), "b": torch.tensor([True, True]), "tags": torch.tensor([[0.0, 1], [1, 1]])}
    outputs = torch.tensor([[0.0, 0.0], [2.0, -1.0]])
    expected = [math.log(2), (math.log1p(math.exp(-2)) + math.log1p(math.exp(1))) / 2]
    for label in (["a", "b"], "tags"):
        task = build_task("multilabel", ["x"], label, None)
        assert torch.equal(task.labels(columns), columns["tags"]), "columns in their order"
        assert task.loss(outputs, columns).tolist() == pytest.approx(expected)
        assert task.metric_sums(outputs, columns)["accuracy"].tolist() == [0.5, 0.5]
        assert task.probabilities(outputs).tolist()[0] == [0.5, 0.5]
        found = task.split_metrics(task.split_values(outputs, columns))
        assert set(found) == set(task.split_metric_names())
        assert found["macro_auc"] == 1.0, "of `a` alone: every row has `b`"


def test_a_task_of_one_label_takes_no_list_and_one_of_a_user_takes_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"task 'binary' has one label, the dataset has \['a', 'b'\]; name one, or set"
    ):
        build_task("binary", ["x"], ["a", "b"], None)
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(OwnTask=OwnTask))
    assert build_task("own:OwnTask", ["x"], ["a", "b"], None).given == (["x"], ["a", "b"], None)


def test_a_users_task_is_constructed_with_features_label_and_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(OwnTask=OwnTask))
    task = build_task("own:OwnTask", ["x"], "y", ["x"])
    assert isinstance(task, OwnTask) and task.given == (["x"], "y", ["x"])


def test_a_task_that_is_no_task_and_a_missing_label_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"model\.task = 'builtins:dict': is .*not a class derived from sparkring\.training\.tasks\.Task",
    ):
        build_task("builtins:dict", [], "y", None)
    with pytest.raises(ValueError, match=r"model\.label: task 'binary' needs a label column"):
        build_task("binary", ["x"], None, None)


def test_a_reference_that_cannot_be_imported_names_its_key() -> None:
    with pytest.raises(ValueError, match=r"model\.task = 'no_such:X': module 'no_such' cannot be imported"):
        load_setting("no_such:X", "model.task")
    with pytest.raises(ValueError, match=r"module 'math' has no 'x'"):
        load_setting("math:x", "model.task")
    with pytest.raises(ValueError, match=r"not a class derived from torch\.nn\.Module"):
        model_class("builtins:dict")
    assert model_class("torch.nn:Linear") is nn.Linear


def test_a_task_whose_metrics_of_a_split_take_no_weights_is_refused_where_rows_have_some() -> None:
    class OfOld(OwnTask):
        def split_metric_names(self) -> tuple[str, ...]:
            return ("auc",)

        def split_metrics(self, values):
            return {"auc": 1.0}

    check_takes_weights(build_task("binary", ["x"], "y", None))
    check_takes_weights(OwnTask(["x"], "y", None))
    with pytest.raises(ValueError, match=r"OfOld\.split_metrics takes none: define split_metrics\(self"):
        check_takes_weights(OfOld(["x"], "y", None))
