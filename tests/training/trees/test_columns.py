"""The matrix that trees split: nulls are missing, categories are codes, numbers are the stored ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.manifest import Column, read_manifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import ReadRequest
from sparkring.training.model.recipe_model import pick_columns
from sparkring.training.trees.columns import MOST_CATEGORIES, TreeColumns, infinite_columns, seen_by
from tests.training.trees.tables import write_homes

TREES = ModelConfig(family="trees")


def test_the_rows_of_a_dataset_become_stored_numbers_codes_and_nan(tmp_path: Path) -> None:
    folder = open_storage(str(write_homes(tmp_path)))
    manifest = seen_by(TREES, read_manifest(folder))
    picked = pick_columns(manifest, TREES)
    columns = TreeColumns.of(manifest, picked.features)
    assert columns.names == ["price", "city", "area", "place__0", "place__1"]
    assert columns.types == ["q", "c", "q", "q", "q"]
    reader = make_reader(DataConfig(), ReadRequest(folder, manifest, "test", picked.read, 200), evaluation=True)
    (batch,) = reader.batches()
    reader.close()
    found = columns.matrix(batch.columns)[batch.ids.argsort().numpy()]
    stored = pq.read_table(tmp_path / "test.parquet")
    codes = {None: np.nan, "Bern": 1, "Oslo": 2, "Rome": 3, "Lima": 4}
    place = np.stack(stored["place"].combine_chunks().to_numpy(zero_copy_only=False))
    expected = [
        stored["price"].to_numpy(),
        [codes[name] for name in stored["city"].to_pylist()],
        stored["area"].to_numpy(),
        *place.T,
    ]
    assert np.isnan(found).any(axis=0).tolist() == [True, True, True, False, False]
    np.testing.assert_array_equal(found, np.column_stack(expected).astype(np.float32))


def test_a_network_sees_the_dataset_as_it_is(tmp_path: Path) -> None:
    manifest = read_manifest(open_storage(str(write_homes(tmp_path))))
    assert seen_by(ModelConfig(), manifest) is manifest
    assert "price__null" in pick_columns(manifest, ModelConfig()).features


def test_inputs_that_the_recipe_names_are_those_of_the_matrix(tmp_path: Path) -> None:
    manifest = read_manifest(open_storage(str(write_homes(tmp_path))))
    model = ModelConfig(family="trees", inputs=["area", "price__null"])
    picked = pick_columns(manifest, model)
    assert picked.features == ["area", "price__null", "area__valid"], "the mask makes nulls of the area missing"
    assert TreeColumns.of(seen_by(model, manifest), picked.features).names == ["area", "price__null"]


@pytest.mark.parametrize(("codes", "kind"), [(MOST_CATEGORIES, "c"), (MOST_CATEGORIES + 1, "q"), (10_000_000, "q")])
def test_a_column_of_very_many_categories_is_split_by_how_often_they_occur(codes: int, kind: str) -> None:
    columns = TreeColumns((Column(name="id", dtype="int32", cardinality=codes),))
    assert columns.types == [kind]
    rows = torch.tensor([0, 1, codes - 1], dtype=torch.int32)
    np.testing.assert_array_equal(columns.matrix({"id": rows}), np.array([[np.nan], [1], [codes - 1]], np.float32))


def test_infinite_columns_are_named() -> None:
    assert infinite_columns(["a", "b"], np.array([[1, 2], [np.nan, -np.inf]], np.float32)) == ["b"]
