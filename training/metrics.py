"""Compute metrics of predictions: one formula each, for ranks, report, baselines and promotion rules.

`conf/tasks.py` describes the metrics. Everything is float64 and weighted by row; a row of weight 0 counts for nothing,
and a whole-number weight n counts as n rows. Rows of equal score are one threshold, so no metric depends on the order
of rows, beyond rounding. A metric that rows do not have (AUC of one class) is NaN.

Shapes: N rows, C classes, L labels, T distinct scores. labels (N,), or (N, L) of several labels; scores (N,)
probabilities of 1 or predicted numbers, (N, C) or (N, L) probabilities; weights (N,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from sparkring.conf import tasks as t
from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import LabelForm, Metric, TaskKind

Array = np.ndarray
Weighing = Callable[[Array], float]  # a metric of given rows, as a function of their weights
CLIP = 1e-15  # of probabilities in the log loss, as in Spark's
TOP = 5  # classes among which `top_5_accuracy` looks for the label


class Rows:
    """Labels and scores of some rows, with what several metrics need of them, made once."""

    def __init__(self, form: LabelForm, labels: Array, scores: Array) -> None:
        """Hold the rows as they are.

        Args:
            form: what the labels are.
            labels: (N,) or (N, L).
            scores: (N,), (N, C) or (N, L); class numbers (N,) where only decisions are asked for.
        """
        self.form, self.labels, self.scores = form, labels, scores

    @cached_property
    def predicted(self) -> Array:
        """Predicted class numbers (N,), of equal probabilities the first; or flags, (N,) or (N, L) bool."""
        if self.form is not LabelForm.CLASS:
            return self.scores > 0.5
        return self.scores.argmax(axis=1) if self.scores.ndim == 2 else self.scores

    @cached_property
    def actual(self) -> Array:
        """The labels as `predicted` has them."""
        return self.labels if self.form is LabelForm.CLASS else self.labels > 0.5

    @cached_property
    def of_label(self) -> Array:
        """Probability of each row's own class, (N,)."""
        found: Array = np.take_along_axis(self.scores, self.labels.astype(np.int64)[:, None], axis=1)[:, 0]
        return found

    @cached_property
    def ranks(self) -> Array:
        """Rank of the label's class, (N,), 1 for the most probable; of equal ones the mean; NaN up to TOP classes."""
        if self.scores.shape[1] <= TOP:
            return np.full(len(self.labels), np.nan)
        own = self.of_label[:, None]
        ranks: Array = 1 + (self.scores > own).sum(axis=1) + ((self.scores == own).sum(axis=1) - 1) / 2
        return ranks

    @cached_property
    def by_score(self) -> SortedRows:
        """Rows of flags, sorted by score."""
        return SortedRows(self.actual, self.scores)

    @cached_property
    def each_label(self) -> list[Rows]:
        """The rows once for each of several labels."""
        pairs = zip(self.labels.T, self.scores.T, strict=True)
        return [Rows(LabelForm.FLAG, labels, scores) for labels, scores in pairs]

    @cached_property
    def all_labels(self) -> Rows:
        """All pairs of row and label, (N * L,)."""
        return Rows(LabelForm.FLAG, self.labels.ravel(), self.scores.ravel())


class SortedRows:
    """Rows sorted by score once, so that another weighting needs no sort. Rows of one score are one step."""

    def __init__(self, is_positive: Array, scores: Array) -> None:
        self._order = np.argsort(scores, kind="stable")
        ordered = scores[self._order]
        self._starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        self._positive = is_positive[self._order]

    def steps(self, weights: Array) -> tuple[Array, Array]:
        """Return the weights of positive and negative rows at each distinct score (T,), rising; counts stay whole."""
        ordered = weights[self._order]
        positive, negative = ordered * self._positive, ordered * ~self._positive
        return np.add.reduceat(positive, self._starts), np.add.reduceat(negative, self._starts)

    def auc(self, weights: Array) -> float:
        """Compute the share of (positive, negative) pairs in the right order; ties count half."""
        positive, negative = self.steps(weights)
        pairs = positive.sum() * negative.sum()
        below = np.cumsum(negative) - negative
        return float((positive * (2 * below + negative)).sum() / (2 * pairs)) if pairs else math.nan

    def average_precision(self, weights: Array) -> float:
        """Compute the mean precision over the positive rows."""
        positive, negative = (step[::-1] for step in self.steps(weights))
        found = np.cumsum(positive)
        seen = found + np.cumsum(negative)
        if not found[-1] or seen[-1] == found[-1]:
            return math.nan
        precision = np.divide(found, seen, out=np.zeros(len(found)), where=seen > 0)
        return float((positive * precision).sum() / found[-1])


@dataclass(frozen=True)
class ClassCounts:
    """Rows of each class, or their weights, each (classes,); not a matrix: of 50,000 classes it would have 20 GB."""

    right: Array  # of the class and predicted to be
    rows: Array  # of the class
    predicted: Array  # predicted to be

    @property
    def precision(self) -> Array:
        """Share of the rows predicted to be of a class that are, (classes,); NaN where no row is."""
        return _divided(self.right, self.predicted)

    @property
    def recall(self) -> Array:
        """Share of the rows of a class that are predicted to be, (classes,); NaN where there are none."""
        return _divided(self.right, self.rows)

    @property
    def f1(self) -> Array:
        """Harmonic mean of both, (classes,); NaN of a class that occurs neither as label nor as prediction."""
        return _divided(2 * self.right, self.rows + self.predicted)

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that occur, as labels or as predictions."""
        return mean_of_known(self.f1)


def class_counts(labels: Array, predicted: Array, classes: int, weights: Array | None = None) -> ClassCounts:
    """Count the rows of each class.

    Args:
        labels: (N,) class numbers.
        predicted: (N,) class numbers.
        classes: number of classes.
        weights: (N,) how often each row counts; None: once.
    """
    right = labels == predicted
    own = right if weights is None else right * weights
    return ClassCounts(
        np.bincount(labels, own, classes),
        np.bincount(labels, weights, classes),
        np.bincount(predicted, weights, classes),
    )


@dataclass(frozen=True)
class Bin:
    """Rows whose score is in one slice of equal counts."""

    rows: int
    predicted: float  # mean score
    observed: float  # positive share
    weight: float  # of its rows together


def calibration(labels: Array, scores: Array, weights: Array | None = None, bins: int = 15) -> list[Bin]:
    """Slice rows by rising score into at most `bins` of about equally many; rows of one score are never parted.

    Args:
        labels: (N,) of 0 and 1.
        scores: (N,) probabilities of 1.
        weights: (N,) at least 0; None for equal weights.
        bins: at most so many slices.
    """
    weights = np.ones(len(labels)) if weights is None else weights
    order = np.argsort(scores, kind="stable")
    order = order[weights[order] > 0]
    scores, labels, weights = scores[order], labels[order], weights[order]
    # starts: (slices,) row of the first of the scores equal to the one at each quantile
    starts = np.unique(np.searchsorted(scores, scores[(np.arange(bins) * len(scores)) // bins], side="left"))
    rows = np.diff(np.append(starts, len(scores)))
    weight = np.add.reduceat(weights, starts)
    predicted = np.add.reduceat(scores * weights, starts) / weight
    observed = np.add.reduceat(labels * weights, starts) / weight
    return [Bin(int(n), *map(float, found)) for n, *found in zip(rows, predicted, observed, weight, strict=True)]


def top_calibration(labels: Array, scores: Array, weights: Array | None = None) -> list[Bin]:
    """Slice rows by the probability of the predicted class; observed: the share that is right.

    Guo 2017, with slices of equal counts: https://arxiv.org/abs/1706.04599. labels (N,), scores (N, C).
    """
    return calibration(scores.argmax(axis=1) == labels, scores.max(axis=1), weights)


def calibration_error(bins: Sequence[Bin]) -> float:
    """Compute the mean distance of predicted from observed share, by weight (ECE, Naeini 2015, equal-count bins)."""
    weight = sum(b.weight for b in bins)
    return sum(b.weight * abs(b.predicted - b.observed) for b in bins) / weight


def negative_log(probability: Array) -> Array:
    """Log loss in nats of events with these probabilities, which are clipped at CLIP."""
    loss: Array = -np.log(np.clip(probability, CLIP, 1.0))
    return loss


def log_losses(rows: Rows) -> Array:
    """Log loss of each row in nats, (N,); of several labels their mean."""
    if rows.form is LabelForm.CLASS:
        return negative_log(rows.of_label)
    p = np.clip(rows.scores, CLIP, 1 - CLIP)
    losses: Array = -np.where(rows.actual, np.log(p), np.log(1 - p))
    return losses if losses.ndim == 1 else losses.mean(axis=1)


def hits(rows: Rows) -> Array:
    """Return whether each row is predicted right, (N,); for several labels the share that is."""
    right: Array = rows.predicted == rows.actual
    return right if right.ndim == 1 else right.mean(axis=1)


def perplexity(loss_nats: float) -> float:
    """Compute exp of the mean loss per token, limited to numbers that JSON can hold."""
    return math.exp(min(loss_nats, 700.0))


def squared_errors(labels: Array, predictions: Array | float) -> Array:
    """Compute the squared error of each row, (N,)."""
    return np.square(predictions - labels)


def deviances(labels: Array, predictions: Array | float) -> Array:
    """Compute the Poisson deviance of each row, (N,): labels at least 0, predicted means clipped at CLIP."""
    expected = np.maximum(predictions, CLIP)
    ratio = np.where(labels > 0, labels, expected) / expected
    found: Array = 2 * (labels * np.log(ratio) - labels + expected)
    return found


def weighted_mean(values: Array, weights: Array) -> float:
    """Average the values (N,); NaN if the weights are all 0."""
    total = weights.sum()
    return float(values @ weights / total) if total else math.nan


def effective_rows(weights: Array) -> int:
    """Return the effective number of rows: (sum of weights)² / sum of their squares (Kish 1965)."""
    if not weights.any():
        return 0
    shares = weights / weights.max()  # squares of 1e200 are infinite
    return round(float(shares.sum() ** 2 / (shares @ shares)))


def mean_of_known(values: Iterable[float]) -> float:
    """Average the values that are not NaN; NaN if all are."""
    known = [float(value) for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _f1(rows: Rows) -> Weighing:
    """Prepare F1 of flags; NaN where 1 is neither present nor predicted."""
    right, either = rows.predicted & rows.actual, rows.predicted.astype(np.int64) + rows.actual

    def of(weights: Array) -> float:
        total = either @ weights
        return float(2 * (right @ weights) / total) if total else math.nan

    return of


def _f1_or_0(rows: Rows) -> Weighing:
    of = _f1(rows)
    return lambda weights: float(np.nan_to_num(of(weights)))


def _macro_f1(rows: Rows) -> Weighing:
    if rows.form is LabelForm.FLAGS:
        return _macro(_f1)(rows)
    labels, predicted = rows.labels.astype(np.int64), rows.predicted.astype(np.int64)
    classes = int(max(labels.max(), predicted.max())) + 1
    return lambda weights: class_counts(labels, predicted, classes, weights).macro_f1


def _macro(of_label: Callable[[Rows], Weighing]) -> Callable[[Rows], Weighing]:
    """Average the metric over the labels that have it."""

    def of(rows: Rows) -> Weighing:
        each = [of_label(label) for label in rows.each_label]
        return lambda weights: mean_of_known(one(weights) for one in each)

    return of


def _micro(of_flags: Callable[[Rows], Weighing]) -> Callable[[Rows], Weighing]:
    """Compute the metric over all pairs of row and label."""

    def of(rows: Rows) -> Weighing:
        every, labels = of_flags(rows.all_labels), rows.labels.shape[1]
        return lambda weights: every(np.repeat(weights, labels))

    return of


def _auc(rows: Rows) -> Weighing:
    return rows.by_score.auc


def _average_precision(rows: Rows) -> Weighing:
    return rows.by_score.average_precision


def _calibration_error(rows: Rows) -> Weighing:
    slices = top_calibration if rows.form is LabelForm.CLASS else calibration
    return lambda weights: calibration_error(slices(rows.labels, rows.scores, weights))


def root(loss: float, of_constant: float) -> float:
    """Compute the square root of a mean squared error."""
    return math.sqrt(loss)


def explained(loss: float, of_constant: float) -> float:
    """Compute the share of the constant's loss that the model avoids; NaN if the constant has no loss."""
    return 1 - loss / of_constant if of_constant > 0 else math.nan


ERRORS: dict[Metric, Callable[[Array, Array | float], Array]] = {
    t.SQUARED_ERROR: squared_errors,
    t.DEVIANCE: deviances,
}
"""Losses of numbers: of each row (N,), given labels and predictions."""
MEANS: dict[Metric, Callable[[Rows], Array]] = {
    t.LOG_LOSS: log_losses,
    t.ACCURACY: hits,
    t.POSITIVE_SHARE: lambda rows: rows.actual,
    t.BRIER: lambda rows: np.square(rows.scores - rows.labels),
    t.TOP_5_ACCURACY: lambda rows: np.where(np.isnan(rows.ranks), np.nan, rows.ranks <= TOP),
    t.RECIPROCAL_RANK: lambda rows: 1 / rows.ranks,
    t.ABS_ERROR: lambda rows: np.abs(rows.scores - rows.labels),
}
"""Metrics that are the mean of a value of each row, (N,)."""
OF_LOSS: dict[Metric, tuple[Metric, Callable[[float, float], float]]] = {
    t.RMSE: (t.SQUARED_ERROR, root),
    t.R2: (t.SQUARED_ERROR, explained),
    t.D2: (t.DEVIANCE, explained),
}
"""Metrics made of a loss of numbers, and of the loss of their mean as the constant prediction."""
WHOLE: dict[Metric, Callable[[Rows], Weighing]] = {
    t.AUC: _auc,
    t.AVERAGE_PRECISION: _average_precision,
    t.F1: _f1_or_0,
    t.CALIBRATION_ERROR: _calibration_error,
    t.MACRO_F1: _macro_f1,
    t.MICRO_F1: _micro(_f1),
    t.MACRO_AUC: _macro(_auc),
    t.MICRO_AUC: _micro(_auc),
    t.MACRO_AVERAGE_PRECISION: _macro(_average_precision),
    t.MICRO_AVERAGE_PRECISION: _micro(_average_precision),
}
"""Metrics of all rows together."""


def row_values(metric: Metric, rows: Rows) -> Array:
    """Return the values (N,) whose mean is the metric. KeyError for other metrics."""
    return ERRORS[metric](rows.labels, rows.scores) if metric in ERRORS else MEANS[metric](rows)


def is_mean(metric: Metric) -> bool:
    """Return whether the metric is the mean of a value of each row, so ranks may sum it."""
    return metric in ERRORS or metric in MEANS


def weighing(metric: Metric, rows: Rows) -> Weighing:
    """Return the metric of these rows as a function of their weights."""
    if is_mean(metric):
        return partial(weighted_mean, row_values(metric, rows))
    return partial(_of_loss, metric, rows) if metric in OF_LOSS else WHOLE[metric](rows)


def _of_loss(metric: Metric, rows: Rows, weights: Array) -> float:
    of, make = OF_LOSS[metric]
    constant = mean_loss_of_constant(ERRORS[of], rows.labels, weights)
    return make(weighted_mean(ERRORS[of](rows.labels, rows.scores), weights), constant)


def mean_loss_of_constant(error: Callable[[Array, float], Array], labels: Array, weights: Array) -> float:
    """Compute the loss of predicting the labels' mean for every row; 0 if all counted labels are equal."""
    counted = labels[weights > 0]
    if not len(counted) or counted.min() == counted.max():
        return 0.0
    return weighted_mean(error(labels, weighted_mean(labels, weights)), weights)


def metrics_of(metrics: Iterable[Metric], rows: Rows, weights: Array | None = None) -> dict[str, float]:
    """Compute metrics by name; NaN if undefined for these rows. weights None: all equal."""
    counts = np.ones(len(rows.labels), np.int64) if weights is None else weights  # whole numbers: counts stay exact
    return {metric.name: weighing(metric, rows)(counts) for metric in metrics}


def task_scores(
    kind: TaskKind, labels: Array, scores: Array, weights: Array | None = None, names: Iterable[str] = ()
) -> dict[str, float]:
    """Compute every held-out metric defined for these rows. ValueError for invalid labels or scores.

    Args:
        kind: kind of a table task.
        labels: (N,) 0 or 1, class numbers, or values; (N, L) 0 or 1.
        scores: (N,) probabilities of 1, or predicted values; (N, C) or (N, L) probabilities.
        weights: (N,) weight of each row, at least 0; None for equal weights.
        names: metrics to compute; empty for all of the task.
    """
    rows, weights = checked_rows(kind.form, labels, scores, weights)
    wanted = {*names} or kind.directions.keys()
    found = metrics_of((metric for metric in kind.metrics if metric.name in wanted), rows, weights)
    return {name: value for name, value in found.items() if name in kind.directions and not math.isnan(value)}


def checked_rows(form: LabelForm, labels: Array, scores: Array, weights: Array | None) -> tuple[Rows, Array | None]:
    """Return the rows with weight and their weights. ValueError for invalid labels or scores.

    Args:
        form: form of the labels.
        labels: labels, see `task_scores`.
        scores: scores, see `task_scores`.
        weights: weights, see `task_scores`.
    """
    labels, scores = np.asarray(labels, np.float64), np.asarray(scores, np.float64)
    dimensions = {LabelForm.CLASS: (1, 2), LabelForm.FLAGS: (2, 2)}.get(form, (1, 1))
    alike = labels.shape == scores.shape[: labels.ndim]
    if (labels.ndim, scores.ndim) != dimensions or not alike or not len(labels):
        what = "rows of equally many labels" if form is LabelForm.FLAGS else "rows"
        raise ValueError(f"labels {labels.shape} and scores {scores.shape} must be equally many {what}, at least one")
    if form in (LabelForm.FLAG, LabelForm.FLAGS) and not np.isin(labels, (0.0, 1.0)).all():
        raise ValueError("labels other than 0 and 1")
    if form is LabelForm.CLASS and not np.isin(labels, np.arange(scores.shape[1])).all():
        raise ValueError(f"labels other than 0 to {scores.shape[1] - 1}: the model has {scores.shape[1]} classes")
    finite = [np.isfinite(values).reshape(len(values), -1).all(axis=1) for values in (labels, scores)]
    if bad := int(np.count_nonzero(~(finite[0] & finite[1]))):
        raise ValueError(f"{bad} of {count_of(len(labels), 'label')} or scores are not finite")
    if weights is None:
        return Rows(form, labels, scores), None
    counts = weights > 0
    if weights.shape != labels.shape[:1] or not counts.any():
        raise ValueError(
            f"weights {weights.shape} of {count_of(len(labels), 'row')}: there must be as many, and one above 0"
        )
    return Rows(form, labels[counts], scores[counts]), weights[counts]


def _divided(ones: Array, others: Array) -> Array:
    """Divide ones / others; NaN where others is 0."""
    found: Array = np.divide(ones, others, out=np.full(len(ones), np.nan), where=others > 0)
    return found
