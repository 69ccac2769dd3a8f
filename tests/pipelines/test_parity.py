"""A served row is to the model what a training row is, nulls and their marks included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import ROW_NUMBER, Column, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.serving import Predictor
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import ReadRequest
from sparkring.training.model.recipe_model import build_model, pick_columns
from sparkring.training.tasks import build_task
from tests.helpers.datasets import listed, manifest_of

STORED = {
    "x": pa.array([1.5, None, -2.0, None, 0.0], pa.float64()),
    "n": pa.array([7, 8, None, None, 2**40], pa.int64()),
    "f": pa.array([None, 1.0, 2.0, None, 0.5], pa.float32()),
    "late": pa.array([0, 1, 0, 1, 1], pa.int8()),
}
COLUMNS = (
    Column(name="x", dtype="float64", nulls="mask"),
    Column(name="n", dtype="int64", nulls="mask"),
    Column(name="f", dtype="float32", nulls="fill", fill=0.25),
    Column(name="late", dtype="int8", role="label"),
)
STATES: dict[str, Any] = {
    "version": 1,
    "inputs": {"raw": "double", "n": "bigint", "f": "float"},
    "features": [
        {"name": name, "kind": "passthrough", "column": raw, "nulls": nulls, "fill": fill, "dtype": None, "shape": None}
        for name, raw, nulls, fill in (("x", "raw", "mask", None), ("n", "n", "mask", None), ("f", "f", "fill", 0.25))
    ],
}


def written(folder: Path, features: dict[str, Any]) -> DatasetManifest:
    (folder / "data").mkdir()
    path = folder / "data/train-0.parquet"
    pq.write_table(pa.table(STORED | {ROW_NUMBER: pa.array(range(5), pa.int64())}), path)
    return manifest_of(COLUMNS, [listed(folder, path, "train")], name="p", features=features)


@pytest.mark.parametrize("inputs", [None, ["x", "x__valid", "n__valid", "f"], ["n__valid"]])
@pytest.mark.parametrize("features", [{}, STATES])
@pytest.mark.parametrize("as_objects", [False, True])
def test_training_and_serving_make_the_same_inputs(
    tmp_path: Path, inputs: list[str] | None, features: dict[str, Any], as_objects: bool
) -> None:
    manifest = written(tmp_path, features)
    columns = pick_columns(manifest, ModelConfig(inputs=inputs))
    request = ReadRequest(open_storage(str(tmp_path)), manifest, "train", columns.read, 5)
    reader = make_reader(DataConfig(), request, evaluation=True)
    (batch,) = reader.batches(0)
    as_stored = {name: values[batch.ids.argsort()] for name, values in batch.columns.items()}
    trained = build_task("binary", columns.features, columns.label, inputs).inputs(as_stored)
    reader.close()
    model = {"args": {"width": 4, "blocks": 1}, "inputs": inputs}
    config = RunConfig.model_validate({"name": "p", "dataset": "somewhere", "model": model})
    predictor = Predictor(config, manifest, build_model(config, manifest).eval())
    raw = pd.DataFrame({name: pd.Series(v.to_pylist(), dtype=object) for name, v in STORED.items() if name != "late"})
    raw = raw.rename(columns={"x": "raw"} if features else {})
    raw["n"] = raw["n"] if as_objects else raw["n"].astype("Int64")
    raw = raw if as_objects else raw.astype({"raw" if features else "x": float, "f": float})
    served = predictor.task.inputs(predictor._raw_tensors(predictor.raw_arrays(raw)))
    if inputs is None:
        (trained,), (served,) = trained, served
        assert set(trained) == set(served) == {"x", "n", "f", "x__valid", "n__valid"}
        assert served["x__valid"].tolist() == [True, False, True, False, True]
        trained, served = [trained[k] for k in sorted(trained)], [served[k] for k in sorted(served)]
        assert np.isfinite(predictor.predict(raw)["prediction"]).all()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(trained, served, strict=True))


def test_a_mask_there_is_not_is_no_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.inputs: \['f__valid'\] not in dataset 'p', which has .*'x__valid'"):
        pick_columns(written(tmp_path, {}), ModelConfig(inputs=["f", "f__valid"]))


def test_the_tabular_model_tells_a_null_from_a_zero(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"name": "p", "dataset": "somewhere", "model": {"args": {"width": 4}}})
    manifest = written(tmp_path, {})
    predictor = Predictor(config, manifest, build_model(config, manifest).eval())
    null, zero = predictor.predict(pd.DataFrame({"x": [None, 0.0], "n": [1, 1], "f": [1.0, 1.0]}))["prediction"]
    assert null != zero


def test_a_label_among_the_inputs_is_refused(tmp_path: Path) -> None:
    """With model.label a column of role feature, the model would be shown what it must predict."""
    manifest = written(tmp_path, {})
    with pytest.raises(ValueError, match=r"model\.label = 'x': it is among the model's inputs"):
        pick_columns(manifest, ModelConfig(label="x"))
    assert pick_columns(manifest, ModelConfig(inputs=["f"], label="x")).label == "x"
