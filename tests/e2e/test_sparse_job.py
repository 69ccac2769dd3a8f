"""Hashed ids from a raw table to the registered model, on two ranks: scores, report, checkpoints, predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.storage import open_storage
from sparkring.pipelines.job.job import run_job
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.serving import load_trusted
from sparkring.pipelines.tracking.store.fetch import copy_model, find_model
from sparkring.training.worker.result import MODEL, read_result

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROWS, USERS = 6000, 300


def test_a_model_of_hashed_ids_is_trained_registered_and_serves(spark: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    user, x = random.integers(0, USERS, ROWS), random.normal(size=ROWS)
    cost = random.normal(size=USERS)[user] + 0.3 * x + 0.1 * random.normal(size=ROWS)
    names = [None if n == 7 else f"user {n}" for n in user]
    columns = {"id": np.arange(ROWS), "user": names, "item": user * 10**12, "x": x, "cost": cost}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    types = {"id": "bigint", "user": "string", "item": "bigint", "x": "double", "cost": "double"}
    given = RunConfig.model_validate({
        "name": "sparse",
        "storage": {"datasets": str(tmp_path / "datasets"), "runs": str(tmp_path / "runs")},
        "etl": {
            "sources": {"rows": {"path": str(tmp_path / "rows.parquet"), "format": "parquet", "columns": types}},
            "rows": "rows", "key": ["id"], "label": "cost",
            "features": {"user": {"kind": "hashed"}, "item": {"kind": "hashed"}, "x": {"kind": "numeric"}},
        },
        "model": {"task": "regression", "args": {"width": 16, "blocks": 1, "hashed_width": 8}},
        "tables": {"optimizer": "adam", "lr": 0.02},
        "optim": {"lr": 0.01},
        "train": {"epochs": 6, "global_batch": 200, "threads_per_rank": 1, "best_metric": "r2", "best_mode": "max"},
        "report": {"must_beat": ["r2"]},
        "tracking": {"root": str(tmp_path / "mlflow"), "system_metrics": False},
    })  # fmt: skip
    assert run_job(Resolved(given, {}), etl=True, session=lambda: spark) == Exit.OK
    (folder,) = (path.parent for path in (tmp_path / "runs").rglob("summary.json"))
    result = read_result(open_storage(str(folder)))
    assert result.train.world == 2 and result.scores[MODEL]["r2"] > 0.8, result.scores
    assert {name: table["rows"] for name, table in result.train.tables.items()} == {
        f"hashed.column_{name}": USERS for name in ("user", "item")
    }
    assert "sparse table" in (folder / "report.html").read_text()
    assert [*folder.rglob("checkpoints/step-*/*/tables/*/rank-00001.safetensors")]
    registered = find_model(given.tracking, "models:/sparse@champion")
    model = load_trusted(str(copy_model(given.tracking, registered, tmp_path / "registered")))
    scored = pa.concat_tables([pq.read_table(folder / file) for file in result.predictions]).to_pandas()
    rows = pq.read_table(tmp_path / "rows.parquet").to_pandas()
    served = model.predict(rows[["user", "item", "x"]])["prediction"].to_numpy()
    assert abs(np.corrcoef(served, cost)[0, 1]) > 0.9
    assert np.isin(scored["prediction"].round(4), served.round(4)).mean() > 0.99
