"""Several labels of 0 and 1, and tags: from the table to scores per label, gates, predictions and an exported file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from mlflow import MlflowClient

from sparkring.pipelines.cli import main
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.serving import _load_pyfunc

pytestmark = pytest.mark.spark
GENRES = ["comedy", "crime", "drama"]
ROWS = 1500


def write_recipe(folder: Path, **etl: Any) -> None:
    """Films: a genre is likely where its own number is far from 0; `tags` has a film's genres."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(ROWS, 3))
    has = np.abs(numbers) + rng.normal(scale=0.2, size=(ROWS, 3)) > [0.6, 0.8, 1.0]
    table: dict[str, Any] = {"id": np.arange(ROWS), "year": 1950 + np.arange(ROWS) % 70}
    table |= {f"x{n}": numbers[:, n] for n in range(3)}
    table |= {genre: has[:, n].astype(np.int64) for n, genre in enumerate(GENRES)}
    table["tags"] = [[genre for genre, one in zip(GENRES, row, strict=True) if one] for row in has]
    table |= {"weight": np.arange(ROWS) % 4 * 0.5, "country": rng.choice(["FR", "IT"], ROWS)}
    pq.write_table(pa.table(table), folder / "films.parquet")
    columns = {"id": "bigint", "year": "bigint", "weight": "double", "country": "string", "tags": "array<string>"}
    columns |= dict.fromkeys(["x0", "x1", "x2"], "double") | dict.fromkeys(GENRES, "bigint")
    recipe: dict[str, Any] = {
        "name": "films",
        "etl": {
            "sources": {"films": {"path": "films.parquet", "format": "parquet", "columns": columns}},
            "rows": "films",
            "key": ["id"],
            "features": {f"x{n}": {"kind": "numeric"} for n in range(3)},
            "label": GENRES,
            "weight": "weight",
            "keep": ["country"],
        }
        | etl,
        "model": {"task": "multilabel", "args": {"width": 16, "blocks": 1}},
        "train": {
            "global_batch": 64,
            "epochs": 3,
            "best_metric": "macro_auc",
            "best_mode": "max",
            "early_stopping": {"metric": "macro_f1", "mode": "max", "patience": 3},
        },
        "optim": {"lr": 1e-2},
        "report": {"groups": ["country"], "min_group_rows": 20, "must_beat": ["loss", "macro_auc"]},
        "promote": {"rules": [{"metric": "macro_average_precision", "threshold": 0.5}]},
        "predict": {"rows": "films", "to": "scored", "keep": ["id"]},
        "launch": {"world": 1},
        "parallel": {"engine": "torch"},
    }
    (folder / "films.yaml").write_text(yaml.safe_dump(recipe))


@pytest.mark.slow  # on ranks: tests/training/test_worker.py; judged: tests/pipelines/evaluation/test_multilabel.py
def test_several_labels_from_the_table_to_the_prediction(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    assert main(["run", "films.yaml"]) == Exit.OK, capsys.readouterr().err
    (run,) = [path.parent for path in tmp_path.glob("data/runs/films/*/summary.json")]
    summary = json.loads((run / "summary.json").read_text())
    assert not summary["missing"] and len(summary["scores"]) == 4
    ours, rates, logistic, trees = summary["scores"].values()
    assert ours["macro_auc"] > 0.85 and rates["macro_auc"] == 0.5 and logistic["macro_auc"] < 0.7
    assert ours["loss"] < rates["loss"] and ours.keys() >= trees.keys()
    assert [each["value"] for each in summary["by_label"]] == GENRES
    assert all(0.8 < each["scores"]["auc"] < 1 for each in summary["by_label"])
    assert {(each["column"], each["value"]) for each in summary["groups"]} == {("country", "FR"), ("country", "IT")}
    assert summary["promotion"]["decision"] == "promoted"
    assert {split: len(each["shares"]) for split, each in summary["labels"].items()} == dict.fromkeys(
        ["train", "valid", "test"], 3
    )
    page = (run / "report.html").read_text()
    assert "Scores by label" in page and 'data-metric="positives"' in page and "Precision and recall by label" in page
    assert all(f"<td>{genre}</td>" in page for genre in GENRES)
    rows = pd.DataFrame({"x0": [3.0, 0.0], "x1": [0.0, -3.0], "x2": [0.0, 3.0]})
    predicted = _load_pyfunc(str(run / "model")).predict(rows)
    assert list(predicted) == [f"label_{genre}" for genre in GENRES]
    assert (predicted > 0.5).to_numpy().tolist() == [[True, False, False], [False, True, True]]
    client = MlflowClient(f"sqlite:///{tmp_path}/data/mlflow/mlflow.db")
    (version,) = client.search_model_versions("name = 'films'")
    assert client.get_model_version_by_alias("films", "champion").version == version.version
    (experiment,) = client.search_experiments(filter_string="name = 'films'")
    metrics = [run.data.metrics for run in client.search_runs([experiment.experiment_id])]
    assert summary["by_label"][2]["scores"]["auc"] in [each.get("test/label/drama/auc") for each in metrics]
    assert "label_drama" in next((tmp_path / "data/mlflow").rglob("MLmodel")).read_text(), "the signature"


@pytest.mark.slow
def test_tags_are_learnt_by_name(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, label="tags", weight=None)
    assert main(["run", "films.yaml"]) == Exit.OK, capsys.readouterr().err
    (run,) = [path.parent for path in tmp_path.glob("data/runs/films/*/summary.json")]
    summary = json.loads((run / "summary.json").read_text())
    assert [each["value"] for each in summary["by_label"]] == GENRES
    assert summary["scores"]["this model"]["micro_auc"] > 0.85 and not summary["missing"]
    rows = pd.DataFrame({"x0": [3.0], "x1": [0.0], "x2": [0.0]})
    predicted = _load_pyfunc(str(run / "model")).predict(rows)
    assert list(predicted) == [f"label_{genre}" for genre in GENRES]
    assert main(["predict", "films.yaml"]) == Exit.OK, capsys.readouterr().err
    scored = pq.read_table(tmp_path / "scored")
    assert scored.num_rows == ROWS and {"id", *predicted} <= {*scored.column_names}
    for form in ("pt2", "onnx"):
        words = ["export", "models:/films@champion", "--format", form, "--out", f"films.{form}"]
        assert main(words) == Exit.OK, capsys.readouterr().err
    files = {"sparkring.json": ""}
    exported = torch.export.load(tmp_path / "films.pt2", extra_files=files)
    assert json.loads(files["sparkring.json"])["classes"] == GENRES
    tensors = {name: torch.zeros(5, dtype=torch.float32) for name in ("x0", "x1", "x2")}
    assert exported.module()(tensors).shape == (5, 3)
