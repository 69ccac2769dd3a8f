"""Columns of every Arrow type, in every way that pyarrow stores them: what the footer check calls them is Spark's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import DataType, StructField, StructType

from sparkring.conf.sources import FilesSource
from sparkring.etl.sources.files.footers import check_footers, parquet_schema, spark_type
from sparkring.etl.sources.files.listing import list_files
from sparkring.etl.sources.pin import pin
from sparkring.etl.spark_platform.session import build_session

pytestmark = pytest.mark.spark

WORD, PRICE, BYTES = ["a", None], [Decimal("1.25"), None], [b"abcd", None]
UNITS, ZONES = ("s", "ms", "us", "ns"), (None, "UTC", "Asia/Tokyo")
TIMES_32, TIMES_64 = (pa.time32("s"), pa.time32("ms"), pa.date32()), (pa.time64("us"), pa.time64("ns"), pa.date64())
DECIMALS = (
    *(pa.decimal32(5, 2), pa.decimal64(12, 2), pa.decimal128(38, 2)),
    *(pa.decimal256(38, 2), pa.decimal256(50, 2)),
)
BINARIES = (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(4))
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NESTED = pa.struct([("a", pa.list_(pa.timestamp("ms", "UTC"))), ("b", pa.uint32())])
MIXED = pa.struct([("a", pa.uint8()), ("b", pa.duration("us")), ("c", pa.null())])
COLUMNS: dict[str, pa.Array] = {
    **{name: pa.array([1, None], getattr(pa, name)()) for name in INTEGERS},
    **{str(kind): pa.array([1.5, None], kind) for kind in (pa.float32(), pa.float64())},
    "float16": pa.array(np.array([1, 2], np.float16)),
    "bool": pa.array([True, None]),
    "null": pa.array([None, None]),
    **{str(kind): pa.array(WORD, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())},
    **{str(kind): pa.array(BYTES, kind) for kind in BINARIES},
    **{f"duration_{unit}": pa.array([1000, None], pa.duration(unit)) for unit in UNITS},
    **{
        f"timestamp_{unit}_{zone}": pa.array([10**9, None], pa.timestamp(unit, zone))
        for unit in UNITS
        for zone in ZONES
    },
    **{str(kind): pa.array([1000, None], pa.int32()).cast(kind) for kind in TIMES_32},
    **{str(kind): pa.array([86_400_000, None], pa.int64()).cast(kind) for kind in TIMES_64},
    **{str(kind): pa.array(PRICE, kind) for kind in DECIMALS},
    "dictionary": pa.array(WORD).dictionary_encode(),
    "dictionary of numbers": pa.array([1, None]).dictionary_encode(),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16, None], pa.binary(16))),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", None])),
    "list of durations": pa.array([[1], None], pa.list_(pa.duration("ns"))),
    "large list": pa.array([[1], None], pa.large_list(pa.uint16())),
    "list of two": pa.array([[1, 2], None], pa.list_(pa.uint32(), 2)),
    "list of decimals": pa.array([PRICE, None], pa.list_(pa.decimal256(50, 2))),
    "list of dictionaries": pa.array([["a"], None], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.uint64())),
    "struct": pa.array([{"a": 1, "b": 2, "c": None}, None], MIXED),
    "struct of nanoseconds": pa.array([{"a": 1000}, None], pa.struct([("a", pa.timestamp("ns"))])),
    "struct of times": pa.array([{"a": 1}, None], pa.struct([("a", pa.time32("ms"))])),
    "nested": pa.array([[{"a": [1], "b": 7}], None], pa.list_(NESTED)),
}
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without Arrow's schema": {"store_schema": False},
    "int96": {"use_deprecated_int96_timestamps": True},
    "version 1": {"version": "1.0"},
    "lists as once": {"use_compliant_nested_type": False},
    "decimals as integers": {"store_decimal_as_integer": True},
}


@pytest.fixture(scope="module")
def of_spark(spark: Any) -> Callable[[Path], str | None]:
    """Spark's own name of the type of column `x` in a file; None where it does not read that.

    Asked once for files of one footer: Spark does not read Arrow's schema.
    """

    def name(path: Path) -> str | None:
        try:
            return str(spark.read.parquet(str(path)).schema["x"].dataType.simpleString())
        except Exception:
            return None

    known: dict[str, str | None] = {}

    def found(path: Path) -> str | None:
        footer = str(pq.ParquetFile(path).schema).partition("\n")[2]  # without the object's address
        if footer not in known:
            known[footer] = name(path)
        return known[footer]

    return found


def of_footer(path: Any) -> str:
    return spark_type(parquet_schema(pq.ParquetFile(path)).field("x"))


@pytest.mark.parametrize("way", WAYS)
def test_the_type_that_the_footer_check_names_is_sparks(
    spark: Any, of_spark: Callable[[Path], str | None], tmp_path: Path, way: str
) -> None:
    """What Spark can read is in one file; each of the others apart, as Spark reads nothing of a file with it."""
    ours, paths = dict[str, str](), {name: tmp_path / f"{number}.parquet" for number, name in enumerate(COLUMNS)}
    for name, path in paths.items():
        with suppress(pa.ArrowNotImplementedError):
            pq.write_table(pa.table({"x": COLUMNS[name]}), path, **WAYS[way])
            ours[name] = of_footer(path)
    read = {name: kind for name, kind in ours.items() if "unknown to Spark" not in kind}
    pq.write_table(pa.table({name: COLUMNS[name] for name in read}), tmp_path / "all", **WAYS[way])
    fields = spark.read.parquet(str(tmp_path / "all")).schema.fields
    assert {field.name: field.dataType.simpleString() for field in fields} == read
    assert [name for name in ours.keys() - read.keys() if of_spark(paths[name]) is not None] == []


def test_other_writers_logical_types_are_named_as_spark_does(
    of_spark: Callable[[Path], str | None], tmp_path: Path
) -> None:
    """DuckDB writes ENUM, UUID, JSON, intervals and every unsigned integer."""
    values = {
        "enum": "'a'::ENUM('a', 'b')", "json": "'{}'::JSON", "uuid": "uuid()", "utinyint": "1::UTINYINT",
        "ubigint": "1::UBIGINT", "blob": "'a'::BLOB", "time": "TIME '01:02:03'", "hugeint": "1::HUGEINT",
        "interval": "INTERVAL 1 DAY", "intervals": "[INTERVAL 1 DAY]",
        "list": "['a'::ENUM('a', 'b')]", "struct": "{'a': 'a'::ENUM('a'), 'b': 'x'::BLOB}",
    }  # fmt: skip
    for name, value in values.items():
        path = tmp_path / f"{name}.parquet"
        duckdb.sql(f"COPY (SELECT {value} AS x) TO '{path}' (FORMAT parquet)")
        its = of_spark(path)
        assert of_footer(path) == its if its is not None else "unknown to Spark" in of_footer(path), name


@pytest.mark.parametrize("name", ["uint8", "uint16", "uint32", "uint64", "duration_s", "duration_ns", "null", "struct"])
def test_values_are_sparks_where_the_declaration_is_and_another_is_refused(
    spark: Any, tmp_path: Any, name: str
) -> None:
    path = tmp_path / "0.parquet"
    pq.write_table(pa.table({"x": COLUMNS[name]}), path)
    rows = spark.read.parquet(str(path))
    kind = rows.schema["x"].dataType.simpleString()
    source = FilesSource(path=str(tmp_path), format="parquet", columns={"x": kind})
    assert pin("t", source).read(build_session(spark, {})).collect() == rows.collect()
    listed = list_files("t", source)
    for other in {"interval day to second", "int", "bigint", "double"} - {kind}:
        declared = StructType([StructField("x", DataType.fromDDL(other))])
        assert check_footers(listed, "parquet", declared, StructType())[0].problems
