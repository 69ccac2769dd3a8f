"""Build tasks: one class per kind of table task, and the user's own classes by reference."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sparkring.conf.references import load_setting
from sparkring.conf.tasks import task_kind
from sparkring.training.data.batch import Columns
from sparkring.training.models.gpt import LanguageModelTask
from sparkring.training.models.scores import (
    MULTILABEL_SCORES,
    class_f1,
    fit_scores,
    macro_f1,
    multilabel_means,
    ranking_scores,
)
from sparkring.training.models.task import Task

Tensor = torch.Tensor
NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class _TableTask(Task):
    """Inputs: the named columns as positional tensors, or one dict of all feature columns."""

    def __init__(self, features: list[str], label: str, inputs: list[str] | None = None):
        self.features, self.label, self.columns = features, label, inputs

    def inputs(self, columns: Columns) -> tuple[Any, ...]:
        if self.columns is not None:
            return tuple(columns[name] for name in self.columns)
        return ({name: columns[name] for name in self.features},)

    def labels(self, columns: Columns) -> Tensor:
        found: Tensor = columns[self.label]
        return found

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Probability of the positive class (B,), of each class or label (B, classes), or the value (B,)."""
        return outputs


class BinaryTask(_TableTask):
    """outputs: logits (B,); label 0 or 1. Log loss in nats."""

    def loss(self, outputs: Tensor, columns: Columns) -> Tensor:
        label = columns[self.label].to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(outputs, label, reduction="none")

    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy", "positive_share")

    def metric_sums(self, outputs: Tensor, columns: Columns) -> dict[str, Tensor]:
        label = columns[self.label].bool()
        return {"accuracy": ((outputs > 0) == label).double(), "positive_share": label.double()}

    def split_metric_names(self) -> tuple[str, ...]:
        return ("auc", "average_precision", "f1")

    def split_values(self, outputs: Tensor, columns: Columns) -> Tensor:
        return torch.stack([self.probabilities(outputs), columns[self.label].double()], dim=1)

    def split_metrics(self, values: Tensor, weights: Tensor | None = None) -> dict[str, float]:
        scores, labels = values.T
        f1 = class_f1((labels > 0.5).long(), (scores > 0.5).long(), weights)
        return ranking_scores(scores, labels, weights) | {"f1": float(f1[1]) if len(f1) > 1 else 0.0}

    def probabilities(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs.double())


class MulticlassTask(_TableTask):
    """outputs: logits (B, classes); label an integer class."""

    def loss(self, outputs: Tensor, columns: Columns) -> Tensor:
        return functional.cross_entropy(outputs, columns[self.label].long(), reduction="none")

    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy",)

    def metric_sums(self, outputs: Tensor, columns: Columns) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(dim=1) == columns[self.label].long()).double()}

    def split_metric_names(self) -> tuple[str, ...]:
        return ("macro_f1",)

    def split_values(self, outputs: Tensor, columns: Columns) -> Tensor:
        return torch.stack([outputs.argmax(dim=1).double(), columns[self.label].double()], dim=1)

    def split_metrics(self, values: Tensor, weights: Tensor | None = None) -> dict[str, float]:
        predicted, labels = values.long().T
        return {"macro_f1": macro_f1(labels, predicted, weights)}

    def probabilities(self, outputs: Tensor) -> Tensor:
        return torch.softmax(outputs.double(), dim=1)


class MultilabelTask(_TableTask):
    """outputs: logits (B, L); L labels of 0 and 1, in columns of their own or one of tags (B, L).

    Log loss in nats, the mean over labels. A label that all rows of a split have, or none, has no part in means of AUC
    and average precision over labels (macro); one that is neither there nor predicted has none in that of F1.
    """

    def __init__(self, features: list[str], label: str | list[str], inputs: list[str] | None = None):
        super().__init__(features, label if isinstance(label, str) else "", inputs)
        self.several = [] if isinstance(label, str) else label

    def labels(self, columns: Columns) -> Tensor:
        if not self.several:
            return super().labels(columns).float()
        return torch.stack([columns[name].float() for name in self.several], dim=1)

    def loss(self, outputs: Tensor, columns: Columns) -> Tensor:
        labels = self.labels(columns).to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none").mean(dim=1)

    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy",)

    def metric_sums(self, outputs: Tensor, columns: Columns) -> dict[str, Tensor]:
        return {"accuracy": ((outputs > 0) == self.labels(columns).bool()).double().mean(dim=1)}

    def split_metric_names(self) -> tuple[str, ...]:
        return MULTILABEL_SCORES

    def split_values(self, outputs: Tensor, columns: Columns) -> Tensor:
        return torch.cat([self.probabilities(outputs), self.labels(columns).double()], dim=1)

    def split_metrics(self, values: Tensor, weights: Tensor | None = None) -> dict[str, float]:
        scores_NL, labels_NL = values.chunk(2, dim=1)
        return multilabel_means(scores_NL, labels_NL, weights)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs.double())


class RegressionTask(_TableTask):
    """outputs: values (B,). Loss is the squared error; `abs_error` in the label's unit."""

    def loss(self, outputs: Tensor, columns: Columns) -> Tensor:
        return (outputs - columns[self.label].to(outputs.dtype)).square()

    def metric_names(self) -> tuple[str, ...]:
        return ("abs_error",)

    def metric_sums(self, outputs: Tensor, columns: Columns) -> dict[str, Tensor]:
        return {"abs_error": (outputs - columns[self.label]).abs().double()}

    def split_metric_names(self) -> tuple[str, ...]:
        return ("rmse", "r2")

    def split_values(self, outputs: Tensor, columns: Columns) -> Tensor:
        return torch.stack([outputs.double(), columns[self.label].double()], dim=1)

    def split_metrics(self, values: Tensor, weights: Tensor | None = None) -> dict[str, float]:
        predicted, labels = values.T
        return fit_scores(predicted, labels, weights)


TABLE_TASKS: dict[str, type[_TableTask]] = {
    "binary": BinaryTask,
    "multiclass": MulticlassTask,
    "multilabel": MultilabelTask,
    "regression": RegressionTask,
}


def model_class(reference: str) -> type[nn.Module]:
    """The torch module that `model.factory` names; ValueError for anything else."""
    found = load_setting(reference, "model.factory")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"model.factory = {reference!r}: is {found!r}, not a class derived from torch.nn.Module")
    return found


def build_task(
    kind: str,
    features: list[str],
    label: str | list[str] | None,
    inputs: list[str] | None,
    pad_id: int = -100,
    args: Mapping[str, Any] = NO_ARGS,
) -> Task:
    """Make a task by name or by `module:Class`, called as (features, label, inputs, **args).

    Args:
        kind: of TABLE_TASKS, `language_model`, or a reference to a class derived from Task.
        features: columns the model sees.
        label: the label's column, or the columns of several; ValueError if a table task has none, or too many.
        inputs: columns passed to the model one by one; None: one dict of all features.
        pad_id: token that is never a target of a language model.
        args: of the user's class (model.task_args).
    """
    described = task_kind(kind)
    if described.is_text:
        return LanguageModelTask(pad_id)
    cls: Any = load_setting(kind, "model.task") if described.is_own else TABLE_TASKS[kind]
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise ValueError(f"model.task = {kind!r}: is {cls!r}, not a class derived from sparkring.training.tasks.Task")
    if label is None:
        raise ValueError(f"model.label: task {kind!r} needs a label column, the dataset marks none; name it")
    if isinstance(label, list) and described.is_table and not described.has_several_labels:
        raise ValueError(
            f"model.label: task {kind!r} has one label, the dataset has {label}; name one, or set model.task to "
            "multilabel"
        )
    make_task: Any = cls
    try:
        inspect.signature(make_task).bind(features, label, inputs, **args)
    except TypeError as error:
        given = f", **{dict(args)}" if args else ""
        raise ValueError(f"model.task = {kind!r}: is made as Class(features, label, inputs{given}): {error}") from None
    task: Task = make_task(features, label, inputs, **args)
    return task


def check_takes_weights(task: Task) -> None:
    """Raise ValueError for a task whose `split_metrics` has no place for the rows' weights."""
    if task.split_metric_names():
        try:
            inspect.signature(task.split_metrics).bind(None, None)
        except TypeError:
            raise ValueError(
                f"etl.weight: rows have weights, and {type(task).__name__}.split_metrics takes none: define "
                "split_metrics(self, values, weights=None), weights (N,) beside values"
            ) from None
