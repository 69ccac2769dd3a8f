"""Iceberg's columns as Spark's. Each carries its field id: by it a file is read, whatever the column was called then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from sparkring.conf.schema import check_case
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.lake_files import FIELD_ID

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.types import IcebergType

# By Iceberg's name of the type. There are no shorter integers; `time` and `uuid` are no types of Spark.
PRIMITIVES: dict[str, DataType] = {
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "date": DateType(),
    "timestamp": TimestampNTZType(),
    "timestamptz": TimestampType(),
    "string": StringType(),
    "binary": BinaryType(),
}


def spark_fields(key: str, schema: Schema, names: Iterable[str]) -> StructType:
    """Make Spark's schema of some columns, field ids in the metadata. Raises EtlError for one that cannot be read."""
    check = list(names)
    there = {field.name: field for field in schema.fields}
    if missing := [name for name in check if name not in there]:
        raise EtlError(f"{key}.columns: the table has no column {missing[0]!r}; it has {list(there)}")
    try:
        check_case("columns", check)
    except ValueError as error:
        raise EtlError(f"{key}.{error}") from error
    fields = [there[name] for name in check]
    return StructType([_field(f.name, f.field_id, _type(key, f.name, f.field_type)) for f in fields])


def comparable(schema: Schema) -> Mapping[str, str]:
    """Spark's types of the columns that a condition may name: those that hold one value."""
    kinds = {f.name: _primitive(f.field_type) for f in schema.fields}
    return {name: kind.simpleString() for name, kind in kinds.items() if kind is not None}


def stored(columns: StructType) -> StructType:
    """The same columns by names that no file has.

    Spark skips row groups by a file's names, whatever the ids: after two columns have swapped names it would skip those
    with the rows that are asked for.
    """
    return StructType([_field(f"__field_{field_id(f)}", field_id(f), f.dataType) for f in columns])


def field_id(field: StructField) -> int:
    return int(field.metadata[FIELD_ID])


def _field(name: str, number: int, kind: DataType) -> StructField:
    return StructField(name, kind, True, {FIELD_ID: number})


def _type(key: str, column: str, kind: IcebergType) -> DataType:
    from pyiceberg.types import ListType, StructType as IcebergStruct
    from pyiceberg.types import MapType as IcebergMap

    if isinstance(kind, IcebergStruct):
        return StructType([_field(f.name, f.field_id, _type(key, column, f.field_type)) for f in kind.fields])
    if isinstance(kind, ListType):
        return ArrayType(_type(key, column, kind.element_type))
    if isinstance(kind, IcebergMap):
        return MapType(_type(key, column, kind.key_type), _type(key, column, kind.value_type))
    found = _primitive(kind)
    if found is None:
        raise EtlError(f"{key}: column {column!r} is {kind}, which Spark cannot read; leave it out of `columns`")
    return found


def _primitive(kind: IcebergType) -> DataType | None:
    from pyiceberg.types import DecimalType as IcebergDecimal
    from pyiceberg.types import FixedType

    if isinstance(kind, IcebergDecimal):
        return DecimalType(kind.precision, kind.scale)
    return BinaryType() if isinstance(kind, FixedType) else PRIMITIVES.get(str(kind))
