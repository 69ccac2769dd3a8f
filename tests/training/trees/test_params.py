"""The recipe's `trees` block reaches XGBoost."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xgboost

from sparkring.conf.blocks.trees import TreesConfig
from sparkring.conf.tasks import REGRESSION
from sparkring.training.trees.params import booster_params

CODES = 40


@pytest.mark.parametrize("most", [4, CODES])
def test_a_split_parts_at_most_so_many_categories_from_the_others(most: int) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(CODES, size=(4000, 1)).astype(np.float32)
    values = random.normal(size=CODES)[codes[:, 0].astype(int)]
    matrix = xgboost.QuantileDMatrix(codes, values, feature_types=["c"], enable_categorical=True)
    params = booster_params(TreesConfig(categories_per_split=most), REGRESSION, 1, 0, 1)
    booster = xgboost.train(params, matrix, 3)
    trees = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
    sizes = np.concatenate([tree["categories_sizes"] for tree in trees])
    largest = np.minimum(sizes, CODES - sizes).max()
    assert largest <= most and (largest > 4) == (most > 4)
