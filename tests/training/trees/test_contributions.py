"""What columns add to the raw predictions of trees, beside the library's own numbers and a definition by hand."""

from __future__ import annotations

from itertools import combinations
from math import factorial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xgboost

from sparkring.conf.manifest import Column
from sparkring.training.trees.columns import TreeColumns
from sparkring.training.trees.contributions import TreesExplainer
from sparkring.training.trees.model import TreesModel

ROWS = 500
COLUMNS = TreeColumns((
    Column(name="city", dtype="int32", cardinality=6),
    *(Column(name=f"x{n}", dtype="float32") for n in range(3)),
    Column(name="place", dtype="float32", layout="vector", shape=(2,)),
))  # fmt: skip
FEATURES = {"city": ["city"], "x": ["x0", "x1"], "x2": ["x2"], "place": ["place"]}
PLACES = [0, 1, 1, 2, 3, 3]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "binary": {"objective": "binary:logistic"},
    "multiclass": {"objective": "multi:softprob", "num_class": 3},
    "multilabel": {"objective": "binary:logistic"},
    "regression": {"objective": "reg:squarederror"},
    "poisson": {"objective": "count:poisson"},
}


def some_rows(count: int = ROWS, seed: int = 0) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    rows = {"city": torch.from_numpy(random.integers(0, 6, count).astype(np.int32))}  # 0: null
    for n in range(3):
        x = random.normal(size=count).astype(np.float32)
        x[random.random(count) < 0.1] = np.nan
        rows[f"x{n}"] = torch.from_numpy(x)
    rows["place"] = torch.from_numpy(random.normal(size=(count, 2)).astype(np.float32))
    return rows


def labels(task: str, rows: dict[str, torch.Tensor]) -> np.ndarray:
    strength = (rows["city"] == 3) * 2.0 + rows["x0"].nan_to_num() * rows["place"][:, 1] + rows["x2"].nan_to_num()
    found = strength.numpy() + np.random.default_rng(1).normal(0, 0.2, len(strength))
    made = {
        "binary": found > 0,
        "multiclass": np.digitize(found, [-1, 1]),
        "multilabel": np.column_stack([found > 0, found > 1]),
        "poisson": np.random.default_rng(2).poisson(np.exp(found / 3)),
    }
    return made.get(task, 1000 + 50 * found).astype(np.float32)


def grown(task: str = "binary", depth: int = 4, rounds: int = 8, **more: Any) -> TreesModel:
    rows = some_rows()
    data = xgboost.QuantileDMatrix(
        COLUMNS.matrix(rows), labels(task, rows), feature_names=COLUMNS.names, feature_types=COLUMNS.types,
        enable_categorical=True, nthread=1,
    )  # fmt: skip
    params = OBJECTIVES[task] | {"max_depth": depth, "nthread": 1, "learning_rate": 0.3} | more
    return TreesModel(xgboost.train(params, data, rounds), COLUMNS)


def by_library(model: TreesModel, rows: dict[str, torch.Tensor]) -> np.ndarray:
    """(rows, outputs, columns + 1) of the library."""
    data = xgboost.DMatrix(
        COLUMNS.matrix(rows), feature_names=COLUMNS.names, feature_types=COLUMNS.types, enable_categorical=True
    )
    found = model.booster.predict(data, pred_contribs=True)
    return found.reshape(len(found), -1, found.shape[-1])


def check_as_library(model: TreesModel, rows: dict[str, torch.Tensor]) -> None:
    found, library = TreesExplainer(model, FEATURES)(rows), by_library(model, rows)
    scale = max(1.0, float(np.abs(library).max()))
    for feature in range(len(FEATURES)):
        theirs = sum(library[:, :, column] for column, place in enumerate(PLACES) if place == feature)
        np.testing.assert_allclose(found.values[:, feature], theirs, atol=2e-5 * scale)
    np.testing.assert_allclose(found.base, library[0, :, -1], atol=2e-5 * scale)
    assert not found.misses().any()


@pytest.mark.parametrize("task", OBJECTIVES)
def test_contributions_of_every_task_are_the_librarys_and_sum_to_the_raw_prediction(task: str) -> None:
    model, rows = grown(task), some_rows(300, seed=5)
    check_as_library(model, rows)
    found = TreesExplainer(model, FEATURES)(rows)
    raw = model(rows).numpy().reshape(300, -1)
    np.testing.assert_allclose(found.base + found.values.sum(axis=1), raw, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("depth", "more"), [(1, {}), (6, {}), (10, {}), (0, {"grow_policy": "lossguide", "max_leaves": 20})]
)
def test_contributions_of_trees_of_any_depth_are_the_librarys(depth: int, more: dict[str, Any]) -> None:
    check_as_library(grown("regression", depth=depth, min_child_weight=0, **more), some_rows(300, seed=6))


def test_trees_of_one_leaf_give_the_base_alone() -> None:
    found = TreesExplainer(grown(min_child_weight=1e6), FEATURES)(some_rows(20))
    assert not found.values.any() and not found.misses().any()


def test_a_category_never_seen_and_one_beyond_the_list_have_contributions() -> None:
    rows = some_rows(60, seed=7)
    rows["city"][:30], rows["city"][30:] = 1, 0
    check_as_library(grown(depth=6), rows)


@pytest.mark.parametrize("depth", [6, 12])
def test_infinite_numbers_have_contributions_whichever_way_they_are_computed(depth: int) -> None:
    rows = some_rows(60, seed=7)
    rows["x0"][:20], rows["x1"][10:30] = torch.inf, -torch.inf
    found = TreesExplainer(grown("regression", depth=depth, min_child_weight=0), FEATURES)(rows)
    assert np.isfinite(found.values).all() and not found.misses().any()


def test_no_rows_have_no_contributions() -> None:
    found = TreesExplainer(grown("multiclass"), FEATURES)(some_rows(0))
    assert found.values.shape == (0, 4, 3) and found.raw.shape == (0, 3) and len(found.base) == 3


def test_rounds_that_were_left_out_of_the_model_do_not_count() -> None:
    model = grown("multiclass", rounds=10)
    check_as_library(TreesModel(model.booster[:4], COLUMNS), some_rows(100, seed=8))


def test_a_contribution_is_a_shapley_value_by_its_definition() -> None:
    """Over all coalitions, an absent column follows both branches by their training rows."""
    model = grown("regression", depth=3, rounds=1)
    tree = model.booster.trees_to_dataframe().set_index("ID")
    rows = some_rows(5, seed=9)
    columns, matrix = COLUMNS.names, COLUMNS.matrix(rows)

    def value(row: np.ndarray, known: frozenset[str], node: str = "0-0") -> float:
        at = tree.loc[node]
        if at["Feature"] == "Leaf":
            return float(at["Gain"])
        yes, no = tree.loc[at["Yes"]], tree.loc[at["No"]]
        if at["Feature"] not in known:
            parts = [each["Cover"] * value(row, known, each.name) for each in (yes, no)]
            return float(sum(parts) / (yes["Cover"] + no["Cover"]))
        x = row[columns.index(at["Feature"])]
        if np.isnan(x):
            return value(row, known, at["Missing"])
        is_yes = x < at["Split"] if pd.notna(at["Split"]) else int(x) not in at["Category"]
        return value(row, known, at["Yes"] if is_yes else at["No"])

    found = TreesExplainer(model, {name: [name] for name in ("city", "x0", "x1", "x2", "place")})(rows)
    for number, row in enumerate(matrix):
        for place, name in enumerate(["city", "x0", "x1", "x2"]):
            others, total = [c for c in columns if c != name], 0.0
            for size in range(len(others) + 1):
                weight = factorial(size) * factorial(len(others) - size) / factorial(len(columns))
                for some in combinations(others, size):
                    total += weight * (value(row, frozenset({*some, name})) - value(row, frozenset(some)))
            assert found.values[number, place, 0] == pytest.approx(total, abs=1e-3)
