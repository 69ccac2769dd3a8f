"""The baselines beside a model: a constant guess, a linear model (one-hot codes + numbers), gradient-boosted trees.

All are fitted by scikit-learn in the driver on the model's features and rows, or a uniform sample of very many, and
scored in the task's metrics on all test rows, file by file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.errors import first_line
from sparkring.conf.manifest import Column
from sparkring.conf.secrets import redact
from sparkring.conf.tasks import LabelForm, TaskKind
from sparkring.pipelines.evaluation.baselines.design import Array, Design, DesignReader, Scale
from sparkring.pipelines.evaluation.baselines.linear import BaselineModel, Fit, linear_fits
from sparkring.pipelines.evaluation.baselines.trees import TREES, grow, named_beside
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.training.metrics import task_scores
from sparkring.training.worker.result import MODEL, Scores, TrainResult

log = logging.getLogger(__name__)
NEEDS_SPARK = "only a job on Spark fits it"
MOST_PREDICTIONS = 1 << 28  # of all test rows: of 8 bytes each
T = TypeVar("T")


@dataclass(frozen=True)
class Fitted:
    """A baseline that was fitted. predictions: of the test rows that count, (N,), (N, C) or (N, L).

    rows: training rows that it was fitted on.
    """

    scores: Scores
    predictions: Array | None = None  # None of a ranking, which no gap is measured of
    rows: int = 0


@dataclass(frozen=True)
class Baselines:
    """What was fitted, by name of baseline, and why others were not."""

    fitted: dict[str, Fitted] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, Scores]:
        """On the test rows."""
        return {name: each.scores for name, each in self.fitted.items()}

    def beside(self, others: Baselines) -> Baselines:
        """Combine these baselines with others."""
        return Baselines(self.fitted | others.fitted, self.missing | others.missing)


def fit_baselines(
    kind: TaskKind, train: SplitRows, test: SplitRows, read: Sequence[Column], labels: Sequence[Column]
) -> Baselines:
    """Fit and score the baselines; without scalar features, the constant guess alone. One that fails is a warning.

    Args:
        kind: kind of the task.
        train: rows to fit on.
        test: rows to score.
        read: the model's input columns, and its labels.
        labels: one of 0 or 1, a class number, or a value; several of 0 and 1, or a vector of them.
    """
    hashed = train.manifest.hashed
    scalar = [c for c in read if c.layout == "scalar" and c not in labels and c.name not in hashed]
    reader = DesignReader(scalar, labels)
    return fit_and_score(kind, bool(scalar), lambda: reader.training(train), partial(reader.files, test))


def best_baseline(scores: Mapping[str, Scores]) -> str:
    """Return the baseline with the least loss; "" if none has a loss. MODEL is no baseline."""
    losses = {name: each["loss"] for name, each in scores.items() if name != MODEL and "loss" in each}
    return min(losses, key=lambda name: losses[name], default="")


def beside_baselines(result: TrainResult, model: ModelConfig) -> list[str]:
    """Compare the model with trees, and with the best other baseline: words after "it is"."""
    loss, best = model.kind.metric("loss").title, best_baseline(result.scores)
    named = ((result.trees_gap, named_beside(model)), (result.best_gap, best))
    return [gap.describe(loss, name) for gap, name in named if gap is not None]


def import_library() -> None:
    """Import what all baselines of the driver are fitted with: most of a second."""
    import sklearn.ensemble
    import sklearn.linear_model  # noqa: F401


def fit_and_score(
    kind: TaskKind,
    has_features: bool,
    read_training: Callable[[], tuple[Design, Scale]],
    test_files: Callable[[], Iterable[Design]],
) -> Baselines:
    """Fit all baselines, trees in a thread of their own and the others meanwhile; then score them.

    Args:
        kind: kind of the task.
        has_features: whether there are features; without, only the constant guess is fitted.
        read_training: reads the training rows; it is called once.
        test_files: reads the test rows, not scaled, file by file.
    """
    import_library()  # before there are threads: each would find the other's imports half done
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(read_training).result
        trees = {TREES: lambda: grow(kind, training()[0])} if has_features else {}
        growing = thread.submit(_attempted, trees)
        models, missing = _attempted(
            {n: partial(_fit, each, training) for n, each in linear_fits(kind, has_features).items()}
        )
        grown, no_trees = growing.result()
    models, missing = models | grown, missing | no_trees
    if not models:
        return Baselines(missing=missing)
    try:
        found = score(kind, models, map(training()[1].applied, test_files()))
    except Exception as error:
        found = left_out([*models], f"{type(error).__name__}: {first_line(error)}")
    return Baselines(missing=missing).beside(found)


def _fit(fit: Fit, training: Callable[[], tuple[Design, Scale]]) -> BaselineModel:
    return fit(training()[0])


def score(kind: TaskKind, models: Mapping[str, BaselineModel], test_files: Iterable[Design]) -> Baselines:
    """Predict the test rows file by file, and score each model on all of them."""
    labels, weights, missing = list[Array](), list[Array | None](), dict[str, str]()
    predictions = {name: list[Array]() for name in models}
    for rows in test_files:
        labels.append(rows.labels if kind.has_several_labels else rows.labels[:, 0])
        weights.append(rows.weights)
        left = {name: model for name, model in models.items() if name not in missing}
        made, failed = _attempted({n: partial(_predict, model, rows, predictions[n]) for n, model in left.items()})
        missing |= failed
        for name, values in made.items():
            predictions[name].append(values)
    truth, weigh = (
        np.concatenate(labels),
        None if weights[0] is None else np.concatenate([w for w in weights if w is not None]),
    )
    found = attempted(
        {
            name: partial(_score, kind, truth, weigh, np.concatenate(predictions[name]), model.rows)
            for name, model in models.items()
            if name not in missing
        }
    )
    return Baselines(missing=missing).beside(found)


def _predict(model: BaselineModel, rows: Design, earlier: Sequence[Array]) -> Array:
    found = model.predict(rows)
    if sum(each.size for each in earlier) + found.size > MOST_PREDICTIONS:
        raise ValueError(f"more than {MOST_PREDICTIONS:,} predictions of test rows, which the driver does not hold")
    return found


def _score(kind: TaskKind, labels: Array, weights: Array | None, predictions: Array, rows: int) -> Fitted:
    """Score the predictions; a class that no training row has gets the probability 0.

    Args:
        kind: task that the labels belong to.
        labels: (N,) or (N, L).
        weights: (N,), or None.
        predictions: (N,), (N, C) or (N, L).
        rows: number of training rows.
    """
    if kind.form is LabelForm.CLASS and (more := int(labels.max()) + 1 - predictions.shape[1]) > 0:
        predictions = np.pad(predictions, ((0, 0), (0, more)))
    return Fitted(task_scores(kind, labels, predictions, weights, kind.baseline_metrics), predictions, rows)


def left_out(names: Sequence[str], why: str) -> Baselines:
    """Log in one line that these baselines are not fitted, and why."""
    log.warning("%s: %s; the report goes without %s", ", ".join(names), why, "them" if len(names) > 1 else "it")
    return Baselines(missing=dict.fromkeys(names, redact(why)))


def attempted(fits: Mapping[str, Callable[[], Fitted]]) -> Baselines:
    """Call each fit; an error, or a score that is no number, becomes an entry of `missing`."""
    return Baselines(*_attempted({name: partial(_finite, fit) for name, fit in fits.items()}))


def _finite(fit: Callable[[], Fitted]) -> Fitted:
    fitted = fit()
    if odd := [metric for metric, value in fitted.scores.items() if value is None or not math.isfinite(value)]:
        raise ValueError(f"{', '.join(odd)}: not a finite number")
    return fitted


def _attempted(actions: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], dict[str, str]]:
    """Call each action: what they return, and the errors by name, since the model is trained by now."""
    done, missing = dict[str, T](), dict[str, str]()
    for name, action in actions.items():
        try:
            done[name] = action()
        except Exception as error:
            missing[name] = redact(f"{type(error).__name__}: {first_line(error)}")
            log.warning("baseline %s: %s; the report goes without it", name, missing[name])
    return done, missing
