"""Spark types and what they become: exact tensors, or a refusal with a remedy. No Spark session."""

import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    StringType,
    StructType,
    TimestampType,
)

from sparkring.conf.manifest import Column
from sparkring.etl.columns.types import ColumnOptions, arrow_field, fixed_row_bytes, manifest_column
from sparkring.etl.errors import EtlError


def column(found: DataType, **options) -> Column:
    return manifest_column("x", found, "feature", ColumnOptions(**options))


@pytest.mark.parametrize(
    ("found", "options", "dtype", "layout", "shape"),
    [
        (IntegerType(), {}, "int32", "scalar", ()),
        (DateType(), {}, "int32", "scalar", ()),
        (TimestampType(), {}, "int64", "scalar", ()),
        (DecimalType(15, 2), {}, "float64", "scalar", ()),
        (DoubleType(), {"dtype": "float16"}, "float16", "scalar", ()),
        (BinaryType(), {}, "binary", "binary", ()),
        (ArrayType(IntegerType()), {}, "int32", "ragged", ()),
        (ArrayType(IntegerType()), {"shape": [3]}, "int32", "vector", (3,)),
        (ArrayType(ArrayType(IntegerType())), {}, "int32", "nested", ()),
        (ArrayType(ArrayType(IntegerType())), {"shape": [2, 3]}, "int32", "vector", (2, 3)),
        (VectorUDT(), {"shape": [4]}, "float64", "vector", (4,)),
    ],
)
def test_a_type_becomes_the_tensor_that_holds_each_of_its_values(found, options, dtype, layout, shape):
    made = column(found, **options)
    assert (made.dtype, made.layout, made.shape, made.logical) == (dtype, layout, shape, found.simpleString())


@pytest.mark.parametrize(
    ("found", "options", "remedy"),
    [
        (StringType(), {}, "make it a categorical feature"),
        (DecimalType(16, 2), {}, r"cast\(x \* 100 as bigint\)"),
        (StructType(), {}, "select its fields"),
        (VectorUDT(), {}, r"declare `shape: \[n\]`"),
        (ArrayType(VectorUDT()), {}, "select its fields"),
        (ArrayType(BinaryType()), {}, "store one binary value per row"),
        (IntegerType(), {"shape": [2]}, "`shape` is for arrays and vectors"),
        (ArrayType(IntegerType()), {"shape": [2, 2]}, "has 2 sizes for 1 levels"),
        (IntegerType(), {"dtype": "float16"}, "float16 is for float and double"),
        (IntegerType(), {"nulls": "fill", "fill": 2.5}, "fill 2.5 is no int32"),
        (DoubleType(), {"nulls": "fill", "fill": "x"}, "fill 'x' is no float64"),
        (DoubleType(), {"nulls": "fill", "fill": 1e9, "dtype": "float16"}, "is no float16"),
        (ArrayType(IntegerType()), {"nulls": "fill", "fill": 0}, "say `nulls: mask`"),
    ],
)
def test_a_type_without_an_exact_tensor_is_refused_with_a_remedy(found, options, remedy):
    with pytest.raises(EtlError, match=rf"column 'x' is .*{remedy}"):
        column(found, **options)


def test_vectors_are_plain_lists_in_parquet_and_nulls_are_declared():
    vector = column(ArrayType(ArrayType(DoubleType())), shape=[2, 3], nulls="mask")
    inner = pa.list_(pa.field("element", pa.float64(), nullable=False))
    assert arrow_field(vector) == pa.field("x", pa.list_(pa.field("element", inner, nullable=False)), nullable=True)
    assert arrow_field(column(DoubleType(), dtype="float16")) == pa.field("x", pa.float32(), nullable=False)


def test_the_width_of_a_row_is_known_unless_it_varies():
    assert fixed_row_bytes(column(ArrayType(DoubleType()), shape=[3])) == 24
    assert fixed_row_bytes(column(DoubleType())) == 8
    assert fixed_row_bytes(column(ArrayType(DoubleType()))) is None and fixed_row_bytes(column(BinaryType())) is None
