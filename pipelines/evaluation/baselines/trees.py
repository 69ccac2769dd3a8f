"""The baseline that is hardest to beat on tables: gradient-boosted trees of scikit-learn with its defaults.

LightGBM's algorithm (Ke et al. 2017): histograms of at most 255 values of each feature, up to 100 rounds, an early stop
on a tenth of the training rows where there are more than 10,000. In one thread, so that the same rows give the same
trees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.tasks import DEVIANCE, LabelForm, TaskKind
from sparkring.pipelines.evaluation.baselines.guesses import Fitted
from sparkring.pipelines.evaluation.baselines.linear import Design, classes_of
from sparkring.training.metrics import task_scores

Array = np.ndarray
TREES = "gradient-boosted trees (scikit-learn)"
MOST_CODES = 255  # of a feature that is split by sets of its codes; one of more is split by the order of its values
MOST_OUTPUTS = 20  # classes or labels, for each of which trees are grown
MOST_CELLS = 1 << 22  # cells of the training rows, times their outputs: some 4 seconds
SEED = 0


def named_beside(model: ModelConfig) -> str:
    """What a verdict calls the baseline, beside a model that may be of trees itself."""
    return "scikit-learn's trees with its defaults" if model.is_trees else "gradient-boosted trees"


def grow(kind: TaskKind, train: Design, test: Design) -> Fitted:
    """Fit on the training rows, or some of them. ValueError where there are too many classes or labels."""
    if (outputs := outputs_of(kind, train)) > MOST_OUTPUTS:
        raise ValueError(f"{outputs} classes or labels, more than {MOST_OUTPUTS}: trees would be grown for each")
    some = sampled(train, outputs)
    predictions = predict(kind, some, test)
    labels = test.labels if kind.has_several_labels else test.labels[:, 0]
    return Fitted(
        task_scores(kind, labels, predictions, test.weights, kind.baseline_metrics), predictions, len(some.labels)
    )


def outputs_of(kind: TaskKind, train: Design) -> int:
    """How many trees a round has."""
    return len(np.unique(train.labels)) if kind.form is LabelForm.CLASS else train.labels.shape[1]


def sampled(train: Design, outputs: int) -> Design:
    """The training rows, or evenly spaced ones of so many that a fit takes seconds."""
    rows, cells = train.values.shape
    most = max(1000, MOST_CELLS // (max(cells, 1) * max(outputs, 1)))
    if rows <= most:
        return train
    kept = np.linspace(0, rows - 1, most).astype(np.int64)
    weights = None if train.weights is None else train.weights[kept]
    return replace(
        train, values=train.values[kept], places=train.places[kept], labels=train.labels[kept], weights=weights
    )


def predict(kind: TaskKind, train: Design, test: Design) -> Array:
    """Fit on the training rows; predictions of the test rows, as of Fitted."""
    if kind.form is LabelForm.NUMBER:
        loss = "poisson" if kind.metric("loss") == DEVIANCE else "squared_error"
        values: Array = _fit(train, train.labels[:, 0], loss).predict(cells(test))
        return values
    if kind.form is LabelForm.CLASS:
        return _class_probabilities(train, test)
    found = np.column_stack([_flag_probabilities(train, labels, test) for labels in train.labels.T])
    return found if kind.form is LabelForm.FLAGS else found[:, 0]


def cells(design: Design) -> Array:
    """Numbers, masks and codes of each row, (N, K) float64; NaN for a code that no training row has."""
    numbers = design.values.shape[1] - len(design.cardinalities)
    firsts = np.cumsum([numbers, *design.cardinalities])[:-1]
    found = design.values.copy()
    codes = design.places[:, numbers:] - firsts
    for place, ranks in enumerate(design.ranks):
        if len(ranks) > MOST_CODES:  # split as a number: near values are to be near, such as dates and versions
            codes[:, place] = ranks[codes[:, place]]
    found[:, numbers:] = np.where(design.values[:, numbers:] > 0, codes, np.nan)
    return found


def _class_probabilities(train: Design, test: Design) -> Array:
    """The probability of each class up to the largest of either split, (N, C); 0 of one that was not trained on."""
    found = np.zeros((len(test.labels), classes_of(train, test)))
    if len(known := np.unique(train.labels)) == 1:
        found[:, int(known[0])] = 1.0
        return found
    model = _fit(train, train.labels[:, 0], "log_loss")
    found[:, model.classes_.astype(np.int64)] = model.predict_proba(cells(test))
    return found


def _flag_probabilities(train: Design, labels: Array, test: Design) -> Array:
    """The probability of 1 for the test rows, (N,)."""
    if len(known := np.unique(labels)) == 1:
        return np.full(len(test.labels), float(known[0]))
    probabilities: Array = _fit(train, labels, "log_loss").predict_proba(cells(test))[:, 1]
    return probabilities


def _fit(train: Design, labels: Array, loss: str) -> Any:
    """A fitted model of scikit-learn."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    numbers = train.values.shape[1] - len(train.cardinalities)
    coded = [numbers + n for n, count in enumerate(train.cardinalities) if count <= MOST_CODES]
    kind = HistGradientBoostingClassifier if loss == "log_loss" else HistGradientBoostingRegressor
    # An early stop keeps a tenth of each class apart, which is refused where a class has one row.
    least = np.unique(labels, return_counts=True)[1].min() if loss == "log_loss" else 2
    stops = "auto" if least > 1 else False
    model = kind(loss=loss, categorical_features=coded or None, early_stopping=stops, random_state=SEED)
    with threadpool_limits(1):
        return model.fit(cells(train), labels, sample_weight=train.weights)
