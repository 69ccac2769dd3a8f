"""Leaves have at least so many rows of mean curvature, however certain the trees are by then."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import xgboost

from sparkring.conf.rank_info import RankInfo
from sparkring.conf.tasks import BINARY, REGRESSION, TaskKind
from sparkring.training.trees.columns import TreeColumns
from sparkring.training.trees.grow import TreesRanks
from sparkring.training.trees.params import OBJECTIVES, curvatures
from sparkring.training.trees.rows import HeldBatch
from sparkring.training.trees.sample import Sampler

ROWS, ROUNDS = 1000, 80
RANK = RankInfo(rank=0, local_rank=0, world_size=1, local_size=1)


def grown(kind: TaskKind, rows_per_leaf: float) -> tuple[TreesRanks, HeldBatch]:
    """Trees of labels that the columns say exactly; rows near the border, of which trees are least certain, weigh 3."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(ROWS, 2)).astype(np.float32)
    above = rows[:, 0] * rows[:, 1] - 0.2
    labels = (above > 0).astype(np.float32)
    weights = np.where(np.abs(above) < 0.1, 3.0, 1.0)
    matrix = xgboost.QuantileDMatrix(rows, labels, weight=weights)
    held = HeldBatch({}, ROWS, ROWS, ROWS, weight=torch.from_numpy(weights), matrix=matrix)
    ranks = TreesRanks(RANK, TreeColumns(()), Sampler(0, 0, 1.0, 1.0), kind, rows_per_leaf)
    ranks.begin({"objective": OBJECTIVES[kind.name], "learning_rate": 0.3, "nthread": 1}, held)
    for number in range(ROUNDS):
        ranks.add_round(number)
    return ranks, held


def leaves_of(ranks: TreesRanks) -> list[np.ndarray]:
    """The sums of second derivatives of the leaves of each round."""
    trees: list[dict[str, Any]] = json.loads(ranks.booster.save_raw("json"))["learner"]["gradient_booster"]["model"][
        "trees"
    ]
    return [np.array(t["sum_hessian"])[np.array(t["left_children"]) == -1] for t in trees]


@pytest.mark.parametrize("kind", [BINARY, REGRESSION], ids=lambda kind: kind.name)
def test_leaves_have_at_least_so_many_rows_of_mean_curvature(kind: TaskKind) -> None:
    ranks, held = grown(kind, 30.0)
    assert held.matrix is not None and held.weight is not None
    for number, leaves in enumerate(leaves_of(ranks)[1:], 1):
        margins = ranks.booster.predict(held.matrix, output_margin=True, iteration_range=(0, number))
        mean = np.average(curvatures(kind, margins), weights=held.weight.numpy())
        assert leaves.min() >= 30 * mean * (1 - 1e-4)


def test_trees_go_on_learning_what_is_certain() -> None:
    ranks, held = grown(BINARY, 30.0)
    assert held.matrix is not None
    odds = ranks.booster.predict(held.matrix, output_margin=True)
    assert curvatures(BINARY, odds).sum() < 2, "no leaf could have the sum that XGBoost asks for by default"
    assert all(len(leaves) > 1 for leaves in leaves_of(ranks)[-10:])
