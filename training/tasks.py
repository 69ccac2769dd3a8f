"""Build tasks: one class per kind of table task, and the user's own classes by reference."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sparkring.conf.references import load_setting
from sparkring.conf.tasks import BINARY, MULTICLASS, MULTILABEL, POISSON, REGRESSION, Metric, TaskKind, task_kind
from sparkring.training.data.batch import Columns
from sparkring.training.metrics import Rows, is_mean, metrics_of, row_values
from sparkring.training.models.gpt import LanguageModelTask
from sparkring.training.models.task import Task

Tensor = torch.Tensor
NO_ARGS: Mapping[str, Any] = MappingProxyType({})
LOSS = "loss"  # of every task; ranks compute it as they train, from outputs rather than probabilities


class _TableTask(Task):
    """A task of a table: its description, its inputs, and its metrics by the formulas of `training/metrics.py`.

    Inputs are the named columns as positional tensors, or one dict of all feature columns. A model of several members
    gives (B, members, ...) while it trains, and a row's loss is the mean over them.
    """

    kind: TaskKind
    output_dim = 1  # of a model's outputs, (B,) or (B, outputs)

    def __init__(self, features: list[str], label: str, inputs: list[str] | None = None):
        self.features, self.label, self.columns = features, label, inputs

    def inputs(self, columns: Columns) -> tuple[Any, ...]:
        if self.columns is not None:
            return tuple(columns[name] for name in self.columns)
        return ({name: columns[name] for name in self.features},)

    def labels(self, columns: Columns) -> Tensor:
        found: Tensor = columns[self.label]
        return found

    def loss(self, outputs: Tensor, columns: Columns) -> Tensor:
        labels = self.labels(columns)
        if outputs.dim() == self.output_dim:
            return self.row_loss(outputs, labels)
        rows, members = outputs.shape[:2]
        losses = self.row_loss(outputs.flatten(0, 1), labels.repeat_interleave(members, dim=0))
        return losses.reshape(rows, members).mean(dim=1)

    @abstractmethod
    def row_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each row (B,) from one model's outputs."""

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the probability of the positive class (B,), of each class or label (B, classes), or the value (B,)."""
        return outputs

    def decisions(self, outputs: Tensor) -> Tensor:
        """Return the input of metrics on ranks: `probabilities`, or the predicted class (B,)."""
        return self.probabilities(outputs).double()

    def metric_names(self) -> tuple[str, ...]:
        return tuple(metric.name for metric in self._on_ranks(means=True))

    def metric_sums(self, outputs: Tensor, columns: Columns) -> dict[str, Tensor]:
        scores, labels = self.decisions(outputs), self.labels(columns).double()
        rows = Rows(self.kind.form, labels.detach().cpu().numpy(), scores.detach().cpu().numpy())
        found = {metric.name: row_values(metric, rows) for metric in self._on_ranks(means=True)}
        return {name: torch.from_numpy(values).to(outputs.device).double() for name, values in found.items()}

    def split_metric_names(self) -> tuple[str, ...]:
        return tuple(metric.name for metric in self._on_ranks(means=False))

    def split_values(self, outputs: Tensor, columns: Columns) -> Tensor:
        scores, labels = self.decisions(outputs), self.labels(columns).double()
        return torch.cat([each.reshape(len(each), -1) for each in (scores, labels)], dim=1)

    def split_metrics(self, values: Tensor, weights: Tensor | None = None) -> dict[str, float]:
        scores, labels = (part.numpy() for part in values.chunk(2, dim=1))
        shape = scores.shape if self.kind.has_several_labels else scores.shape[:1]
        rows = Rows(self.kind.form, labels.reshape(shape), scores.reshape(shape))
        return metrics_of(self._on_ranks(means=False), rows, None if weights is None else weights.numpy())

    def _on_ranks(self, means: bool) -> list[Metric]:
        """List metrics that ranks compute besides the loss: means over rows, or those of all rows together."""
        metrics = (metric for metric in self.kind.metrics if metric.on_ranks and metric.name != LOSS)
        return [metric for metric in metrics if is_mean(metric) == means]


class BinaryTask(_TableTask):
    """outputs: logits (B,); label 0 or 1. Log loss in nats."""

    kind = BINARY

    def row_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype), reduction="none")

    def probabilities(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs.double())


class MulticlassTask(_TableTask):
    """outputs: logits (B, classes); label an integer class."""

    kind, output_dim = MULTICLASS, 2

    def row_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels.long(), reduction="none")

    def decisions(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1).double()

    def probabilities(self, outputs: Tensor) -> Tensor:
        return torch.softmax(outputs.double(), dim=1)


class MultilabelTask(_TableTask):
    """outputs: logits (B, L); L labels of 0 and 1, in columns of their own or one of tags (B, L).

    Log loss in nats, the mean over labels. A label that all rows of a split have, or none, has no part in means of AUC
    and average precision over labels (macro); one that is neither there nor predicted has none in that of F1.
    """

    kind, output_dim = MULTILABEL, 2

    def __init__(self, features: list[str], label: str | list[str], inputs: list[str] | None = None):
        super().__init__(features, label if isinstance(label, str) else "", inputs)
        self.several = [] if isinstance(label, str) else label

    def labels(self, columns: Columns) -> Tensor:
        if not self.several:
            return super().labels(columns).float()
        return torch.stack([columns[name].float() for name in self.several], dim=1)

    def row_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        entropy = functional.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype), reduction="none")
        return entropy.mean(dim=1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs.double())


class RegressionTask(_TableTask):
    """outputs: values (B,). Loss is the squared error; `abs_error` in the label's unit."""

    kind = REGRESSION

    def row_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels.to(outputs.dtype)).square()


class PoissonTask(_TableTask):
    """outputs: log of the expected count or rate (B,). Loss is the Poisson deviance.

    Label: a count; or a rate, the count divided by the exposure, where `etl.weight` is the exposure. That is the
    likelihood of counts with the offset log(exposure), and how scikit-learn's PoissonRegressor is used.
    """

    kind = POISSON

    def row_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        rate = labels.to(outputs.dtype)
        return 2 * (torch.xlogy(rate, rate) - rate * outputs - rate + outputs.exp())

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.double().exp()


TASK_CLASSES: dict[str, type[_TableTask]] = {
    cls.kind.name: cls for cls in (BinaryTask, MulticlassTask, MultilabelTask, RegressionTask, PoissonTask)
}


def model_class(reference: str) -> type[nn.Module]:
    """Return the torch module that `model.factory` names; ValueError for anything else."""
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
        kind: name of a task in `conf/tasks.py`, or a reference to a class derived from Task.
        features: columns the model sees.
        label: the label's column, or the columns of several; ValueError if a table task has none, or too many.
        inputs: columns passed to the model one by one; None: one dict of all features.
        pad_id: token that is never a target of a language model.
        args: arguments of the user's class (model.task_args).
    """
    described = task_kind(kind)
    if described.is_text:
        return LanguageModelTask(pad_id)
    cls: Any = load_setting(kind, "model.task") if described.is_own else TASK_CLASSES[kind]
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
