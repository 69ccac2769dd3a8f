"""One registered model, whose rows come from pandas, Spark, JSON and an HTTP server: the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.storage import open_storage
from sparkring.pipelines.model.check import data_folder, serve_check
from sparkring.pipelines.model.sample import PREDICTIONS, write_sample
from sparkring.pipelines.model.sources import model_sources, requirements
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.serving import (
    Predictor,
    make_predictor,
    signature_inputs,
    signature_outputs,
)
from sparkring.pipelines.tracking.ops import ModelInfo
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.training.model.folder import copy_model_files
from tests.helpers.ports import unused_port
from tests.pipelines.served import CONFIG, manifest, model_folder

SAMPLE = pa.table(
    {
        "carrier": ["UA", "B6", None, "ZZ"],
        "month": pa.array([1, 2, None, 7], pa.int32()),
        "wind": [1.5, None, 2.25, 30.0],
        "hour": pa.array([0, 1, None, 23], pa.int32()),
    }
)
WHOLE = {"carrier": ["UA", "B6", "ZZ"], "month": [1, 2, 7], "wind": [True, 5, 30.5], "hour": [0, 6, 23]}


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    folder = tmp_path_factory.mktemp("model")
    copy_model_files(model_folder(folder / "run"), open_storage(str(folder / "data")))
    found = make_predictor(open_storage(str(folder / "data")))
    assert isinstance(found, Predictor)
    found.folder = folder  # type: ignore[attr-defined]
    return found


@pytest.fixture(scope="module")
def tracking(predictor: Predictor) -> TrackingConfig:
    """A store with the model registered, as a job does it."""
    folder: Path = predictor.folder  # type: ignore[attr-defined]
    sources = model_sources(CONFIG)
    for name, text in sources.files.items():
        (folder / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "code" / name).write_text(text)
    predictions = pa.table(predictor.predictions(predictor.scores_of_stored(SAMPLE)))
    write_sample(folder / "data", SAMPLE, predictions)
    settings = TrackingConfig(experiment="m", root=str(folder / "mlflow"), flush_every_s=0.05, system_metrics=False)
    info = ModelInfo(
        name="final", step=1, sha256="0" * 64, loader_module="sparkring.pipelines.serving", registered_model="flights",
        inputs=signature_inputs(CONFIG, manifest()), outputs=signature_outputs("binary"), alias="champion",
        requirements=requirements(sources.packages),
    )  # fmt: skip
    with Tracker(settings, job="j", name="flights") as tracker:
        tracker.model("job", folder / "data", info, folder / "code")
        assert tracker.flush(180)
    return settings


@pytest.fixture(scope="module")
def folder(tracking: TrackingConfig) -> Path:
    (found,) = Path(tracking.root).rglob("MLmodel")
    return found.parent


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow leaves a model's folder of code on Python's path."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def whole_rows() -> pd.DataFrame:
    """int64 where numbers and categories are whole, a bool among numbers."""
    rows = pd.DataFrame(WHOLE)
    assert rows["month"].dtype == rows["hour"].dtype == np.int64 and rows["wind"].dtype == object
    return rows


def test_pandas_rows_of_any_number_type_are_taken(predictor: Predictor, folder: Path, own_path: None) -> None:
    import mlflow.pyfunc

    served, rows = mlflow.pyfunc.load_model(str(folder)), whole_rows()
    expected = predictor.predict(rows)["prediction"].tolist()
    assert len(set(expected)) == 3
    for changed in (rows, rows.astype({"month": "int32", "hour": float, "wind": float}), rows.astype({"hour": object})):
        assert served.predict(changed)["prediction"].tolist() == expected
    nulls = rows.assign(month=[1, None, 7], wind=[None, None, 1], carrier=["UA", None, "B6"])
    without = served.predict(nulls.assign(wind=None).drop(columns="wind"))["prediction"]
    assert without.tolist() == predictor.predict(nulls.assign(wind=None))["prediction"].tolist()
    assert served.predict(nulls)["prediction"].tolist() == predictor.predict(nulls)["prediction"].tolist()
    for column in ("carrier", "month", "hour"):
        with pytest.raises(Exception, match=rf"missing inputs \['{column}'\]"):
            served.predict(rows.drop(columns=column))


@pytest.mark.spark
def test_spark_rows_give_the_same_bits(spark: Any, predictor: Predictor, folder: Path, own_path: None) -> None:
    import mlflow.pyfunc
    from pyspark.sql import functions as F

    rows = whole_rows().astype({"wind": float})
    frame = spark.createDataFrame(rows)
    assert dict(frame.dtypes)["month"] == "bigint"
    score = mlflow.pyfunc.spark_udf(spark, str(folder), result_type="double", env_manager="local")
    scored = frame.withColumn("prediction", score(F.struct(*rows.columns))).orderBy("hour").toPandas()
    assert scored["prediction"].tolist() == predictor.predict(rows)["prediction"].tolist()


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    port = unused_port()
    words = ["models", "serve", "-m", str(folder), "--env-manager", "local", "--port", str(port), "--workers", "1"]
    names = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    names["PATH"] = f"{Path(sys.executable).parent}:{names['PATH']}"  # MLflow starts uvicorn by its name
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words], env=names, cwd=folder, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait(300)


def ask_server(address: str, path: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()


@pytest.mark.slow  # the same rows as JSON, without a server: tests/e2e/test_job.py
def test_mlflows_server_gives_the_same_numbers(predictor: Predictor, server: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            ask_server(server, "/ping")
            break
        except OSError:
            assert time.monotonic() < deadline, "the server never answered"
            time.sleep(0.2)
    rows = [dict(zip(WHOLE, values, strict=True)) for values in zip(*WHOLE.values(), strict=True)]
    answer = json.loads(ask_server(server, "/invocations", json.dumps({"dataframe_records": rows}).encode()))
    expected = predictor.predict(whole_rows())["prediction"].tolist()
    assert [row["prediction"] for row in answer["predictions"]] == expected


@pytest.mark.slow
def test_a_fresh_environment_of_the_models_folder_predicts_alike(tracking: TrackingConfig, folder: Path) -> None:
    """Installed by pip from the configured index, which holds no `sparkring`: equal, and named where it is not."""
    lines: list[str] = []
    assert serve_check("models:/flights@champion", tracking, lines.append) == Exit.OK
    assert lines[-1].endswith("4 rows, from pandas and from json: predictions are equal bit by bit")
    assert "its requirements are installed, in " in lines[0]
    import pyarrow.parquet as pq

    recorded = data_folder(folder, "m") / PREDICTIONS
    content, changed = recorded.read_bytes(), pq.read_table(recorded).to_pydict()
    changed["prediction"][2] += 0.01
    pq.write_table(pa.table(changed), recorded)
    try:
        assert serve_check(str(folder), tracking, lines.append) == Exit.QUALITY
    finally:
        recorded.write_bytes(content)
    assert "row 2, column 'prediction': " in lines[-1]
