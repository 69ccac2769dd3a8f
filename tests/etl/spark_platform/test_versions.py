"""What takes the place of functions that older Sparks lack gives what the functions give."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from sparkring.etl.spark_platform import capabilities, versions
from tests.spark_connect import connect_session

SCHEMA = "n int, big bigint, x double, t string, b binary, d date, at timestamp, wall timestamp_ntz, m decimal(9,2)"
WALL = datetime(2024, 3, 10, 2, 30)
FIRST = (1, 1 << 60, 0.1, "é", b"\0", date(1960, 1, 2), WALL.replace(tzinfo=UTC), WALL, Decimal("1.25"))
ROWS: list[tuple[Any, ...]] = [FIRST, (None,) * len(FIRST)]


@pytest.mark.spark
@pytest.mark.parametrize("count", [1, 3, 200])
def test_a_row_goes_to_the_partition_of_its_number(spark: Any, count: int) -> None:
    rows = spark.range(1000).select((F.col("id") % count).cast("int").alias("at"), "id")
    place = F.spark_partition_id().alias("place")
    found = versions.repartition_by_number(rows, count, "at").select("at", place)
    assert found.rdd.getNumPartitions() == count
    assert found.where("at != place").count() == 0
    if hasattr(rows, "repartitionById"):
        assert rows.repartitionById(count, F.col("at")).select("at", place).where("at != place").count() == 0


@pytest.mark.parametrize("partition", [0, 1, 2, 1000, (1 << 31) - 1])
def test_every_number_is_the_hash_of_one_integer(partition: int) -> None:
    key = versions.key_of_partition(partition)
    assert -(1 << 31) <= key < 1 << 31
    assert versions.key_of_partition(partition + 1) != key


@pytest.mark.spark
def test_spark_gives_a_key_the_hash_that_it_is_for(spark: Any) -> None:
    numbers = [0, 1, 2, 77, 123_456_789]
    keys = ",".join(f"({number}, {versions.key_of_partition(number)})" for number in numbers)
    assert spark.sql(f"SELECT n FROM VALUES {keys} AS t(n, k) WHERE hash(k) != n").collect() == []


@pytest.mark.spark
def test_rows_and_tables_are_the_same_by_either_way(spark: Any) -> None:
    kinds = versions.type_of_ddl(SCHEMA)
    assert isinstance(kinds, StructType)
    rows = spark.createDataFrame(ROWS, kinds)
    table = versions.to_arrow(rows)
    assert versions.arrow_of_rows(rows).cast(table.schema).equals(table)
    assert table.schema.types == versions.arrow_schema(kinds).types
    for made in (versions.arrow_table(spark, table, kinds), versions.rows_of_arrow(spark, table, kinds)):
        assert made.schema == kinds and versions.to_arrow(made).equals(table)
        assert made.selectExpr("unix_micros(at)").collect()[0][0] == 1_710_037_800_000_000
    assert versions.rows_of_arrow(spark, table.slice(0, 0), kinds).count() == 0


@pytest.mark.spark
def test_a_type_is_read_by_the_server_as_here(spark: Any) -> None:
    with connect_session(spark) as session:
        for ddl in ("int", "array<decimal(9,2)>", SCHEMA):
            assert versions.type_by_server(session, ddl) == versions.type_of_ddl(ddl)


@pytest.mark.spark
def test_a_text_that_is_not_utf8_is_found_by_either_way(spark: Any) -> None:
    session = spark.newSession()
    if session.version >= "4":
        session.conf.set("spark.sql.legacy.codingErrorAction", "true")  # decode() as before 4.0
    values = "x'61', x'c3a9', x'ff', x'eda080', x'c080', x'f09f9880', NULL"
    rows = session.sql(f"SELECT CAST(b AS string) AS t FROM (SELECT explode(array({values})) AS b)")
    both = rows.select(versions.is_valid_text("t"), versions.is_decoded_again("t"))
    assert [tuple(row) for row in both.collect()] == [(v, v) for v in (True, True, False, False, False, True, None)]


@pytest.mark.spark
def test_the_settings_of_a_session_are_named_by_either_way(spark: Any) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.mine", "1")
    found = capabilities.all_settings(session)
    assert found["spark.sql.mine"] == "1" and "spark.app.name" in found
    assert found.keys() == capabilities.settings_by_sql(session).keys()


def test_types_of_arrow_are_sparks() -> None:
    assert versions.type_of_arrow(pa.timestamp("us")).simpleString() == "timestamp_ntz"
    found = versions.spark_schema(pa.schema({"a": pa.timestamp("us"), "b": pa.list_(pa.int32())}))
    assert found.simpleString() == "struct<a:timestamp_ntz,b:array<int>>"


def test_the_version_of_a_vendors_spark_is_read() -> None:
    assert [versions.version_of(text) for text in ("3.5.6-amzn-1", "4.10.0")] == [(3, 5), (4, 10)]


def test_it_is_known_whether_a_barrier_stage_takes_a_profile() -> None:
    class Older:
        def mapInArrow(self, func: Any, schema: str, barrier: bool = False) -> None: ...

    class Newer:
        def mapInArrow(self, func: Any, schema: str, barrier: bool = False, profile: Any = None) -> None: ...

    assert versions.takes_profiles(Newer) and not versions.takes_profiles(Older)
