"""Fit a calibration of a model's probabilities on the validation rows, and keep it where it helps.

Rows are divided into FOLDS, and each row is scored by calibrations that were fitted on the other folds. Only where that
lowers their log loss by more than its standard error does the model get a calibration, fitted on all rows. Several
METHODS are tried, and one replaces a simpler one by the same rule. Where labels are distributed otherwise than in
training, as after a split by time, it gets none: a calibration would take the rate of those rows for the model's fault,
and make it wrong about all others.
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
from sparkring.pipelines.evaluation.importance import mean_and_error
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
MOST_ODDS = 36.0  # log-odds of the largest probability below 1
FEWEST_OTHERS = 10  # of them besides the most frequent class: without any, every probability would go to 0 or 1


@dataclass(frozen=True)
class ValidationRows:
    """Rows with their labels (N,), probabilities (N,) or (N, C), and weights (N,) whose mean is 1."""

    form: LabelForm
    labels: Array
    scores: Array
    weights: Array

    def take(self, rows: Array) -> ValidationRows:
        """Select some of the rows, by a mask or by number."""
        return replace(self, labels=self.labels[rows], scores=self.scores[rows], weights=self.weights[rows])

    def calibrated(self, calibration: Calibration) -> ValidationRows:
        return replace(self, scores=calibration.of(self.scores))

    @property
    def loss(self) -> float:
        """Log loss in nats."""
        return weighted_mean(self.losses, self.weights)

    @property
    def losses(self) -> Array:
        """Log loss of each row in nats, (N,)."""
        return log_losses(checked_rows(self.form, self.labels, self.scores, None)[0])


def calibrate(
    config: RunConfig, folder: Storage, trained: Trained, balance: Mapping[str, LabelBalance]
) -> CalibrationFit | None:
    """Calibrate the model of a run on its validation rows and log it; None if nothing was fitted.

    The model folder gets the file of a calibration that is kept, and loses that of an earlier attempt.

    Args:
        config: resolved configuration of the run.
        folder: folder of the run.
        trained: result of the training.
        balance: label balance of its splits, as far as known.
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
    """Describe how the labels of validation rows differ from those of training rows; "" where they do not."""
    if "train" not in balance or valid not in balance:
        return ""
    train, other = balance["train"], balance[valid]
    if not (name := shifted_class(train, other)):
        return ""
    ours, theirs = (each.shares.get(name, 0.0) for each in (train, other))
    return f"the label {name} is {ours:.1%} of train and {theirs:.1%} of {valid}"


def fit_calibration(rows: ValidationRows, shift: str = "") -> CalibrationFit:
    """Fit a calibration; keep it if it lowers the log loss of other rows by more than its standard error.

    ValueError for too few rows, or too few with another label than most. `shift`: how their labels differ from those of
    training rows.
    """
    count, effective = len(rows.labels), effective_rows(rows.weights)
    if effective < FEWEST:
        as_much = "" if effective == count else f" of uneven weights are as good as {effective}, which"
        raise ValueError(f"{count}{as_much} say too little, at least {FEWEST} are needed")
    others = count - int(np.unique(rows.labels, return_counts=True)[1].max())
    if others < FEWEST_OTHERS:
        raise ValueError(f"{others} have another label than most, at least {FEWEST_OTHERS} are needed")
    shares = rows.weights / rows.weights.sum()
    losses = {"": rows.losses}  # of each method; "": of the model's own probabilities
    kept = ""
    for name, method in METHODS[rows.form].items():  # the simplest first: a curve has more ways to be wrong
        losses[name] = cross_fitted(method, rows).losses
        gain, error = mean_and_error(losses[kept] - losses[name], shares)
        kept = name if gain > error else kept
    tried = kept or min(METHODS[rows.form], key=lambda name: float(shares @ losses[name]))
    gain, error = mean_and_error(losses[""] - losses[tried], shares)
    return CalibrationFit(
        method=tried,
        rows=count,
        loss_before=rows.loss,
        loss_after=rows.loss - gain,
        gain_error=error,
        kept=METHODS[rows.form][kept](rows) if kept and not shift else None,
        shift=shift,
    )


def cross_fitted(method: Method, rows: ValidationRows) -> ValidationRows:
    """Score each row by a calibration that was fitted on the other folds."""
    folds = np.arange(len(rows.labels)) % FOLDS
    scores = np.empty_like(rows.scores)
    for fold in range(FOLDS):
        scores[folds == fold] = method(rows.take(folds != fold)).of(rows.scores[folds == fold])
    return replace(rows, scores=scores)


def fit_temperature(rows: ValidationRows) -> Calibration:
    """Fit temperature scaling of class probabilities."""
    logs = np.log(np.maximum(rows.scores, LEAST))
    (scale,) = minimize(lambda at: class_slopes(at, logs, rows), np.ones(1))
    return in_order(scale)


def fit_platt(rows: ValidationRows) -> Calibration:
    """Fit Platt scaling of a flag's log-odds."""
    return in_order(*minimize(lambda at: flag_slopes(at, _odds(rows), rows), np.array([1.0, 0.0])))


def fit_shift(rows: ValidationRows) -> Calibration:
    """Fit a shift of a flag's log-odds, where probabilities are too high or too low throughout."""
    odds = _odds(rows)

    def slopes(at: Array) -> tuple[float, Array, Array]:
        loss, gradient, curves = flag_slopes(np.array([1.0, at[0]]), odds, rows)
        return loss, gradient[1:], curves[1:, 1:]

    (shift,) = minimize(slopes, np.zeros(1))
    return Calibration(shift=float(shift))


def fit_isotonic(rows: ValidationRows) -> Calibration:
    """Fit a curve through the blocks of an isotonic regression (Zadrozny 2002, doi:10.1145/775047.775151).

    A block's rate has one row of the model's own mean probability added: a block without a positive row would have
    log-odds of minus infinity.
    """
    from sklearn.isotonic import isotonic_regression  # a job needs it after training alone

    order = np.argsort(rows.scores, kind="stable")
    bounded = np.clip(_odds(rows), -MOST_ODDS, MOST_ODDS)  # a score of 0 would draw its block's mean far away
    odds, labels, weights = (values[order] for values in (bounded, rows.labels, rows.weights))
    _, ties = np.unique(odds, return_inverse=True)  # rows of one score are in one block
    total = np.bincount(ties, weights)
    rates = isotonic_regression(np.bincount(ties, weights * labels) / np.maximum(total, LEAST), sample_weight=total)
    blocks = np.unique(rates, return_inverse=True)[1][ties]
    counts = np.bincount(blocks, weights)
    center, rate, own = (np.bincount(blocks, weights * each) / counts for each in (odds, labels, rows.scores[order]))
    least = 0.5 / len(labels)  # a model that is certain has no infinite log-odds either
    smooth = (counts * rate + np.clip(own, least, 1 - least)) / (counts + 1)
    points = np.column_stack([center, np.log(smooth) - np.log1p(-smooth)])
    rising = np.concatenate([[True], np.diff(np.maximum.accumulate(points[:, 1])) > 0])
    return Calibration.through(points[rising])


Method = Callable[[ValidationRows], Calibration]
METHODS: dict[LabelForm, dict[str, Method]] = {
    LabelForm.FLAG: {
        "a shift of log-odds": fit_shift,
        "Platt scaling": fit_platt,
        "isotonic regression": fit_isotonic,
    },
    LabelForm.CLASS: {"temperature scaling": fit_temperature},
}


def in_order(scale: float, shift: float = 0.0) -> Calibration:
    """Return the calibration, or none at all in place of one that would turn the order of rows around."""
    return Calibration(scale=float(scale), shift=float(shift)) if scale > 0 else Calibration()


def _odds(rows: ValidationRows) -> Array:
    odds: Array = log_odds(torch.from_numpy(rows.scores)).numpy()
    return odds


def flag_slopes(at: Array, odds: Array, rows: ValidationRows) -> tuple[float, Array, Array]:
    """Compute the loss of log-odds scale * odds + shift, and its slopes. at: scale and shift; odds (N,).

    Rows that are few, or that the model separates, do not run to infinite log-odds: the loss has half the squared
    distance from no change added, which is as much as a row or two.
    """
    z, w = at[0] * odds + at[1], rows.weights
    p = np.exp(-np.logaddexp(0, -z))
    away = at - [1.0, 0.0]
    loss = (w * (np.logaddexp(0, z) - rows.labels * z)).sum() + (away**2).sum() / 2
    error, curve = w * (p - rows.labels), w * p * (1 - p)
    gradient = np.array([(error * odds).sum(), error.sum()]) + away
    mixed = (curve * odds).sum()
    return float(loss), gradient, np.array([[(curve * odds**2).sum() + 1, mixed], [mixed, curve.sum() + 1]])


def class_slopes(at: Array, logs: Array, rows: ValidationRows) -> tuple[float, Array, Array]:
    """Compute the loss of class probabilities ~ exp(scale * logs), as `flag_slopes` does. at: scale; logs (N, C)."""
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
    """Minimize a strictly convex function, by Newton's method within a region of trust (SciPy)."""
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
        fit: calibration fitted on validation rows.
        kind: kind of the task.
        labels: labels of the test rows, (N,).
        scores: probabilities before and after, (N,) or (N, C).
        weights: weights of the rows, (N,); None for equal weights.
    """
    if fit.kept is None:
        return fit
    name = CALIBRATION_ERROR.name
    before, after = (task_scores(kind, labels, each, weights, [name])[name] for each in scores)
    return replace(fit, error_before=before, error_after=after)
