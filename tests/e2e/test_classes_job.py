"""Twelve classes as texts: by name from the table to the report, the prediction and the signature; as a trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from mlflow import MlflowClient

from sparkring.pipelines.cli import main
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.serving import _load_pyfunc

pytestmark = pytest.mark.spark
KINDS = [f"kind {letter}" for letter in "abcdefghijkl"]


def write_recipe(folder: Path) -> None:
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=4000), rng.normal(size=4000)
    twelfth = ((np.arctan2(z, x) + np.pi) / (2 * np.pi) * 12).astype(int).clip(0, 11)
    table = {"id": np.arange(4000), "x": x, "z": z, "kind": [KINDS[i] for i in twelfth], "town": ["Ulm"] * 4000}
    pq.write_table(pa.table(table), folder / "points.parquet")
    columns = {"id": "bigint", "x": "double", "z": "double", "kind": "string", "town": "string"}
    recipe: dict[str, Any] = {
        "name": "kinds",
        "etl": {
            "sources": {"points": {"path": "points.parquet", "format": "parquet", "columns": columns}},
            "rows": "points",
            "key": ["id"],
            "features": {"x": {"kind": "numeric"}, "z": {"kind": "numeric"}},
            "label": "kind",
            "keep": ["town"],
        },
        "model": {"args": {"width": 32, "blocks": 1}},
        "train": {"global_batch": 64},
        "optim": {"lr": 1e-2},
        "launch": {"world": 1},
        "parallel": {"engine": "torch"},
    }
    (folder / "kinds.yaml").write_text(yaml.safe_dump(recipe))


@pytest.mark.slow  # classes as texts, from files to a served model: test_image_job.py
def test_twelve_classes_as_texts(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    assert main(["run", "kinds.yaml"]) == Exit.USAGE, "binary is the default"
    said = capsys.readouterr().err
    assert "model.task = 'binary': the label 'kind' is text of 12 classes (kind a, kind b, " in said
    assert "set model.task to multiclass" in said and "Traceback" not in said
    assert not list(tmp_path.glob("data/datasets/*/_manifest.json")), "found before a row was written"
    words = ["run", "kinds.yaml", "model.task=multiclass", "--limit-rows", "3000", "train.steps=150"]
    assert main(words) == Exit.OK, capsys.readouterr().err
    (run,) = [path.parent for path in tmp_path.glob("data/runs/kinds-trial/*/summary.json")]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["scores"]["this model"]["accuracy"] > 0.7
    page = (run / "report.html").read_text()
    assert all(f"<td>{kind}</td>" in page for kind in KINDS), "class balance"
    manifest = json.loads(next(tmp_path.glob("data/datasets/kinds-trial-*/_manifest.json")).read_text())
    assert 2500 < manifest["accounting"]["rows_out"] < 3500
    client = MlflowClient(f"sqlite:///{tmp_path}/data/mlflow/mlflow.db")
    (version,) = client.search_model_versions("name = 'kinds-trial'")
    assert not client.get_registered_model("kinds-trial").aliases, "a trial is given no alias"
    experiment = client.get_experiment_by_name("kinds-trial")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert version.run_id in {r.info.run_id for r in runs}
    assert all(r.data.tags["sparkring.trial"] == "3000 rows" for r in runs)
    predicted = _load_pyfunc(str(run / "model")).predict(pd.DataFrame({"x": [1.0, -1.0], "z": [0.3, -0.3]}))
    assert list(predicted) == ["prediction", *(f"class_{kind}" for kind in KINDS)]
    assert predicted["prediction"].tolist() == ["kind g", "kind a"]
    assert np.allclose(predicted.drop(columns="prediction").sum(axis=1), 1)
    assert "class_kind l" in next((tmp_path / "data/mlflow").rglob("MLmodel")).read_text(), "the signature"
