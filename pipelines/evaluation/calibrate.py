"""Fit a calibration of a model's probabilities on the validation rows, and keep it where it helps.

Rows are dealt into FOLDS, and each is scored by a calibration that was fitted on the others. Only where their log loss
is lower than before does the model get a calibration, which is fitted on all of them. Where labels are otherwise
distributed than in training, as after a split by time, it gets none: a calibration would take the rate of those rows
for the model's fault, and make it wrong about all others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.parquet as pq
import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.storage import Storage
from sparkring.conf.tasks import CALIBRATION_ERROR, LabelForm, TaskKind
from sparkring.pipelines.evaluation.balance import shifted_class
from sparkring.pipelines.evaluation.prediction_files import read_columns
from sparkring.training.metrics import checked_rows, effective_rows, log_losses, task_scores, weighted_mean
from sparkring.training.model.calibration import FILE, LEAST, Calibration, is_calibrated, log_odds
from sparkring.training.worker.result import CalibrationFit, LabelBalance, Trained

log = logging.getLogger(__name__)
Array = np.ndarray
Slopes = Callable[[Array], tuple[float, Array, Array]]
"""Parameters (P,) -> what is minimized, its gradient (P,) and its second derivatives (P, P)."""
FOLDS = 5
FEWEST = 100  # validation rows, of equal weights; fewer say too little
FEWEST_OTHERS = 10  # of them beside the most frequent class: without any, every probability would go to 0 or 1
METHODS = {LabelForm.FLAG: "Platt scaling", LabelForm.CLASS: "temperature scaling"}


@dataclass(frozen=True)
class ValidationRows:
    """Rows with their labels (N,), probabilities (N,) or (N, C), and weights (N,) whose mean is 1."""

    form: LabelForm
    labels: Array
    scores: Array
    weights: Array

    def take(self, rows: Array) -> ValidationRows:
        """Some of the rows, by a mask or by number."""
        return replace(self, labels=self.labels[rows], scores=self.scores[rows], weights=self.weights[rows])

    def calibrated(self, calibration: Calibration) -> ValidationRows:
        return replace(self, scores=calibration.of(self.scores))

    @property
    def loss(self) -> float:
        """Log loss in nats."""
        rows, weights = checked_rows(self.form, self.labels, self.scores, self.weights)
        assert weights is not None, "they were given"
        return weighted_mean(log_losses(rows), weights)


def calibrate(
    config: RunConfig, folder: Storage, trained: Trained, balance: Mapping[str, LabelBalance]
) -> CalibrationFit | None:
    """Calibrate the model of a run on its validation rows, and say so; None where nothing was fitted.

    The model folder gets the file of a calibration that is kept, and loses that of an earlier attempt.

    Args:
        config: the recipe.
        folder: of the run.
        trained: what training gave.
        balance: the labels of its splits, as far as they are known.
    """
    assert trained.train.weights is not None, "training is finished"
    model = folder.at(trained.train.weights)
    if model.exists(FILE):
        model.delete(FILE)
    if not config.model.may_calibrate:
        return None
    if not is_calibrated(config):
        log.info("not calibrated: by train.valid_split, validation rows are training rows")
        return None
    try:
        rows = read_scored(config.model.kind, folder, trained.valid_predictions)
        fit = fit_calibration(rows, shift_between(balance, config.train.valid_split))
    except ValueError as error:  # of labels and predictions: the model is trained by now
        log.warning("not calibrated: validation rows: %s", error)
        return None
    log.info("%s", fit.describe())
    if fit.kept is not None:
        fit.kept.write(model)
    return fit


def read_scored(kind: TaskKind, folder: Storage, files: list[str]) -> ValidationRows:
    """Read the validation rows that count, in the dataset's order. ValueError for what cannot be scored."""
    weighted = "weight" in pq.read_schema(folder.path(files[0]), filesystem=folder.fs).names if files else False
    columns = read_columns(folder, files, ["label", "prediction", *(["weight"] if weighted else [])])
    labels = columns["label"].astype(np.float64)
    rows, weights = checked_rows(kind.form, labels, columns["prediction"], columns.get("weight"))
    weights = np.ones(len(rows.labels)) if weights is None else weights / weights.mean()
    return ValidationRows(kind.form, rows.labels, rows.scores, weights)


def shift_between(balance: Mapping[str, LabelBalance], valid: str) -> str:
    """Say how the labels of validation rows differ from those of training rows; "" where they do not."""
    if "train" not in balance or valid not in balance:
        return ""
    train, other = balance["train"], balance[valid]
    if not (name := shifted_class(train, other)):
        return ""
    ours, theirs = (each.shares.get(name, 0.0) for each in (train, other))
    return f"the label {name} is {ours:.1%} of train and {theirs:.1%} of {valid}"


def fit_calibration(rows: ValidationRows, shift: str = "") -> CalibrationFit:
    """Fit a calibration, and keep it where it lowers the log loss of rows that it was not fitted on.

    ValueError where there are too few rows, or too few of other labels than most.
    `shift`: how their labels differ from those of training rows.
    """
    count, effective = len(rows.labels), effective_rows(rows.weights)
    if effective < FEWEST:
        as_much = "" if effective == count else f" of uneven weights are as good as {effective}, which"
        raise ValueError(f"{count}{as_much} say too little, at least {FEWEST} are needed")
    others = count - int(np.unique(rows.labels, return_counts=True)[1].max())
    if others < FEWEST_OTHERS:
        raise ValueError(f"{others} have another label than most, at least {FEWEST_OTHERS} are needed")
    folds = np.arange(count) % FOLDS
    scores = np.empty_like(rows.scores)
    for fold in range(FOLDS):
        scores[folds == fold] = fit(rows.take(folds != fold)).of(rows.scores[folds == fold])
    before, after = rows.loss, replace(rows, scores=scores).loss
    kept = fit(rows) if after < before and not shift else None
    return CalibrationFit(
        method=METHODS[rows.form], rows=count, loss_before=before, loss_after=after, kept=kept, shift=shift
    )


def fit(rows: ValidationRows) -> Calibration:
    """The calibration with the least log loss; one that would turn the order of rows around is left out.

    Rows that are few, or that the model separates, do not run to infinite log-odds: the loss has half the squared
    distance from no change added, which is as much as a row or two.
    """
    if rows.form is LabelForm.CLASS:
        logs = np.log(np.maximum(rows.scores, LEAST))
        (scale,) = minimize(lambda at: class_slopes(at, logs, rows), np.ones(1))
        shift = 0.0
    else:
        odds = log_odds(torch.from_numpy(rows.scores)).numpy()
        scale, shift = minimize(lambda at: flag_slopes(at, odds, rows), np.array([1.0, 0.0]))
    return Calibration(scale=float(scale), shift=float(shift)) if scale > 0 else Calibration()


def flag_slopes(at: Array, odds: Array, rows: ValidationRows) -> tuple[float, Array, Array]:
    """Slopes of the loss of log-odds scale * odds + shift. at: scale and shift; odds (N,)."""
    z, w = at[0] * odds + at[1], rows.weights
    p = np.exp(-np.logaddexp(0, -z))
    away = at - [1.0, 0.0]
    loss = (w * (np.logaddexp(0, z) - rows.labels * z)).sum() + (away**2).sum() / 2
    error, curve = w * (p - rows.labels), w * p * (1 - p)
    gradient = np.array([(error * odds).sum(), error.sum()]) + away
    mixed = (curve * odds).sum()
    return float(loss), gradient, np.array([[(curve * odds**2).sum() + 1, mixed], [mixed, curve.sum() + 1]])


def class_slopes(at: Array, logs: Array, rows: ValidationRows) -> tuple[float, Array, Array]:
    """Slopes of the loss of class probabilities ~ exp(scale * logs). at: scale; logs (N, C)."""
    z, w, own = at[0] * logs, rows.weights, rows.labels.astype(np.int64)[:, None]
    top = z.max(axis=1, keepdims=True)
    total = np.exp(z - top).sum(axis=1, keepdims=True)
    p, of_own = np.exp(z - top) / total, np.take_along_axis(logs, own, 1)[:, 0]
    mean = (p * logs).sum(axis=1)
    loss = (w * ((top + np.log(total))[:, 0] - at[0] * of_own)).sum() + (at[0] - 1) ** 2 / 2
    gradient = (w * (mean - of_own)).sum() + at[0] - 1
    spread = (p * (logs - mean[:, None]) ** 2).sum(axis=1)
    return float(loss), np.array([gradient]), np.array([[(w * spread).sum() + 1]])


def minimize(slopes: Slopes, start: Array) -> Array:
    """The least value of a strictly convex function, by Newton's method within a region of trust (SciPy)."""
    from scipy import optimize  # a job needs it after training alone

    found = optimize.minimize(
        lambda at: slopes(at)[:2], start, method="trust-exact", jac=True, hess=lambda at: slopes(at)[2]
    )
    best: Array = found.x
    return best


def with_test_errors(
    fit: CalibrationFit, kind: TaskKind, labels: Array, scores: tuple[Array, Array], weights: Array | None
) -> CalibrationFit:
    """Add the calibration errors of the test rows, where the calibration is kept.

    Args:
        fit: on validation rows.
        kind: the task.
        labels: of the test rows, (N,).
        scores: probabilities before and after, (N,) or (N, C).
        weights: (N,); None: all alike.
    """
    if fit.kept is None:
        return fit
    name = CALIBRATION_ERROR.name
    before, after = (task_scores(kind, labels, each, weights, [name])[name] for each in scores)
    return replace(fit, error_before=before, error_after=after)
