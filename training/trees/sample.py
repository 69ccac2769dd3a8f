"""The rows and columns that a round's trees are grown on, as functions of the round alone.

XGBoost draws them from generators whose state no model file has, so that a resumed training would grow other trees
than one that was not interrupted. So ranks draw themselves: a row that is left out weighs 0 in the round, and of
columns whose weights differ by 12 orders of magnitude XGBoost draws the heavy ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import xgboost
from numpy.typing import NDArray

TAKEN, LEFT_OUT = 1e6, 0.0  # weights of columns


@dataclass(frozen=True)
class Sampler:
    """Draws by the shares of `trees`. rank: each has rows of its own; columns are the same on all ranks."""

    seed: int
    rank: int
    rows: float
    columns: float

    def apply(self, matrix: xgboost.DMatrix, weights: NDArray[np.float32], number: int) -> None:
        """Weigh the rows and columns of the training matrix for a round, counted from 0. `weights`: of the rows.

        The first round takes all rows: the value that trees start from is estimated then.
        """
        if self.rows < 1:
            matrix.set_info(weight=weights * self.row_mask(len(weights), number))
        if self.taken(matrix.num_col()) < matrix.num_col():
            matrix.set_info(feature_weights=self.column_weights(matrix.num_col(), number))

    def taken(self, columns: int) -> int:
        """Return the number of columns per round, rounded up; all of two or three, to keep them together."""
        return max(1, math.ceil(self.columns * columns))

    def share_drawn(self, columns: int) -> float:
        """Return XGBoost's `colsample_bytree`, which it rounds down to whole columns."""
        taken = self.taken(columns)
        return 1.0 if taken == columns else (taken + 0.5) / columns

    def row_mask(self, rows: int, number: int) -> NDArray[np.bool_]:
        draw = np.random.default_rng([self.seed % 2**32, number, self.rank])
        mask: NDArray[np.bool_] = draw.random(rows, dtype=np.float32) < self.rows
        return mask if number else np.ones(rows, np.bool_)

    def column_weights(self, columns: int, number: int) -> NDArray[np.float32]:
        """Make as many columns heavy as XGBoost draws."""
        order = np.random.default_rng([self.seed % 2**32, number]).permutation(columns)
        weights = np.full(columns, LEFT_OUT, np.float32)
        weights[order[: self.taken(columns)]] = TAKEN
        return weights
