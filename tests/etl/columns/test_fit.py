"""Inputs of features are checked before anything is fitted. Fitting itself: tests/spark/test_etl_features.py."""

from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter
from pyspark.sql.types import StructType

from sparkring.conf.blocks.etl import Feature
from sparkring.etl.columns.fit import check_inputs
from sparkring.etl.errors import EtlError

ROWS = SimpleNamespace(schema=StructType().add("a", "integer").add("s", "string").add("d", "date").add("x", "double"))


def features(**kinds):
    return {name: TypeAdapter(Feature).validate_python(feature) for name, feature in kinds.items()}


def test_inputs_are_found_with_their_types():
    wanted = features(a={"kind": "numeric"}, day={"kind": "categorical", "column": "d"})
    assert check_inputs(ROWS, wanted) == {"a": "int", "d": "date"}


def test_every_wrong_input_is_named_at_once():
    wanted = features(
        s={"kind": "numeric"}, x={"kind": "categorical"}, z={"kind": "passthrough"}, d={"kind": "cyclic", "period": 7}
    )
    with pytest.raises(EtlError) as caught:
        check_inputs(ROWS, wanted)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"etl.features.{name}" for name in "sxzd"]
    assert "numeric wants a number" in lines[0] and "cast it" in lines[1] and "no column 'z'" in lines[2]
