"""The factorization machine against a sum over pairs of columns; which column of a dataset becomes what."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.training.data.batch import Ragged
from sparkring.training.models.factors import FactorizationMachine
from sparkring.training.models.sparse_embedding import PulledRows, sparse_embeddings
from tests.helpers.datasets import manifest_of

IDS, FACTORS = torch.tensor([-5, 2, 9]), 3
COLUMNS: dict[str, Any] = {
    "user": torch.tensor([9, -5]),
    "seen": Ragged(torch.tensor([2, 9, 2]), (torch.tensor([0, 3, 3]),)),
    "day": torch.tensor([1, 0], dtype=torch.int32),
    "age": torch.tensor([0.5, -2.0]),
    "rich": torch.tensor([1.0, 3.0]),
}


def test_the_output_is_the_sum_of_weights_and_of_every_pairs_product() -> None:
    torch.manual_seed(0)
    model = FactorizationMachine(["user"], ["seen"], {"day": 2}, ["age", "rich"], factors=FACTORS).double()
    rows = {name: torch.randn(3, 1 + FACTORS, dtype=torch.float64) for name in ("user", "seen")}
    for table in sparse_embeddings(model).values():
        table.source = PulledRows(IDS, rows[table.columns[0]])
    day, number = model.tables["column_day"].weight, model.of_number
    assert number is not None
    expected = []
    for user, seen, code, age, rich in ((2, [1, 2, 1], 1, 0.5, 1.0), (0, [], 0, -2.0, 3.0)):
        bag = rows["seen"][seen].mean(dim=0) if seen else torch.zeros(1 + FACTORS, dtype=torch.float64)
        parts = [rows["user"][user], bag, day[code], age * number[0], rich * number[1]]  # type: ignore[index]
        pairs = sum(one[1:] @ other[1:] for one, other in itertools.combinations(parts, 2))
        expected.append(model.bias + sum(part[0] for part in parts) + pairs)
    columns = {name: c.double() if name in ("age", "rich") else c for name, c in COLUMNS.items()}
    torch.testing.assert_close(model(columns), torch.stack(expected), rtol=0, atol=1e-12)


def test_first_weights_are_zero_and_first_vectors_are_small_and_not_alike() -> None:
    model = FactorizationMachine(["user"], [], {"day": 50}, ["age"], factors=FACTORS, scale=0.01)
    for weight in (model.tables["column_day"].weight, model.of_number):
        assert isinstance(weight, torch.Tensor) and not weight[:, 0].any()
        assert 0 < weight[:, 1:].abs().max() < 0.01 and weight[:, 1:].unique().numel() == weight[:, 1:].numel()
    (table,) = sparse_embeddings(model).values()
    assert table.scale == [0.0] + [0.01] * FACTORS


def manifest(*columns: Column) -> DatasetManifest:
    label = Column(name="liked", dtype="int32", role="label")
    hashed = {"name": "user", "kind": "hashed", "column": "name"}
    stored = Column(name="name", dtype="string", role="input", nulls="keep")
    return manifest_of(
        columns=(stored, *columns, label), features={"version": 2, "inputs": {"name": "string"}, "features": [hashed]}
    )


def test_columns_of_a_dataset_become_what_they_are() -> None:
    made = FactorizationMachine.from_manifest(
        manifest(
            Column(name="seen", dtype="int64", layout="ragged", nulls="mask"),
            Column(name="day", dtype="int32", cardinality=7),
            Column(name="age", dtype="float32"),
        ),
        factors=2,
    )
    assert {name: table.bag for name, table in sparse_embeddings(made).items()} == {
        "tables.column_user": "mean",
        "tables.column_seen": "mean",
    }
    assert made.names == ["user", "seen", "day"] and made.number_names == ["age", "seen__valid"]


def test_columns_that_are_no_ids_and_no_numbers_are_refused() -> None:
    odd = [
        Column(name="at", dtype="float32", layout="ragged"),
        Column(name="photo", dtype="float32", layout="vector", shape=(3,)),
    ]
    with pytest.raises(ValueError, match=r"\['at', 'photo'\] are neither"):
        FactorizationMachine.from_manifest(manifest(*odd))
    with pytest.raises(ValueError, match="needs a feature column"):
        FactorizationMachine([], [], {}, [])
