"""Convert one column of a decoded row group to numpy, as the manifest declares. No value changes silently."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sparkring.conf.manifest import Column
from sparkring.conf.plain_text import count_of

Array = NDArray[Any]


class DataError(ValueError):
    """The stored data is not what the manifest says: names file, row group and column."""


class StorageFailure(DataError):
    """Storage failed to deliver a file that may be sound: no reason to leave it out."""


@dataclass(frozen=True)
class RaggedArray:
    """n rows of unequal length, in numpy.

    offsets: outermost first, each (n + 1,) int64; level l + 1 is indexed by the values of level l, the last one indexes
    `values` (N, *shape), which for binary columns are bytes.
    """

    values: Array
    offsets: tuple[NDArray[np.int64], ...]


def is_fixed(column: Column) -> bool:
    """Return whether every row takes the same number of bytes: a scalar or a vector."""
    return column.layout in ("scalar", "vector")


def numpy_dtype(column: Column) -> np.dtype[Any]:
    """Return the element type of the column's tensor; bytes for binary columns."""
    return _dtype_of(column.dtype)


@lru_cache  # called for every column of every row group
def _dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(np.uint8) if name == "binary" else np.dtype(name)


def row_bytes(column: Column) -> int:
    """Return the bytes of one row of a fixed column, including its validity byte if masked."""
    return int(numpy_dtype(column).itemsize * np.prod(column.shape, dtype=np.int64)) + (column.nulls == "mask")


def check_type(column: Column, stored: pa.DataType) -> None:
    """Raise DataError where a stored type cannot become the declared one unchanged."""
    if column.layout == "binary":
        fits = _is_bytes(stored) or pa.types.is_string(stored) or pa.types.is_large_string(stored)
    elif column.dtype == "string":
        texts = _leaf(stored) if column.layout == "ragged" else stored
        fits = pa.types.is_string(texts.value_type if pa.types.is_dictionary(texts) else texts)
    elif column.layout == "scalar":
        fits = _scalar_fits(column, stored)
    elif column.layout == "vector" and _is_bytes(stored):
        fits = True  # little-endian values of the declared dtype; the length is checked row by row
    else:
        fits = _is_list(stored) and _scalar_fits(column, _leaf(stored))
    if not fits:
        raise DataError(
            f"column {column.name!r} is stored as {stored}, the manifest declares {column.layout} {column.dtype}"
        )


def _scalar_fits(column: Column, stored: pa.DataType) -> bool:
    kind = numpy_dtype(column).kind
    if pa.types.is_boolean(stored):
        return kind == "b"
    if pa.types.is_date(stored) or pa.types.is_timestamp(stored):
        return kind == "i"
    if pa.types.is_decimal(stored):
        return kind in "fi"
    if pa.types.is_floating(stored):
        return kind == "f"
    return pa.types.is_integer(stored) and kind in "iuf"


def fixed_values(column: Column, data: pa.ChunkedArray) -> tuple[Array, Array | None]:
    """Convert a row group's rows of a scalar or vector column.

    Returns the values (n, *shape), and which rows are present (n,); None: all.
    """
    array = one_array(data)
    present = _present(column, array)
    if column.layout == "vector":
        values = vector_values(column, array if present is None else array.drop_null())
    else:
        values = scalar_values(column, array if present is None else array.fill_null(_zero(array.type)))
    values = values.astype(numpy_dtype(column), copy=False)
    if present is None:
        return values, None
    out = np.empty((len(array), *column.shape), numpy_dtype(column))
    out[present] = values if column.layout == "vector" else values[present]
    out[~present] = column.fill if column.nulls == "fill" and column.fill is not None else 0
    return out, present


def one_array(data: pa.ChunkedArray) -> pa.Array:
    return data.chunk(0) if data.num_chunks == 1 else pa.concat_arrays(data.chunks or [pa.array([], data.type)])


def _present(column: Column, array: pa.Array) -> Array | None:
    """Find rows that are not null (n,), None: all; DataError if no null is allowed."""
    if not array.null_count:
        return None
    if column.nulls == "refuse":
        raise DataError(
            f"column {column.name!r} has {count_of(array.null_count, 'null')} and is declared without (nulls: refuse); "
            "rebuild the dataset, or declare mask or fill for the column"
        )
    return plain_values(array.is_valid())


def _zero(stored: pa.DataType) -> pa.Scalar:
    return pa.scalar(0, pa.int64()).cast(stored) if not pa.types.is_boolean(stored) else pa.scalar(False)


def scalar_values(column: Column, array: pa.Array) -> Array:
    """Convert an array without nulls to (n,) values, as views where layouts agree."""
    stored = array.type
    if pa.types.is_timestamp(stored):
        array = (array if stored.unit == "us" else array.cast(pa.timestamp("us", stored.tz))).view(pa.int64())
    elif pa.types.is_date32(stored):
        array = array.view(pa.int32())
    elif pa.types.is_date64(stored):
        array = array.cast(pa.date32()).view(pa.int32())
    elif pa.types.is_decimal(stored):
        array = array.cast(pa.float64() if numpy_dtype(column).kind == "f" else pa.int64())
    values, target = plain_values(array), numpy_dtype(column)
    if values.dtype.kind in "iu" and target.kind in "iu" and values.dtype.itemsize > target.itemsize:
        _refuse_overflow(column, values, target)
    return values


PLAIN: dict[pa.DataType, np.dtype[Any]] = {
    pa.type_for_alias(name): np.dtype(name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
} | {pa.float16(): np.dtype(np.float16)}


def plain_values(array: pa.Array) -> Array:
    """Convert a boolean or numeric array without nulls to (n,) values.

    A view of its buffer where Arrow's layout is numpy's. `to_numpy` does the same, but it imports pandas, which costs
    every process 30 MB and a quarter of a second.
    """
    if not len(array):
        return np.zeros(0, PLAIN.get(array.type, np.dtype(np.bool_)))
    buffer, end = array.buffers()[1], array.offset + len(array)
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(buffer, np.uint8), count=end, bitorder="little")
        return bits[array.offset :].view(np.bool_)
    return np.frombuffer(buffer, PLAIN[array.type], count=end)[array.offset :]


def nulls_of(array: pa.Array) -> NDArray[np.bool_]:
    """Return which rows (n,) of an array with nulls are null."""
    end = array.offset + len(array)
    valid = np.unpackbits(np.frombuffer(array.buffers()[0], np.uint8), count=end, bitorder="little")
    return ~valid[array.offset :].view(np.bool_)


def _refuse_overflow(column: Column, values: Array, target: np.dtype[Any]) -> None:
    limits = np.iinfo(target)
    if len(values) and (values.min() < limits.min or values.max() > limits.max):
        raise DataError(f"column {column.name!r} holds {values.min()}..{values.max()}, which {target} cannot")


def vector_values(column: Column, array: pa.Array) -> Array:
    """Convert a list or bytes array without nulls to (n, *shape) values."""
    width = int(np.prod(column.shape, dtype=np.int64))
    if _is_bytes(array.type):
        offsets, values = byte_rows(array)
        _same_length(column, np.diff(offsets), width * numpy_dtype(column).itemsize, "bytes")
        return values.view(numpy_dtype(column)).reshape(-1, *column.shape)
    leaf = array
    while _is_list(leaf.type):
        leaf = leaf.flatten()
        if len(array) and leaf.null_count:
            raise DataError(
                f"column {column.name!r} has {count_of(leaf.null_count, 'null')} inside vectors; only whole vectors "
                "may be null"
            )
    if not pa.types.is_fixed_size_list(array.type):
        lengths = plain_values(pc.list_value_length(array))
        _same_length(column, lengths, width if len(column.shape) == 1 else column.shape[0], "elements")
    if len(leaf) != len(array) * width:
        raise DataError(
            f"column {column.name!r}: {count_of(len(leaf), 'element')} in {count_of(len(array), 'row')} of shape "
            f"{column.shape}"
        )
    return scalar_values(column, leaf).reshape(-1, *column.shape)


def _same_length(column: Column, lengths: Array, expected: int, unit: str) -> None:
    if len(lengths) and (lengths != expected).any():
        row = int(np.flatnonzero(lengths != expected)[0])
        raise DataError(
            f"column {column.name!r}: row {row} has {lengths[row]} {unit}, its shape {column.shape} needs {expected}"
        )


def ragged_values(column: Column, data: pa.ChunkedArray) -> tuple[RaggedArray, Array | None]:
    """Convert a row group's rows of a ragged, nested or binary column.

    Returns them, and which are present (n,); None: all.
    """
    array = one_array(data)
    present = _present(column, array)
    if present is not None and column.fill is not None:
        raise DataError(
            f"column {column.name!r} is {column.layout}: its nulls become empty rows, fill {column.fill!r} cannot be"
        )
    if column.layout == "binary":
        offsets, values = byte_rows(array)
        return RaggedArray(values, (offsets,)), present
    levels: list[NDArray[np.int64]] = []
    while _is_list(array.type):
        lengths = pc.list_value_length(array)
        lengths = plain_values(lengths.fill_null(0) if lengths.null_count else lengths)
        levels.append(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
        array = array.flatten()
        if array.null_count:
            raise DataError(f"column {column.name!r} has {count_of(array.null_count, 'null')} inside its lists")
    values = scalar_values(column, array).astype(numpy_dtype(column), copy=False)
    return RaggedArray(values.reshape(-1, *column.shape), tuple(levels)), present


def byte_rows(array: pa.Array) -> tuple[NDArray[np.int64], Array]:
    """Return offsets (n + 1,) and bytes of a binary or string array; a null row has no bytes."""
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        data = np.frombuffer(array.buffers()[1] or b"", np.uint8)[
            array.offset * width : (array.offset + len(array)) * width
        ]
        return np.arange(len(array) + 1, dtype=np.int64) * width, data
    large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    _, offsets_buffer, data_buffer = array.buffers()
    if not len(array):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    raw = np.frombuffer(offsets_buffer, np.int64 if large else np.int32)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    offsets = raw.astype(np.int64)
    return offsets - offsets[0], data[offsets[0] : offsets[-1]]


def _is_bytes(stored: pa.DataType) -> bool:
    return bool(pa.types.is_binary(stored) or pa.types.is_large_binary(stored) or pa.types.is_fixed_size_binary(stored))


def _is_list(stored: pa.DataType) -> bool:
    return bool(pa.types.is_list(stored) or pa.types.is_large_list(stored) or pa.types.is_fixed_size_list(stored))


def _leaf(stored: pa.DataType) -> pa.DataType:
    while _is_list(stored):
        stored = stored.value_type
    return stored
