"""A regression and a twelve-class problem from raw table to registered model: scores, baselines, figures, version."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.storage import open_storage
from sparkring.pipelines.evaluation.baselines.trees import TREES
from sparkring.pipelines.job.job import run_job
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.training.worker.result import MODEL, read_result

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROWS = 4000


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`cost` and `kind` are curves of x beside effects of the shop, which no linear model knows."""
    random = np.random.default_rng(0)
    shop, x = random.integers(0, 5, ROWS), random.normal(size=ROWS)
    cost = np.sin(3 * x) + 0.2 * shop + 0.1 * random.normal(size=ROWS)
    kind = (np.floor(6 + 3 * np.sin(3 * x)).astype(int) + (random.random(ROWS) < 0.1)) % 12
    folder = tmp_path_factory.mktemp("raw")
    columns = {"id": np.arange(ROWS), "shop": [f"shop {n}" for n in shop], "x": x, "cost": cost, "kind": kind}
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return folder


def config(folder: Path, table: Path, task: str, label: str, **blocks: Any) -> RunConfig:
    types = {"id": "bigint", "shop": "string", "x": "double", "cost": "double", "kind": "bigint"}
    values = {
        "name": task,
        "storage": {"datasets": str(folder / "datasets"), "runs": str(folder / "runs")},
        "etl": {
            "sources": {"rows": {"path": str(table / "rows.parquet"), "format": "parquet", "columns": types}},
            "rows": "rows", "key": ["id"], "label": label,
            "features": {"shop": {"kind": "categorical"}, "x": {"kind": "numeric"}},
        },
        "model": {"task": task, "args": {"width": 32, "blocks": 1, "outputs": 12 if task == "multiclass" else 1}},
        "optim": {"lr": 0.02},
        "parallel": {"engine": "torch"},
        "tracking": {"root": str(folder / "mlflow"), "system_metrics": False},
    }  # fmt: skip
    return RunConfig.model_validate(values | blocks)


@pytest.mark.parametrize(
    ("task", "label", "best", "must_beat", "baselines", "figures"),
    [
        ("regression", "cost", {"best_metric": "r2", "best_mode": "max"}, ["rmse", "abs_error", "r2"],
         ["mean", "linear regression (scikit-learn)"], ["predicted_and_actual", "residuals"]),
        ("multiclass", "kind", {"best_metric": "macro_f1", "best_mode": "max"}, ["loss", "accuracy", "macro_f1"],
         ["class rates", "multinomial logistic regression (scikit-learn)"], ["confusion", "calibration", "classes"]),
    ],
)  # fmt: skip
def test_each_task_is_judged_beside_its_baselines(
    spark: Any, tmp_path: Path, table: Path, task: str, label: str, best: dict[str, str], must_beat: list[str],
    baselines: list[str], figures: list[str],
) -> None:  # fmt: skip
    train = {"epochs": 12, "global_batch": 200, "threads_per_rank": 1} | best
    given = config(tmp_path, table, task, label, train=train, report={"must_beat": must_beat})
    assert run_job(Resolved(given, {}), etl=True, session=lambda: spark) == Exit.OK
    (folder,) = (path.parent for path in (tmp_path / "runs").rglob("summary.json"))
    result = read_result(open_storage(str(folder)))
    assert list(result.scores) == [MODEL, *baselines, TREES] and result.missing == {} and result.version == "1"
    assert all(set(must_beat) <= scores.keys() for scores in result.scores.values())
    assert list(result.labels) == ["train", "valid", "test"] and sum(e.rows for e in result.labels.values()) == ROWS
    assert (
        result.importance and result.importance[0].low > 0 and 0 < result.importance_rows <= result.labels["test"].rows
    )
    curve = dict(result.history[f"valid/{best['best_metric']}"])
    assert result.train.best_value == max(curve.values()) == curve[result.train.exported_step or -1]
    html = (folder / "report.html").read_text()
    assert f"models:/{task}/1, given the alias &#39;champion&#39;" in html and baselines[1] in html
    client = MlflowClient(given.tracking.store_uri)
    (job,) = client.search_runs(["1"], "tags.`sparkring.key` = 'job'")
    drawn = {artifact.path for artifact in client.list_artifacts(job.info.run_id, "figures")}
    assert {f"figures/{name}.png" for name in [*figures, "importance"]} <= drawn
    (judged,) = client.search_runs(["1"], "tags.`sparkring.key` = 'evaluate'")
    assert "importance.json" in {artifact.path for artifact in client.list_artifacts(judged.info.run_id)}
    assert len(job.data.params) <= 40 and job.data.params["fingerprint"] == result.fingerprint
    shown = {name: value for name, value in job.data.metrics.items() if name.startswith("test/")}
    assert shown == pytest.approx(result.test_metrics()) and all(map(math.isfinite, shown.values()))


def test_a_regression_that_loses_to_the_mean_is_registered_without_the_alias(
    spark: Any, tmp_path: Path, table: Path
) -> None:
    train = {"steps": 1, "global_batch": 200, "threads_per_rank": 1}
    given = config(tmp_path, table, "regression", "cost", train=train, optim={"lr": 1e-9}, report={"must_beat": ["r2"]})
    assert run_job(Resolved(given, {}), etl=True, session=lambda: spark) == Exit.QUALITY
    (folder,) = (path.parent for path in (tmp_path / "runs").rglob("summary.json"))
    assert json.loads((folder / "summary.json").read_text())["version"] == "1"
    html = (folder / "report.html").read_text()
    assert "of mean; report.must_beat: r2" in html and "the alias &#39;champion&#39; was not given to it" in html
    assert MlflowClient(given.tracking.store_uri).get_registered_model("regression").aliases == {}
