"""Map a Spark type to what is stored and the tensor it becomes.

Nothing is changed silently: a type without an exact tensor type is refused with the column, its type and the remedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column as Expression
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DecimalType,
    DoubleType,
    StringType,
    UserDefinedType,
)

from sparkring.conf.features import EXACT_DTYPES
from sparkring.conf.manifest import Column, Nulls, Role
from sparkring.conf.plain_text import count_of
from sparkring.etl.errors import EtlError

ARROW: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float16": pa.float32(),  # Spark and most readers have no half type; the values are half-precision ones
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
}
# Logical types that Parquet has one of its own for; the tensor has the whole number behind them.
ARROW_DATES = {
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
EXACT_DECIMAL_DIGITS = 15  # every decimal of so many digits has its own double


@dataclass(frozen=True)
class ColumnOptions:
    """How a column is stored, as a passthrough or image feature of the recipe declares it."""

    nulls: Nulls = "refuse"
    fill: Any = None
    shape: list[int] | None = None
    dtype: str | None = None
    image: bool = False


def input_column(name: str, found: DataType) -> Column:
    """Make the manifest's entry for a column that features are made of: its values as they are, nulls among them."""
    simple = found.simpleString()
    dtype = "string" if isinstance(found, StringType) else EXACT_DTYPES.get(simple, "float64")  # else it is a decimal
    return Column(name=name, dtype=dtype, role="input", logical=simple, nulls="keep")


def manifest_column(name: str, found: DataType, role: Role, options: ColumnOptions | None = None) -> Column:
    """Make the manifest's entry for a Spark column. Raises EtlError with the remedy for a type that has no tensor."""
    options = options or ColumnOptions()
    if role in ("meta", "label") and isinstance(found, StringType):
        nulls: Nulls = "keep" if role == "meta" else "refuse"
        return Column(name=name, dtype="string", role=role, logical=found.simpleString(), nulls=nulls)
    shape = options.shape
    depth, element = _array_depth(found)
    if role == "label" and depth == 1 and isinstance(element, StringType):
        return Column(name=name, dtype="string", layout="ragged", role=role, logical=found.simpleString())
    layout = "binary" if isinstance(element, BinaryType) else ("scalar", "ragged")[depth] if depth < 2 else "nested"
    if isinstance(found, UserDefinedType):
        if found.typeName() != "vector" and type(found).__name__ != "VectorUDT":
            raise _refused(name, found, "select its fields as columns of their own")
        if shape is None:
            raise _refused(name, found, "declare `shape: [n]`, the vectors' fixed length")
        layout, stored = "vector", "float64"
    else:
        stored = _stored_dtype(name, found, element)
    if isinstance(element, BinaryType) and depth:
        raise _refused(name, found, "store one binary value per row")
    if shape is not None and not options.image:
        if depth == 0 and layout != "vector":
            raise _refused(name, found, "`shape` is for arrays and vectors")
        if len(shape) != max(depth, 1):
            raise _refused(
                name, found, f"`shape` {shape} has {count_of(len(shape), 'size')} for {max(depth, 1)} levels of arrays"
            )
        layout = "vector"
    if options.dtype == "float16" and stored not in ("float32", "float64"):
        raise _refused(name, found, "dtype float16 is for float and double columns")
    column = Column(
        name=name,
        dtype=options.dtype or stored,
        layout=layout,
        shape=tuple(shape or ()),
        role=role,
        logical=found.simpleString(),
        nulls=options.nulls,
        fill=options.fill,
    )
    if column.fill is not None:
        _check_fill(column, found)
    return column


def _check_fill(column: Column, found: DataType) -> None:
    """Raise EtlError for a fill the tensor cannot hold exactly: numpy would silently cut 2.5 down to an integer."""
    if column.layout not in ("scalar", "vector"):
        raise _refused(
            column.name,
            found,
            f"fill {column.fill!r} is no row of it: say `nulls: mask`, which makes an empty row of a null, or "
            "coalesce() it in the recipe's SQL",
        )
    if not _fits(column.fill, column.dtype):
        raise _refused(column.name, found, f"fill {column.fill!r} is no {column.dtype}: give one that is")


def _fits(value: Any, dtype: str) -> bool:
    """Return whether a tensor of this dtype can hold the value: rounded for floats, else exactly."""
    if dtype == "bool" or isinstance(value, (bool, str)):
        return dtype == "bool" and isinstance(value, bool)
    if dtype.startswith("float"):
        return not math.isfinite(value) or abs(value) <= float(np.finfo(dtype).max)
    limits = np.iinfo(dtype)
    return math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max


def _array_depth(found: DataType) -> tuple[int, DataType]:
    depth = 0
    while isinstance(found, ArrayType):
        depth, found = depth + 1, found.elementType
    return depth, found


def _stored_dtype(name: str, found: DataType, element: DataType) -> str:
    if element.simpleString() in EXACT_DTYPES:
        return EXACT_DTYPES[element.simpleString()]
    if isinstance(element, BinaryType):
        return "binary"
    if isinstance(element, StringType):
        raise _refused(
            name, found, "make it a categorical feature, or bytes with encode(x, 'utf-8') in the recipe's SQL"
        )
    if isinstance(element, DecimalType):
        if element.precision <= EXACT_DECIMAL_DIGITS:
            return "float64"
        raise _refused(
            name,
            found,
            f"doubles hold {EXACT_DECIMAL_DIGITS} digits exactly: cast to double to round, or keep all of "
            f"them as integers with cast({name} * {10**element.scale} as bigint)",
        )
    raise _refused(name, found, "select its fields as columns of their own, or cast it in the recipe's SQL")


def _refused(name: str, found: DataType, remedy: str) -> EtlError:
    return EtlError(f"column {name!r} is {found.simpleString()}, which cannot be stored: {remedy}")


def stored_expression(value: Expression, found: DataType, column: Column) -> Expression:
    """Convert `value` to the stored type: vectors to arrays, decimals to doubles; the rest is stored as it is."""
    if isinstance(found, UserDefinedType):
        from pyspark.ml.functions import vector_to_array  # needs numpy in Spark's Python only when used

        return vector_to_array(value)
    depth, element = _array_depth(found)
    if isinstance(element, DecimalType):
        return value.cast("array<" * depth + "double" + ">" * depth)
    if column.dtype == "float16" and isinstance(element, DoubleType):
        return value.cast("array<" * depth + "float" + ">" * depth)
    return value


def arrow_field(column: Column) -> pa.Field:
    """Return the Parquet field; vectors are plain lists (fixed-size lists decode three times slower)."""
    element = column.logical.replace("array<", "").rstrip(">")
    kind = ARROW_DATES.get(element, ARROW[column.dtype])
    levels = len(column.shape) if column.layout == "vector" else column.logical.count("array<")
    for _ in range(levels):
        kind = pa.list_(pa.field("element", kind, nullable=False))
    return pa.field(column.name, kind, nullable=column.nulls != "refuse")


def fixed_row_bytes(column: Column) -> int | None:
    """Return the bytes per row of the column; None if they vary from row to row."""
    if column.layout in ("scalar", "vector"):
        return ARROW[column.dtype].bit_width // 8 * math.prod(column.shape) or 1
    return None
