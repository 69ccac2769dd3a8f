"""`predict.contributions`: each scored row has numbers by column that sum to its raw prediction."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xgboost
import yaml
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, load_config
from sparkring.conf.manifest import DatasetManifest, read_manifest
from sparkring.conf.storage import open_storage
from sparkring.etl.errors import EtlError
from sparkring.pipelines.predict import score
from sparkring.pipelines.predict.job import run_predict
from sparkring.pipelines.predict.model import load
from sparkring.pipelines.predict.publish import PublishedPredictions, read_predictions
from sparkring.pipelines.serving import Predictor
from sparkring.training.data.features.tensors import element_names
from sparkring.training.model.calibration import Calibration
from sparkring.training.model.contributions import Contributions
from sparkring.training.model.folder import describe_model
from sparkring.training.model.recipe_model import build_model, pick_columns
from sparkring.training.trees.columns import TreeColumns, seen_by
from sparkring.training.trees.model import write_trees
from tests.pipelines.served import export, manifest, model_folder, random_rows
from tests.training.trees.tables import homes, write_homes

TASKS = ("binary", "multiclass", "multilabel", "regression", "poisson")
COLUMNS = {"price": "double", "city": "string", "area": "float", "place": "array<float>"}
FLIGHTS = {"carrier": "string", "month": "int", "wind": "double", "hour": "int"}


def described(task: str) -> DatasetManifest:
    """Flights with a label of the task: classes by name, two labels, or a number."""
    made = manifest()
    if task == "multiclass":
        classes = {"name": "late", "kind": "classes", "column": "late", "values": ["no", "some", "very"],
                   "counts": {"train": [1, 1, 1]}}  # fmt: skip
        columns = [c if c.name != "late" else c.model_copy(update={"dtype": "string"}) for c in made.columns]
        return made.model_copy(update={"columns": tuple(columns), "features": made.features | {"labels": [classes]}})
    if task == "multilabel":
        both = [made.columns[-1].model_copy(update={"name": name}) for name in ("late", "lost")]
        flags = {"values": ["late", "lost"], "counts": {"train": [1, 1]}, "odd": {}}
        return made.model_copy(
            update={"columns": (*made.columns[:-1], *both), "features": made.features | {"flags": flags}}
        )
    return made


def net_folder(folder: Path, task: str) -> Predictor:
    """A network with several members, whose weights are random; a value is in the label's unit."""
    args = {"width": 16, "blocks": 1, "members": 3, "cosine_width": 2}
    args |= {"output_center": 300.0, "output_scale": 20.0} if task == "regression" else {}
    config = RunConfig.model_validate({"name": "flights", "model": {"args": args, "task": task}})
    torch.manual_seed(0)
    model = build_model(config, described(task))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    describe_model(export(folder, model), config, described(task))
    return load(folder)


def trees_folder(folder: Path, task: str, table: Path, rounds: int = 12) -> Predictor:
    """Trees of homes; an early stop left the last rounds out."""
    config = RunConfig.model_validate({"name": "homes", "dataset": "d", "model": {"family": "trees", "task": task}})
    seen = seen_by(config.model, read_manifest(open_storage(str(table))))
    columns = TreeColumns.of(seen, pick_columns(seen, config.model).features)
    rows = pd.DataFrame({k: v.to_pandas() for k, v in homes(600, 3, task).items()})
    city = rows["city"].map({"Oslo": 2, "Rome": 3, "Lima": 4}).fillna(1).where(rows["city"].notna())
    matrix = np.column_stack([rows["price"], city, rows["area"], np.stack(rows["place"])]).astype(np.float32)
    data = xgboost.QuantileDMatrix(
        matrix, rows["label"], feature_names=columns.names, feature_types=columns.types, enable_categorical=True
    )
    objective = {
        "binary": {"objective": "binary:logistic"},
        "multiclass": {"objective": "multi:softprob", "num_class": 3},
        "regression": {"objective": "reg:squarederror"},
        "poisson": {"objective": "count:poisson"},
    }[task]
    target = open_storage(str(folder))
    write_trees(target, xgboost.train(objective | {"nthread": 1}, data, rounds)[:8])
    describe_model(target, config, read_manifest(open_storage(str(table))))
    assert columns.names == [name for column in columns.tensors for name in element_names(column)]
    return load(folder)


def raw_prediction(predictor: Predictor, rows: pd.DataFrame, task: str) -> np.ndarray:
    """The predictions (N, outputs) of the way that has no contributions, back from the link."""
    scores = predictor.scores(predictor.raw_arrays(rows), len(rows))
    scores = scores.reshape(len(rows), -1)
    if task in ("binary", "multilabel"):
        return np.asarray(np.log(scores / (1 - scores)))
    return np.log(scores) if task in ("multiclass", "poisson") else scores


def check_sums(found: Contributions, raw: np.ndarray, task: str) -> None:
    assert not found.misses().any()
    sums = found.base + found.values.sum(axis=1)
    if task == "multiclass":  # a softmax forgets what all classes have in common
        sums, raw = (each - each.mean(axis=1, keepdims=True) for each in (sums, raw))
    np.testing.assert_allclose(sums, raw, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("task", TASKS)
def test_contributions_of_a_network_sum_to_its_raw_prediction(task: str, tmp_path: Path) -> None:
    """Nulls, categories never seen, and whole numbers among the rows; one feature for a number and its indicator."""
    predictor, rows = net_folder(tmp_path / "model", task), pd.DataFrame(random_rows(300))
    found = predictor.contributions(predictor.raw_arrays(rows), len(rows))
    assert predictor.raw_columns == [*FLIGHTS] and found.values.shape[1] == 4
    assert predictor.output_names(found) == {"multiclass": ["no", "some", "very"], "multilabel": ["late", "lost"]}.get(
        task, []
    )
    check_sums(found, raw_prediction(predictor, rows, task), task)
    assert (np.abs(found.values).mean(axis=0) > 0).all()


@pytest.mark.parametrize(
    ("task", "calibration"),
    [
        ("binary", Calibration(scale=0.4, shift=-0.7)),
        ("binary", Calibration.through(np.array([[-1.0, -2.0], [0.1, -1.5], [0.4, 3.0]]))),
        ("multiclass", Calibration(scale=0.4)),
    ],
    ids=["line", "curve", "classes"],
)
def test_contributions_of_a_calibrated_model_sum_to_its_calibrated_prediction(
    task: str, calibration: Calibration, tmp_path: Path
) -> None:
    plain, rows = net_folder(tmp_path / "model", task), pd.DataFrame(random_rows(200))
    calibration.write(open_storage(str(tmp_path / "model")))
    predictor = load(tmp_path / "model")
    found = predictor.contributions(predictor.raw_arrays(rows), len(rows))
    check_sums(found, raw_prediction(predictor, rows, task), task)
    assert not np.allclose(raw_prediction(predictor, rows, task), raw_prediction(plain, rows, task))


@pytest.mark.parametrize("task", [task for task in TASKS if task != "multilabel"])
@pytest.mark.parametrize("weigh", [False, True])
def test_contributions_of_trees_sum_to_their_raw_prediction(task: str, weigh: bool, tmp_path: Path) -> None:
    table = write_homes(tmp_path / "table", kind=task, weigh=weigh)
    predictor = trees_folder(tmp_path / "model", task, table)
    rows = pd.DataFrame({name: values.to_pandas() for name, values in homes(200, 9, task).items()})[[*COLUMNS]]
    found = predictor.contributions(predictor.raw_arrays(rows), len(rows))
    assert predictor.raw_columns == [*COLUMNS], "the numbers of a vector are one feature, and a weight is none"
    check_sums(found, raw_prediction(predictor, rows, task), task)


def recipe(folder: Path, **predict: Any) -> str:
    source = {"path": str(folder / "rows"), "format": "parquet", "columns": {"id": "bigint"} | FLIGHTS}
    block = {"rows": "rows", "to": str(folder / "out"), "model": str(folder / "model"), "keep": ["id"]}
    values = {
        "name": "flights",
        "etl": {"sources": {"rows": source}, "rows": "rows", "features": {"carrier": {"kind": "categorical"}}},
        "tracking": {"enabled": False},
        "predict": block | {"contributions": True} | predict,
    }
    path = folder / "flights.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def write_rows(folder: Path, rows: int = 3000) -> None:
    made = random_rows(rows)
    (folder / "rows").mkdir()
    columns = {
        "id": pa.array(range(rows), pa.int64()),
        "carrier": pa.array(made["carrier"]),
        "month": pa.array([None if v is None else int(v) for v in made["month"]], pa.int32()),
        "wind": pa.array([None if v is None else float(v) for v in made["wind"]]),
        "hour": pa.array(made["hour"], pa.int32()),
    }
    pq.write_table(pa.table(columns), folder / "rows/0.parquet")


def predict(folder: Path, **block: Any) -> PublishedPredictions:
    assert run_predict(load_config(recipe(folder, **block))) == 0
    return read_predictions(open_storage(str(folder / "out")))


@pytest.mark.spark
def test_spark_finds_the_contributions_of_each_row_by_column(tmp_path: Path, spark: SparkSession) -> None:
    write_rows(tmp_path)
    net_folder(tmp_path / "model", "binary")
    published = predict(tmp_path)
    assert (published.rows_out, published.missed) == (3000, 0)
    scored = spark.read.parquet(str(tmp_path / "out"))
    types = dict(scored.dtypes)
    assert types["contributions"] == "map<string,double>" and types["contribution_base"] == "double"
    total = F.expr("contribution_base + aggregate(map_values(contributions), 0D, (sum, one) -> sum + one)")
    missed = F.abs(1 / (1 + F.exp(-total)) - F.col("prediction"))
    assert scored.select(F.max(missed)).first()[0] < 1e-5  # type: ignore[index]
    (keys,) = scored.select(F.sort_array(F.map_keys("contributions")).alias("keys")).distinct().collect()
    assert keys.keys == sorted(FLIGHTS)
    rows = pq.read_table(tmp_path / "rows").to_pandas()
    predictor = load(tmp_path / "model")
    expected = predictor.contributions(predictor.raw_arrays(rows), len(rows)).values[:, 2, 0]
    found = scored.orderBy("id").select("contributions.wind").toPandas()["wind"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.spark
def test_of_several_classes_spark_finds_them_by_class_and_column(tmp_path: Path, spark: SparkSession) -> None:
    write_rows(tmp_path, 500)
    net_folder(tmp_path / "model", "multiclass")
    predict(tmp_path)
    scored = spark.read.parquet(str(tmp_path / "out"))
    assert dict(scored.dtypes)["contributions"] == "map<string,map<string,double>>"
    sums = [
        F.expr(
            f"contribution_base['{name}'] + aggregate(map_values(contributions['{name}']), 0D, (sum, one) -> sum + one)"
        )
        for name in ("no", "some", "very")
    ]
    odds = scored.select((F.exp(sums[1]) / (F.exp(sums[0]) + F.exp(sums[1]) + F.exp(sums[2]))).alias("p"), "class_some")
    assert odds.select(F.max(F.abs(F.col("p") - F.col("class_some")))).first()[0] < 1e-5  # type: ignore[index]


@pytest.mark.spark
def test_without_the_key_there_are_no_contributions(tmp_path: Path, spark: SparkSession) -> None:
    write_rows(tmp_path, 100)
    model_folder(tmp_path / "model")
    predict(tmp_path, contributions=False)
    assert "contribution" not in " ".join(spark.read.parquet(str(tmp_path / "out")).columns)


@pytest.mark.spark
def test_rows_whose_contributions_miss_are_counted_and_told(
    tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that gives a row another output each time it is asked has no contributions that sum to one."""
    write_rows(tmp_path, 400)
    net_folder(tmp_path / "model", "binary")
    config = (tmp_path / "model/config.json").read_text()
    odd = config.replace("sparkring.training.models.tabular:Tabular", "tests.pipelines.predict.unsteady:Unsteady")
    (tmp_path / "model/config.json").write_text(odd)
    values = yaml.safe_load(Path(recipe(tmp_path)).read_text())
    values["model"] = {"factory": "tests.pipelines.predict.unsteady:Unsteady"}
    (tmp_path / "flights.yaml").write_text(yaml.safe_dump(values))
    with caplog.at_level(logging.WARNING, "sparkring"):
        assert run_predict(load_config(str(tmp_path / "flights.yaml"))) == 0
    published = read_predictions(open_storage(str(tmp_path / "out")))
    assert published.rows_out == 400 and published.missed > 300
    assert f"{published.missed} of 400 rows have contributions that miss the raw prediction" in caplog.text


def test_a_model_without_contributions_is_refused_before_spark(tmp_path: Path) -> None:
    write_rows(tmp_path, 10)
    net_folder(tmp_path / "model", "binary")
    config = (tmp_path / "model/config.json").read_text()
    own = config.replace('"task": "binary"', '"task": "tests.training.own_example:Own"')
    (tmp_path / "model/config.json").write_text(own)
    values = yaml.safe_load(Path(recipe(tmp_path)).read_text())
    values["model"] = {"task": "tests.training.own_example:Own"}
    (tmp_path / "flights.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"predict.contributions: .*model: model.task = 'tests.training.own_example"):
        run_predict(load_config(str(tmp_path / "flights.yaml")))


def test_a_kept_column_has_not_their_name(tmp_path: Path) -> None:
    write_rows(tmp_path, 10)
    net_folder(tmp_path / "model", "binary")
    with pytest.raises(
        EtlError, match=r"predict.keep = 'contributions': the model's predictions have a column of that"
    ):
        run_predict(load_config(recipe(tmp_path, keep=["contributions"])))


def test_rows_without_a_finite_prediction_leave_those_of_others_in_place(tmp_path: Path) -> None:
    predictor = net_folder(tmp_path / "model", "binary")
    wind = [1.0, np.inf, 30.0]
    batch = pa.record_batch({"id": [1, 2, 3], "carrier": ["UA"] * 3, "month": [1] * 3, "wind": wind, "hour": [6] * 3})
    about = score.About("m", "1", pd.Timestamp("2026-01-01", tz="UTC").to_pydatetime(), None)
    task, counts = score.ScoreTask("", "", "v", ("id",), about, contributions=True), score.Counts()
    made = score.score_batch(predictor, task, batch, counts)
    rows = batch.to_pandas().iloc[[0, 2]]
    expected = predictor.contributions(predictor.raw_arrays(rows), 2)
    assert made["id"].to_pylist() == [1, 3] and counts.missed == 0
    found = [dict(row) for row in made["contributions"].to_pylist()]
    assert [row["wind"] for row in found] == pytest.approx(expected.values[:, 2, 0])
    none = score.score_batch(predictor, task, batch.slice(1, 1), counts)
    assert none.num_rows == 0 and none.schema == made.schema
