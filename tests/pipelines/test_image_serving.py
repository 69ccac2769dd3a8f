"""A model of images outside of Spark: raw cells, stored cells and JSON give the same predictions."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from mlflow.pyfunc.scoring_server import infer_and_parse_data
from mlflow.types import Schema
from PIL import Image
from torch import nn

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.pipelines.model.sources import DECODE, model_sources, requirements
from sparkring.pipelines.serving import Predictor, signature_inputs
from tests.pipelines.served import manifest

STATE = {
    "name": "photo", "kind": "passthrough", "column": "content", "dtype": None, "shape": [4, 4, 3], "nulls": "refuse",
    "fill": None, "fit": "resize",
}  # fmt: skip
CONFIG = RunConfig.model_validate(
    {"name": "photos", "model": {"factory": "tests.pipelines.test_image_serving:Cnn", "inputs": ["photo"]}}
)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 1))

    def forward(self, photo: torch.Tensor) -> torch.Tensor:  # (B, height, width, channels) uint8
        found: torch.Tensor = self.layers(photo.permute(0, 3, 1, 2).float() / 255).squeeze(-1)
        return found


def photos() -> DatasetManifest:
    image = Column(name="photo", dtype="binary", layout="binary", shape=(4, 4, 3))
    features = {"version": 1, "inputs": {"content": "binary"}, "features": [STATE]}
    columns = (image, Column(name="late", dtype="int8", role="label"))
    return DatasetManifest.model_validate(dict(manifest()) | {"columns": columns, "features": features})


@pytest.fixture(scope="module")
def cells() -> list[bytes]:
    random, made = np.random.default_rng(1), []
    for size in (3, 4, 9):
        out = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (size, 5, 3), dtype=np.uint8)).save(out, "PNG")
        made.append(out.getvalue())
    return made


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    torch.manual_seed(0)
    return Predictor(CONFIG, photos(), Cnn().eval())


def test_raw_stored_and_sent_images_are_scored_alike(predictor: Predictor, cells: list[bytes]) -> None:
    found = predictor.predict(pd.DataFrame({"content": cells}))["prediction"].to_numpy()
    assert found.dtype == np.float64 and len(set(found.tolist())) == 3
    predictor.batch_rows = 2  # one batch and a half
    stored = pa.table({"photo": pa.chunked_array([pa.array(cells[:1], pa.binary()), pa.array(cells[1:], pa.binary())])})
    np.testing.assert_allclose(predictor.scores_of_stored(stored), found, rtol=1e-6)
    np.testing.assert_allclose(predictor.scores({"content": pa.array(cells, pa.binary())}, 3), found, rtol=1e-6)
    inputs = signature_inputs(CONFIG, photos())
    assert inputs == [{"name": "content", "type": "binary", "required": True}]
    schema = Schema.from_json(pd.Series(inputs).to_json(orient="values"))
    sent = [{"content": base64.b64encode(cell).decode()} for cell in cells]
    parsed = infer_and_parse_data({"dataframe_records": sent}, schema)
    np.testing.assert_allclose(predictor.predict(parsed)["prediction"], found, rtol=1e-6)


def test_only_a_model_of_images_takes_pillow_along(tmp_path: Path) -> None:
    plain, images = model_sources(RunConfig(name="t")), model_sources(RunConfig(name="t"), images=True)
    assert "PIL" in images.packages - plain.packages
    assert {f"{DECODE.replace('.', '/')}.py"} <= images.files.keys() - plain.files.keys()
    assert any(line.startswith("pillow==") for line in requirements(images.packages))
