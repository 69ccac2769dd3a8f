"""Which columns are stored, under which names and roles. No Spark session: only the rows' schema is looked at."""

from types import SimpleNamespace

import pytest
from pyspark.sql.types import StructType

from sparkring.conf.config import EtlConfig
from sparkring.etl.errors import EtlError
from sparkring.etl.features import STATE_VERSION
from sparkring.etl.table import plain_roles, stored_columns

ROWS = SimpleNamespace(
    schema=StructType().add("a", "integer").add("c", "string").add("y", "double").add("month", "integer")
)


def config(features=None, **changes) -> EtlConfig:
    source = {"path": "t.csv", "columns": {"a": "int"}}
    block = {"sources": {"t": source}, "rows": "t", "features": features or {"a": {"kind": "numeric"}}}
    return EtlConfig.model_validate(block | {"label": "y", "keep": ["month"]} | changes)


def state(*features):
    return {"version": STATE_VERSION, "inputs": {}, "features": list(features)}


NUMERIC = {"name": "a", "kind": "numeric", "column": "a", "indicator": True}
CODES = {"name": "c", "kind": "categorical", "column": "c", "values": ["x", "y"]}
AS_IT_IS = {"name": "p", "kind": "passthrough", "column": "a", "nulls": "mask", "fill": None, "shape": None}


def test_features_come_first_then_label_then_kept_columns():
    found = stored_columns(ROWS, config(), state(NUMERIC, CODES, AS_IT_IS | {"dtype": None}))
    assert [c.name for c in found] == ["a", "a__null", "c", "p", "y", "month"]
    assert [c.dtype for c in found] == ["float32", "float32", "int32", "int32", "float64", "int32"]
    assert [c.role for c in found] == ["feature"] * 4 + ["label", "meta"]
    assert found[2].cardinality == 4 and found[3].nulls == "mask"


def test_two_columns_of_one_name_to_spark_are_refused():
    with pytest.raises(EtlError, match="two columns would be stored as 'a' and 'A'"):
        stored_columns(ROWS, config(), state(NUMERIC | {"indicator": False}, NUMERIC | {"name": "A"}))


def test_a_missing_column_and_a_second_role_are_refused():
    types = {field.name: field.dataType for field in ROWS.schema.fields}
    with pytest.raises(EtlError, match=r"etl\.label = 'z': rows have no such column"):
        plain_roles(config(label="z"), types)
    with pytest.raises(EtlError, match=r"etl\.keep: 'month' is meta already"):
        plain_roles(SimpleNamespace(label="y", keep=["month", "month"]), types)
