"""Rows per second of `sparkring predict`, on rows like those of the flights recipe.

    python benchmarks/predict.py --rows 1000000 --rounds 3 --out benchmarks/results/predict_2core_202611.md

The rows are Parquet with the raw columns of the recipe's features (texts, numbers with nulls); the model is the
recipe's, with random weights. A round is all that a job does after the session has started and the workers are there:
pin the source (which hashes its files), read, score and write in Spark, publish. Wall and CPU seconds are of this
process, its JVM and Spark's Python workers. Three columns are kept. The last round's predictions are compared with
`Predictor`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from etl_write import cpu_by_process, used_s
from machine import measured_with, publish
from pyspark.sql import SparkSession

from sparkring.conf.config import RunConfig
from sparkring.conf.features import State
from sparkring.conf.load import Resolved, load_config
from sparkring.conf.manifest import Accounting, Column, DatasetManifest, Lineage
from sparkring.conf.storage import open_storage
from sparkring.pipelines.predict.job import run_predict
from sparkring.pipelines.run.spark import DEFAULTS
from sparkring.pipelines.serving import make_predictor
from sparkring.training.checkpoint.weights import write_weights
from sparkring.training.model.folder import describe_model
from sparkring.training.model.recipe_model import build_model
from sparkring.training.parallel.state import TensorInfo

TARGET = 300_000  # rows per second
TEXTS = 100  # values of a column
DTYPES = {"string": "string", "int": "int32", "bigint": "int64", "double": "float64"}
WHOLE = ("hour", "weekday")  # categories that are numbers


def features_of(config: RunConfig) -> State:
    """Fitted state like that of the recipe's features; standard deviations are not those of flights."""
    assert config.etl is not None
    inputs, states = dict[str, str](), list[State]()
    for name, feature in config.etl.features.items():
        column = feature.column or name
        state: State = {"name": name, "kind": feature.kind, "column": column}
        if feature.kind == "categorical":
            inputs[column] = "int" if name in WHOLE else "string"
            values = [str(n) for n in range(24)] if name in WHOLE else [f"value {n}" for n in range(TEXTS)]
            state["values"] = values
        elif feature.kind == "cyclic":
            inputs[column], state["period"] = "bigint", float(feature.period)
        else:
            inputs[column] = "double"
            state |= {"transform": feature.transform, "mean": 1.0, "std": 2.0, "fill": 1.0}
            state["indicator"] = feature.indicator != "never"
        states.append(state)
    return {"version": 1, "inputs": inputs, "features": states}


def write_rows(folder: Path, features: State, rows: int) -> None:
    """Texts of which some were not seen in training, numbers of which 2 % are null; four files."""
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {"id": pa.array(range(rows), pa.int64())}
    for name, kind in features["inputs"].items():
        if kind == "string":
            texts = np.array([f"value {n}" for n in range(TEXTS + 5)])
            columns[name] = pa.array(texts[random.integers(0, len(texts), rows)])
        elif kind == "int":
            columns[name] = pa.array(random.integers(0, 25, rows).astype(np.int32))
        elif kind == "bigint":
            columns[name] = pa.array(random.integers(0, 1440, rows))
        else:
            readings = random.normal(0, 10, rows).round(1)  # as of the weather: few digits
            columns[name] = pa.array(readings, mask=random.random(rows) < 0.02)
    table = pa.table(columns)
    folder.mkdir()
    for part in range(4):
        pq.write_table(table.slice(part * rows // 4, rows // 4), folder / f"{part}.parquet")


def write_model(folder: Path, config: RunConfig, features: State) -> None:
    columns = [
        *(Column(name=n, dtype=DTYPES[k], role="input", nulls="keep") for n, k in features["inputs"].items()),  # type: ignore[arg-type]
        Column(name="late", dtype="int8", role="label"),
    ]
    manifest = DatasetManifest(
        name="flights",
        fingerprint="a" * 64,
        created_at="",
        columns=tuple(columns),
        files=(),
        splits={},
        accounting=Accounting(rows_in=0, rows_out=0),
        features=features,
        lineage=Lineage(sources={}),
    )
    torch.manual_seed(0)
    state, storage = build_model(config, manifest).state_dict(), open_storage(str(folder))
    described = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()]
    write_weights(storage, described, state.values(), {})
    describe_model(storage, config, manifest)


def scoring(config: RunConfig, features: State, rows: Path, to: Path, model: Path) -> Resolved:
    """The recipe with these rows as its only source."""
    source = {"path": str(rows), "format": "parquet", "columns": {"id": "bigint"} | features["inputs"]}
    values = config.model_dump(mode="json", exclude={"etl"})
    values["etl"] = {"sources": {"rows": source}, "rows": "rows", "features": {"distance": {"kind": "numeric"}}}
    keep = ["id", "carrier", "distance"]
    values["predict"] = {"rows": "rows", "to": str(to), "model": str(model), "keep": keep}
    values["report"], values["tracking"] = {"must_beat": []}, {"enabled": False}
    return Resolved(RunConfig.model_validate(values), {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    config = load_config("flights").config
    features = features_of(config)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_rows(folder / "rows", features, words.rows)
        write_rows(folder / "few", features, words.rows // 20)
        write_model(folder / "model", config, features)
        builder = SparkSession.builder.master("local[2]")
        for key, value in (DEFAULTS | {"spark.driver.host": "127.0.0.1"}).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        run_predict(scoring(config, features, folder / "few", folder / "warm", folder / "model"))
        lines = []
        for _ in range(words.rounds):
            before, began = cpu_by_process(), time.monotonic()
            run_predict(scoring(config, features, folder / "rows", folder / "to", folder / "model"))
            wall_s, cpu_s = time.monotonic() - began, used_s(before)
            lines.append(f"| {wall_s:.2f} | {cpu_s:.2f} | {words.rows / wall_s:,.0f} | {words.rows / cpu_s:,.0f} |")
        made = pa.concat_tables(pq.read_table(path) for path in (folder / "to").glob("*.parquet")).sort_by("id")
        given = pq.read_table(folder / "rows").sort_by("id")
        expected = make_predictor(open_storage(str(folder / "model"))).predict(given.to_pandas())["prediction"]
        equal = made["prediction"].to_numpy().tobytes() == expected.to_numpy().tobytes()
        written = sum(path.stat().st_size for path in (folder / "to").iterdir()) / 2**20
        spark.stop()
    columns, made_of = len(features["inputs"]), len(features["features"])
    text = f"""# Batch scoring of {words.rows:,} rows

{measured_with("pyspark", "torch", "pyarrow", "numpy")}; local[2] with 1g of heap.

{columns} raw columns, {made_of} features, model {config.model.factory}; {written:.0f} MiB of predictions written.

| wall s | CPU s | rows per s | rows per CPU s |
|---|---|---|---|
{chr(10).join(lines)}

Target: {TARGET:,} rows per second. Bit-equal to `Predictor` on all rows: {"yes" if equal else "NO"}.
"""
    publish(text, words.out)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
