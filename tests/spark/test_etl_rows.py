"""Rows that are read again or kept between the passes over them: the same dataset either way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.shards import shard
from sparkring.etl.sources.files.read import local_table
from sparkring.etl.spark_platform.plans import is_cheap
from sparkring.etl.spark_platform.session import BATCH_BYTES, build_session
from sparkring.etl.windows.window import pin_dataset

pytestmark = pytest.mark.spark


def test_only_columns_of_files_that_no_join_or_python_stands_over_are_read_again(spark, tmp_path: Path) -> None:
    for kind in ("parquet", "orc", "csv"):
        spark.range(10).write.format(kind).save(str(tmp_path / kind))
    rows = spark.read.parquet(str(tmp_path / "parquet"))
    doubled = rows.where("id > 3").selectExpr("id * 2 AS id")
    assert is_cheap(rows) and is_cheap(doubled) and is_cheap(doubled.union(rows))
    assert is_cheap(spark.read.orc(str(tmp_path / "orc")))
    files = local_table(spark, StructType([StructField("file", LongType())]), [[1, 2]])
    assert is_cheap(rows.join(F.broadcast(files), rows["id"] == files["file"], "left"))
    in_python = F.udf(lambda number: number, "long")
    costly = {
        "text": spark.read.schema("id long").csv(str(tmp_path / "csv")),
        "a join": rows.join(doubled, "id"),
        "a join below that of files": rows.join(doubled, "id").join(files, F.col("id") == files["file"]),
        "an aggregate": rows.groupBy("id").count(),
        "Python": rows.select(in_python("id")),
        "a random number": rows.withColumn("random", F.rand()),
        "no file": spark.createDataFrame([(1,)], "id long"),
    }
    assert [what for what, frame in costly.items() if is_cheap(frame)] == []


def test_a_dataset_is_the_same_whether_its_rows_were_kept_or_read_again(spark, tmp_path: Path, monkeypatch) -> None:
    table = pa.table({"id": range(300), "kind": ["a", "b", None] * 100})
    pq.write_table(table, path := tmp_path / "events.parquet")
    config = EtlConfig.model_validate(
        {
            "sources": {
                "events": {"format": "parquet", "path": str(path), "columns": {"id": "bigint", "kind": "string"}}
            },
            "rows": "events",
            "one_per": "events",
            "key": ["id"],
            "checks": [{"name": "small", "kind": "range", "column": "id", "max": 289, "level": "row"}],
            "split": {"kind": "hash", "shares": {"train": 0.8, "test": 0.2}},
            "shard": {"shards": {"train": 3}},
            "features": {"kind": {"kind": "categorical"}},
            "keep": ["id"],
        }
    )
    kept: list[DataFrame] = []
    persist = type(spark.range(1)).persist
    monkeypatch.setattr(type(spark.range(1)), "persist", lambda frame, *level: kept.append(frame) or persist(frame))
    built = []
    for name in ("read", "kept"):
        pinned = pin_dataset(config, {})
        built.append(build_dataset(spark, BuildRequest(config, pinned, "events", str(tmp_path / name))).manifest)
        assert len(kept) == (name == "kept"), "Parquet is read again unless it is costly"
        monkeypatch.setattr("sparkring.etl.rows.is_cheap", lambda rows: False)
    again, once = built
    assert [(f.split, f.rows, f.sha256) for f in again.files] == [(f.split, f.rows, f.sha256) for f in once.files]
    assert (again.features, again.checks, again.accounting) == (once.features, once.checks, once.accounting)
    assert again.accounting.quarantined == {"small": 10}


def days(folder: Path, **check: object) -> EtlConfig:
    """A recipe over a table in folders by day and hour, with a rule."""
    for day, hour in (("2024-03-01", 0), ("2024-03-01", 1), ("2024-03-02", 0)):
        file = folder / f"day={day}/hour={hour}/x.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": [hour, 10 + hour, 10 + hour], "text": ["a" * 10, None, "b"]}), file)
    return EtlConfig.model_validate(
        {
            "sources": {
                "events": {
                    "format": "parquet",
                    "path": str(folder),
                    "columns": {"id": "bigint", "text": "string"},
                    "partitions": {"day": "date", "hour": "int"},
                    "where": "day = '2024-03-01'",
                }
            },
            "rows": "events",
            "key": ["day", "hour", "id"],
            "checks": [{"name": "once", "kind": "unique", "columns": ["day", "hour", "id"], **check}],
            "split": {"kind": "hash", "shares": {"train": 1.0}},
            "features": {"text": {"kind": "categorical"}},
            "keep": ["id", "day", "hour"],
        }
    )


@pytest.mark.parametrize(
    ("check", "where", "times", "values"),
    [
        ({"level": "dataset", "max_share": 0.5}, "day = '2024-03-01'", 0, {0: 3, 1: 3}),
        ({"level": "dataset", "max_share": 0.5}, "day = '2024-03-01' AND hour = 1", 0, {1: 3}),
        ({"level": "row"}, "day = '2024-03-01'", 1, {0: 2, 1: 2}),
    ],
    ids=["of the dataset", "of one folder", "of rows"],
)
def test_rows_in_folders_are_kept_only_for_rules_that_later_passes_need(
    spark, tmp_path: Path, monkeypatch, check, where, times, values
) -> None:
    config = days(tmp_path / "lake", **check)
    source = config.sources["events"].model_copy(update={"where": where})
    config = config.model_copy(update={"sources": {"events": source}})
    kept: list[DataFrame] = []
    persist = type(spark.range(1)).persist
    monkeypatch.setattr(type(spark.range(1)), "persist", lambda frame, *level: kept.append(frame) or persist(frame))
    request = BuildRequest(config, pin_dataset(config, {}), "events", str(tmp_path / "datasets"))
    built = build_dataset(spark, request)
    assert len(kept) == times
    assert built.manifest.checks[0]["failing"] == len(values)
    (file,) = built.manifest.files
    stored = pq.read_table(Path(built.uri) / file.path)
    assert Counter(stored["hour"].to_pylist()) == values and set(map(str, stored["day"].to_pylist())) == {"2024-03-01"}
    assert set(stored["text"].to_pylist()) == {"a" * 10, None, "b"} - ({"b"} if times else set())


@pytest.mark.parametrize(("length", "is_counted"), [(10, False), (4000, True)])
def test_spark_adds_up_the_bytes_of_batches_only_where_texts_are_long(
    spark, tmp_path: Path, monkeypatch, length: int, is_counted: bool
) -> None:
    """10,000 rows of a batch with texts of 4,000 bytes would be more than its 32 MiB."""
    pq.write_table(pa.table({"id": range(5), "text": ["x" * length] + ["y"] * 4}), path := tmp_path / "events.parquet")
    config = days(tmp_path / "lake", level="dataset", max_share=0.5).model_dump(mode="json")
    config["sources"]["events"] |= {"path": str(path), "partitions": {}, "where": None}
    config |= {"key": ["id"], "checks": [], "keep": ["id"]}
    etl = EtlConfig.model_validate(config)
    limits: list[str] = []
    session = build_session(spark, {})
    monkeypatch.setattr("sparkring.etl.build.build_session", lambda *arguments: session)
    found = shard.write_shards

    def noted(*arguments):
        limits.append(session.conf.get(BATCH_BYTES))
        return found(*arguments)

    monkeypatch.setattr("sparkring.etl.rows.write_shards", noted)
    build_dataset(spark, BuildRequest(etl, pin_dataset(etl, {}), "events", str(tmp_path / "datasets")))
    assert limits == [str(32 << 20) if is_counted else str((1 << 31) - 1)]
    assert session.conf.get(BATCH_BYTES) == str(32 << 20)
