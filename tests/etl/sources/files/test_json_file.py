"""JSON lines as typed columns: each value kept exactly or refused with its line; keys that are not declared counted."""

import datetime as dt
import io
import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sparkring.etl.sources.files import json_file
from sparkring.etl.sources.files.json_file import check, check_type, read


def schema(**kinds):
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def opener(*lines):
    data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    return lambda: io.BytesIO(data)


def rows(kinds, *lines):
    assert check(opener(*lines), kinds).problems == []
    return [row for batch in read(opener(*lines), kinds) for row in batch.to_pylist()]


SCALARS = schema(a=IntegerType(), s=StringType(), f=DoubleType(), b=BooleanType(), p=DecimalType(10, 2), d=DateType())


def test_values_of_every_type_are_kept_and_missing_keys_are_null():
    full = b'\xef\xbb\xbf{"a": 1, "s": "\xc3\xa9", "f": 1e23, "b": true, "p": 1.50, "d": "2024-02-29"}'
    nothing = dict.fromkeys(SCALARS.names)
    kept = {"a": 1, "s": "é", "f": 1e23, "b": True, "p": Decimal("1.50"), "d": dt.date(2024, 2, 29)}
    assert rows(SCALARS, full, "", '{"a": null}\r', " {} ") == [kept, nothing, nothing]
    (noon,) = rows(schema(at=TimestampType()), '{"at": "2024-01-31T13:00:00+01:00"}')
    assert noon["at"] == dt.datetime(2024, 1, 31, 12, tzinfo=dt.UTC)


def test_nested_values_are_kept():
    inner = schema(x=LongType(), y=StringType())
    kinds = schema(l=ArrayType(inner), m=MapType(StringType(), ArrayType(IntegerType())), o=inner)
    found = rows(kinds, '{"l": [{"x": 1}, null, {}], "m": {"k": [1, null], "n": null}, "o": {"y": "q"}}', '{"l": []}')
    empty = {"x": None, "y": None}
    first = {"l": [empty | {"x": 1}, None, empty], "m": [("k", [1, None]), ("n", None)], "o": empty | {"y": "q"}}
    assert found == [first, {"l": [], "m": None, "o": None}]


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("a", "1.0", "column 'a' is int, and cannot keep '1.0'"),
        ("a", "2147483648", "column 'a' is int, and cannot keep '2147483648'"),
        ("a", '"1"', "column 'a' is int, and cannot keep '\"1\"'"),
        ("s", "1", "column 's' is string, and cannot keep '1'"),
        ("s", '"\\ud800"', "column 's' is string, and cannot keep '\"\\\\ud800\"'"),
        ("s", '{"x": 1}', "column 's' is string, and cannot keep '{\"x\": \"1\"}'"),
        ("f", '"1.5"', "column 'f' is double, and cannot keep '\"1.5\"'"),
        ("f", "9007199254740993", "column 'f' is double, and cannot keep '9007199254740993'"),
        ("b", "1", "column 'b' is boolean, and cannot keep '1'"),
        ("p", "1.239", "column 'p' is decimal(10,2), and cannot keep '1.239'"),
        ("d", '"2024-13-01"', "column 'd' is date, and cannot keep '\"2024-13-01\"'"),
        ("d", "20240131", "column 'd' is date, and cannot keep '20240131'"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_line(column, value, shown):
    assert check(opener("{}", f'{{"{column}": {value}}}'), SCALARS).problems == [f"line 2: {shown}"]
    with pytest.raises(ValueError, match="changed while it was read"):
        list(read(opener(f'{{"{column}": {value}}}'), SCALARS))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[", "is not JSON (Expecting value); a json file has one object on each line"),
        ('[{"a": 1}]', "is no JSON object"),
        ('{"a": 1} {"a": 2}', "is not JSON (Extra data)"),
        ('{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b'{"s": "\xff"}', "is not UTF-8"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_line_that_is_no_object_is_refused(line, words):
    (problem,) = check(opener("{}", line, '{"a": 1}'), SCALARS).problems
    assert problem.startswith("line 2: ") and words in problem


def test_faults_are_counted_over_batches(monkeypatch):
    monkeypatch.setattr(json_file, "BATCH_RECORDS", 2)
    found = check(opener(*['{"a": 1}', '{"a": "x", "l": [1, "y"]}'] * 3), schema(a=LongType(), l=ArrayType(LongType())))
    wrong = "column 'a' is bigint, and cannot keep '\"x\"' (and 2 more)"
    assert found.problems == [
        f"line 2: {wrong}",
        "line 2: column 'l[]' is bigint, and cannot keep '\"y\"' (and 2 more)",
    ]


def test_undeclared_keys_are_counted_and_one_of_another_case_is_refused():
    kinds = schema(a=IntegerType(), o=schema(x=IntegerType()))
    found = check(opener('{"b": 1, "o": {"z": 1}}', '{"b": 1}', '{"A": 7, "o": {"X": 1}}'), kinds)
    assert found.unknown == {"b": 2, "o.z": 1, "A": 1, "o.X": 1}
    assert found.problems == [
        "has a key 'A' (in 1 record), which differs from the declared 'a' by case alone; rename one",
        "has a key 'o.X' (in 1 record), which differs from the declared 'o.x' by case alone; rename one",
    ]


def test_types_that_no_json_value_has_are_known():
    from pyspark.sql.types import BinaryType, ByteType, NullType

    assert check_type(ArrayType(MapType(StringType(), schema(a=ByteType())))) is None
    assert check_type(ArrayType(BinaryType())) and check_type(NullType()) and check_type(schema(a=BinaryType()))
    assert check_type(MapType(IntegerType(), IntegerType())) == "the keys of an object are strings"


texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
records = st.fixed_dictionaries(
    {},
    optional={
        "i": st.none() | st.integers(-(2**31), 2**31 - 1),
        "f": st.none() | st.floats(allow_nan=False),
        "s": st.none() | texts,
        "b": st.none() | st.booleans(),
        "l": st.none() | st.lists(st.none() | texts, max_size=3),
    },
)


@given(st.lists(records, max_size=20), st.booleans())
def test_what_python_writes_is_read_back(written, escaped):
    kinds = schema(i=IntegerType(), f=DoubleType(), s=StringType(), b=BooleanType(), l=ArrayType(StringType()))
    found = rows(kinds, *(json.dumps(record, ensure_ascii=escaped) for record in written))
    assert found == [dict.fromkeys(kinds.names) | record for record in written]
