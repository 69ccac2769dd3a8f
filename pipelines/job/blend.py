"""Mix a network and trees that were trained on the same rows, where that is better than either (model.blend).

The network's share is fitted on the validation rows. Whether the blend is better is decided by rows that their share
was not fitted on: the rows are dealt into FOLDS, each of which takes the share that the others give. That is done
DEALS times, and a row is predicted with the mean of its shares, since one deal of few rows may decide either way.

    <run>/model/               the weights of both, and blend.json
    <run>/predictions/blend/   what the blend predicts for the rows of each split that both were scored on
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sparkring.conf.storage import Storage, copy_files
from sparkring.conf.tasks import POSITIVE_SHARE, Family, TaskKind, is_better
from sparkring.pipelines.context.context import JobContext
from sparkring.pipelines.evaluation.prediction_files import read_columns
from sparkring.pipelines.promotion.scores import resampled
from sparkring.training.metrics import Rows, row_values, task_scores
from sparkring.training.model.blend import Blend, before_link, mixed
from sparkring.training.model.folder import weight_files
from sparkring.training.model.predictions import stored_values
from sparkring.training.worker.result import FamilyChoice, Trained

log = logging.getLogger(__name__)
Array = NDArray[np.float64]
SHARES = np.linspace(0, 1, 21)
FOLDS, DEALS = 5, 20
FEWEST = 100  # validation rows that count; fewer say too little
RESAMPLES = 200  # of the validation rows
MODEL, PREDICTIONS = "model", "predictions/blend"


@dataclass(frozen=True)
class PairedRows:
    """Rows of a split with what both families predict: labels (N,) or (N, L), predictions (N,), (N, C) or (N, L)."""

    kind: TaskKind
    ids: NDArray[np.int64]
    labels: Array
    net: Array
    trees: Array
    weights: Array | None = None  # (N,); None: all alike

    def blended(self, share: float | Array) -> Array:
        """Predictions of a blend. `share`: of the network, for all rows or (N,) for each."""
        of_rows = np.expand_dims(share, tuple(range(1, self.net.ndim))) if np.ndim(share) else share
        return mixed(self.kind, of_rows, before_link(self.kind, self.net), before_link(self.kind, self.trees))

    def scores(self, predictions: Array) -> dict[str, float]:
        """All metrics of predictions of the rows."""
        return task_scores(self.kind, self.labels, predictions, self.weights)

    def half_width(self, metric: str, one: Array, other: Array) -> float | None:
        """Half of the 95 % interval of the difference of a metric, by paired resamples; None where it is no number."""
        if metric not in self.kind.resampled:
            return None
        found = resampled(self.kind, metric, self.labels, (one, other), RESAMPLES, self.weights)
        width = 1.96 * float(np.std(found[:, 0] - found[:, 1]))
        return width if np.isfinite(width) else None


def read_pairs(folder: Storage, kind: TaskKind, net: Sequence[str], trees: Sequence[str]) -> PairedRows | None:
    """Read what both families predict; None where they were not scored on the same rows, as of a damaged split.

    Args:
        folder: of the run.
        kind: the task.
        net: files of the network's predictions, below the run folder.
        trees: those of trees.
    """
    if not net or not trees:
        return None
    weighted = "weight" in pq.read_schema(folder.path(net[0]), filesystem=folder.fs).names
    ours = read_columns(folder, net, ["label", "prediction", *(["weight"] if weighted else [])])
    theirs = read_columns(folder, trees, ["prediction"])
    if not np.array_equal(ours["id"], theirs["id"]):
        return None
    labels, weights = ours["label"].astype(np.float64), ours.get("weight")
    return PairedRows(kind, ours["id"], labels, ours["prediction"], theirs["prediction"], weights)


@dataclass(frozen=True)
class BlendFit:
    """A share of the network; predictions: of each row, with the mean of the shares that rows without it give."""

    share: float
    predictions: Array


def fit_blend(rows: PairedRows) -> BlendFit:
    """Fit the share with the least loss. ValueError where there are too few rows."""
    weights = np.ones(len(rows.labels)) if rows.weights is None else rows.weights
    if (count := np.count_nonzero(weights)) < FEWEST:
        raise ValueError(f"{count} validation rows say too little, at least {FEWEST} are needed")
    folds = deal(len(weights))
    losses = fold_losses(rows, weights, folds)
    best = SHARES[(losses.sum(axis=2, keepdims=True) - losses).argmin(axis=0)]  # (DEALS, FOLDS): of the others' rows
    shares = np.mean([best[number][fold_of] for number, fold_of in enumerate(folds)], axis=0)
    return BlendFit(float(SHARES[losses[:, 0].sum(axis=1).argmin()]), rows.blended(shares))


def deal(rows: int) -> NDArray[np.int8]:
    """The fold of each row in each deal, (DEALS, rows): folds are of equal size, and the same every time."""
    folds = (np.arange(rows) % FOLDS).astype(np.int8)
    return np.stack([np.random.default_rng(number).permutation(folds) for number in range(DEALS)])


def fold_losses(rows: PairedRows, weights: Array, folds: NDArray[np.int8]) -> Array:
    """The sum of the rows' weighted losses by share, deal and fold, (shares, DEALS, FOLDS)."""
    loss = rows.kind.metric("loss")
    of_rows = (weights * row_values(loss, Rows(rows.kind.form, rows.labels, rows.blended(share))) for share in SHARES)
    return np.array([[np.bincount(fold_of, each, FOLDS) for fold_of in folds] for each in of_rows])


def better_blend(
    job: JobContext, trained: Mapping[Family, Trained], choice: FamilyChoice, valid: PairedRows
) -> tuple[Trained | None, FamilyChoice]:
    """The training whose model is a blend, or None where none is better than the better family's; the choice says why.

    Args:
        job: of both families.
        trained: what their trainings gave.
        choice: between the two.
        valid: the validation rows.
    """
    try:
        fit = fit_blend(valid)
        found = valid.scores(fit.predictions)[choice.metric]
    except (ValueError, KeyError) as error:  # a metric that these rows do not have
        log.warning("no blend: %s", error)
        return None, choice
    best = valid.net if choice.winner == "net" else valid.trees
    tried = replace(choice, values={**choice.values, "both": found})
    if not 0 < fit.share < 1 or not is_better(choice.metric, found, valid.scores(best)[choice.metric]):
        return None, tried
    blend = Blend(share=fit.share)
    write_model(job.folder, blend, trained)
    width = valid.half_width(choice.metric, fit.predictions, best)
    chosen = replace(tried, winner="both", half_width=width, share=fit.share)
    return blended(job.folder, blend, trained, valid), chosen


def write_model(folder: Storage, blend: Blend, trained: Mapping[Family, Trained]) -> None:
    """Copy both models' weights into the run's model folder, and then say how they are mixed."""
    target = folder.at(MODEL)
    for each in trained.values():
        assert each.train.weights is not None, "training is finished"
        source = folder.at(each.train.weights)
        copy_files(source, target, weight_files(source))
    blend.write(target)


def blended(folder: Storage, blend: Blend, trained: Mapping[Family, Trained], valid: PairedRows) -> Trained:
    """The network's training with the blend in place of its model, its predictions and their scores."""
    net, trees = trained["net"], trained["trees"]
    assert net.train.exported_valid is not None, "ranks were asked for it"
    of_valid, valid_file = write_rows(folder, "valid", blend, valid)
    metrics = beside_labels(of_valid, net.train.exported_valid.metrics)
    scored = replace(net.train.exported_valid, metrics=metrics, predictions=valid_file)
    train = replace(net.train, weights=MODEL, exported_valid=scored, test={}, predictions=None)
    found = replace(net, train=train, predictions=[], valid_predictions=[valid_file])
    test = read_pairs(folder, valid.kind, net.predictions, trees.predictions)
    if test is None:
        return found
    of_test, test_file = write_rows(folder, "test", blend, test)
    metrics = beside_labels(of_test, net.train.test)
    return replace(found, train=replace(train, test=metrics, predictions=test_file), predictions=[test_file])


def beside_labels(found: Mapping[str, float], of_net: Mapping[str, float]) -> dict[str, float]:
    """A blend's metrics with that of the rows' labels, which is the network's too, in the order of the network's."""
    every = {**{name: value for name, value in of_net.items() if name == POSITIVE_SHARE.name}, **found}
    return {name: every[name] for name in (*of_net, *found) if name in every}


def write_rows(folder: Storage, split: str, blend: Blend, rows: PairedRows) -> tuple[dict[str, float], str]:
    """Write what the blend predicts, as ranks write it for their rows, and return its metrics and the file."""
    predictions = rows.blended(blend.share)
    columns = {"id": rows.ids, "prediction": predictions, "label": rows.labels}
    columns |= {} if rows.weights is None else {"weight": rows.weights}
    sink, file = pa.BufferOutputStream(), f"{PREDICTIONS}/{split}.parquet"
    pq.write_table(pa.table({name: stored_values(values) for name, values in columns.items()}), sink)
    folder.put_atomic(file, sink.getvalue().to_pybytes())
    return rows.scores(predictions), file
