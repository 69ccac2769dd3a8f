"""Trees that the ranks of a job grow together: each has its own rows, and sums over all of them choose every split."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xgboost

from sparkring.conf.rank_info import RankInfo
from sparkring.conf.tasks import REGRESSION, TaskKind
from sparkring.training.data.batch import Batch
from sparkring.training.model.folder import TREES_ENGINE
from sparkring.training.parallel.strategy import Ranks
from sparkring.training.trees.collective import TreesMeeting
from sparkring.training.trees.columns import TreeColumns
from sparkring.training.trees.model import TreesModel
from sparkring.training.trees.params import curvatures
from sparkring.training.trees.rows import HeldBatch
from sparkring.training.trees.sample import Sampler
from sparkring.training.trees.stored import read_stored
from sparkring.training.waiting import waits_for_ranks


class TreesRanks(Ranks):
    """A rank's part of the trees. Life: begin -> (add_round, evaluate, state)* -> keep_rounds -> evaluate."""

    engine, is_data_leader = TREES_ENGINE, True

    def __init__(
        self, info: RankInfo, columns: TreeColumns, sampler: Sampler, kind: TaskKind, rows_per_leaf: float
    ) -> None:
        self.kind, self.rows_per_leaf = kind, rows_per_leaf
        self.data_rank, self.data_size, self.meeting = info.rank, info.world_size, TreesMeeting(info)
        self.columns, self.sampler = columns, sampler
        self.booster = xgboost.Booster()
        self._training: xgboost.DMatrix | None = None
        self._weights = np.zeros(0, np.float32)  # of the training rows

    @property
    def waited_s(self) -> float:
        return 0.0  # XGBoost does not tell

    def begin(self, params: dict[str, Any], training: HeldBatch, state: bytes | None = None) -> None:
        """Start without trees, or with those of a checkpoint. ValueError where it holds no trees."""
        assert training.matrix is not None, "it is held"
        params = params | {"colsample_bytree": self.sampler.share_drawn(training.matrix.num_col())}
        self._training, self._weights = training.matrix, training.row_weights().numpy().astype(np.float32)
        self.booster = xgboost.Booster(params, [training.matrix])
        if state is not None:
            read_stored(state)
            self.booster.load_model(bytearray(state))
            self.booster.set_param(params)

    @waits_for_ranks
    def add_round(self, number: int) -> None:
        """Add the trees of a round, counted from 0. Collective."""
        assert self._training is not None, "begin comes first"
        self.booster.set_param({"min_child_weight": self.rows_per_leaf * (self._mean_curvature() if number else 1.0)})
        self.sampler.apply(self._training, self._weights, number)
        self.booster.update(self._training, number)

    def _mean_curvature(self) -> float:
        """Return the mean second derivative of the training rows' losses, over all ranks. Collective.

        XGBoost's bound of a leaf is a sum of second derivatives, which shrink as trees get certain: with a fixed bound,
        a label that can be known exactly stops learning long before it is known.
        """
        if self.kind is REGRESSION:
            return 1.0
        margins = self.booster.predict(self._training, output_margin=True)
        found = curvatures(self.kind, margins)
        of_rows = found.mean(axis=tuple(range(1, found.ndim)))  # over classes; a rank may have no rows
        weighed = of_rows * self._weights  # not `@`: threads of BLAS wait for its next product at full speed
        sums = torch.tensor([weighed.sum(), self._weights.sum()], dtype=torch.float64)
        total, weight = self.meeting.sum_over_data(sums)
        return float(total / weight)

    def keep_rounds(self, rounds: int) -> None:
        """Remove the trees of later rounds from the model."""
        self.booster = self.booster[:rounds]

    def state(self) -> bytes:
        """Serialize all trees so far, the same bytes on every rank."""
        return bytes(self.booster.save_raw("ubj"))

    def evaluate(self, batch: Batch) -> torch.Tensor | None:
        if not batch.rows:
            return None
        if isinstance(batch, HeldBatch) and batch.matrix is not None:
            return torch.from_numpy(self.booster.predict(batch.matrix, output_margin=True))
        return TreesModel(self.booster, self.columns)(batch.columns)
