"""`sparkring init table` decides the split: by groups or by time where these matter, else at random."""

from __future__ import annotations

import math
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyspark.sql import SparkSession

from sparkring.conf.blocks.etl import SplitConfig
from sparkring.conf.load import load_config
from sparkring.etl.split import split_column
from sparkring.pipelines.init.folder import write_project
from sparkring.pipelines.init.sample import read_sample
from sparkring.pipelines.init.split import spark_buckets
from sparkring.pipelines.init.table import table_project

ROWS = 3000
DAYS = np.arange(ROWS) // 10


def project(folder: Path, rows: pd.DataFrame) -> tuple[dict[str, Any], list[str], str]:
    """The recipe, what was decided, and the recipe's text."""
    pq.write_table(pa.Table.from_pandas(rows, preserve_index=False), folder / "rows.parquet")
    made = table_project(str(folder / "rows.parquet"), "y", None, folder / "mine")
    write_project(folder / "mine", made, ["sparkring", "init"])
    text = (folder / "mine/recipe.yaml").read_text()
    load_config(str(folder / "mine/recipe.yaml"))
    return yaml.safe_load(text)["etl"], made.decided, text


def dated(trend: float, days: np.ndarray = DAYS) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    at = np.datetime64("2022-01-05") + days
    return pd.DataFrame({
        "at": pd.Series(at).dt.date,
        "year": pd.to_datetime(at).year.astype("int64"),
        "week": pd.to_datetime(at).isocalendar().week.to_numpy().astype("int64"),
        "odometer": (3.1 * days + draw.normal(size=len(days))).round(2),
        "size": draw.normal(size=len(days)).round(1),
        "y": (trend * days / days.max() + draw.normal(size=len(days))).round(3),
    })  # fmt: skip


def visits() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    of = np.repeat(np.arange(60), 20)
    signal = 2 * draw.normal(size=60)[of] + 0.3 * draw.normal(size=len(of))
    rows = pd.DataFrame({"patient": [f"p{each}" for each in of], "height": draw.normal(size=60)[of].round(3)})
    return rows.assign(dose=draw.normal(size=len(of)).round(2), y=signal.round(3)).sample(frac=1, random_state=0)


def test_rows_of_a_person_are_in_one_split_and_the_name_is_no_feature(tmp_path: Path) -> None:
    etl, decided, text = project(tmp_path, visits())
    assert etl["split"]["key"] == ["patient"] and "patient" not in etl["features"]
    assert "patient" in etl["views"]["prepared"]
    assert any("split by patient (etl.split.key), 60 groups" in line and "RMSE" in line for line in decided)
    assert "# To predict further rows of a known patient:\n#   split: {kind: hash, " in text


def test_where_the_order_of_time_matters_rows_are_split_by_it_without_what_says_when(tmp_path: Path) -> None:
    etl, decided, _ = project(tmp_path, dated(trend=5))
    assert etl["split"] == {
        "kind": "time",
        "column": "at",
        "boundaries": {"valid": "2022-09-02", "test": "2022-10-02"},
    }
    assert {*etl["features"]} == {"size", "at_weekday"}
    assert any("the order of time matters; trees have an RMSE of" in line for line in decided)
    view = etl["views"]["prepared"]
    assert "at_weekday" in view and not any(name in view for name in ("year", "week,", "odometer", "at_month"))


def test_categories_that_say_when_a_row_is_are_left_out_whatever_they_are_called(tmp_path: Path) -> None:
    rows = dated(trend=5)
    at = pd.to_datetime(rows["at"])
    rows = rows.assign(
        named=at.dt.month_name(), short=at.dt.strftime("%y/%m"), part="Q" + at.dt.quarter.astype(str),
        season=pd.Series(["cold", "mild", "hot", "wet"])[(at.dt.month % 12 // 3).to_numpy()].to_numpy(),
        kind=at.dt.day_name(), size_class=np.where(rows["size"] > 0, "large", "small"),
    )  # fmt: skip
    etl, _, _ = project(tmp_path, rows)
    assert etl["split"]["kind"] == "time" and {*etl["features"]} == {"size", "at_weekday", "kind", "size_class"}


def test_parts_of_dates_that_repeat_stay(tmp_path: Path) -> None:
    etl, _, _ = project(tmp_path, dated(trend=5, days=4 * DAYS))
    assert {"at_month", "at_weekday"} <= {*etl["features"]} and "year" not in etl["features"]


def test_where_time_does_not_matter_a_split_by_it_is_a_comment(tmp_path: Path) -> None:
    etl, decided, text = project(tmp_path, dated(trend=0))
    assert etl["split"]["kind"] == "hash" and "key" not in etl["split"] and "at_month" in etl["features"]
    (comment,) = (line for line in text.splitlines() if line.startswith("#   split:"))
    block = yaml.safe_load(comment.removeprefix("#"))["split"]
    assert SplitConfig.model_validate(block).column == "at" and len(block["boundaries"]) == 2
    assert "without " in text and "at_month" in text.partition("name:")[0]
    assert any("split at random" in line for line in decided)


def test_of_few_groups_each_split_has_several(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    of = np.repeat(np.arange(12), draw.integers(30, 90, 12))
    rows = pd.DataFrame({"sensor": of + 40, "load": draw.normal(size=len(of)).round(2)})
    rows["y"] = (3 * draw.normal(size=12)[of] + draw.normal(size=len(of))).round(3)
    etl, _, _ = project(tmp_path, rows)
    assert etl["split"]["key"] == ["sensor"] and etl["split"]["shares"] == {"train": 0.6, "valid": 0.2, "test": 0.2}
    sample = read_sample(str(tmp_path / "rows.parquet"))
    buckets = spark_buckets([sample.rows.column("sensor")], ["bigint"], etl["split"].get("seed", 0))
    for low, high, share in ((0, 600_000, 0.6), (600_000, 800_000, 0.2), (800_000, 1_000_000, 0.2)):
        assert abs(np.mean((buckets >= low) & (buckets < high)) - share) < 0.3 * share


@pytest.mark.parametrize("kinds", [("string",), ("bigint",), ("int",), ("string", "bigint"), ("bigint", "string")])
def test_buckets_are_those_of_spark(spark: SparkSession, kinds: tuple[str, ...]) -> None:
    texts: list[str | None] = [f"{'longer than a stripe of bytes ' * (n % 3)}{n}\u00e9" for n in range(50)]
    values: dict[str, tuple[pa.DataType, list[Any]]] = {
        "string": (pa.string(), [*texts[:-1], None]),
        "bigint": (pa.int64(), [*range(49), None]),
        "int": (pa.int32(), [*range(50)]),
    }
    table = pa.table({f"c{n}": pa.array(values[kind][1], values[kind][0]) for n, kind in enumerate(kinds)})
    config = SplitConfig(kind="hash", shares={"train": 0.5, "test": 0.5}, key=table.column_names, seed=3)
    frame = spark.createDataFrame(table.to_pylist(), ", ".join(f"c{n} {kind}" for n, kind in enumerate(kinds)))
    found = [row[0] for row in frame.select(split_column(config, [])).collect()]
    ours = spark_buckets(table.columns, list(kinds), 3)
    assert ["train" if bucket < 500_000 else "test" for bucket in ours] == found


def test_columns_of_odd_types_do_not_end_it(tmp_path: Path) -> None:
    """Nanoseconds, the last year of the calendar, infinities, nulls, whole numbers beyond 2^53."""
    n = 60
    rows: dict[str, Any] = {
        "ns": np.datetime64("2020-01-01T00:00:00.123456789", "ns") + np.arange(n) * 10**9,
        "late": [date(9999, 12, 31 - i % 9) for i in range(n)],
        "dated": [None if i % 5 == 0 else date(1, 1, 1) + timedelta(days=i) for i in range(n)],
        "odd": [math.inf if i % 7 == 0 else math.nan if i % 5 == 0 else float(i % 6) for i in range(n)],
        "big": [2**62 + i % 11 for i in range(n)],
        "user_id": pa.array([f"u{i // 4}" for i in range(n)]).dictionary_encode(),
        "raw": [b"\xff%d" % (i % 5) for i in range(n)],
        "y": np.random.default_rng(0).normal(size=n),
    }
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    assert table_project(str(tmp_path / "rows.parquet"), "y", None, tmp_path / "mine").recipe["etl"]["split"]
