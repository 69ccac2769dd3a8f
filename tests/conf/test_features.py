"""What a state says of tensors, and the whole numbers behind the texts of categories."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.conf.features import output_names, outputs, whole_number


@given(st.dates())
def test_a_date_is_its_days_since_1970(day: dt.date) -> None:
    assert whole_number(day.isoformat(), "date") == (day - dt.date(1970, 1, 1)).days


@pytest.mark.parametrize(
    ("text", "spark_type", "number"),
    [
        ("+10000-01-01", "date", 2_932_897),  # Spark's own years go beyond Python's
        ("-0044-03-15", "date", -735_525),
        ("true", "boolean", 1),
        ("false", "boolean", 0),
        ("-9223372036854775808", "bigint", -(1 << 63)),
    ],
)
def test_whole_numbers_behind_texts(text: str, spark_type: str, number: int) -> None:
    assert whole_number(text, spark_type) == number


@pytest.mark.parametrize(
    ("text", "spark_type"),
    [("9223372036854775808", "bigint"), ("07", "int"), ("1.0", "int"), ("True", "boolean"), ("2013-13-01", "date")],
)
def test_other_texts_are_refused(text: str, spark_type: str) -> None:
    with pytest.raises(ValueError):
        whole_number(text, spark_type)


def test_outputs_have_names_types_and_sizes() -> None:
    codes = {"name": "c", "kind": "categorical", "values": ["a", "b"]}
    assert [(o.name, o.dtype, o.cardinality) for o in outputs(codes)] == [("c", "int32", 4)]
    assert output_names({"name": "x", "kind": "numeric", "indicator": True}) == ["x", "x__null"]
    assert output_names({"name": "h", "kind": "cyclic"}) == ["h_sin", "h_cos"]
    assert output_names({"name": "p", "kind": "passthrough"}) == ["p"]
