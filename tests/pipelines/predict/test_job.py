"""`sparkring predict` in a real session, on a registered model and on a run's; and killed in the middle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from mlflow import MlflowClient
from pyspark.sql import DataFrame, SparkSession

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, load_config
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.etl.errors import EtlError
from sparkring.etl.spark_platform.session import BATCH_BYTES, MOST_BATCH_BYTES, UNLIMITED, build_session
from sparkring.pipelines.cli import main
from sparkring.pipelines.predict import job
from sparkring.pipelines.predict.job import run_predict
from sparkring.pipelines.predict.model import get_model
from sparkring.pipelines.predict.publish import PublishedPredictions, read_predictions
from sparkring.pipelines.predict.rows import make_rows, pin_rows
from sparkring.pipelines.predict.score import NOT_FINITE, About, Counts, ScoreTask, score_batch, without_refused
from sparkring.pipelines.serving import _load_pyfunc, signature_inputs, signature_outputs
from sparkring.pipelines.tracking.ops import ModelInfo
from sparkring.pipelines.tracking.tracker import Tracker
from tests.pipelines.served import CONFIG, manifest, model_folder, random_rows
from tests.spark.sales import recipe as sales_recipe
from tests.spark.sales import write_sales

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[3]
ROWS = 9_000


def write_rows(folder: Path, rows: int = ROWS) -> pa.Table:
    """A source of several files; `id` tells rows apart."""
    made = random_rows(rows)
    table = pa.table({
        "id": pa.array(range(rows), pa.int64()),
        "carrier": pa.array(made["carrier"]),
        "month": pa.array([None if v is None else int(v) for v in made["month"]], pa.int32()),
        "wind": pa.array([None if v is None else float(v) for v in made["wind"]]),
        "hour": pa.array(made["hour"], pa.int32()),
    })  # fmt: skip
    folder.mkdir()
    for part in range(3):
        pq.write_table(table.slice(part * rows // 3, rows // 3), folder / f"{part}.parquet")
    return table


def recipe(folder: Path, **predict: Any) -> str:
    """The path of a recipe that scores the view `made` of the rows in `folder`/rows."""
    columns = {"id": "bigint", "carrier": "string", "month": "int", "wind": "double", "hour": "int"}
    block = {"rows": "made", "to": str(folder / "predictions"), "model": str(folder / "run"), "keep": ["id", "carrier"]}
    values = {
        "name": "flights",
        "etl": {
            "sources": {"rows": {"path": str(folder / "rows"), "format": "parquet", "columns": columns}},
            "views": {"made": "SELECT * FROM rows", "few": "SELECT id, carrier, wind, hour FROM rows WHERE id < 9"},
            "rows": "made",
            "features": {"carrier": {"kind": "categorical"}},
        },
        "tracking": {"root": str(folder / "mlflow"), "flush_every_s": 0.05, "system_metrics": False},
        "predict": block | predict,
    }
    path = folder / "flights.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def predict(folder: Path, ds: str | None = None, overrides: Sequence[str] = (), **block: Any) -> PublishedPredictions:
    assert run_predict(load_config(recipe(folder, **block), overrides), ds) == 0
    found = predictions_folder(folder, ds)
    return read_predictions(open_storage(str(found)))


def predictions_folder(folder: Path, ds: str | None) -> Path:
    return folder / "predictions" / (f"day={ds}" if ds else "")


def scored_table(folder: Path) -> pa.Table:
    """What a plain reader of the folder finds, by id."""
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("*.parquet"))).sort_by("id")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows")
    model_folder(tmp_path / "run")
    return tmp_path


def register(folder: Path, seed: int) -> None:
    settings = TrackingConfig(
        experiment="flights", root=str(folder / "mlflow"), flush_every_s=0.05, system_metrics=False
    )
    model_folder(folder / f"run-{seed}", seed)
    info = ModelInfo(
        name="final", step=1, sha256=f"{seed:064d}", loader_module="sparkring.pipelines.serving", alias="champion",
        inputs=signature_inputs(CONFIG, manifest()), outputs=signature_outputs("binary"), registered_model="flights",
    )  # fmt: skip
    with Tracker(settings, job=f"j{seed}", name="flights") as tracker:
        tracker.model("job", Path(folder / f"run-{seed}"), info)
        assert tracker.flush(180)


def test_predictions_of_the_champion_have_the_bits_that_its_predictor_gives(
    folder: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(folder, 5)
    for name, value in {"TYPE": "file", "LOG_FILE_PATH": str(folder / "events.jsonl"), "APPEND": "true"}.items():
        monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{name}", value)
    found = predict(folder, "2013-03-01", ["tracking.openlineage=prod"], model=None)
    day = folder / "predictions/day=2013-03-01"
    assert (found.rows_in, found.rows_out, found.refused) == (ROWS, ROWS, {})
    assert found.model == "models:/flights/1" and (found.model_name, found.model_version) == ("flights", "1")
    assert {*os.listdir(day)} == {"_predictions.json", *(file.path for file in found.files)}
    for file in found.files:
        content = (day / file.path).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (file.sha256, file.bytes)
        assert pq.read_metadata(day / file.path).num_rows == file.rows

    table = scored_table(day)
    assert table.column_names == [
        "id", "carrier", "prediction", "model_name", "model_version", "scored_at", "interval"
    ]  # fmt: skip
    assert table["id"].to_pylist() == list(range(ROWS))
    assert table["interval"].unique().to_pylist() == ["2013-03-01"] and len(table["scored_at"].unique()) == 1
    rows = pq.read_table(folder / "rows").to_pandas()
    expected = _load_pyfunc(str(folder / "run-5")).predict(rows)["prediction"].to_numpy()
    assert len(np.unique(expected)) > 50
    assert table["prediction"].to_numpy().tobytes() == expected.tobytes()
    assert spark.read.parquet(str(folder / "predictions")).where("day = '2013-03-01'").count() == ROWS

    client = MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db")
    run = client.get_run(str(found.mlflow_run_id))
    assert run.info.run_name == "predict 2013-03-01" and run.info.status == "FINISHED"
    assert run.data.metrics["rows/in"] == run.data.metrics["rows/out"] == ROWS
    assert run.data.tags["sparkring.model_version"] == "models:/flights/1"
    (used,) = run.inputs.dataset_inputs
    assert used.dataset.name == "rows" and used.dataset.digest == found.sources["rows"][:36]

    start, end = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    assert (start["eventType"], end["eventType"], end["job"]["name"]) == ("START", "COMPLETE", "flights.predict")
    rows_read, scored_by = end["inputs"]
    assert rows_read["facets"]["version"]["datasetVersion"] == found.sources["rows"]
    assert (scored_by["name"], scored_by["facets"]["version"]["datasetVersion"]) == ("flights", "1")
    (made,) = end["outputs"]
    assert made["name"] == str(folder / "predictions")
    assert made["outputFacets"]["outputStatistics"]["rowCount"] == ROWS


def test_the_next_scoring_of_a_date_replaces_it_and_leaves_others(folder: Path, spark: SparkSession) -> None:
    first, other = predict(folder, "2013-03-01"), predict(folder, "2013-03-02")
    model_folder(folder / "other", seed=9)
    second = predict(folder, "2013-03-01", model=str(folder / "other"), keep=["id"])
    assert first.model_version == other.model_version != second.model_version
    day = folder / "predictions/day=2013-03-01"
    assert {*os.listdir(day)} == {"_predictions.json", *(file.path for file in second.files)}
    table = scored_table(day)
    assert table["model_version"].unique().to_pylist() == [second.model_version] and len(table) == ROWS
    assert "carrier" not in table.column_names
    assert len(scored_table(folder / "predictions/day=2013-03-02")) == ROWS
    assert not [path for path in (folder / "predictions").iterdir() if path.name.endswith(".staging")]


def test_rows_with_long_texts_are_scored_apart_in_batches_of_bounded_bytes(
    folder: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pq.read_table(folder / "rows/1.parquet")
    texts = [f"{n} " + "ä" * 300 if n % 7 == 0 else text for n, text in enumerate(table["carrier"].to_pylist())]
    table = table.set_column(table.column_names.index("carrier"), "carrier", pa.array(texts))
    pq.write_table(table, folder / "rows/1.parquet")
    batches = []
    run_tasks = job.run_tasks

    def seen(rows: DataFrame, *words: Any) -> Any:
        scored = run_tasks(rows, *words)
        batches.append((rows.sparkSession.conf.get(BATCH_BYTES), scored.rows_in))
        return scored

    monkeypatch.setattr(job, "run_tasks", seen)
    found = predict(folder)
    long = len(range(0, len(table), 7))
    assert batches == [(str(UNLIMITED), ROWS), (str(MOST_BATCH_BYTES), long)]
    assert (found.rows_in, found.rows_out, sum(file.rows for file in found.files)) == (ROWS, ROWS, ROWS)
    scored, given = scored_table(folder / "predictions"), pq.read_table(folder / "rows").sort_by("id")
    assert scored.select(["id", "carrier"]).equals(given.select(["id", "carrier"]))
    expected = _load_pyfunc(str(folder / "run")).predict(given.to_pandas())["prediction"].to_numpy()
    # Not the same bits: the last rows of a matrix product are rounded otherwise, and here other rows are the last.
    np.testing.assert_allclose(scored["prediction"].to_numpy(), expected, rtol=1e-6)


def test_rows_that_the_model_refuses_are_counted_by_column(tmp_path: Path, spark: SparkSession) -> None:
    table = write_rows(tmp_path / "rows", 3000)
    features = json.loads(json.dumps(manifest().features))
    features["features"].append(
        {"name": "month", "kind": "passthrough", "column": "month", "dtype": None, "shape": None, "nulls": "refuse",
         "fill": None}
    )  # fmt: skip
    features["features"] = [f for f in features["features"] if f["name"] != "month" or f["kind"] == "passthrough"]
    columns = [c.model_copy(update={"role": "feature", "nulls": "refuse"}) if c.name == "month" else c
               for c in manifest().columns]  # fmt: skip
    described = manifest().model_copy(update={"features": features, "columns": tuple(columns)})
    model_folder(tmp_path / "run", described=described)
    found = predict(tmp_path)
    nulls = table["month"].null_count
    assert nulls > 100 and found.refused == {"month": nulls}
    assert (found.rows_in, found.rows_out) == (3000, 3000 - nulls) and found.interval is None
    kept = table.filter(table["month"].is_valid())["id"].to_pylist()
    assert scored_table(tmp_path / "predictions")["id"].to_pylist() == kept


def test_a_row_without_refused_columns_is_counted_once() -> None:
    batch = pa.record_batch({"a": [1, None, None, 4], "b": [None, None, 3, 4]})
    kept, refused = without_refused(batch, ["a", "b"])
    assert kept.to_pylist() == [{"a": 4, "b": 4}] and refused == {"a": 2, "b": 1}
    assert without_refused(batch.slice(3), ["a", "b"]) == (batch.slice(3), {})


def test_a_row_without_a_finite_prediction_is_refused_and_counted() -> None:
    class Halves:
        """Stands for a model whose prediction is not finite where its input is not."""

        refuses_null: tuple[str, ...] = ()
        raw_columns = ("x",)

        def scores(self, raw: Any, count: int) -> np.ndarray:
            return np.asarray(raw["x"].to_numpy(), np.float64) / 2

        def predictions(self, scores: np.ndarray) -> dict[str, np.ndarray]:
            return {"prediction": scores}

    about = About("m", "1", datetime(2026, 1, 1, tzinfo=UTC), None)
    task, counts = ScoreTask("", "", "v", ("id",), about), Counts()
    batch = pa.record_batch({"id": [1, 2, 3], "x": [1.0, math.inf, math.nan]})
    found = score_batch(Halves(), task, batch, counts)  # type: ignore[arg-type]
    assert found.select(["id", "prediction"]).to_pylist() == [{"id": 1, "prediction": 0.5}]
    assert (counts.rows, counts.refused) == (1, {NOT_FINITE: 2})


def test_of_a_recipe_with_an_interval_the_rows_of_its_last_are_scored(tmp_path: Path, spark: SparkSession) -> None:
    """A look back at the day before gives a view more rows, which are not scored; files of other days are not read."""
    etl = sales_recipe(write_sales(tmp_path / "sales"), "SELECT *, amount - 1 AS other FROM sales", look_back=1)
    block = {"rows": "made", "to": str(tmp_path / "predictions"), "keep": ["day", "shop"]}
    tracking = {"root": str(tmp_path / "mlflow")}
    values = {"name": "sales", "etl": etl.model_dump(mode="json"), "predict": block, "tracking": tracking}
    config = RunConfig.model_validate(values)
    (tmp_path / "sales/day=2024-03-01/broken.parquet").write_bytes(b"no Parquet")
    pinned = pin_rows(config, lambda: spark)
    assert sorted(pinned.fingerprints) == ["sales", "sales[-1]"] and config.predict is not None
    rows = make_rows(build_session(spark, {}), config, config.predict, pinned)
    assert sorted((str(r.day), r.shop) for r in rows.collect()) == [("2024-03-04", s) for s in ("a", "b", "c")]


def test_a_models_code_must_be_trusted_and_that_of_the_recipe_is(tmp_path: Path) -> None:
    """A task's name is no module: one called `binary` is not trusted because the recipe's task is."""
    model_folder(tmp_path / "run")
    stored = json.loads((tmp_path / "run/config.json").read_text())
    config = load_config(recipe(tmp_path)).config
    assert config.predict is not None
    for reference, is_own in (("binary:Model", False), ("mine.models:Model", False), ("mine.models:Model", True)):
        stored["model"]["factory"] = reference
        (tmp_path / "run/config.json").write_text(json.dumps(stored))
        own = config.model_copy(
            update={"model": config.model.model_copy(update={"factory": "mine.models:Other" if is_own else "x.y:Z"})}
        )
        if is_own:
            assert get_model(own, config.predict, tmp_path / "scratch").trained.config.model.factory == reference
        else:
            with pytest.raises(
                StoredError, match=f"config.json: model.factory = '{reference}': a stored file may name"
            ):
                get_model(own, config.predict, tmp_path / "scratch")


def test_what_is_wrong_is_said_before_anything_is_replaced(folder: Path, spark: SparkSession) -> None:
    before = predict(folder, keep=["id"])
    few = {"rows": "few", "keep": ["id"]}
    with pytest.raises(EtlError, match=r"predict.rows = 'few': lacks \['month'\], which the model was trained on"):
        predict(folder, **few)
    with pytest.raises(EtlError, match=r"predict.keep = 'carier': 'made' has no such column; did you mean 'carrier'"):
        predict(folder, keep=["carier"])
    with pytest.raises(EtlError, match=r"predict.rows = 'none': has no rows; nothing is replaced"):
        path = recipe(folder, rows="none")
        run_predict(load_config(path, ["etl.views.none=SELECT * FROM rows WHERE id < 0"]))
    assert read_predictions(open_storage(str(folder / "predictions"))) == before
    assert predict(folder, **few, on_missing_column="null").rows_out == 9
    rows = pq.read_table(folder / "rows").slice(0, 9).to_pandas().assign(month=None)
    expected = _load_pyfunc(str(folder / "run")).predict(rows)["prediction"].to_numpy()
    assert scored_table(folder / "predictions")["prediction"].to_numpy().tobytes() == expected.tobytes()


def test_a_missing_model_or_folder_of_others_is_found_before_spark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    with pytest.raises(StoredError, match=r"no model: it has no config.json, manifest.json, weights.safetensors"):
        predict(tmp_path)
    assert main(["predict", recipe(tmp_path), "model=models:/flights@champion"]) == 3
    assert "models:/flights@champion: no model: " in capsys.readouterr().err
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions/notes.txt").touch()
    with pytest.raises(StoredError, match=r"holds 'notes.txt', which `predict` did not write"):
        predict(tmp_path)


def test_a_recipe_without_the_block_is_refused(tmp_path: Path) -> None:
    path = Path(recipe(tmp_path))
    path.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(path.read_text()).items() if k != "predict"}))
    with pytest.raises(ConfigError, match="predict: the recipe has no such block"):
        run_predict(load_config(str(path)))


@pytest.mark.slow  # a writer that is killed at any moment: test_publish.py
def test_killed_in_the_middle_of_the_second_run_a_date_has_the_first_ones_version(
    tmp_path: Path, spark: SparkSession
) -> None:
    write_rows(tmp_path / "rows", 120_000)
    model_folder(tmp_path / "run")
    model_folder(tmp_path / "other", seed=9)
    first = predict(tmp_path)
    command = [sys.executable, "-m", "sparkring.pipelines.cli", "predict", recipe(tmp_path, model="other")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True) as run:
        deadline = time.monotonic() + 600
        while not [*tmp_path.glob(".predictions.*.staging/*")] and time.monotonic() < deadline:
            assert run.poll() is None
            time.sleep(0.005)
        below = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(below, timeout=300)  # Python workers have a group of their own, and still write
    assert not left
    assert [*tmp_path.glob(".predictions.*.staging")], "it was not killed in the middle"
    assert read_predictions(open_storage(str(tmp_path / "predictions"))) == first
    assert {*os.listdir(tmp_path / "predictions")} == {"_predictions.json", *(file.path for file in first.files)}
    assert scored_table(tmp_path / "predictions")["model_version"].unique().to_pylist() == [first.model_version]
    assert predict(tmp_path, model=str(tmp_path / "other")).model_version != first.model_version
    assert not [*tmp_path.glob(".predictions.*.staging")]
