"""A landing: whole or not there, with bytes that depend on the rows alone, deleted when it is old."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from sparkring.conf.storage import open_storage
from sparkring.etl.sources import landing
from sparkring.etl.sources.landing import LANDING_AGE, _row_groups, land, sweep

pytestmark = pytest.mark.spark


def test_the_bytes_of_a_landing_depend_on_its_rows_alone(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "FILE_BYTES", 20_000)  # several files
    monkeypatch.setattr(landing, "ROW_GROUP_BYTES", 4_000)
    text = F.expr("repeat('x', int(id % 13))")
    # 0.0 and -0.0, which Spark makes of no literal, in rows that are equal in all else.
    zero = F.expr("if(int(id / 650) % 2 = 0, 1.0D, -1.0D) * double(id - id)")
    few = spark.range(0, 3000, 1, 3).select((F.col("id") % 50).alias("a`b.c"), text.alias("t"), zero.alias("z"))
    many = few.repartition(7, F.rand(1))
    session = spark.newSession()
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "17")
    first, again = land(few, str(tmp_path / "1")), land(many, str(tmp_path / "2"))
    batched = land(session.createDataFrame(few.toArrow()), str(tmp_path / "3"))
    assert first.files == again.files == batched.files and first.fingerprint == again.fingerprint
    assert len(first.files) > 2 and first.rows == 3000 and first.is_whole()
    groups = [pq.read_metadata(first.folder.path(file.path)).num_row_groups for file in first.files]
    assert max(groups) > 1
    other = land(few.withColumn("t", F.col("t").cast("binary")), str(tmp_path / "4"))
    assert other.fingerprint != first.fingerprint


def test_rows_that_cannot_be_computed_leave_nothing(spark: Any, tmp_path: Path) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", "true")
    with pytest.raises(PySparkException, match="DIVIDE_BY_ZERO"):
        land(session.range(0, 100, 1, 4).selectExpr("1 / (id - 99) AS a"), str(tmp_path))
    assert not list(tmp_path.glob("landed/*"))


def test_rows_are_computed_once(spark: Any, tmp_path: Path) -> None:
    """A database would give others the second time."""
    count = spark.sparkContext.accumulator(0)

    def counted(batches: Any) -> Any:
        for batch in batches:
            count.add(batch.num_rows)
            yield batch

    assert land(spark.range(0, 500, 1, 2).mapInArrow(counted, "id bigint"), str(tmp_path)).rows == 500
    assert count.value == 500


def test_old_landings_are_deleted_and_young_ones_stay(spark: Any, tmp_path: Path) -> None:
    old, young = (land(spark.range(5), str(tmp_path)) for _ in range(2))
    for file in Path(old.folder.root).rglob("*"):
        os.utime(file, (1, 1))
    os.utime(old.folder.root, (1, 1))
    sweep(open_storage(str(tmp_path)), datetime.now(UTC) - LANDING_AGE)
    assert young.is_whole() and not old.is_whole() and not Path(old.folder.root).exists()
    sweep(open_storage(str(tmp_path / "nowhere")), datetime.now(UTC) + timedelta(days=1))


def test_a_folder_of_landings_that_is_a_symbolic_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "others/mine").mkdir(parents=True)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/landed").symlink_to(tmp_path / "others")
    sweep(open_storage(str(tmp_path / "datasets")), datetime.now(UTC) + timedelta(days=1))
    assert (tmp_path / "others/mine").exists()


def test_row_groups_are_exact_whatever_the_batches() -> None:
    whole = pa.record_batch({"a": list(range(23))})
    for sizes in ([23], [5] * 5, [1] * 23, [0, 11, 0, 12]):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        batches = [whole.slice(start, size) for start, size in zip(starts, sizes, strict=True)]
        found = list(_row_groups(iter(batches), 5))
        assert [table.num_rows for table in found] == [5, 5, 5, 5, 3]
        assert pa.concat_tables(found).column("a").to_pylist() == list(range(23))
        assert all(table.column("a").num_chunks == 1 for table in found)
