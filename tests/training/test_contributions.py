"""What features add to a network's raw prediction, and which models have no such numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.features import FIRST_CODE
from sparkring.conf.manifest import Column
from sparkring.training.data.batch import Columns
from sparkring.training.data.features.xxhash64 import NULL_ID
from sparkring.training.model.contributions import (
    Contributions,
    NetExplainer,
    base_row,
    contribution_problem,
    orders_of,
    tensors_by_feature,
)
from tests.pipelines.served import CONFIG, manifest

NAMES = ["a", "b", "c", "d"]
FEATURES = [["a"], ["b", "c"], ["d"]]
BASE = {name: torch.tensor([0.5 * place]) for place, name in enumerate(NAMES)}


def some_rows(count: int = 40) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(count, generator=made) for name in NAMES}


def alone(columns: Columns) -> torch.Tensor:
    return 3 + columns["a"].exp() + columns["b"] * columns["c"] - columns["d"]


def in_pairs(columns: Columns) -> torch.Tensor:
    return torch.stack([columns["a"] * columns["b"] + columns["d"], columns["d"] * columns["c"]], dim=1)


def three_at_once(columns: Columns) -> torch.Tensor:
    return columns["a"] * columns["b"] * columns["d"]


def shapley(model: object, rows: dict[str, torch.Tensor]) -> np.ndarray:
    """By the definition, over all orders of the features: (rows, features, outputs)."""
    assert callable(model)
    count = len(rows["a"])
    orders = list(itertools.permutations(range(len(FEATURES))))
    first = model({name: value.expand(count) for name, value in BASE.items()}).reshape(count, -1).double().numpy()
    found = np.zeros((count, len(FEATURES), first.shape[1]))
    for order in orders:
        now, before = {name: value.expand(count) for name, value in BASE.items()}, first
        for place in order:
            now |= {name: rows[name] for name in FEATURES[place]}
            after = model(now).reshape(count, -1).double().numpy()
            found[:, place] += (after - before) / len(orders)
            before = after
    return found


@pytest.mark.parametrize("model", [alone, in_pairs])
def test_contributions_are_exact_where_features_act_alone_or_in_pairs(model: object) -> None:
    rows = some_rows()
    found = NetExplainer(model, BASE, FEATURES)(rows)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.values, shapley(model, rows), atol=1e-6)
    np.testing.assert_allclose(found.base, model(BASE).reshape(-1))  # type: ignore[operator]


def test_contributions_sum_to_the_raw_prediction_where_many_features_act_together() -> None:
    rows = some_rows()
    found = NetExplainer(three_at_once, BASE, FEATURES)(rows)
    np.testing.assert_allclose(found.base + found.values.sum(axis=1), found.raw, atol=1e-12)
    np.testing.assert_array_equal(found.raw[:, 0], three_at_once(rows).double())
    assert not found.misses().any()


def test_equal_rows_have_equal_contributions_whatever_stands_beside_them() -> None:
    explain, rows = NetExplainer(three_at_once, BASE, FEATURES), some_rows()
    some = {name: values[7:9] for name, values in rows.items()}
    np.testing.assert_array_equal(explain(some).values, explain(rows).values[7:9])
    assert explain({name: values[:0] for name, values in rows.items()}).values.shape == (0, 3, 1)


def test_each_order_of_the_features_has_its_reverse() -> None:
    orders = orders_of(5)
    assert orders[1] == orders[0][::-1] and orders[3] == orders[2][::-1] and orders[0] != orders[2]
    assert all(sorted(order) == [*range(5)] for order in orders)


def test_a_row_whose_contributions_miss_its_prediction_in_any_output_is_found() -> None:
    values = np.zeros((4, 1, 2))
    values[:, 0] = [[1, 1], [1, 1], [1, 1], [math.nan, 1]]
    raw = np.array([[2, 2], [2, 2.01], [2, 2.00001], [2, 2]])
    assert Contributions(values, np.ones(2), raw).misses().tolist() == [False, True, False, True]


def test_all_tensors_that_are_made_of_a_column_are_one_feature() -> None:
    features = ["carrier", "month", "wind", "wind__null", "hour_sin", "hour_cos"]
    assert tensors_by_feature(manifest(), features) == {
        "carrier": ["carrier"], "month": ["month"], "wind": ["wind", "wind__null"], "hour": ["hour_sin", "hour_cos"]
    }  # fmt: skip
    number = {**manifest().features["features"][2], "name": "month_number", "column": "month"}
    both = {**manifest().features, "features": [*manifest().features["features"], number]}
    described = manifest().model_copy(update={"features": both})
    found = tensors_by_feature(described, ["month", "month_number", "month_number__null"])
    assert found == {"month": ["month", "month_number", "month_number__null"]}
    masked = described.model_copy(update={"columns": (Column(name="area", dtype="float32", nulls="mask"),)})
    assert tensors_by_feature(masked, ["area", "area__valid"]) == {"area": ["area", "area__valid"]}


def test_the_base_row_has_the_mean_of_numbers_and_the_most_frequent_category() -> None:
    hashed = {"name": "user", "kind": "hashed", "column": "carrier"}
    features = {**manifest().features, "features": [*manifest().features["features"], hashed]}
    area = Column(name="area", dtype="float32", nulls="mask")
    described = manifest().model_copy(update={"features": features, "columns": (*manifest().columns, area)})
    found = base_row(described, ["carrier", "wind", "wind__null", "hour_sin", "user", "area", "area__valid"])
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "carrier": [FIRST_CODE], "wind": [0.0], "wind__null": [0.0], "hour_sin": [0.0], "user": [NULL_ID],
        "area": [0.0], "area__valid": [True],
    }  # fmt: skip


def test_models_without_contributions_are_named() -> None:
    assert contribution_problem(CONFIG, manifest()) is None
    own = RunConfig.model_validate({"name": "n", "model": {"task": "mine.tasks:Own"}})
    assert "model.task = 'mine.tasks:Own': a raw prediction is known" in str(contribution_problem(own, manifest()))
    label = manifest().columns[-1]
    image = Column(name="photo", dtype="binary", layout="binary", shape=(3, 8, 8))
    with_image = manifest().model_copy(update={"columns": (image, label), "features": {}})
    assert "['photo'], which are images or sequences" in str(contribution_problem(CONFIG, with_image))
    states = [{"name": name, "kind": "hashed", "column": "carrier"} for name in ("user", "item")]
    features = {**manifest().features, "features": states}
    ids = manifest().model_copy(update={"features": features})
    assert "the model reads ids alone, ['user', 'item']" in str(contribution_problem(CONFIG, ids))
