"""Rows as linear models and trees take them: of training rows as many as the driver holds, of test rows file by file.

Shapes: N rows, K cells of a row (one for each number, mask and code), F coefficients, L labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparkring.conf.features import FIRST_CODE
from sparkring.conf.manifest import Column
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.training.data.features.tensors import element_names

Array = np.ndarray
MOST_CELLS = 1 << 25  # of training rows: of 12 bytes, a double and its place; with all copies about 1.5 GB


@dataclass(frozen=True)
class Design:
    """Rows of K cells each: a value, and the coefficient that it is multiplied by."""

    values: Array  # (N, K) float64: numbers first, scaled by those of the training rows; then 1 for each code
    places: Array  # (N, K) int32
    labels: Array  # (N, L) float64
    weights: Array | None  # (N,) float64, above 0; None: all equal
    cardinalities: tuple[int, ...]  # codes of each coded feature, in the order of the last cells
    coefficients: int  # F
    ranks: tuple[Array, ...] = ()  # of each coded feature: (codes,) the place of a code's value among the sorted values

    def matrix(self) -> Any:
        """Return the features, (N, F), sparse."""
        from scipy.sparse import csr_matrix  # seconds of imports, and only after training

        rows, cells = self.values.shape
        starts = np.arange(0, rows * cells + 1, max(cells, 1), dtype=np.int32)[: rows + 1]
        return csr_matrix((self.values.ravel(), self.places.ravel(), starts), shape=(rows, self.coefficients))

    @property
    def total(self) -> float:
        """How much all rows weigh together."""
        return float(len(self.labels) if self.weights is None else self.weights.sum())

    @property
    def classes(self) -> int:
        """Number of classes up to the largest."""
        return int(self.labels.max()) + 1

    def means(self, values: Array) -> Array:
        """Return the means of values (N, n) over the rows, by weight: (n,)."""
        found: Array = values.mean(axis=0) if self.weights is None else self.weights @ values / self.total
        return found

    def sampled(self, most: int) -> Design:
        """Return the rows, or `most` evenly spaced ones."""
        rows = len(self.labels)
        if rows <= most:
            return self
        kept = np.linspace(0, rows - 1, most).astype(np.int64)
        weights = None if self.weights is None else self.weights[kept]
        return replace(
            self, values=self.values[kept], places=self.places[kept], labels=self.labels[kept], weights=weights
        )


@dataclass(frozen=True)
class DesignReader:
    """Read a split's rows. `labels`: columns whose elements are the labels."""

    features: Sequence[Column]
    labels: Sequence[Column]

    @property
    def cells(self) -> int:
        """Cells of a row: one for each feature, and one for its mask."""
        return sum(1 + (column.mask is not None) for column in self.features)

    def training(self, rows: SplitRows) -> tuple[Design, Scale]:
        """Read training rows, scaled; of more than MOST_CELLS cells the first rows of each file, in proportion.

        Stored rows are in the order of a hash, so the first ones are a uniform sample.
        """
        share = min(1.0, MOST_CELLS / max(1, rows.most_rows * max(1, self.cells)))
        parts = [*self.files(rows, share)]
        joined = (np.concatenate(each) for each in zip(*((p.values, p.places, p.labels) for p in parts), strict=True))
        values, places, labels = joined
        weights = (
            None if parts[0].weights is None else np.concatenate([p.weights for p in parts if p.weights is not None])
        )
        design = replace(parts[0], values=values, places=places, labels=labels, weights=weights)
        scale = Scale.of(design, self.cells - len(design.cardinalities))
        return scale.applied(design), scale

    def files(self, rows: SplitRows, share: float = 1.0) -> Iterator[Design]:
        """Read the rows of each file that weigh something, not scaled. `share`: of each file, from its beginning."""
        coded = [column for column in self.features if column.cardinality is not None]
        plain = [column for column in self.features if column.cardinality is None]
        masks = [column.mask for column in self.features if column.mask is not None]
        weight = rows.manifest.weight["column"] if rows.manifest.weight is not None else None
        targets = [(name, column) for column in self.labels for name in element_names(column)]
        cardinalities = tuple(int(column.cardinality or 0) for column in coded)
        firsts = np.cumsum([len(plain) + len(masks), *cardinalities])
        states = {state["name"]: state.get("values", []) for state in rows.manifest.fitted}
        ranks = tuple(ranks_of(states.get(c.name, []), count) for c, count in zip(coded, cardinalities, strict=True))
        names = dict.fromkeys(c.name for c in (*self.features, *self.labels))
        for batch in rows.doubles([*names, *([weight] if weight is not None else [])], share):
            columns = dict(zip(batch.schema.names, (column.to_numpy() for column in batch.columns), strict=True))
            weighs = np.ones(batch.num_rows) if weight is None else columns[weight]
            numbers = [_filled(columns[c.name], c) for c in plain] + [columns[name] for name in masks]
            codes = np.stack([columns[c.name] for c in coded], axis=1) if coded else np.zeros((batch.num_rows, 0))
            known = (codes >= 0) & (codes < np.diff(firsts))  # a code beyond them has no coefficient
            values = np.column_stack([*numbers, known.astype(np.float64)])
            places = np.empty(values.shape, np.int32)
            places[:, : len(numbers)] = np.arange(len(numbers))
            places[:, len(numbers) :] = firsts[:-1] + np.where(known, codes, 0)
            wanted = np.column_stack([_filled(columns[name], column) for name, column in targets])
            counts = weighs > 0
            weights = None if weight is None else weighs[counts]
            yield Design(values[counts], places[counts], wanted[counts], weights, cardinalities, int(firsts[-1]), ranks)


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each number of the training rows, which become 0 and 1."""

    means: Array  # (numbers,)
    deviations: Array  # (numbers,)

    @classmethod
    def of(cls, design: Design, numbers: int) -> Scale:
        """Measure the first `numbers` cells. A number that is constant, but for rounding, keeps its deviation of 1."""
        values = design.values[:, :numbers]
        means = design.means(values)
        deviations = np.sqrt(design.means(np.square(values - means)))
        return cls(means, np.where(deviations > 1e-12 * abs(means), deviations, 1.0))

    def applied(self, design: Design) -> Design:
        """Scale the rows in place, and return them."""
        numbers = design.values[:, : len(self.means)]
        numbers -= self.means
        numbers /= self.deviations
        return design


def joined(weights: Sequence[Array | None]) -> Array | None:
    """Return the weights of some rows after others; None where rows have none."""
    known = [each for each in weights if each is not None]
    return np.concatenate(known) if known else None


def ranks_of(values: Sequence[Any], codes: int) -> Array:
    """Return the place of each code in the order of the values: (codes,). A code without a value keeps its own."""
    ranks = np.arange(codes)
    ranks[FIRST_CODE : FIRST_CODE + len(values)] = FIRST_CODE + np.argsort(np.argsort(np.array(values)))
    return ranks


def _filled(values: Array, column: Column) -> Array:
    """Fill NaN as the reader fills nulls."""
    fill = float(column.fill) if column.nulls == "fill" and column.fill is not None else 0.0
    return np.nan_to_num(values, copy=True, nan=fill, posinf=np.inf, neginf=-np.inf)
