"""Baselines of rows that fit in the driver's memory: a constant guess, and a linear model of scikit-learn.

The guesses and models of `mllib`, on the same rows and features, without a job of Spark.

Shapes: N rows, K cells of a row (one for each number, mask and code), F coefficients, L labels, C classes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sparkring.conf.features import FIRST_CODE
from sparkring.conf.manifest import Column
from sparkring.conf.tasks import TaskKind
from sparkring.pipelines.evaluation.baselines.guesses import (
    Fitted,
    check_coefficients,
    check_labels,
    class_metrics,
    class_rates,
    constant_scores,
    flag_scores,
    mean_of_labels,
)
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.training.data.features.tensors import element_names
from sparkring.training.metrics import negative_log, task_scores

Array = np.ndarray
MAJORITY, LOGISTIC = "majority rate", "logistic regression (scikit-learn)"
CLASS_RATES, MULTINOMIAL = "class rates", "multinomial logistic regression (scikit-learn)"
RATES, LOGISTICS = "label rates", "logistic regression per label (scikit-learn)"
MEAN, LINEAR = "mean", "linear regression (scikit-learn)"
RATE = "Poisson regression (scikit-learn)"
REGULARIZATION, ITERATIONS = 1e-5, 50  # as MLlib's
MOST_CELLS = 1 << 25  # of 12 bytes, a double and its place; with all copies about 1.5 GB


def fits_in_driver(rows: int, cells: int, classes: int = 1) -> bool:
    """Whether the driver's memory holds what a fit needs: the cells of all rows, and a probability for each class."""
    return rows * max(cells, classes) <= MOST_CELLS


def cells_of_row(features: Sequence[Column]) -> int:
    """How many cells a row has: one for each feature, and one for its mask."""
    return sum(1 + (column.mask is not None) for column in features)


@dataclass(frozen=True)
class Design:
    """Rows as a linear model takes them: of K cells each, a value and the coefficient that it is multiplied by."""

    values: Array  # (N, K) float64: numbers first, scaled by those of the training rows; then 1 for each code
    places: Array  # (N, K) int32
    labels: Array  # (N, L) float64
    weights: Array | None  # (N,) float64, above 0; None: all alike
    cardinalities: tuple[int, ...]  # codes of each coded feature, in the order of the last cells
    coefficients: int  # F
    ranks: tuple[Array, ...] = ()  # of each coded feature: (codes,) the place of a code's value among the sorted values

    def matrix(self) -> Any:
        """The features, (N, F), sparse."""
        from scipy.sparse import csr_matrix  # seconds of imports, and only after training

        rows, cells = self.values.shape
        starts = np.arange(0, rows * cells + 1, max(cells, 1), dtype=np.int32)[: rows + 1]
        return csr_matrix((self.values.ravel(), self.places.ravel(), starts), shape=(rows, self.coefficients))

    @property
    def total(self) -> float:
        """How much all rows weigh together."""
        return float(len(self.labels) if self.weights is None else self.weights.sum())

    def mean(self, values: Array) -> float:
        """The mean of values (N,), by weight."""
        return float(np.average(values, weights=self.weights))


def make_designs(
    train: SplitRows, test: SplitRows, features: Sequence[Column], labels: Sequence[Column]
) -> tuple[Design, Design]:
    """Read both splits; numbers are scaled to mean 0 and deviation 1 of the training rows, as MLlib's solvers do.

    Args:
        train: rows to fit on.
        test: rows to score.
        features: scalar ones.
        labels: whose elements are columns of `labels`.
    """
    of_train, of_test = (_read(rows, features, labels) for rows in (train, test))
    numbers = cells_of_row(features) - sum(column.cardinality is not None for column in features)
    for place in range(numbers):
        values = of_train.values[:, place]
        middle = of_train.mean(values)
        deviation = math.sqrt(of_train.mean(np.square(values - middle)))
        deviation = deviation if deviation > 1e-12 * abs(middle) else 1.0  # else all are alike, but for rounding
        for design in (of_train, of_test):
            design.values[:, place] = (design.values[:, place] - middle) / deviation
    return of_train, of_test


def _read(rows: SplitRows, features: Sequence[Column], labels: Sequence[Column]) -> Design:
    coded = [column for column in features if column.cardinality is not None]
    plain = [column for column in features if column.cardinality is None]
    masks = [column.mask for column in features if column.mask is not None]
    weight = rows.manifest.weight["column"] if rows.manifest.weight is not None else None
    targets = [(name, column) for column in labels for name in element_names(column)]
    cardinalities = tuple(int(column.cardinality or 0) for column in coded)
    firsts = np.cumsum([len(plain) + len(masks), *cardinalities])
    names = dict.fromkeys(c.name for c in (*features, *labels))
    parts: list[tuple[Array, Array, Array, Array]] = []
    for batch in rows.doubles([*names, *([weight] if weight is not None else [])]):
        columns = dict(zip(batch.schema.names, (column.to_numpy() for column in batch.columns), strict=True))
        weighs = np.ones(batch.num_rows) if weight is None else columns[weight]
        numbers = [_filled(columns[c.name], c) for c in plain] + [columns[name] for name in masks]
        codes = np.stack([columns[c.name] for c in coded], axis=1) if coded else np.zeros((batch.num_rows, 0))
        known = (codes >= 0) & (codes < np.diff(firsts))  # a code beyond them has no coefficient
        values = np.column_stack([*numbers, known.astype(np.float64)])
        places = np.empty(values.shape, np.int32)
        places[:, : len(numbers)] = np.arange(len(numbers))
        places[:, len(numbers) :] = firsts[:-1] + np.where(known, codes, 0)
        wanted = np.column_stack([_filled(columns[name], column) for name, column in targets])
        counts = weighs > 0
        parts.append((values[counts], places[counts], wanted[counts], weighs[counts]))
    values, places, found, weighs = (np.concatenate(each) for each in zip(*parts, strict=True))
    states = {state["name"]: state.get("values", []) for state in rows.manifest.fitted}
    ranks = tuple(ranks_of(states.get(c.name, []), count) for c, count in zip(coded, cardinalities, strict=True))
    weighed = None if weight is None else weighs
    return Design(values, places, found, weighed, cardinalities, int(firsts[-1]), ranks)


def ranks_of(values: Sequence[Any], codes: int) -> Array:
    """Return the place of each code in the order of the values: (codes,). A code without a value keeps its own."""
    ranks = np.arange(codes)
    ranks[FIRST_CODE : FIRST_CODE + len(values)] = FIRST_CODE + np.argsort(np.argsort(np.array(values)))
    return ranks


def _filled(values: Array, column: Column) -> Array:
    """The values with NaN filled as the reader fills nulls."""
    fill = float(column.fill) if column.nulls == "fill" and column.fill is not None else 0.0
    return np.nan_to_num(values, copy=True, nan=fill, posinf=np.inf, neginf=-np.inf)


Fit = Callable[[Design, Design], Fitted]


def linear_fits(
    kind: TaskKind, has_features: bool, designs: Callable[[], tuple[Design, Design]]
) -> dict[str, Callable[[], Fitted]]:
    """The baselines by name, each a function that fits and scores it; without features, the constant guess alone.

    `designs`: gives those of the training and of the test rows.
    """
    known: dict[str, tuple[tuple[str, Fit], tuple[str, Fit]]] = {
        "binary": ((MAJORITY, partial(first_of, label_rates)), (LOGISTIC, partial(first_of, fit_logistic))),
        "multiclass": ((CLASS_RATES, fit_class_rates), (MULTINOMIAL, fit_multinomial)),
        "multilabel": ((RATES, partial(mean_of, label_rates)), (LOGISTICS, partial(mean_of, fit_logistic))),
        "poisson": ((MEAN, partial(fit_mean, kind)), (RATE, partial(fit_rate, kind))),
        "regression": ((MEAN, partial(fit_mean, kind)), (LINEAR, partial(fit_linear, kind))),
    }
    (constant_name, constant), (linear_name, linear) = known[kind.name]
    fits: dict[str, Callable[[], Fitted]] = {constant_name: lambda: constant(*designs())}
    return fits | ({linear_name: lambda: linear(*designs())} if has_features else {})


def first_of(fit: Callable[[Design, Design], list[Fitted]], train: Design, test: Design) -> Fitted:
    """The fit of the only label."""
    return fit(train, test)[0]


def mean_of(fit: Callable[[Design, Design], list[Fitted]], train: Design, test: Design) -> Fitted:
    """The means of the labels' scores; ValueError where there are too many labels."""
    found = fit(train, test)
    scores = mean_of_labels([each.scores for each in found], [test.mean(labels) for labels in test.labels.T])
    predictions = np.column_stack([each.predictions for each in found if each.predictions is not None])
    return Fitted(scores, predictions, len(train.labels))


def label_rates(train: Design, test: Design) -> list[Fitted]:
    """Always predict the training rows' share of a label; a fit of each label."""
    found = []
    for ours, theirs in zip(train.labels.T, test.labels.T, strict=True):
        rate = train.mean(ours)
        scores = constant_scores(rate, test.mean(theirs))
        found.append(Fitted(scores, np.full(len(theirs), rate), len(ours)))
    return found


def fit_logistic(train: Design, test: Design) -> list[Fitted]:
    """Fit a logistic regression of each label: log loss in nats, ROC AUC, accuracy. ValueError for too many labels."""
    check_labels(train.labels.shape[1])
    found, matrices = label_rates(train, test), (train.matrix(), test.matrix())
    for n, (ours, labels) in enumerate(zip(train.labels.T, test.labels.T, strict=True)):
        if train.mean(ours) in (0.0, 1.0):  # there is one class to learn: the guess
            continue
        _, odds = probabilities(train, *matrices, ours)
        found[n] = Fitted(flag_scores(labels, odds[:, 1], test.weights), odds[:, 1], len(ours))
    return found


def probabilities(train: Design, of_train: Any, of_test: Any, labels: Array) -> tuple[Array, Array]:
    """The classes (C,) of the training rows' labels (N,), and the probability of each for the test rows, (N, C)."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    classes = np.unique(labels)
    if len(classes) == 1:
        return classes, np.ones((of_test.shape[0], 1))
    model = LogisticRegression(C=1 / (REGULARIZATION * train.total), max_iter=ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # after as many iterations as MLlib's
        model.fit(of_train, labels, sample_weight=train.weights)
    return classes, model.predict_proba(of_test)


def fit_class_rates(train: Design, test: Design) -> Fitted:
    """Always predict the training rows' share of each class, so the most frequent one."""
    counted = []
    for design in (train, test):
        classes, where = np.unique(design.labels[:, 0].astype(np.int64), return_inverse=True)
        counted.append(dict(zip(classes.tolist(), np.bincount(where, design.weights).tolist(), strict=True)))
    rates = np.zeros((1, classes_of(train, test)))
    rates[0, [*counted[0]]] = np.array([*counted[0].values()]) / train.total
    return Fitted(class_rates(*counted), np.broadcast_to(rates, (len(test.labels), rates.shape[1])), len(train.labels))


def classes_of(train: Design, test: Design) -> int:
    """How many classes there are: up to the largest of either split."""
    return int(max(train.labels.max(), test.labels.max())) + 1


def fit_multinomial(train: Design, test: Design) -> Fitted:
    """Fit a multinomial regression: log loss in nats, accuracy, macro F1. ValueError for too many coefficients."""
    labels, truth = train.labels[:, 0], test.labels[:, 0]
    check_coefficients((int(labels.max()) + 1) * train.coefficients)
    classes, odds = probabilities(train, train.matrix(), test.matrix(), labels)
    place = np.searchsorted(classes, truth).clip(max=len(classes) - 1)
    own = np.where(classes[place] == truth, odds[np.arange(len(truth)), place], 0.0)  # no other class is ever predicted
    loss = test.mean(negative_log(own))
    pairs = np.column_stack([truth, classes[odds.argmax(axis=1)]]).astype(np.int64)
    groups, where = np.unique(pairs, axis=0, return_inverse=True)
    counts = np.bincount(where.ravel(), test.weights)
    scores = class_metrics([(int(a), int(b), n) for (a, b), n in zip(groups, counts, strict=True)])
    found = np.zeros((len(truth), classes_of(train, test)))
    found[:, classes.astype(np.int64)] = odds
    return Fitted({"loss": loss} | scores, found, len(labels))


def fit_mean(kind: TaskKind, train: Design, test: Design) -> Fitted:
    """Always predict the training rows' mean."""
    guess = train.mean(train.labels[:, 0])
    return _fitted_values(kind, train, test, np.full(len(test.labels), guess))


def fit_linear(kind: TaskKind, train: Design, test: Design) -> Fitted:
    """Fit a linear regression."""
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=REGULARIZATION * train.total, solver="sparse_cg", tol=1e-8)
    model.fit(train.matrix(), train.labels[:, 0], sample_weight=train.weights)
    return _fitted_values(kind, train, test, model.predict(test.matrix()))


def fit_rate(kind: TaskKind, train: Design, test: Design) -> Fitted:
    """Fit a Poisson regression with a log link."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import PoissonRegressor

    model = PoissonRegressor(alpha=REGULARIZATION, max_iter=ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(train.matrix(), train.labels[:, 0], sample_weight=train.weights)
    return _fitted_values(kind, train, test, model.predict(test.matrix()))


def _fitted_values(kind: TaskKind, train: Design, test: Design, predictions: Array) -> Fitted:
    scores = task_scores(kind, test.labels[:, 0], predictions, test.weights, kind.baseline_metrics)
    return Fitted(scores, predictions, len(train.labels))
