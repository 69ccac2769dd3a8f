"""What older versions of Spark lack, each by one function with equal results from 3.5 on, classic and Connect.

A function has a second way only where the first is missing, or would be slower on Sparks that have it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type, to_arrow_schema
from pyspark.sql.types import DataType, StructType
from pyspark.sql.utils import is_remote

OLDEST, TOO_NEW = (3, 5), (5, 0)
WORD = (1 << 32) - 1
HASH_SEED = 42  # of Spark's hash partitioning


def version_of(text: str) -> tuple[int, int]:
    """Read `4.0.1`, or `3.5.2-amzn-1`, as 4.0 or 3.5."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def repartition_by_number(rows: DataFrame, count: int, number: str) -> DataFrame:
    """Move each row to the partition that its column `number`, from 0 to `count` - 1, names.

    Spark 4.1 has DataFrame.repartitionById. Here each number is replaced by an integer whose hash it is.
    """
    keys = ",".join(str(key_of_partition(partition)) for partition in range(count))
    return rows.repartition(count, F.expr(f"array({keys})[`{number}`]"))


def key_of_partition(partition: int) -> int:
    """Find the int whose hash by Spark (Murmur3 of 4 bytes, which is a bijection) is `partition`."""
    word = _unshifted(partition, 16)
    word = _unshifted(word * pow(0xC2B2AE35, -1, 1 << 32) & WORD, 13)
    word = _unshifted(word * pow(0x85EBCA6B, -1, 1 << 32) & WORD, 16) ^ 4  # 4: bytes
    word = (word - 0xE6546B64) * pow(5, -1, 1 << 32) & WORD
    word = _rotated(word, 32 - 13) ^ HASH_SEED
    word = _rotated(word * pow(0x1B873593, -1, 1 << 32) & WORD, 32 - 15)
    word = word * pow(0xCC9E2D51, -1, 1 << 32) & WORD
    return word - (1 << 32) if word >> 31 else word


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & WORD


def _unshifted(word: int, bits: int) -> int:
    """Undo `word ^= word >> bits`."""
    found = word
    for _ in range(32 // bits):
        found = word ^ found >> bits
    return found


def to_arrow(rows: DataFrame) -> pa.Table:
    """Collect the rows as a table."""
    if hasattr(rows, "toArrow"):  # from 4.0 on
        return rows.toArrow()
    return arrow_of_rows(rows)


def arrow_of_rows(rows: DataFrame) -> pa.Table:
    """Collect rows as by `to_arrow`, through Python's values."""
    return pa.Table.from_pylist([row.asDict(recursive=True) for row in rows.collect()], arrow_schema(rows.schema))


def arrow_table(spark: SparkSession, table: pa.Table, schema: StructType) -> DataFrame:
    """Make a DataFrame of a small table; from 4.0 on it is part of the plan."""
    if version_of(spark.version) >= (4, 0):
        return spark.createDataFrame(table, schema)
    return rows_of_arrow(spark, table, schema)


def rows_of_arrow(spark: SparkSession, table: pa.Table, schema: StructType) -> DataFrame:
    """Make a DataFrame as by `arrow_table`, through Python's values."""
    return spark.createDataFrame([*zip(*[column.to_pylist() for column in table.columns], strict=True)], schema)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Convert Spark's schema to Arrow's, with instants in UTC."""
    if "timezone" in inspect.signature(to_arrow_schema).parameters:  # from 4.2 on; before, UTC is the default
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def spark_schema(schema: pa.Schema) -> StructType:
    """Convert Arrow's schema to Spark's; times without a zone stay without one."""
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def type_of_arrow(kind: pa.DataType) -> DataType:
    """Convert Arrow's type to Spark's; times without a zone stay without one."""
    return from_arrow_type(kind, prefer_timestamp_ntz=True)


def type_of_ddl(ddl: str) -> DataType:
    """Read a type as SQL writes it, or the fields of a struct."""
    if hasattr(DataType, "fromDDL"):  # from 4.0 on
        return DataType.fromDDL(ddl)
    if is_remote():
        return type_by_server(SparkSession.builder.getOrCreate(), ddl)
    from pyspark.sql.types import _parse_datatype_string  # private to PySpark

    return _parse_datatype_string(ddl)


def type_by_server(session: Any, ddl: str) -> DataType:
    """Parse a type as by `type_of_ddl`, on the server of a Spark Connect session."""
    found: DataType = session.client._analyze(method="ddl_parse", ddl_string=ddl).parsed
    return found


def is_valid_text(name: str) -> Column:
    """Return whether a text is valid UTF-8; null for null."""
    if hasattr(F, "is_valid_utf8"):  # from 4.0 on
        return F.is_valid_utf8(name)
    return is_decoded_again(name)


def is_decoded_again(name: str) -> Column:
    """Return `is_valid_text` by decode(), which replaces invalid bytes before Spark 4.0."""
    found = F.col(name).cast("binary")
    return found == F.encode(F.decode(found, "UTF-8"), "UTF-8")


def barrier_tasks(
    rows: DataFrame, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str, profile: Any
) -> DataFrame:
    """Map each partition of the rows in a task of its own, all of them at the same time.

    `profile`: a ResourceProfile of the tasks where this Spark `takes_profiles`, or None.
    """
    if profile is None:
        return rows.mapInArrow(task, schema, barrier=True)
    return rows.mapInArrow(task, schema, barrier=True, profile=profile)


def takes_profiles(frame: type = DataFrame) -> bool:
    """Return whether tasks of `barrier_tasks` may have a ResourceProfile, as from Spark 4.0 on."""
    return "profile" in inspect.signature(frame.mapInArrow).parameters  # type: ignore[attr-defined]
