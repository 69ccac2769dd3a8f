"""What a round's trees are grown on depends on the round alone."""

from __future__ import annotations

import json

import numpy as np
import xgboost

from sparkring.training.trees.sample import TAKEN, Sampler


def test_rows_and_columns_are_drawn_by_round_and_rank() -> None:
    sampler, other = Sampler(3, 0, 0.8, 0.5), Sampler(3, 1, 0.8, 0.5)
    first, second = sampler.row_mask(10_000, 1), sampler.row_mask(10_000, 2)
    assert (first == Sampler(3, 0, 0.8, 0.5).row_mask(10_000, 1)).all() and (first != second).any()
    assert 0.78 < first.mean() < 0.82 and (first != other.row_mask(10_000, 1)).any()
    assert sampler.row_mask(100, 0).all(), "the first round, in which the value that trees start from is estimated"
    columns = sampler.column_weights(9, 5)
    assert (columns == other.column_weights(9, 5)).all() and (columns == TAKEN).sum() == 5
    assert (Sampler(3, 0, 1, 0.01).column_weights(9, 5) == TAKEN).sum() == 1
    assert Sampler(-1, 0, 0.5, 0.5).row_mask(10, 1).shape == (10,), "a seed may be negative"


def test_few_columns_are_all_taken() -> None:
    """One of two, which XGBoost would draw for 0.8, would keep any tree from seeing both."""
    sampler = Sampler(0, 0, 1.0, 0.8)
    assert [sampler.taken(columns) for columns in (1, 2, 3, 4, 5, 30)] == [1, 2, 3, 4, 4, 24]
    assert [int(sampler.share_drawn(columns) * columns) for columns in (1, 2, 5, 30, 999)] == [1, 2, 4, 24, 800]


def test_only_the_columns_that_were_drawn_are_split() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(2000, 12)).astype(np.float32)
    matrix = xgboost.QuantileDMatrix(rows, rows.sum(axis=1))
    sampler = Sampler(0, 0, 0.7, 0.3)
    booster = xgboost.Booster(
        {"colsample_bytree": sampler.share_drawn(12), "nthread": 1, "tree_method": "hist"}, [matrix]
    )
    for number in range(50):
        sampler.apply(matrix, np.ones(2000, np.float32), number)
        booster.update(matrix, number)
    trees = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
    for number, tree in enumerate(trees):
        inner = np.array(tree["left_children"]) >= 0
        drawn = np.flatnonzero(sampler.column_weights(12, number) == TAKEN)
        assert {*np.array(tree["split_indices"])[inner]} <= {*drawn}, number
