"""Which columns are stored, under which names and roles. No Spark session: only the rows' schema is looked at."""

from types import SimpleNamespace

import pytest
from pyspark.sql.types import StructType

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.features import STATE_VERSION
from sparkring.conf.manifest import tensor_columns
from sparkring.etl.columns.table import plain_roles, stored_columns
from sparkring.etl.errors import EtlError

ROWS = SimpleNamespace(
    schema=StructType().add("a", "integer").add("c", "string").add("y", "double").add("month", "integer")
)


def config(features=None, **changes) -> EtlConfig:
    source = {"path": "t.csv", "columns": {"a": "int"}}
    block = {"sources": {"t": source}, "rows": "t", "features": features or {"a": {"kind": "numeric"}}}
    return EtlConfig.model_validate(block | {"label": "y", "keep": ["month"]} | changes)


def state(*features):
    inputs = {"a": "int", "c": "string", "month": "int"}
    return {"version": STATE_VERSION, "inputs": inputs, "features": list(features)}


NUMERIC = {"name": "a", "kind": "numeric", "column": "a", "indicator": True}
CODES = {"name": "c", "kind": "categorical", "column": "c", "values": ["x", "y"]}
AS_IT_IS = {"name": "p", "kind": "passthrough", "column": "a", "nulls": "mask", "fill": None, "shape": None}


def test_values_are_stored_once_and_tensors_come_in_the_order_of_features_label_and_kept_columns():
    made = state(NUMERIC, CODES, NUMERIC | {"name": "again"}, AS_IT_IS | {"dtype": None})
    found = stored_columns(ROWS, config(keep=["month", "c"]), made)
    assert [c.name for c in found] == ["a", "c", "p", "y", "month"]
    assert [c.dtype for c in found] == ["int32", "string", "int32", "float64", "int32"]
    assert [c.role for c in found] == ["input", "meta", "feature", "label", "meta"]
    assert [c.nulls for c in found] == ["keep", "keep", "mask", "refuse", "refuse"]
    tensors = tensor_columns(found, made)
    assert [c.name for c in tensors] == ["a", "a__null", "c", "again", "again__null", "p", "y", "month"]
    assert [c.dtype for c in tensors] == [
        "float32", "float32", "int32", "float32", "float32", "int32", "float64", "int32"
    ]  # fmt: skip
    assert [c.role for c in tensors] == ["feature"] * 6 + ["label", "meta"] and tensors[2].cardinality == 4


def test_two_columns_of_one_name_to_spark_are_refused():
    with pytest.raises(EtlError, match="two columns would be read as 'a' and 'A'"):
        stored_columns(ROWS, config(), state(NUMERIC | {"indicator": False}, NUMERIC | {"name": "A"}))
    passed = AS_IT_IS | {"name": "C", "dtype": None}
    with pytest.raises(EtlError, match="two columns would be stored as 'C' and 'c'"):
        stored_columns(ROWS, config(), state(passed, CODES | {"name": "coded"}))


@pytest.mark.parametrize("other", [{"column": "month", "dtype": None}, {"column": "a", "dtype": "float16"}])
def test_a_feature_cannot_store_other_values_under_the_name_of_a_column_that_is_stored(other):
    rows = SimpleNamespace(schema=StructType().add("a", "double").add("y", "double").add("month", "integer"))
    with pytest.raises(EtlError, match=r"etl\.features\.a: .* rename the feature 'a'"):
        stored_columns(rows, config(), state(NUMERIC | {"name": "scaled"}, AS_IT_IS | {"name": "a"} | other))
    same = state(NUMERIC | {"name": "scaled"}, AS_IT_IS | {"name": "a", "dtype": None})
    assert [c.name for c in stored_columns(rows, config(), same)] == ["a", "y", "month"]


def test_a_weight_is_stored_beside_what_is_kept_and_has_one_role():
    stored = stored_columns(ROWS, config(weight="month", keep=[]), state(NUMERIC))
    assert [(c.name, c.role) for c in stored] == [("a", "input"), ("y", "label"), ("month", "weight")]
    with pytest.raises(ValueError, match="'month' and 'month' are one name"):
        config(weight="month", keep=["month"])


def test_a_missing_column_and_a_second_role_are_refused():
    types = {field.name: field.dataType for field in ROWS.schema.fields}
    with pytest.raises(EtlError, match=r"etl\.label = 'z': rows have no such column"):
        plain_roles(config(label="z"), types)
    with pytest.raises(EtlError, match=r"etl\.keep: 'month' is meta already"):
        plain_roles(SimpleNamespace(labels=["y"], weight=None, keep=["month", "month"]), types)
