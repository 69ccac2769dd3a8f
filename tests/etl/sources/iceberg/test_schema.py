"""Iceberg's types as Spark's, and how columns are found in files. No Spark session."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import NameMapping
from pyiceberg.types import (
    DecimalType,
    FixedType,
    IntegerType,
    ListType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.schema import comparable, field_id, spark_fields, stored, stored_by_names

ITEM = StructType(NestedField(21, "p", IntegerType()), NestedField(22, "q", StringType()))
SCHEMA = Schema(
    NestedField(1, "i", IntegerType()),
    NestedField(2, "at", TimestamptzType()),
    NestedField(3, "wall", TimestampType()),
    NestedField(4, "d", DecimalType(9, 2)),
    NestedField(5, "x", FixedType(16)),
    NestedField(6, "l", ListType(23, ITEM)),
    NestedField(7, "m", MapType(24, StringType(), 25, IntegerType())),
    NestedField(8, "t", TimeType()),
    NestedField(9, "u", UUIDType()),
    NestedField(10, "I", IntegerType()),
)
READ = ["i", "at", "wall", "d", "x", "l", "m"]


def test_types_are_sparks_and_fields_at_any_depth_have_their_ids():
    fields = spark_fields("k", SCHEMA, READ)
    assert fields.simpleString() == (
        "struct<i:int,at:timestamp,wall:timestamp_ntz,d:decimal(9,2),x:binary,"
        "l:array<struct<p:int,q:string>>,m:map<string,int>>"
    )
    assert [field_id(f) for f in fields] == [1, 2, 3, 4, 5, 6, 7]
    assert [field_id(f) for f in fields["l"].dataType.elementType] == [21, 22]
    assert not set(stored(fields).names) & set(READ) and [field_id(f) for f in stored(fields)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["t"], r"k: column 't' is time, which Spark cannot read; leave it out of `columns`"),
        (["u"], r"k: column 'u' is uuid"),
        (["none"], r"k\.columns: the table has no column 'none'; it has \['i', "),
        (["i", "I"], r"k\.columns: 'i' and 'I' are one name to Spark"),
    ],
)
def test_a_column_that_spark_cannot_read_is_refused(names, words):
    with pytest.raises(EtlError, match=words):
        spark_fields("k", SCHEMA, names)


def test_a_condition_may_name_columns_of_one_value():
    assert list(comparable(SCHEMA)) == ["i", "at", "wall", "d", "x", "I"]


def test_files_without_ids_are_read_by_the_names_that_the_mapping_has():
    element = {"field-id": 23, "names": ["element"], "fields": [{"field-id": 22, "names": ["old_q"]}]}
    wanted = [{"field-id": 1, "names": ["was_i", "i"]}, {"field-id": 6, "names": ["l"], "fields": [element]}]
    mapping = NameMapping.model_validate(wanted).root
    item = pa.struct([("p", pa.int32()), ("old_q", pa.string())])
    there = pa.schema([("was_i", pa.int32()), ("d", pa.decimal128(9, 2)), ("l", pa.list_(item))])
    found = stored_by_names(spark_fields("k", SCHEMA, ["i", "d", "l"]), mapping, there)
    assert found.simpleString() == (
        "struct<was_i:int,__field_4:decimal(9,2),l:array<struct<__field_21:int,old_q:string>>>"
    )
    with pytest.raises(ValueError, match=r"has columns \['was_i', 'i'\], which are all 'i'"):
        stored_by_names(
            spark_fields("k", SCHEMA, ["i"]), mapping, pa.schema([("i", pa.int32()), ("was_i", pa.int32())])
        )
