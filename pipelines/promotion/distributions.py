"""How far two distributions are apart. Pure functions of counts.

Counts of two distributions are (cells,) arrays over the same cells: values of a category, ranges of a number, and one
cell of nulls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sparkring.etl.columns.statistics import Numbers, Statistics

Array = NDArray[Any]
RANGES = 10  # a number is cut at the reference's deciles, as the population stability index usually is
LEAST_SHARE = 1e-4  # of a cell in psi, which is infinite where a cell is empty in one distribution alone
NULLS = "\0"  # the cell of nulls; no value of ours has that character alone
Counts = tuple[Array, Array]  # of the reference, and of what is compared with it


def distance(measure: str, reference: Array, current: Array) -> float:
    """Compute the measure between counts (cells,); ValueError if one distribution has no rows."""
    if not reference.sum() or not current.sum():
        raise ValueError("no rows to compare")
    p, q = reference / reference.sum(), current / current.sum()
    if measure == "infinity_norm":
        return float(np.abs(p - q).max())
    if measure == "psi":
        p, q = np.maximum(p, LEAST_SHARE), np.maximum(q, LEAST_SHARE)
        return float(((q - p) * np.log(q / p)).sum())
    assert measure == "jensen_shannon_divergence", measure
    middle = (p + q) / 2
    return (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2


def _relative_entropy(p: Array, q: Array) -> float:
    """Compute the Kullback-Leibler divergence in bits."""
    there = p > 0
    return float((p[there] * np.log2(p[there] / q[there])).sum())


def column_counts(column: str, reference: Statistics, current: Statistics) -> Counts | None:
    """Count a column's values in the same cells; None where a side has counted nothing of it."""
    if column in reference.values and column in current.values:
        return category_counts(_of_values(reference, column), _of_values(current, column))
    before, now = _numbers_of(reference, column), _numbers_of(current, column)
    if before is None or now is None:
        return None
    ranges = range_counts(_table(before), _table(now))
    return np.append(ranges[0], _others(reference, before)), np.append(ranges[1], _others(current, now))


def _numbers_of(statistics: Statistics, column: str) -> Numbers | None:
    """Return the column's numbers; None if missing, or counted before histograms existed."""
    found = next((numbers for numbers in statistics.numbers if numbers.column == column), None)
    return None if found is not None and found.count and not found.histogram else found


def _table(numbers: Numbers) -> Array:
    return np.array(numbers.histogram, np.int64).reshape(-1, 2)


def _others(statistics: Statistics, numbers: Numbers) -> tuple[int, int]:
    """Count rows with an infinity, and rows without a number: nulls and NaN."""
    return numbers.infinite, statistics.rows - numbers.count - numbers.infinite


def _of_values(statistics: Statistics, column: str) -> dict[str, int]:
    """Count rows by value of a category, nulls included."""
    table: pa.Table = statistics.values[column]
    found = dict(zip(table["value"].to_pylist(), table["count"].to_pylist(), strict=True))
    return found | {NULLS: statistics.rows - sum(found.values())}


def category_counts(reference: Mapping[Any, int], current: Mapping[Any, int]) -> Counts:
    """Line up rows by value; a value that one side lacks has no rows there."""
    values = [*dict.fromkeys([*reference, *current])]
    return np.array([reference.get(v, 0) for v in values]), np.array([current.get(v, 0) for v in values])


def range_counts(reference: Array, current: Array) -> Counts:
    """Sum histograms into ranges that are about equally full in the reference.

    Histograms are (buckets, 2) of (bucket, count) by rising bucket. Values beyond the ranges count as the first or
    last.
    """
    if not len(reference):
        return np.zeros(1), np.array([current[:, 1].sum()])
    cuts = _cuts(reference)
    return _in_ranges(reference, cuts), _in_ranges(current, cuts)


def _cuts(reference: Array) -> Array:
    """Return the first buckets (ranges - 1,) of all ranges but the first."""
    below = np.cumsum(reference[:, 1])
    wanted = below[-1] * np.arange(1, RANGES) / RANGES
    return np.unique(reference[np.searchsorted(below, wanted), 0]) + 1


def _in_ranges(histogram: Array, cuts: Array) -> Array:
    places = np.searchsorted(cuts, histogram[:, 0], side="right")
    return np.bincount(places, histogram[:, 1], minlength=len(cuts) + 1)


def prediction_counts(reference: Array, current: Array, several: bool = False) -> Counts:
    """Count predictions: (N,) values in ranges of the reference, (N, classes) by their likeliest class.

    Of several labels, (N, labels), each predicted label counts, and each row that has none.
    """
    if reference.ndim != current.ndim or reference.shape[1:] != current.shape[1:]:
        raise ValueError(f"predictions are of {reference.shape[1:]} and {current.shape[1:]} classes")
    if several:
        return _predicted_labels(reference), _predicted_labels(current)
    if reference.ndim == 2:
        cells, classes = [p.argmax(axis=1) for p in (reference, current)], reference.shape[1]
    else:
        cuts = np.unique(np.quantile(reference, np.arange(1, RANGES) / RANGES))
        cells, classes = [np.searchsorted(cuts, p, side="right") for p in (reference, current)], len(cuts) + 1
    return np.bincount(cells[0], minlength=classes), np.bincount(cells[1], minlength=classes)


def _predicted_labels(predictions: Array) -> Array:
    """Count rows by predicted label, and those without any, (labels + 1,)."""
    chosen = predictions > 0.5
    return np.append(chosen.sum(axis=0), (~chosen.any(axis=1)).sum())
