"""What is asked of a model: its inputs, its per-row loss, its metrics. One class per kind of task, all stateless."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from conf.references import NoSuchName, load_reference, module_of
from training.data.batch import Columns
from training.parallel.base import Task

Tensor = torch.Tensor


class _TableTask:
    """Inputs: the named columns as positional tensors, or one dict of all feature columns."""

    def __init__(self, features: list[str], label: str, inputs: list[str] | None = None):
        self.features, self.label, self.columns = features, label, inputs

    def inputs(self, columns: Columns) -> tuple[Any, ...]:
        if self.columns is not None:
            return tuple(columns[name] for name in self.columns)
        return ({name: columns[name] for name in self.features},)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """What the held-out report is drawn from: probability of the positive class, class shares, or the value."""
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

    def probabilities(self, outputs: Tensor) -> Tensor:
        return torch.softmax(outputs.double(), dim=1)


class RegressionTask(_TableTask):
    """outputs: values (B,). Loss is the squared error; `abs_error` in the label's unit."""

    def loss(self, outputs: Tensor, columns: Columns) -> Tensor:
        return (outputs - columns[self.label].to(outputs.dtype)).square()

    def metric_names(self) -> tuple[str, ...]:
        return ("abs_error",)

    def metric_sums(self, outputs: Tensor, columns: Columns) -> dict[str, Tensor]:
        return {"abs_error": (outputs - columns[self.label]).abs().double()}


TASK_METHODS = ("inputs", "loss", "metric_names", "metric_sums")
TABLE_TASKS: dict[str, Any] = {"binary": BinaryTask, "multiclass": MulticlassTask, "regression": RegressionTask}


def load_setting(reference: str, key: str) -> Any:
    """Import `module:name`. ValueError names the configuration key, what was found and what to do."""
    try:
        return load_reference(reference)
    except ImportError as error:
        raise ValueError(
            f"{key} = {reference!r}: module {module_of(reference)!r} cannot be imported ({error}); it must be on the "
            "Python path of the workers (install it there, or ship it with --py-files)"
        ) from error
    except NoSuchName as error:
        raise ValueError(f"{key} = {reference!r}: {error}") from error


def model_class(reference: str) -> type[nn.Module]:
    """The torch module that `model.factory` names. ValueError for anything else: it would be called."""
    found = load_setting(reference, "model.factory")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"model.factory = {reference!r}: is {found!r}, not a class derived from torch.nn.Module")
    return found


def build_task(kind: str, features: list[str], label: str | None, inputs: list[str] | None, pad_id: int = -100) -> Task:
    """A task by name or by the user's `module:Class`, which is constructed as (features, label, inputs).

    `pad_id`: token that is never a target of a language model.
    """
    if kind == "language_model":
        from training.models.gpt import LanguageModelTask

        return LanguageModelTask(pad_id)
    cls = TABLE_TASKS[kind] if kind in TABLE_TASKS else load_setting(kind, "model.task")
    if not (isinstance(cls, type) and all(hasattr(cls, name) for name in TASK_METHODS)):
        raise ValueError(f"model.task = {kind!r}: is {cls!r}, not a class with the methods {', '.join(TASK_METHODS)}")
    if label is None:
        raise ValueError(f"model.label: task {kind!r} needs a label column, the dataset marks none; name it")
    task: Task = cls(features, label, inputs)
    return task
