"""Describe the tasks a model can be trained for: label, metrics, baselines and outputs, each in one place.

Recipe checks import this module, so it loads no numpy. The formulas of the metrics are in `training/metrics.py`; losses
and model inputs are in `training/tasks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from sparkring.conf.plain_text import count_of

TaskName = Literal["binary", "regression", "poisson", "multiclass", "multilabel", "language_model"]
Family = Literal["net", "trees"]
"""What learns a task."""
Families = Literal[Family, "both"]
"""Values of model.family."""


class LabelForm(Enum):
    """What a row's label is. It decides the shape of predictions, the figures and how splits are compared."""

    FLAG = "0 or 1"  # predictions: probability of 1, (N,)
    CLASS = "a class number from 0"  # probability of each class, (N, classes)
    FLAGS = "several labels of 0 and 1"  # probability of each label, (N, labels)
    NUMBER = "a number"  # predicted number, (N,)
    TOKENS = "the next token"
    OWN = "whatever the user's own task reads"


@dataclass(frozen=True)
class Metric:
    """One metric: how it is named and shown, and who computes it."""

    name: str  # in recipes, summary.json and MLflow
    title: str  # in the report
    higher_is_better: bool | None  # None: describes the rows and judges no model
    on_ranks: bool = True  # computed at every evaluation, so train.best_metric may name it
    resampled: bool = True  # the bootstrap of promotion rules can compute it
    in_verdict: bool = False  # the report's first sentence compares it with the baselines


@dataclass(frozen=True)
class TaskKind:
    """One task, as recipes, ranks, report and gates see it."""

    name: str
    form: LabelForm
    metrics: tuple[Metric, ...] = ()
    baseline_metrics: tuple[str, ...] = ()  # metrics that the baselines have
    prediction: str = ""  # what `sparkring predict` writes for a row, as `init` says it

    @property
    def directions(self) -> dict[str, bool]:
        """Map each metric of held-out scores to whether higher values are better."""
        return {m.name: m.higher_is_better for m in self.metrics if m.higher_is_better is not None}

    @property
    def resampled(self) -> list[str]:
        """Metrics of held-out scores that the bootstrap can compute."""
        return [m.name for m in self.metrics if m.resampled and m.name in self.directions]

    @property
    def is_own(self) -> bool:
        """Whether the task is a class of the user's."""
        return self.form is LabelForm.OWN

    @property
    def is_text(self) -> bool:
        """Whether the model reads and writes tokens instead of rows of a table."""
        return self.form is LabelForm.TOKENS

    @property
    def is_table(self) -> bool:
        """Whether the task is a built-in one with a label column; its champion can be scored again."""
        return not (self.is_own or self.is_text)

    @property
    def has_several_labels(self) -> bool:
        """Whether a row may have several labels at once."""
        return self.form is LabelForm.FLAGS

    @property
    def has_label_range(self) -> bool:
        """Whether `range_problem` refuses any number."""
        return self.form in (LabelForm.FLAG, LabelForm.CLASS)

    def metric(self, name: str) -> Metric:
        """Return the metric with this name."""
        return next(metric for metric in self.metrics if metric.name == name)

    def text_problem(self, classes: Sequence[str]) -> str:
        """Explain why a label of texts does not fit the task; "" if it does. classes: [] if not known yet."""
        return ""

    def range_problem(self, label: str, low: float, high: float) -> str:
        """Explain why a label with values from `low` to `high` does not fit the task; "" if it does."""
        return ""

    def initial_outputs(self, mean: float, deviation: float) -> dict[str, float]:
        """Return `model.args` with which the built-in model starts at the label's mean; {} if it starts at 0."""
        return {}

    def score_columns(self, classes: Sequence[str], labels: Sequence[str], width: int = 0) -> list[str]:
        """List the columns of a row's scores where a row has one score per class or label.

        Args:
            classes: class names in output order; [] if classes are numbers.
            labels: label names of a multilabel dataset, in output order.
            width: number of classes without names.
        """
        if self.has_several_labels and labels:
            return [f"label_{name}" for name in labels]
        return [f"class_{name}" for name in classes or range(width)]

    def outputs(self, classes: Sequence[str], labels: Sequence[str]) -> dict[str, str]:
        """Map the columns of a prediction to their MLflow types; {} if they are not known before scoring."""
        if self.is_text:
            return {"text": "string"}
        if self.form in (LabelForm.FLAG, LabelForm.NUMBER):
            return {"prediction": "double"}
        likeliest = {"prediction": "string"} if self.form is LabelForm.CLASS and classes else {}
        named = [] if self.is_own else self.score_columns(classes, labels)
        return likeliest | dict.fromkeys(named, "double")


class _BinaryKind(TaskKind):
    def text_problem(self, classes: Sequence[str]) -> str:
        if len(classes) > 2:  # a dataset of one class is an error of the data, whatever its label
            return f" of {count_of(len(classes), 'class')} ({some(classes)}); set model.task to multiclass"
        return ""

    def range_problem(self, label: str, low: float, high: float) -> str:
        if low < 0 or high > 1:
            return "and binary has 0 and 1; set model.task to regression, or make a label of it in the SQL"
        return ""


class _MulticlassKind(TaskKind):
    def range_problem(self, label: str, low: float, high: float) -> str:
        if low < 0 or not low.is_integer() or not high.is_integer():
            return f"and classes are whole numbers from 0; set model.task to regression, {as_texts(label)}"
        return ""


class _MultilabelKind(TaskKind):
    def text_problem(self, classes: Sequence[str]) -> str:
        return ", one class per row; set model.task to multiclass, or make an array of texts of it, its tags"


class _NumberKind(TaskKind):
    def text_problem(self, classes: Sequence[str]) -> str:
        return ", a class and no number; set model.task to multiclass, or binary where there are two"

    def initial_outputs(self, mean: float, deviation: float) -> dict[str, float]:
        return {"output_center": mean, "output_scale": deviation}


class _RateKind(_NumberKind):
    @property
    def has_label_range(self) -> bool:
        return True

    def range_problem(self, label: str, low: float, high: float) -> str:
        if low < 0:
            return (
                f"and counts and rates are at least 0; set model.task to {REGRESSION.name}, or mend {label} in the SQL"
            )
        return ""

    def initial_outputs(self, mean: float, deviation: float) -> dict[str, float]:
        return {"output_center": math.log(mean)} if mean > 0 else {}


def as_texts(label: str) -> str:
    """Return the remedy for class numbers that do not fit: make classes of their texts."""
    return f"or make texts of them, which are classes whatever they are: CAST({label} AS string) in the SQL"


def some(names: Sequence[str], most: int = 5) -> str:
    """Join the first names with commas."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


LOG_LOSS = Metric("loss", "log loss (nats)", False, in_verdict=True)
ACCURACY = Metric("accuracy", "accuracy", True)
POSITIVE_SHARE = Metric("positive_share", "positive share", None)
AUC = Metric("auc", "ROC AUC", True, in_verdict=True)
AVERAGE_PRECISION = Metric("average_precision", "average precision", True)
F1 = Metric("f1", "F1", True)
BRIER = Metric("brier", "Brier score", False, on_ranks=False)
CALIBRATION_ERROR = Metric("calibration_error", "calibration error", False, on_ranks=False, resampled=False)
MACRO_F1 = Metric("macro_f1", "macro F1", True, in_verdict=True)
TOP_5_ACCURACY = Metric("top_5_accuracy", "top-5 accuracy", True, on_ranks=False)
RECIPROCAL_RANK = Metric("mean_reciprocal_rank", "mean reciprocal rank", True, on_ranks=False)
OF_MANY_CLASSES = (TOP_5_ACCURACY, RECIPROCAL_RANK)  # a model of few classes has none of these
MACRO_AUC = Metric("macro_auc", "macro ROC AUC", True, in_verdict=True)
MICRO_AUC = Metric("micro_auc", "micro ROC AUC", True)
MACRO_AVERAGE_PRECISION = Metric("macro_average_precision", "macro average precision", True)
MICRO_AVERAGE_PRECISION = Metric("micro_average_precision", "micro average precision", True)
MICRO_F1 = Metric("micro_f1", "micro F1", True)
SQUARED_ERROR = Metric("loss", "mean squared error", False, in_verdict=True)
ABS_ERROR = Metric("abs_error", "mean absolute error", False)
RMSE = Metric("rmse", "RMSE", False)
R2 = Metric("r2", "R²", True, in_verdict=True)
DEVIANCE = Metric("loss", "mean Poisson deviance", False, in_verdict=True)
D2 = Metric("d2", "D²", True, in_verdict=True)
TOKEN_LOSS = Metric("loss", "loss (nats per token)", False, in_verdict=True)
PERPLEXITY = Metric("perplexity", "perplexity", False, on_ranks=False)

BINARY = _BinaryKind(
    "binary",
    LabelForm.FLAG,
    (LOG_LOSS, ACCURACY, POSITIVE_SHARE, AUC, AVERAGE_PRECISION, F1, BRIER, CALIBRATION_ERROR),
    baseline_metrics=("loss", "auc", "accuracy"),
    prediction="the probability of the second value",
)
MULTICLASS = _MulticlassKind(
    "multiclass",
    LabelForm.CLASS,
    (LOG_LOSS, ACCURACY, MACRO_F1, CALIBRATION_ERROR, TOP_5_ACCURACY, RECIPROCAL_RANK),
    baseline_metrics=("loss", "accuracy", "macro_f1"),
    prediction="a probability per class, and the likeliest",
)
MULTILABEL = _MultilabelKind(
    "multilabel",
    LabelForm.FLAGS,
    (LOG_LOSS, ACCURACY, MACRO_AUC, MICRO_AUC, MACRO_AVERAGE_PRECISION, MICRO_AVERAGE_PRECISION, MACRO_F1, MICRO_F1),
    baseline_metrics=("loss", "macro_auc", "accuracy"),
    prediction="a probability per label",
)
REGRESSION = _NumberKind(
    "regression",
    LabelForm.NUMBER,
    (SQUARED_ERROR, ABS_ERROR, RMSE, R2),
    baseline_metrics=("loss", "rmse", "abs_error", "r2"),
    prediction="the value",
)
POISSON = _RateKind(
    "poisson",
    LabelForm.NUMBER,
    (DEVIANCE, ABS_ERROR, D2),
    baseline_metrics=("loss", "abs_error", "d2"),
    prediction="the expected count, or rate",
)
LANGUAGE_MODEL = TaskKind(
    "language_model", LabelForm.TOKENS, (TOKEN_LOSS, PERPLEXITY), baseline_metrics=("loss", "perplexity")
)
TASKS = {kind.name: kind for kind in (BINARY, MULTICLASS, MULTILABEL, REGRESSION, POISSON, LANGUAGE_MODEL)}
TABLE_TASKS = tuple(kind.name for kind in TASKS.values() if kind.is_table)
LOWER_IS_BETTER = {m.name for kind in TASKS.values() for m in kind.metrics if m.higher_is_better is False}
IN_VERDICT = {m.name for kind in TASKS.values() for m in kind.metrics if m.in_verdict}
TITLES = {m.name: m.title for kind in TASKS.values() for m in kind.metrics if m.name != "loss"}


def task_kind(name: str) -> TaskKind:
    """Return the task of that name; for `module:Class`, one whose label and metrics its class decides."""
    return TASKS.get(name) or TaskKind(name, LabelForm.OWN)


def is_better(metric: str, one: float, other: float) -> bool:
    """Return whether `one` beats `other` in the metric; a value that is not a number beats nothing."""
    return one < other if metric in LOWER_IS_BETTER else one > other
