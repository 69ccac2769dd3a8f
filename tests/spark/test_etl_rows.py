"""Rows that are read again or kept between the passes over them: the same dataset either way."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkring.conf.config import EtlConfig
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.rows import is_cheap
from sparkring.etl.sources.pin import pin_sources

pytestmark = pytest.mark.spark


def test_only_columns_of_files_that_no_join_or_python_stands_over_are_read_again(spark, tmp_path: Path) -> None:
    for kind in ("parquet", "orc", "csv"):
        spark.range(10).write.format(kind).save(str(tmp_path / kind))
    rows = spark.read.parquet(str(tmp_path / "parquet"))
    doubled = rows.where("id > 3").selectExpr("id * 2 AS id")
    assert is_cheap(rows) and is_cheap(doubled) and is_cheap(doubled.union(rows))
    assert is_cheap(spark.read.orc(str(tmp_path / "orc")))
    in_python = F.udf(lambda number: number, "long")
    costly = {
        "text": spark.read.schema("id long").csv(str(tmp_path / "csv")),
        "a join": rows.join(doubled, "id"),
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
        sources = pin_sources(config.sources)
        built.append(build_dataset(spark, BuildRequest(config, sources, "events", str(tmp_path / name))).manifest)
        assert len(kept) == (name == "kept"), "Parquet is read again unless it is costly"
        monkeypatch.setattr("sparkring.etl.rows.is_cheap", lambda rows: False)
    again, once = built
    assert [(f.split, f.rows, f.sha256) for f in again.files] == [(f.split, f.rows, f.sha256) for f in once.files]
    assert (again.features, again.checks, again.accounting) == (once.features, once.checks, once.accounting)
    assert again.accounting.quarantined == {"small": 10}
