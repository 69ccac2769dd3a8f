"""Baselines of scikit-learn: a constant guess, and a linear model of one-hot codes and numbers.

Shapes: N rows, F coefficients, L labels, C classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import TaskKind
from sparkring.pipelines.evaluation.baselines import design
from sparkring.pipelines.evaluation.baselines.design import Array, Design

MAJORITY, LOGISTIC = "majority rate", "logistic regression (scikit-learn)"
CLASS_RATES, MULTINOMIAL = "class rates", "multinomial logistic regression (scikit-learn)"
RATES, LOGISTICS = "label rates", "logistic regression per label (scikit-learn)"
MEAN, LINEAR = "mean", "linear regression (scikit-learn)"
RATE = "Poisson regression (scikit-learn)"
REGULARIZATION, ITERATIONS = 1e-5, 50
MOST_LABELS = 20  # of which each is fitted in turn: some seconds
MOST_COEFFICIENTS = 5_000_000  # of a multinomial regression: its solvers keep several copies of them


@dataclass(frozen=True)
class BaselineModel:
    """A fitted baseline. predict: rows -> (N,) probabilities of 1 or values, (N, C) or (N, L) probabilities.

    rows: training rows that it was fitted on.
    """

    predict: Callable[[Design], Array]
    rows: int


Fit = Callable[[Design], BaselineModel]


def linear_fits(kind: TaskKind, has_features: bool) -> dict[str, Fit]:
    """Return each baseline's fit by its name; without features, the constant guess alone."""
    known: dict[str, tuple[tuple[str, Fit], tuple[str, Fit]]] = {
        "binary": ((MAJORITY, fit_means), (LOGISTIC, fit_logistic)),
        "multiclass": ((CLASS_RATES, fit_class_rates), (MULTINOMIAL, fit_multinomial)),
        "multilabel": ((RATES, fit_means), (LOGISTICS, fit_logistic)),
        "poisson": ((MEAN, fit_means), (RATE, fit_rate)),
        "regression": ((MEAN, fit_means), (LINEAR, fit_linear)),
    }
    constant, linear = known[kind.name]
    return dict([constant, linear] if has_features else [constant])


def fit_means(train: Design) -> BaselineModel:
    """Fit a model that always predicts the training rows' mean, or a label's share of them."""
    means = train.means(train.labels)
    return BaselineModel(lambda rows: of_labels([np.full(len(rows.labels), mean) for mean in means]), len(train.labels))


def of_labels(predictions: Sequence[Array]) -> Array:
    """Return the predictions of each label, (N,) each, as a task has them: (N, L), or (N,) of one label."""
    return predictions[0] if len(predictions) == 1 else np.column_stack(predictions)


def fit_logistic(train: Design) -> BaselineModel:
    """Fit a logistic regression of each label. ValueError for more than MOST_LABELS."""
    if (labels := train.labels.shape[1]) > MOST_LABELS:
        raise ValueError(f"{count_of(labels, 'label')}, more than {MOST_LABELS}: each would be fitted in turn")
    fits = [probabilities(train, each) for each in train.labels.T]
    return BaselineModel(  # times the class: that of 1, or 0 where no training row has it
        lambda rows: of_labels([predicted(rows)[:, -1] * classes[-1] for classes, predicted in fits]), len(train.labels)
    )


def probabilities(train: Design, labels: Array) -> tuple[Array, Callable[[Design], Array]]:
    """Fit the classes of labels (N,): (classes (C,), rows -> probability of each (N, C))."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    classes = np.unique(labels)
    if len(classes) == 1:
        return classes, lambda rows: np.ones((len(rows.labels), 1))
    model = LogisticRegression(C=1 / (REGULARIZATION * train.total), max_iter=ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # as many iterations are enough
        model.fit(train.matrix(), labels, sample_weight=train.weights)
    return classes, lambda rows: model.predict_proba(rows.matrix())


def fit_class_rates(train: Design) -> BaselineModel:
    """Fit a model that always predicts the training rows' share of each class."""
    rates = np.bincount(train.labels[:, 0].astype(np.int64), train.weights) / train.total
    return BaselineModel(lambda rows: np.broadcast_to(rates, (len(rows.labels), len(rates))), len(train.labels))


def fit_multinomial(train: Design) -> BaselineModel:
    """Fit a multinomial regression. ValueError for more than MOST_COEFFICIENTS."""
    count = train.classes
    if (coefficients := count * train.coefficients) > MOST_COEFFICIENTS:
        raise ValueError(f"{count_of(coefficients, 'coefficient', ',')}, more than {MOST_COEFFICIENTS:,}")
    some = train.sampled(design.MOST_CELLS // count)  # the solver has a probability of each row and class
    classes, predicted = probabilities(some, some.labels[:, 0])
    return BaselineModel(partial(with_classes, classes, predicted, count), len(some.labels))


def with_classes(classes: Array, predicted: Callable[[Design], Array], count: int, rows: Design) -> Array:
    """Return the probabilities of `count` classes, (N, count): 0 of those that were not trained on."""
    found = np.zeros((len(rows.labels), count))
    found[:, classes.astype(np.int64)] = predicted(rows)
    return found


def fit_linear(train: Design) -> BaselineModel:
    """Fit a linear regression."""
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=REGULARIZATION * train.total, solver="sparse_cg", tol=1e-8)
    return _fitted(model, train)


def fit_rate(train: Design) -> BaselineModel:
    """Fit a Poisson regression with a log link."""
    from sklearn.linear_model import PoissonRegressor

    return _fitted(PoissonRegressor(alpha=REGULARIZATION, max_iter=ITERATIONS), train)


def _fitted(model: Any, train: Design) -> BaselineModel:
    """Fit a regression of scikit-learn."""
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(train.matrix(), train.labels[:, 0], sample_weight=train.weights)
    return BaselineModel(lambda rows: model.predict(rows.matrix()), len(train.labels))
