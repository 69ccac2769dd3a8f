"""Trees from a raw table to a registered model and predictions, judged beside a network of the same recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xgboost
import yaml
from mlflow import MlflowClient

from sparkring.pipelines.cli import main
from sparkring.pipelines.evaluation.baselines.trees import TREES
from sparkring.pipelines.run.exit_codes import Exit

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROWS = 6000


def write_recipe(folder: Path) -> None:
    """Whether a visit ends in an order depends on a threshold of the price in some cities, which no line can say."""
    rng = np.random.default_rng(0)
    price, city = rng.exponential(5, ROWS), rng.choice(["Oslo", "Rome", "Lima", "Bern"], ROWS)
    strength = np.where((price > 4) == np.isin(city, ["Oslo", "Lima"]), 1.5, -1.5)
    order = rng.random(ROWS) < 1 / (1 + np.exp(-strength))
    columns = {
        "id": np.arange(ROWS),
        "price": pa.array(price, mask=rng.random(ROWS) < 0.1),
        "city": city,
        "order": order,
    }
    pq.write_table(pa.table(columns), folder / "visits.parquet")
    types = {"id": "bigint", "price": "double", "city": "string", "order": "boolean"}
    recipe: dict[str, Any] = {
        "name": "visits",
        "etl": {
            "sources": {"visits": {"path": "visits.parquet", "format": "parquet", "columns": types}},
            "views": {"made": "SELECT id, price, city, `order` AS bought FROM visits"},
            "rows": "made",
            "key": ["id"],
            "features": {"price": {"kind": "numeric"}, "city": {"kind": "categorical"}},
            "label": "bought",
        },
        "model": {"args": {"width": 16, "blocks": 1}},
        "trees": {"learning_rate": 0.2, "early_stopping_rounds": 20},
        "train": {"global_batch": 200, "epochs": 1, "threads_per_rank": 1},
        "launch": {"world": 2},
        "parallel": {"engine": "auto"},
        "report": {"must_beat": ["loss"], "must_beat_guess": False},
        "promote": {"rules": [{"metric": "loss", "min_relative_change": 0.0, "confidence": 0.9}]},
        "predict": {"rows": "made", "to": "scored", "keep": ["id"]},
    }
    (folder / "visits.yaml").write_text(yaml.safe_dump(recipe))


def runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("data/runs/visits/*/summary.json"))


def test_trees_are_trained_judged_beside_a_network_registered_and_reproduced(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    assert main(["run", "visits.yaml", "report.must_beat=[]"]) == Exit.OK, capsys.readouterr().err
    assert main(["run", "visits.yaml", "model.family=trees"]) == Exit.OK, capsys.readouterr().err
    run = runs(tmp_path)[-1]
    summary = json.loads((run / "summary.json").read_text())
    train, ours = summary["train"], summary["scores"]["this model"]
    assert train["engine"] == "xgboost" and train["stopped_early"] and train["exported_step"] == train["best_step"]
    assert ours["loss"] < summary["scores"]["logistic regression (scikit-learn)"]["loss"]
    assert ours["loss"] == pytest.approx(summary["scores"][TREES]["loss"], rel=0.1)
    promotion = summary["promotion"]
    assert promotion["decision"] == "promoted" and promotion["champion"] == "1", "judged against a network, on its rows"
    page = (run / "report.html").read_text()
    assert "scikit-learn's trees with its defaults" in page.replace("&#39;", "'")
    client = MlflowClient(f"sqlite:///{tmp_path}/data/mlflow/mlflow.db")
    assert int(client.get_model_version_by_alias("visits", "champion").version) == 2

    assert main(["predict", "visits.yaml"]) == Exit.OK, capsys.readouterr().err
    scored = pd.concat(pd.read_parquet(path) for path in tmp_path.glob("scored/**/*.parquet")).sort_values("id")
    raw = pd.read_parquet(tmp_path / "visits.parquet")
    assert scored["id"].tolist() == raw["id"].tolist()
    booster = xgboost.Booster(model_file=run / "model/trees.ubj")
    states = json.loads((run / "model/manifest.json").read_text())["features"]["features"]
    values = next(state["values"] for state in states if state["name"] == "city")
    columns = {"price": raw["price"], "city": raw["city"].map({value: 2 + n for n, value in enumerate(values)})}
    alone = booster.inplace_predict(np.column_stack([columns[name] for name in booster.feature_names or []]))
    np.testing.assert_allclose(scored["prediction"], alone, rtol=1e-6)

    assert main(["reproduce", str(run)]) == Exit.OK, capsys.readouterr().err
    assert "reproduced: bits are equal" in capsys.readouterr().out
    assert main(["run", "visits.yaml", "train.seed=5"]) == Exit.QUALITY, capsys.readouterr().err
    last = json.loads((runs(tmp_path)[-1] / "summary.json").read_text())
    assert last["promotion"]["champion"] == "2" and last["promotion"]["champion_scores"]["loss"] == pytest.approx(
        ours["loss"], rel=1e-6
    )
