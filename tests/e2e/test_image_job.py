"""Images in a folder, labels in a table and the user's CNN: from the recipe to a model that is served bytes."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from mlflow.models import Model
from mlflow.pyfunc.scoring_server import infer_and_parse_data
from PIL import Image

from sparkring.conf.storage import open_storage
from sparkring.conf.tasks import MULTICLASS
from sparkring.pipelines.serving import TRUSTED, _load_pyfunc
from sparkring.training.metrics import task_scores
from sparkring.training.worker.result import MODEL, read_result
from tests.e2e.commands import run_here
from tests.helpers.modules import ship_module

pytestmark = pytest.mark.spark
KINDS = ("blue", "green", "red")
COUNT = 180
MODULE = """
import torch
from torch import nn


class Cnn(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
        )

    def forward(self, photo: torch.Tensor) -> torch.Tensor:  # (B, height, width, channels) uint8
        return self.layers(photo.permute(0, 3, 1, 2).float() / 255)
"""


def write_files(folder: Path) -> None:
    """Noisy images of three colors, of many sizes, PNG and JPEG; the camera `old` sees gray, and is not trusted."""
    random = np.random.default_rng(0)
    labels: dict[str, list[Any]] = {"path": [], "kind": [], "camera": [], "trust": []}
    for number in range(COUNT):
        channel, is_old = number % 3, random.random() < 0.2
        pixels = random.integers(0, 120, (*random.integers(9, 30, 2), 3))
        pixels[..., channel if not is_old else slice(None)] += 100
        kind = "PNG" if number % 2 else "JPEG"
        name = f"{number // 100}/{number:03}.{kind.lower()}"
        file = folder / "photos" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(file, kind)
        row = (name, KINDS[2 - channel], "old" if is_old else "new", 0.0 if is_old else 1.0 + number % 2)
        for column, value in zip(labels.values(), row, strict=True):
            column.append(value)
    pq.write_table(pa.table(labels), folder / "labels.parquet")
    (folder / "cnn_of_test.py").write_text(MODULE)
    columns = {"path": "string", "kind": "string", "camera": "string", "trust": "double"}
    recipe = {
        "name": "photos",
        "etl": {
            "sources": {
                "photos": {"path": "photos", "format": "binaryFile"},
                "labels": {"path": "labels.parquet", "format": "parquet", "columns": columns},
            },
            "views": {"labeled": "SELECT l.*, p.content FROM labels l JOIN photos p ON p.path = l.path"},
            "rows": "labeled",
            "one_per": "labels",
            "key": ["path"],
            "features": {"photo": {"kind": "image", "column": "content", "shape": [16, 16, 3], "fit": "crop"}},
            "label": "kind",
            "weight": "trust",
            "keep": ["camera"],
            "split": {"shares": {"train": 0.6, "valid": 0.2, "test": 0.2}},
        },
        "model": {"factory": "cnn_of_test:Cnn", "args": {"classes": 3}, "task": "multiclass", "inputs": ["photo"]},
        "train": {"epochs": 10, "global_batch": 16},
        "optim": {"lr": 0.03},
        "launch": {"world": 1},
        "parallel": {"engine": "torch"},
        "report": {"groups": ["camera"], "min_group_rows": 1, "baselines": False, "must_beat_guess": False},
        "tracking": {"system_metrics": False},
    }
    (folder / "photos.yaml").write_text(yaml.safe_dump(recipe))


def encoded(color: tuple[int, int, int]) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 25), color).save(out, "PNG")
    return out.getvalue()


def test_images_become_a_model_that_is_served_their_bytes(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ship_module(spark, tmp_path / "cnn_of_test.py")
    done = run_here(tmp_path, "run", "photos.yaml")
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = [path.parent for path in tmp_path.glob("data/runs/photos/*/summary.json")]
    result = read_result(open_storage(str(run)))
    ours = result.scores[MODEL]
    assert result.version == "1" and ours["accuracy"] > 0.9
    groups = {group.value: group for group in result.groups}
    assert list(groups) == ["new"], "no row of the camera `old` counts"
    assert groups["new"].scores["accuracy"] == ours["accuracy"]
    assert "each by its weight, the column trust" in (run / "report.html").read_text()

    monkeypatch.setenv(TRUSTED, "cnn_of_test")
    model = _load_pyfunc(str(run / "model"))
    shown = pd.DataFrame({"content": [encoded((200, 50, 50)), encoded((50, 50, 200))]})
    predicted = model.predict(shown)
    assert predicted["prediction"].tolist() == ["red", "blue"]
    (registered,) = (path.parent for path in (tmp_path / "data/mlflow").rglob("MLmodel"))
    schema = Model.load(str(registered)).get_input_schema()
    assert str(schema) == "['content': binary (required)]"
    sent = [{"content": base64.b64encode(cell).decode()} for cell in shown["content"]]
    parsed = infer_and_parse_data({"dataframe_records": sent}, schema)
    pd.testing.assert_frame_equal(model.predict(parsed), predicted)

    sample = next(registered.rglob("sample_rows.parquet"))
    rows, expected = pq.read_table(sample), pq.read_table(sample.with_name("sample_predictions.parquet")).to_pandas()
    pd.testing.assert_frame_equal(model.predict(rows.to_pandas()), expected)
    assert any(line.startswith("pillow==") for line in (registered / "requirements.txt").read_text().splitlines())

    (dataset,) = tmp_path.glob("data/datasets/photos-*")
    stored = [pq.read_table(file).to_pandas() for file in sorted(dataset.rglob("test-*.parquet"))]
    test = pd.concat(stored, ignore_index=True)
    scores = model.predict(test.rename(columns={"photo": "content"}))[[f"class_{kind}" for kind in KINDS]].to_numpy()
    found = task_scores(MULTICLASS, test["kind"].map(KINDS.index).to_numpy(), scores, test["trust"].to_numpy())
    assert {name: ours[name] for name in found} == pytest.approx(found, rel=1e-5)
    assert set(test["camera"]) == {"new", "old"}
