"""A table as trees see it: one matrix of float32, in which a missing value is NaN and a category is its code.

Numbers are those of the stored column: trees need no scale, and the exported file then splits on values that people
know. A category of the manifest's list has its code, those outside the list share one; a null is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.features import NULL_CODE, State
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.training.data.batch import Columns
from sparkring.training.data.features.tensors import element_names

Matrix = NDArray[np.float32]  # (rows, columns)
MOST_CATEGORIES = 4096  # a column of more is split as a number: by how often a category occurs
AS_STORED: dict[str, State] = {
    "numeric": {"transform": "none", "mean": 0.0, "std": 1.0, "fill": float("nan")},
    "cyclic": {"fill": float("nan")},
}
"""Kind of feature -> what its state says for trees."""
NUMBER, CATEGORY = "q", "c"  # as XGBoost calls the types of columns


def seen_by(model: ModelConfig, manifest: DatasetManifest) -> DatasetManifest:
    """Return the dataset as the model sees it: for trees numbers stay unscaled, and a null is NaN."""
    if not model.is_trees or "features" not in manifest.features:
        return manifest
    states = [state | AS_STORED.get(state["kind"], {}) for state in manifest.features["features"]]
    return manifest.model_copy(update={"features": manifest.features | {"features": states}})


@dataclass(frozen=True)
class TreeColumns:
    """The columns of the matrix: each is a tensor of the dataset, or an element of a vector."""

    tensors: tuple[Column, ...]

    @classmethod
    def of(cls, manifest: DatasetManifest, features: Sequence[str]) -> TreeColumns:
        """Return the columns of a model's features, without masks, which become NaN.

        `features`: names of tensors and masks (ModelColumns.features).
        """
        masks = {column.mask for column in manifest.tensors if column.mask is not None}
        return cls(tuple(manifest.tensor(name) for name in features if name not in masks))

    @property
    def names(self) -> list[str]:
        return [name for column in self.tensors for name in element_names(column)]

    @property
    def types(self) -> list[str]:
        """NUMBER or CATEGORY of each column."""
        return [CATEGORY if is_category(column) else NUMBER for column in self.tensors for _ in element_names(column)]

    def matrix(self, columns: Columns) -> Matrix:
        """Make the rows of a batch: tensors by name, each (rows, *shape), and the masks of those that have one."""
        parts = [_values(column, columns) for column in self.tensors]
        return np.ascontiguousarray(np.concatenate(parts, axis=1))


def is_category(column: Column) -> bool:
    return column.cardinality is not None and column.cardinality <= MOST_CATEGORIES


def _values(column: Column, columns: Columns) -> Matrix:
    """Return the values (rows, elements) of one tensor."""
    given: torch.Tensor = columns[column.name]
    values: Matrix = given.numpy().reshape(len(given), math.prod(column.shape)).astype(np.float32)
    if column.cardinality is not None:
        values[values == NULL_CODE] = np.nan
    if column.mask is not None:
        values[~columns[column.mask].numpy()] = np.nan
    return values


def infinite_columns(names: Sequence[str], matrix: Matrix) -> list[str]:
    """List the columns with infinite values."""
    return [names[column] for column in np.flatnonzero(np.isinf(matrix).any(axis=0)).tolist()]
