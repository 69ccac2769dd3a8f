"""The recipe's `trees` block reaches XGBoost."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xgboost

from sparkring.conf.blocks.trees import TreesConfig
from sparkring.conf.tasks import BINARY, MULTICLASS, MULTILABEL, POISSON, REGRESSION, TaskKind
from sparkring.training.trees.params import OBJECTIVES, booster_params, curvatures, rows_per_leaf

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


@pytest.mark.parametrize("kind", [BINARY, MULTICLASS, MULTILABEL, POISSON, REGRESSION], ids=lambda kind: kind.name)
def test_curvatures_are_those_of_the_library(kind: TaskKind) -> None:
    """Their sum over the rows is what it calls the cover of a tree's root."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(500, 2)).astype(np.float32)
    labels = {
        BINARY: rows[:, 0] > 0.3,
        MULTICLASS: np.digitize(rows[:, 0], [-0.5, 1.0]),
        MULTILABEL: rows > [[0.3, -0.5]],
        POISSON: draw.poisson(np.exp(rows[:, 0])),
        REGRESSION: rows[:, 0],
    }[kind].astype(np.float32)
    params = {"objective": OBJECTIVES[kind.name], "min_child_weight": 0, "nthread": 1}
    params |= {"num_class": 3} if kind is MULTICLASS else {}
    matrix = xgboost.QuantileDMatrix(rows, labels)
    booster = xgboost.train(params, matrix, 4)
    found = curvatures(kind, booster.predict(matrix, output_margin=True, iteration_range=(0, 3)))
    trees = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
    per_round = len(trees) // 4
    covers = [tree["sum_hessian"][0] for tree in trees[-per_round:]]
    np.testing.assert_allclose(found.reshape(500, -1).sum(axis=0), covers, rtol=1e-4)


def test_leaves_of_amounts_have_fewer_rows_unless_the_recipe_says_how_many() -> None:
    given = TreesConfig(rows_per_leaf=0.0)
    assert [rows_per_leaf(TreesConfig(), kind) for kind in (REGRESSION, POISSON, BINARY, MULTICLASS)] == [5, 5, 30, 30]
    assert rows_per_leaf(given, REGRESSION) == rows_per_leaf(given, BINARY) == 0
