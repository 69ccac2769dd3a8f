"""Claims and exposures, from the raw table to two ranks, a report, a registered model and predictions."""

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
from sklearn import metrics as sklearn

from sparkring.pipelines.cli import main
from sparkring.pipelines.evaluation.baselines.trees import TREES
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.serving import _load_pyfunc

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROWS = 6000


def write_recipe(folder: Path) -> None:
    """Claims follow a curve of x that no linear model knows, in proportion to the exposure."""
    rng = np.random.default_rng(0)
    x, area, exposure = rng.normal(size=ROWS), rng.integers(0, 4, ROWS), rng.uniform(0.1, 2.0, ROWS)
    claims = rng.poisson(exposure * np.exp(np.sin(2 * x) + 0.3 * area))
    table = {"id": np.arange(ROWS), "x": x, "area": [f"area {n}" for n in area], "claims": claims, "exposure": exposure}
    pq.write_table(pa.table(table), folder / "policies.parquet")
    columns = {"id": "bigint", "x": "double", "area": "string", "claims": "bigint", "exposure": "double"}
    recipe: dict[str, Any] = {
        "name": "claims",
        "etl": {
            "sources": {"policies": {"path": "policies.parquet", "format": "parquet", "columns": columns}},
            "views": {"made": "SELECT id, x, area, exposure, claims / exposure AS rate FROM policies"},
            "rows": "made",
            "key": ["id"],
            "features": {"x": {"kind": "numeric"}, "area": {"kind": "categorical"}},
            "label": "rate",
            "weight": "exposure",
        },
        "model": {"task": "poisson", "args": {"width": 32, "blocks": 1}},
        "train": {"global_batch": 100, "epochs": 12, "threads_per_rank": 1, "best_metric": "d2", "best_mode": "max"},
        "optim": {"lr": 0.01},
        "launch": {"world": 2},
        "parallel": {"engine": "torch"},
        "report": {"must_beat": ["loss", "d2"], "groups": ["area"]},
        "promote": {"rules": [{"metric": "loss", "min_relative_change": 0.0, "confidence": 0.9}]},
        "predict": {"rows": "made", "to": "scored", "keep": ["id"]},
    }
    (folder / "claims.yaml").write_text(yaml.safe_dump(recipe))


def test_rates_weighted_by_their_exposure_are_learned_judged_and_predicted(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    negative = ["run", "claims.yaml", "etl.views.made=SELECT id, x, area, exposure, claims - 1 AS rate FROM policies"]
    assert main([*negative, "name=negative"]) == Exit.USAGE
    assert "has values from -1 to " in (said := capsys.readouterr().err) and "rates are at least 0" in said, said
    assert main(["run", "claims.yaml"]) == Exit.OK, capsys.readouterr().err
    (run,) = [path.parent for path in tmp_path.glob("data/runs/claims/*/summary.json")]
    summary = json.loads((run / "summary.json").read_text())
    names = ["this model", "mean", "Poisson regression (scikit-learn)"]
    assert list(summary["scores"]) == [*names, TREES] and summary["missing"] == {}
    assert summary["trees_gap"]["rows"] > 0
    ours, constant, linear = (summary["scores"][name] for name in names)
    assert ours.keys() == constant.keys() == linear.keys() == {"loss", "abs_error", "d2"}
    assert constant["loss"] > linear["loss"] > ours["loss"] and abs(constant["d2"]) < 0.01 < linear["d2"] < ours["d2"]
    assert {group["value"] for group in summary["groups"]} == {f"area {n}" for n in range(4)}
    page = (run / "report.html").read_text()
    assert "mean Poisson deviance" in page and "Predicted against actual rate" in page and "D²" in page
    client = MlflowClient(f"sqlite:///{tmp_path}/data/mlflow/mlflow.db")
    assert [*client.get_registered_model("claims").aliases] == ["champion"]
    assert main(["predict", "claims.yaml"]) == Exit.OK, capsys.readouterr().err
    scored = pd.concat(pd.read_parquet(path) for path in tmp_path.glob("scored/**/*.parquet")).sort_values("id")
    raw = pd.read_parquet(tmp_path / "policies.parquet")
    assert scored["id"].tolist() == raw["id"].tolist() and (scored["prediction"] > 0).all()
    d2 = sklearn.d2_tweedie_score(
        raw["claims"] / raw["exposure"], scored["prediction"], power=1, sample_weight=raw["exposure"]
    )
    assert d2 > linear["d2"]
    served = _load_pyfunc(str(run / "model")).predict(raw[["x", "area"]].head(3))
    np.testing.assert_allclose(served["prediction"], scored["prediction"].head(3), rtol=1e-5)
