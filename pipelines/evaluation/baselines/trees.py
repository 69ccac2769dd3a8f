"""The baseline that is hardest to beat on tables: gradient-boosted trees of scikit-learn with its defaults.

LightGBM's algorithm (Ke et al. 2017): histograms of at most 255 values of each feature, up to 100 rounds, an early stop
on a tenth of the training rows where there are more than 10,000. In one thread, so that the same rows give the same
trees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.tasks import DEVIANCE, LabelForm, TaskKind
from sparkring.pipelines.evaluation.baselines.design import Array, Design
from sparkring.pipelines.evaluation.baselines.linear import BaselineModel, of_labels, with_classes

TREES = "gradient-boosted trees (scikit-learn)"
MOST_CODES = 255  # of a feature that is split by sets of its codes; one of more is split by the order of its values
MOST_OUTPUTS = 20  # classes or labels, for each of which trees are grown
MOST_CELLS = 1 << 22  # cells of the training rows, times their outputs: some 4 seconds
SEED = 0


def named_beside(model: ModelConfig) -> str:
    """Name the baseline next to a model that may be of trees itself."""
    return "scikit-learn's trees with its defaults" if model.is_trees else "gradient-boosted trees"


def grow(kind: TaskKind, train: Design) -> BaselineModel:
    """Fit on the training rows, or evenly spaced ones of so many that a fit takes seconds.

    ValueError for more than MOST_OUTPUTS classes or labels.
    """
    classes = np.unique(train.labels)
    outputs = len(classes) if kind.form is LabelForm.CLASS else train.labels.shape[1]
    if outputs > MOST_OUTPUTS:
        raise ValueError(f"{outputs} classes or labels, more than {MOST_OUTPUTS}: trees would be grown for each")
    some = train.sampled(max(1000, MOST_CELLS // (max(train.values.shape[1], 1) * max(outputs, 1))))
    return BaselineModel(_predictor(kind, some), len(some.labels))


def _predictor(kind: TaskKind, train: Design) -> Callable[[Design], Array]:
    if kind.form is LabelForm.NUMBER:
        loss = "poisson" if kind.metric("loss") == DEVIANCE else "squared_error"
        model = _fit(train, train.labels[:, 0], loss)
        return lambda rows: model.predict(cells(rows))
    fits = [_probabilities(train, labels) for labels in train.labels.T]
    if kind.form is LabelForm.CLASS:
        classes, predicted = fits[0]
        return partial(with_classes, classes, predicted, train.classes)
    return lambda rows: of_labels([predicted(rows)[:, -1] * classes[-1] for classes, predicted in fits])


def _probabilities(train: Design, labels: Array) -> tuple[Array, Callable[[Design], Array]]:
    """Fit the classes of labels (N,): (classes (C,), rows -> probability of each (N, C))."""
    if len(known := np.unique(labels)) == 1:
        return known, lambda rows: np.ones((len(rows.labels), 1))
    model = _fit(train, labels, "log_loss")
    return model.classes_, lambda rows: model.predict_proba(cells(rows))


def cells(design: Design) -> Array:
    """Return numbers, masks and codes of each row, (N, K) float64; NaN for a code without training rows."""
    numbers = design.values.shape[1] - len(design.cardinalities)
    firsts = np.cumsum([numbers, *design.cardinalities])[:-1]
    found = design.values.copy()
    codes = design.places[:, numbers:] - firsts
    for place, ranks in enumerate(design.ranks):
        if len(ranks) > MOST_CODES:  # split as a number: near values are to be near, such as dates and versions
            codes[:, place] = ranks[codes[:, place]]
    found[:, numbers:] = np.where(design.values[:, numbers:] > 0, codes, np.nan)
    return found


def _fit(train: Design, labels: Array, loss: str) -> Any:
    """Fit a scikit-learn model."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    numbers = train.values.shape[1] - len(train.cardinalities)
    coded = [numbers + n for n, count in enumerate(train.cardinalities) if count <= MOST_CODES]
    kind = HistGradientBoostingClassifier if loss == "log_loss" else HistGradientBoostingRegressor
    # An early stop keeps a tenth of each class apart, which is refused where a class has one row.
    least = np.unique(labels, return_counts=True)[1].min() if loss == "log_loss" else 2
    stops = "auto" if least > 1 else False
    model = kind(loss=loss, categorical_features=coded or None, early_stopping=stops, random_state=SEED)
    with threadpool_limits(1):
        return model.fit(cells(train), labels, sample_weight=train.weights)
