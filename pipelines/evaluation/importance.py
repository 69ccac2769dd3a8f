"""Permutation importance: by how much the loss of test rows grows where a column's values are those of other rows.

After Breiman 2001 (https://doi.org/10.1023/A:1010933404324), on rows that the model was not trained on. All that the
model sees of a column is permuted together. Two columns that say the same have little importance each, since the other
one is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sparkring.conf.tasks import TaskKind
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.pipelines.serving import TablePredictor
from sparkring.training.metrics import Rows, row_values
from sparkring.training.worker.result import Importance

Array = NDArray[np.float64]
MOST_SCORED = 1 << 16  # rows that are scored for all columns together: half a second for the built-in model
MOST_REPEATS, SEED = 5, 0


@dataclass(frozen=True)
class SampleSize:
    """How many test rows are looked at, and how often each column is permuted."""

    rows: int
    repeats: int

    @classmethod
    def of(cls, rows: int, columns: int) -> SampleSize:
        """Choose as many rows as MOST_SCORED allows, then as many repeats, up to MOST_REPEATS."""
        each = MOST_SCORED // max(columns, 1)
        some = max(1, min(rows, each))
        return cls(some, max(1, min(MOST_REPEATS, each // some)))


@dataclass(frozen=True)
class Sample:
    """Test rows whose weights are above 0, as they are stored."""

    table: pa.Table
    labels: Array  # (N,), or (N, labels)
    weights: Array  # (N,), their sum is 1


def mean_and_half_width(values: Array, weights: Array) -> tuple[float, float]:
    """Return the weighted mean of values (N,), and half the width of its 95 % interval. weights (N,): their sum is 1.

    The interval is Student's, with as many degrees of freedom as the weights have effective rows (Kish), less one.
    """
    from scipy.special import stdtrit  # a job needs it after training alone

    mean, error = mean_and_error(values, weights)
    if not math.isfinite(error):
        return mean, math.inf
    return mean, error * float(stdtrit(1 / float(weights @ weights) - 1, 0.975))  # 12.7 of two rows, 1.96 of many


def mean_and_error(values: Array, weights: Array) -> tuple[float, float]:
    """Return the weighted mean of values (N,), and its standard error. weights (N,): their sum is 1.

    Values are nearer to their own mean than to the true one, by a share that their weights know: 1 / N of equal ones.
    Of one row that counts, or of one next to which others count for nothing, the error is infinite.
    """
    mean, free = float(weights @ values), 1 - float(weights @ weights)
    if free <= 0:
        return mean, math.inf
    return mean, math.sqrt(np.square(weights) @ np.square(values - mean) / free)


def find_importances(predictor: TablePredictor, kind: TaskKind, sample: Sample, repeats: int) -> list[Importance]:
    """Compute the importance of each stored column the model reads, largest first; deterministic by rows.

    Args:
        predictor: predictor of the model.
        kind: kind of its task.
        sample: rows to permute.
        repeats: permutations of each column.
    """

    def losses(table: pa.Table) -> Array:
        return row_values(kind.metric("loss"), Rows(kind.form, sample.labels, predictor.scores_of_stored(table)))

    ours, found = losses(sample.table), []
    for number, name in enumerate(predictor.stored_columns):
        tables = permuted(sample.table, name, repeats, number)
        grown = np.mean([losses(table) - ours for table in tables], axis=0)
        mean, half_width = mean_and_half_width(grown, sample.weights)
        found.append(Importance(feature=name, mean=mean, low=mean - half_width, high=mean + half_width))
    return sorted(found, key=lambda each: -each.mean)


def permuted(table: pa.Table, name: str, repeats: int, number: int) -> Iterator[pa.Table]:
    """Yield the rows with one column permuted. `number`: the column's, which seeds the orders."""
    place = table.column_names.index(name)
    for repeat in range(repeats):
        order = np.random.default_rng([SEED, number, repeat]).permutation(len(table))
        yield table.set_column(place, name, table.column(place).take(pa.array(order)))


def sample_rows(rows: SplitRows, columns: Sequence[str], labels: Array, weights: Array | None, most: int) -> Sample:
    """Read evenly spaced rows.

    Args:
        rows: rows of the test split.
        columns: stored columns that the model reads.
        labels: (N,) or (N, labels) of all rows.
        weights: weights (N,) of all rows; None for equal weights.
        most: most rows to read.
    """
    counts = np.arange(len(labels)) if weights is None else np.flatnonzero(weights > 0)
    kept = counts[np.linspace(0, len(counts) - 1, min(most, len(counts))).astype(np.int64)]
    texts = [name for name in columns if rows.manifest.column(name).dtype == "string"]
    parts, first = [], 0
    for table in rows.tables(columns, texts):
        here = kept[(kept >= first) & (kept < first + len(table))] - first
        parts.append(table.select([*columns]).take(pa.array(here)))
        first += len(table)
    table = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
    share = np.ones(len(kept)) if weights is None else weights[kept]
    return Sample(table, labels[kept], share / share.sum())
