"""Trees that the ranks of a job grow together: each has its own rows, and sums over all of them choose every split."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xgboost

from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch
from sparkring.training.model.folder import TREES_ENGINE
from sparkring.training.parallel.strategy import Ranks
from sparkring.training.trees.collective import TreesMeeting
from sparkring.training.trees.columns import TreeColumns
from sparkring.training.trees.model import TreesModel
from sparkring.training.trees.rows import HeldBatch
from sparkring.training.trees.sample import Sampler
from sparkring.training.waiting import waits_for_ranks


class TreesRanks(Ranks):
    """A rank's part of the trees. Life: begin -> (add_round, evaluate, state)* -> keep_rounds -> evaluate."""

    engine, is_data_leader = TREES_ENGINE, True

    def __init__(self, info: RankInfo, columns: TreeColumns, sampler: Sampler) -> None:
        self.data_rank, self.data_size, self.meeting = info.rank, info.world_size, TreesMeeting(info)
        self.columns, self.sampler = columns, sampler
        self.booster = xgboost.Booster()
        self._training: xgboost.DMatrix | None = None
        self._weights = np.zeros(0, np.float32)  # of the training rows

    @property
    def waited_s(self) -> float:
        return 0.0  # XGBoost does not tell

    def begin(self, params: dict[str, Any], training: HeldBatch, state: bytes | None = None) -> None:
        """Begin without trees, or with those of a checkpoint."""
        assert training.matrix is not None, "it is held"
        params = params | {"colsample_bytree": self.sampler.share_drawn(training.matrix.num_col())}
        self._training, self._weights = training.matrix, training.row_weights().numpy().astype(np.float32)
        self.booster = xgboost.Booster(params, [training.matrix])
        if state is not None:
            self.booster.load_model(bytearray(state))
            self.booster.set_param(params)

    @waits_for_ranks
    def add_round(self, number: int) -> None:
        """Add the trees of a round, counted from 0. Collective."""
        assert self._training is not None, "begin comes first"
        self.sampler.apply(self._training, self._weights, number)
        self.booster.update(self._training, number)

    def keep_rounds(self, rounds: int) -> None:
        """Leave the trees of later rounds out of the model."""
        self.booster = self.booster[:rounds]

    def state(self) -> bytes:
        """All trees so far, the same bytes on every rank."""
        return bytes(self.booster.save_raw("ubj"))

    def evaluate(self, batch: Batch) -> torch.Tensor | None:
        if not batch.rows:
            return None
        if isinstance(batch, HeldBatch) and batch.matrix is not None:
            return torch.from_numpy(self.booster.predict(batch.matrix, output_margin=True))
        return TreesModel(self.booster, self.columns)(batch.columns)
