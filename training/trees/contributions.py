"""TreeSHAP of trees: what each feature adds to a row's raw prediction, and the base it is added to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import xgboost
from numpy.typing import NDArray

from sparkring.training.data.batch import Columns
from sparkring.training.data.features.tensors import element_names
from sparkring.training.model.contributions import Contributions
from sparkring.training.trees.columns import Matrix
from sparkring.training.trees.model import TreesModel
from sparkring.training.trees.shapley import MatrixColumns, TreeTables, make_tables

FINITE = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)


class TreesExplainer:
    """Computes Shapley values by path (Lundberg et al. 2020, https://doi.org/10.1038/s42256-019-0138-9).

    An absent column follows both branches of a split, each by the share of the training rows that took it, so the base
    is the mean raw prediction of the rows that the trees were grown on.
    """

    def __init__(self, model: TreesModel, features: Mapping[str, Sequence[str]]) -> None:
        """Prepare the columns. `features`: raw column -> the tensors made of it."""
        self.model, self.features = model, len(features)
        place = {name: number for number, names in enumerate(features.values()) for name in names}
        self.places = [place[tensor.name] for tensor in model.columns.tensors for _ in element_names(tensor)]
        """Column of the matrix -> feature."""

    def __call__(self, rows: Columns) -> Contributions:
        """Explain the rows of a batch. `rows`: tensors by name."""
        matrix = self.model.columns.matrix(rows)
        values = np.zeros((len(matrix), self.features, len(self.base)))
        if self._tables is None:
            found = self.by_library(matrix)[:, :, :-1]
            for column, place in enumerate(self.places):
                values[:, place] += found[:, :, column]
        else:
            columns = MatrixColumns.of(matrix, self.model.columns.types)
            for table in self._tables:
                values[:, table.features, table.output] += table.of(columns)
        raw = self.model(rows).numpy().astype(np.float64).reshape(len(matrix), len(self.base))
        return Contributions(values, self.base, raw)

    @cached_property
    def base(self) -> NDArray[np.float64]:
        """The mean raw prediction (O,) of the training rows."""
        missing = np.full((1, len(self.places)), np.nan, np.float32)
        found: NDArray[np.float64] = self.by_library(missing)[0, :, -1]
        return found

    @cached_property
    def _tables(self) -> list[TreeTables] | None:
        return make_tables(self.model.booster, self.places, self.features)

    def by_library(self, matrix: Matrix) -> NDArray[np.float64]:
        """Compute contributions by XGBoost: (B, O, columns and the base)."""
        columns = self.model.columns
        finite = np.clip(matrix, *FINITE)  # XGBoost refuses infinite numbers here, which go the same way at every split
        data = xgboost.DMatrix(
            finite, feature_names=columns.names, feature_types=columns.types, enable_categorical=True, nthread=1
        )
        found = self.model.booster.predict(data, pred_contribs=True).astype(np.float64)
        outputs = found.size // max(len(matrix) * found.shape[-1], 1)
        made: NDArray[np.float64] = found.reshape(len(matrix), outputs, found.shape[-1])
        return made
