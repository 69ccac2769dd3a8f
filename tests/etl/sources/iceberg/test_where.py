"""A file is planned wherever one of its rows may match, whatever the condition and the partitioning. No Spark."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyiceberg.transforms import parse_transform

from sparkring.etl.sources.iceberg.files import plan
from sparkring.etl.sources.iceberg.schema import comparable
from sparkring.etl.sources.iceberg.where import file_filter
from sparkring.etl.sources.predicate import parse
from tests.etl.sources.iceberg.tables import catalog_at, pinned

DAYS = [dt.date(1969, 12, 31), dt.date(1970, 1, 1), dt.date(2024, 2, 29), dt.date(2024, 3, 1)]
MOMENTS = [dt.datetime(1969, 12, 31, 23, 59, 59, 999999), dt.datetime(2024, 2, 29), dt.datetime(2024, 3, 1, 12, 30)]
VALUES = {  # the smallest int truncated to tens is a large one, in any engine: no value so near to it
    "i": (pa.int32(), [None, -(2**31) + 10, -1, 0, 7, 2**31 - 1]),
    "l": (pa.int64(), [None, -(2**63), -1, 0, 7, 2**63 - 1]),
    "d": (
        pa.decimal128(38, 2),
        [None, Decimal("-0.01"), Decimal("1.25"), Decimal("123456789012345678901234567890123456.78")],
    ),
    "s": (pa.string(), [None, "", "a", "ab", "abc", "zebra crossings are striped", "é"]),
    "day": (pa.date32(), [None, *DAYS]),
    "at": (pa.timestamp("us", "UTC"), [None, *[m.replace(tzinfo=dt.UTC) for m in MOMENTS]]),
    "wall": (pa.timestamp("us"), [None, *MOMENTS]),
    "flag": (pa.bool_(), [None, True, False]),
}
SPECS = [
    {},
    {"i": "identity", "day": "identity", "s": "identity"},
    {"l": "bucket[3]", "s": "truncate[1]", "day": "month", "at": "hour"},
    {"i": "truncate[10]", "day": "year", "wall": "day", "flag": "identity", "d": "identity"},
    {"s": "bucket[2]", "at": "day", "d": "truncate[100]", "wall": "month"},
    {"day": "day", "at": "year", "i": "bucket[4]", "wall": "hour"},
]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """For each partitioning a table: the rows of each of its files, by path."""
    with catalog_at(tmp_path_factory.mktemp("where")) as catalog:
        found = []
        for number, spec in enumerate(SPECS):
            chosen = random.Random(number)
            data = {name: pa.array(chosen.choices(values, k=24), kind) for name, (kind, values) in VALUES.items()}
            table = catalog.create_table(f"db.t{number}", pa.table(data).schema)
            with table.update_spec() as update:
                for column, transform in spec.items():
                    update.add_field(column, parse_transform(transform), f"{column}_{number}")
            table.append(pa.table(data).slice(0, 13))
            table.append(pa.table(data).slice(13))
            version = pinned(table=f"prod.db.t{number}").version
            files = {
                f.path: pq.ParquetFile(f.path.removeprefix("file://")).read().to_pylist()
                for f in plan("", version, None)
            }
            found.append((version, files))
        yield found


def literals(column):
    values = [v for v in VALUES[column][1] if v is not None]
    quote = {"s": "'{}'", "day": "DATE '{}'", "at": "TIMESTAMP '{}'", "wall": "TIMESTAMP_NTZ '{}'"}.get(column, "{}")
    made = [quote.format(v) for v in values if not (isinstance(v, int) and abs(v) >= 2**63)]
    return st.sampled_from([*made, *(["0.5", "-3", "4611686018427387904"] if column in "ild" else []), "NULL"])


def leaf(column):
    literal = literals(column)
    forms = [
        st.tuples(st.sampled_from(["=", "<>", "<", "<=", ">", ">=", "<=>"]), literal).map(
            lambda p: f"{column} {p[0]} {p[1]}"
        ),
        st.tuples(literal, st.sampled_from(["=", "<", ">=", "<=>"])).map(lambda p: f"{p[0]} {p[1]} {column}"),
        st.lists(literal, min_size=1, max_size=3).map(lambda v: f"{column} IN ({', '.join(v)})"),
        st.tuples(literal, literal).map(lambda p: f"{column} BETWEEN {p[0]} AND {p[1]}"),
        st.sampled_from([f"{column} IS NULL", f"{column} IS NOT NULL", "i < l"]),
    ]
    return st.one_of(*forms, *([st.just("flag")] if column == "flag" else []))


CONDITIONS = st.recursive(
    st.sampled_from(list(VALUES)).flatmap(leaf),
    lambda inner: st.one_of(
        inner.map(lambda c: f"NOT ({c})"),
        st.tuples(inner, st.sampled_from(["AND", "OR"]), inner).map(lambda p: f"({p[0]}) {p[1]} ({p[2]})"),
    ),
    max_leaves=4,
)


@settings(max_examples=60)
@given(CONDITIONS)
@example("d = 123456789012345678901234567890123456.78")
def test_a_file_with_a_row_that_matches_is_planned(tables, text):
    for version, files in tables:
        condition = parse("where", text, comparable(version.schema))
        planned = {f.path for f in plan("", version, file_filter(condition.test, version.schema))}
        wanted = {path for path, rows in files.items() if any(map(condition.matches, rows))}
        assert wanted <= planned <= files.keys()


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (1, "i = 7"),
        (1, "NOT i <> 7"),
        (1, "i <=> NULL"),
        (1, "'ab' = s OR s = 'zebra crossings are striped'"),
        (1, "i < -0.0 AND i >= -1"),
        (2, "at >= TIMESTAMP '2024-03-01 12:30:00'"),
        (2, "day = '2024-02-29'"),
        (2, "l IN (7, -1)"),
        (3, "flag"),
        (3, "NOT flag"),
        (3, "day BETWEEN '2024-01-01' AND '2024-12-31' AND wall < '1970-01-01 00:00:00'"),
        (3, "d = 1.25"),
        (3, "i > 1000"),
        (4, "d > 123456789012345678901234567890123456"),
        (0, "day > '2024-03-01'"),
    ],
)
def test_other_files_are_not_planned(tables, table, text):
    version, files = tables[table]
    condition = parse("where", text, comparable(version.schema))
    planned = {f.path for f in plan("", version, file_filter(condition.test, version.schema))}
    assert len(planned) < len(files)


def test_what_is_null_or_unknown_is_not_taken_for_its_opposite(tables):
    """`NOT (i = NULL)` is unknown of every row: no file is wanted, and a filter of no file is right."""
    version, files = tables[1]
    for text in ("i = NULL", "NOT (i = NULL)", "i < NULL"):
        assert (
            plan("", version, file_filter(parse("where", text, comparable(version.schema)).test, version.schema)) == ()
        )
    assert len(
        plan("", version, file_filter(parse("where", "i < l", comparable(version.schema)).test, version.schema))
    ) == len(files)
