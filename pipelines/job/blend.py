"""Mix a network and trees that were trained on the same rows, unless one is better alone (model.blend).

The network's share is one half, or as near to it as the validation rows allow: of the shares whose loss is within a
standard error of the least one, the nearest. By few rows the best share, or the better family, is a matter of chance,
and the mean of two models that err otherwise is the safer choice; many rows leave only shares near the best one. The
rule is that of Breiman et al. 1984 for the size of a tree.

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

from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage, copy_files
from sparkring.conf.tasks import POSITIVE_SHARE, Family, TaskKind, is_better
from sparkring.pipelines.context.context import JobContext
from sparkring.pipelines.evaluation.prediction_files import read_columns
from sparkring.pipelines.promotion.scores import resampled
from sparkring.training.metrics import Rows, effective_rows, row_values, task_scores
from sparkring.training.model.blend import Blend, before_link, mixed
from sparkring.training.model.folder import weight_files
from sparkring.training.model.predictions import stored_values
from sparkring.training.worker.result import FamilyChoice, Trained

log = logging.getLogger(__name__)
Array = NDArray[np.float64]
SHARES = np.arange(21) / 20
EVEN = 0.5
FEWEST = 100  # validation rows, of equal weights; fewer say too little
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
    weights: Array | None = None  # (N,); None for equal weights

    def blended(self, share: float | Array) -> Array:
        """Blend the predictions. `share`: the network's, one for all rows or (N,) for each."""
        of_rows = np.expand_dims(share, tuple(range(1, self.net.ndim))) if np.ndim(share) else share
        return mixed(self.kind, of_rows, before_link(self.kind, self.net), before_link(self.kind, self.trees))

    @property
    def effective(self) -> int:
        """How many rows of equal weights say as much."""
        return len(self.labels) if self.weights is None else effective_rows(self.weights)

    def scores(self, predictions: Array) -> dict[str, float]:
        """Compute all metrics of predictions for the rows."""
        return task_scores(self.kind, self.labels, predictions, self.weights)

    def half_width(self, metric: str, one: Array, other: Array) -> float | None:
        """Return half the 95 % interval of a metric's difference, by paired resamples; None if not finite."""
        if metric not in self.kind.resampled or self.effective < 2:
            return None
        found = resampled(self.kind, metric, self.labels, (one, other), RESAMPLES, self.weights)
        width = 1.96 * float(np.std(found[:, 0] - found[:, 1]))
        return width if np.isfinite(width) else None


def read_pairs(folder: Storage, kind: TaskKind, net: Sequence[str], trees: Sequence[str]) -> PairedRows | None:
    """Read both families' predictions; None if their rows differ, as with a damaged split.

    Args:
        folder: folder of the run.
        kind: kind of the task.
        net: prediction files of the network, relative to the run folder.
        trees: prediction files of the trees.
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


def fit_share(rows: PairedRows) -> float:
    """Fit the network's share. ValueError for too few rows or predictions that are no numbers."""
    weights = np.ones(len(rows.labels)) if rows.weights is None else rows.weights
    if (count := rows.effective) < FEWEST:
        uneven = "" if rows.weights is None else ", by their weights"
        raise ValueError(f"{count_of(count, 'validation row is')} too few{uneven}, at least {FEWEST} are needed")
    loss = rows.kind.metric("loss")

    def losses(share: float) -> Array:
        return row_values(loss, Rows(rows.kind.form, rows.labels, rows.blended(share)))

    least = losses(min(SHARES, key=lambda share: float(losses(share) @ weights)))
    if not np.isfinite(least).all():
        raise ValueError("a family predicts what is no number")

    def is_near(share: float) -> bool:
        behind = losses(share) - least
        mean = behind @ weights / weights.sum()
        error = np.linalg.norm(weights * (behind - mean)) / weights.sum()  # the standard error of the mean
        return bool(mean <= error)

    return min((float(share) for share in SHARES if is_near(share)), key=lambda share: abs(share - EVEN))


def better_blend(
    job: JobContext, trained: Mapping[Family, Trained], choice: FamilyChoice, valid: PairedRows
) -> tuple[Trained | None, FamilyChoice]:
    """Return the blended training, or None if the better family alone is better; the choice explains it.

    Args:
        job: job of both families.
        trained: finished trainings by family.
        choice: choice between the two.
        valid: rows of the validation split.
    """
    try:
        share = fit_share(valid)
        if not 0 < share < 1:
            return None, choice
        mix = valid.blended(share)
        found = valid.scores(mix)[choice.metric]
    except (ValueError, KeyError) as error:  # a metric that these rows do not have
        log.warning("no blend: %s", error)
        return None, choice
    best = valid.net if choice.winner == "net" else valid.trees
    tried = replace(choice, values={**choice.values, "both": found})
    width = valid.half_width(choice.metric, mix, best)
    if is_behind(choice.metric, found, valid.scores(best)[choice.metric], width):
        return None, tried
    blend = Blend(share=share)
    write_model(job.folder, blend, trained)
    chosen = replace(tried, winner="both", half_width=width, share=share)
    return blended(job.folder, blend, trained, valid), chosen


def is_behind(metric: str, value: float, best: float, half_width: float | None) -> bool:
    """Return whether a blend is worse by more than a standard error, or at all if that is unknown.

    Args:
        metric: name of train.best_metric, which may differ from the fitted loss.
        value: metric of the blend.
        best: metric of the better family.
        half_width: half of the 95 % interval of their difference.
    """
    error = 0.0 if half_width is None else half_width / 1.96
    return not (is_better(metric, value, best) or abs(value - best) <= error)  # what is no number is behind


def write_model(folder: Storage, blend: Blend, trained: Mapping[Family, Trained]) -> None:
    """Copy both models' weights into the run's model folder, and then say how they are mixed."""
    target = folder.at(MODEL)
    for each in trained.values():
        assert each.train.weights is not None, "training is finished"
        source = folder.at(each.train.weights)
        copy_files(source, target, weight_files(source))
    blend.write(target)


def blended(folder: Storage, blend: Blend, trained: Mapping[Family, Trained], valid: PairedRows) -> Trained:
    """Return the network's training with the blend as its model, and its predictions and scores."""
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
    """Return a blend's metrics in the network's order, with the label's share of positive rows."""
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
