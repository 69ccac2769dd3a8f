"""One stored column as numpy: what fits arrives unchanged, what does not is refused by name."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkring.conf.manifest import Column
from sparkring.training.data.decoding.columns import (
    DataError,
    check_type,
    fixed_values,
    plain_values,
    ragged_values,
    row_bytes,
)


def column(dtype: str = "int64", layout: str = "scalar", *shape: int, **extra: Any) -> Column:
    return Column.model_validate({"name": "c", "dtype": dtype, "layout": layout, "shape": shape} | extra)


def chunked(values: list[Any], stored: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, stored)])


@pytest.mark.parametrize(
    ("declared", "stored", "fits"),
    [
        (column("int64"), pa.int32(), True),
        (column("int64"), pa.float64(), False),
        (column("float32"), pa.float64(), True),
        (column("bool"), pa.int8(), False),
        (column("int64"), pa.timestamp("ns"), True),
        (column("float64"), pa.decimal128(9, 2), True),
        (column("float32", "vector", 2), pa.binary(), True),
        (column("float32", "ragged"), pa.float32(), False),
        (column("int64", "ragged"), pa.large_list(pa.int64()), True),
        (column("binary", "binary"), pa.large_string(), True),
    ],
)
def test_a_stored_type_fits_a_declared_one_or_is_named(declared: Column, stored: pa.DataType, fits: bool) -> None:
    if fits:
        check_type(declared, stored)
    else:
        with pytest.raises(DataError, match=f"column 'c' is stored as {stored}, the manifest declares"):
            check_type(declared, stored)


def test_plain_values_are_views_also_of_slices() -> None:
    numbers = pa.array(range(20), pa.int32())[3:9]
    assert plain_values(numbers).tolist() == [3, 4, 5, 6, 7, 8]
    assert not plain_values(numbers).flags.owndata
    flags = [i % 3 == 0 for i in range(40)]
    assert plain_values(pa.array(flags)[5:31]).tolist() == flags[5:31]
    assert plain_values(pa.array([], pa.float16())).dtype == np.float16


def test_dates_and_times_are_days_and_microseconds() -> None:
    moment = dt.datetime(1970, 1, 1, 0, 0, 2)
    assert fixed_values(column(), chunked([moment], pa.timestamp("ns")))[0].tolist() == [2_000_000]
    assert fixed_values(column("int32"), chunked([dt.date(1970, 1, 3)], pa.date64()))[0].tolist() == [2]


def test_nulls_are_refused_masked_or_filled() -> None:
    data = chunked([1, None, 3], pa.int64())
    with pytest.raises(DataError, match=r"column 'c' has 1 null and is declared without"):
        fixed_values(column(), data)
    values, present = fixed_values(column(nulls="mask"), data)
    assert values.tolist() == [1, 0, 3] and present is not None and present.tolist() == [True, False, True]
    values, _ = fixed_values(column(nulls="fill", fill=9), data)
    assert values.tolist() == [1, 9, 3] and values.dtype == np.int64
    vectors, _ = fixed_values(
        column("int64", "vector", 2, nulls="fill", fill=5), chunked([[1, 2], None], pa.list_(pa.int64()))
    )
    assert vectors.tolist() == [[1, 2], [5, 5]]


def test_integers_too_large_for_their_dtype_are_refused() -> None:
    assert fixed_values(column("int8"), chunked([-128, 127], pa.int64()))[0].dtype == np.int8
    with pytest.raises(DataError, match=r"holds 0\.\.128, which int8 cannot"):
        fixed_values(column("int8"), chunked([0, 128], pa.int64()))


@pytest.mark.parametrize(
    ("values", "stored", "message"),
    [
        ([[1, 2], [3]], pa.list_(pa.int64()), "row 1 has 1 elements"),
        ([[1, 2], [3, None]], pa.list_(pa.int64()), "has 1 null inside vectors"),
        ([b"x" * 16, b"x" * 15], pa.binary(), "row 1 has 15 bytes"),
    ],
)
def test_vectors_of_another_length_are_refused(values: list[Any], stored: pa.DataType, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fixed_values(column("int64", "vector", 2), chunked(values, stored))


def test_ragged_rows_have_one_level_of_offsets_per_list() -> None:
    rows, present = ragged_values(
        column("int32", "nested"), chunked([[[1], [2, 3]], [], [[]]], pa.list_(pa.list_(pa.int32())))
    )
    assert present is None and rows.values.tolist() == [1, 2, 3]
    assert [level.tolist() for level in rows.offsets] == [[0, 2, 2, 3], [0, 1, 3, 3]]
    texts = pa.chunked_array([pa.array(["skipped", "ab", None, "c"])[1:]])
    rows, present = ragged_values(column("binary", "binary", nulls="mask"), texts)
    assert bytes(rows.values) == b"abc" and rows.offsets[0].tolist() == [0, 2, 2, 3]
    assert present is not None and present.tolist() == [True, False, True]
    with pytest.raises(DataError, match="null inside its lists"):
        ragged_values(column("int32", "ragged"), chunked([[1, None]], pa.list_(pa.int32())))


def test_a_masked_row_takes_one_byte_more() -> None:
    assert row_bytes(column("float32", "vector", 2, 3)) == 24 and row_bytes(column("int16", nulls="mask")) == 3
