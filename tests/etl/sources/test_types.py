"""Types read without Spark are those that Spark reads, and what is refused Spark refuses."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.types import DataType

from sparkring.etl.sources.types import NoSuchType, parse_type

KNOWN = [
    *("int", "INTEGER", "long", "smallint", "byte", "real", "double", "string", "binary", "date", "boolean"),
    *("timestamp", "timestamp_ntz", "timestamp_ltz", "decimal", "dec(5)", "numeric( 10 , 2 )", "array<float>"),
    *("map<string, array<int>>", "struct<a: int, `b c`: string>", "struct<a int NOT NULL, b array<double>>"),
    "struct<>",
]
LEFT_TO_SPARK = [
    "varchar(10)",
    "interval day to second",
    "variant",
    "a int, b string",
    "void",
    "struct<a int COMMENT 'x'>",
]
REFUSED = [
    "int64",
    "integr",
    "array<int",
    "decimal(40,2)",
    "decimal(x)",
    "decimal(5,6)",
    "map<string>",
    "string>",
    "",
    "a-b",
]


@pytest.mark.spark
def test_a_type_is_read_as_spark_reads_it(spark: Any) -> None:
    for text in KNOWN:
        assert parse_type(text) == DataType.fromDDL(text), text


@pytest.mark.spark
def test_what_is_refused_is_no_type_of_spark_and_what_is_left_to_it_is(spark: Any) -> None:
    for text in LEFT_TO_SPARK:
        assert parse_type(text) is None, text
        DataType.fromDDL(text)
    for text in REFUSED:
        with pytest.raises(NoSuchType):
            parse_type(text)
        if text:  # Spark takes no text for a struct without fields
            with pytest.raises(Exception, match=r"PARSE|DECIMAL|UNSUPPORTED|INVALID|SCALE"):
                DataType.fromDDL(text)


def test_the_name_that_was_meant_is_said() -> None:
    for text, meant in {"int64": "bigint", "integr": "integer", "array<float64>": "double", "str": "string"}.items():
        with pytest.raises(NoSuchType, match=f"did you mean '{meant}'"):
            parse_type(text)


@pytest.mark.parametrize("start", ["array<", "map<int,", "struct<a:", "array<struct<a:"])
def test_types_that_are_nested_too_deeply_are_refused(start):
    text = start * 2000 + "int" + ">" * (2000 * start.count("<"))
    with pytest.raises(NoSuchType, match="nested too deeply"):
        parse_type(text)
