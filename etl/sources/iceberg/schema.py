"""Iceberg's columns as Spark's. Each carries its field id: files are read by it, whatever a column was called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
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
    from pyiceberg.table.name_mapping import MappedField
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
    """Return Spark's types of the columns that a condition may name: those with one value per row."""
    kinds = {f.name: _primitive(f.field_type) for f in schema.fields}
    return {name: kind.simpleString() for name, kind in kinds.items() if kind is not None}


def stored(columns: StructType) -> StructType:
    """Rename the columns to names that no file has.

    Spark skips row groups by a file's names, whatever the ids: after two columns swapped names it would skip the wrong
    ones.
    """
    return StructType([_field(f"__field_{field_id(f)}", field_id(f), f.dataType) for f in columns])


def stored_by_names(columns: StructType, mapping: Sequence[MappedField], there: Iterable[pa.Field]) -> StructType:
    """Rename the columns to their names in a file without field ids, by the table's name mapping.

    A column without a name there is null. Raises ValueError for one with two names in the file.
    """
    by_id, in_file, fields = {m.field_id: m for m in mapping}, {field.name: field for field in there}, []
    for column in columns:
        mapped = by_id.get(field_id(column))
        found = [name for name in ([] if mapped is None else mapped.names) if name in in_file]
        if len(found) > 1:
            raise ValueError(f"has columns {found}, which are all {column.name!r} by the table's name mapping")
        if mapped is None or not found:
            fields.append(StructField(f"__field_{field_id(column)}", column.dataType))
            continue
        kind = _type_by_names(column.dataType, mapped.fields, in_file[found[0]].type)
        fields.append(StructField(found[0], kind))
    return StructType(fields)


def _type_by_names(kind: DataType, mapping: Sequence[MappedField], there: pa.DataType) -> DataType:
    if isinstance(kind, StructType):
        return stored_by_names(kind, mapping, [there.field(n) for n in range(there.num_fields)])
    within = {name: mapped.fields for mapped in mapping for name in mapped.names}
    if isinstance(kind, ArrayType):
        return ArrayType(_type_by_names(kind.elementType, within.get("element", []), there.value_type))
    if isinstance(kind, MapType):
        key = _type_by_names(kind.keyType, within.get("key", []), there.key_type)
        return MapType(key, _type_by_names(kind.valueType, within.get("value", []), there.item_type))
    return kind


def field_id(field: StructField) -> int:
    return int(field.metadata[FIELD_ID])


def _field(name: str, number: int, kind: DataType) -> StructField:
    return StructField(name, kind, True, {FIELD_ID: number})


def _type(key: str, column: str, kind: IcebergType) -> DataType:
    from pyiceberg.types import ListType
    from pyiceberg.types import MapType as IcebergMap
    from pyiceberg.types import StructType as IcebergStruct

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
