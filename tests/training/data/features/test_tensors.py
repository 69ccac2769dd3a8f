"""Tensors are made of stored columns: only those asked for, of one column as often as features want it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import MANIFEST_NAME, Column, DatasetManifest, ManifestError, with_features
from sparkring.conf.storage import open_storage
from sparkring.training.data.build import make_reader
from sparkring.training.data.decoding.columns import DataError
from sparkring.training.data.features.tensors import TensorSource
from sparkring.training.data.petastorm_adapter.reader import as_stored
from sparkring.training.data.request import ReadRequest
from tests.training.conftest import MakeDataset, described

STORED = (
    Column(name="carrier", dtype="string", role="input", logical="string", nulls="keep"),
    Column(name="x", dtype="float64", role="input", logical="double", nulls="keep"),
    Column(name="n", dtype="int64", nulls="mask"),
    Column(name="note", dtype="string", role="meta", nulls="keep"),
    Column(name="id", dtype="int64", role="label"),
)


def features(*values: str) -> dict[str, Any]:
    number = {"kind": "numeric", "column": "x", "transform": "none", "mean": 1.0, "std": 2.0, "fill": 3.0}
    return {
        "version": 1,
        "inputs": {"carrier": "string", "x": "double", "n": "bigint"},
        "features": [
            {"name": "code", "kind": "categorical", "column": "carrier", "values": list(values)},
            {"name": "first", "kind": "categorical", "column": "carrier", "values": list(values[:1])},
            number | {"name": "x", "indicator": True},
            {"name": "n", "kind": "passthrough", "column": "n", "dtype": None, "shape": None, "nulls": "mask",
             "fill": None},
        ],
    }  # fmt: skip


TABLE = pa.table({
    "carrier": pa.array(["UA", None, "AA", "ZZ"]).dictionary_encode(),
    "x": pa.array([3.0, None, float("nan"), 1.0]),
    "n": pa.array([7, None, 8, 9]),
    "note": pa.array(["a", "b", None, "c"]),
    "id": [0, 1, 2, 3],
})  # fmt: skip


def test_only_the_columns_of_the_wanted_tensors_are_decoded() -> None:
    manifest = described(STORED, features("UA", "AA"))
    names = ["code", "first", "x", "x__null", "n", "id"]
    assert [c.name for c in manifest.tensors] == names  # a text is for people and filters
    source = TensorSource(manifest, ["x__null", "first"], audit=True)
    assert [c.name for c in source.stored] == ["carrier", "x", "sparkring_row"]
    with pytest.raises(KeyError, match="has no column 'carrier'; it has"):
        TensorSource(manifest, ["carrier"])


def test_tensors_of_a_row_group() -> None:
    source = TensorSource(described(STORED, features("UA", "AA")), None)
    made = {column.name: (values.tolist(), present) for column, values, present in source.made(TABLE)}  # type: ignore[union-attr]
    assert made["code"][0] == [2, 0, 3, 1] and made["first"][0] == [2, 0, 1, 1]
    assert made["x"][0] == [1.0, 1.0, 1.0, 0.0] and made["x__null"][0] == [0.0, 1.0, 1.0, 0.0]
    assert made["n"][0] == [7, 0, 8, 9] and made["n"][1].tolist() == [True, False, True, True]  # type: ignore[union-attr]
    doubles = TensorSource(described(STORED, features("UA")), ["n", "code"]).doubles(TABLE).to_pydict()
    assert doubles == {"n": [7, 0, 8, 9], "n__valid": [1, 0, 1, 1], "code": [2, 0, 1, 1]}


def texts(ids: np.ndarray) -> dict[str, Any]:
    carriers = np.array(["UA", "AA", "B6"])
    return {
        "carrier": pa.array(carriers[ids % 3]),
        "x": ids.astype(float),
        "n": ids,
        "note": ["-"] * len(ids),
        "id": ids,
    }


def test_parts_of_a_mix_are_read_with_the_state_of_the_jobs_own_dataset(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    """Each part was built with categories of its own; a model has one code for a value."""
    folders = [tmp_path / name for name in ("own", "other")]
    manifests = []
    for folder, values in zip(folders, (("UA", "AA", "B6"), ("B6", "AA")), strict=True):
        plain = make_dataset(folder, [[20] * 4], STORED, texts)
        made = DatasetManifest.model_validate(dict(plain) | {"features": features(*values)})
        (folder / MANIFEST_NAME).write_text(made.to_json())
        manifests.append(made)
    parts = [{"dataset": str(folder), "weight": 1.0} for folder in folders]
    config = DataConfig.model_validate({"mix": {"parts": parts, "stop": "first_exhausted"}})
    request = ReadRequest(open_storage(str(folders[0])), manifests[0], "train", ["code", "id"], 10)
    with closing(make_reader(config, request)) as reader:
        for batch in reader.batches(0):
            assert batch.columns["code"].tolist() == [2 + i % 3 for i in batch.columns["id"].tolist()]
    with pytest.raises(ManifestError, match=r"dataset 'test', read with the feature state of another: .*'carrier'"):
        with_features(described(STORED[1:]), features("UA"))


def test_pandas_columns_become_what_was_stored_or_are_refused() -> None:
    whole = Column(name="n", dtype="int64", role="input", nulls="keep")
    assert as_stored(whole, pd.Series([1.0, np.nan])).to_pylist() == [1, None]
    assert as_stored(STORED[0], pd.Series(["a", None, "None"])).to_pylist() == ["a", None, "None"]
    with pytest.raises(DataError, match=r"column 'n' holds nulls and numbers beyond 2\^53"):
        as_stored(whole, pa.array([None, 2**53 + 1]).to_pandas())
