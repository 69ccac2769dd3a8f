"""Rows of listed data files through Spark: each gets the values of its file, and deleted ones are gone."""

import datetime as dt
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from sparkring.conf.storage import open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.lake_files import FIELD_ID, LakeFile, LakeFiles, LakeSchema, check_types
from sparkring.etl.spark_platform.session import build_session

pytestmark = pytest.mark.spark
ODD = ["a b", "a+b", "a%20b", "é:%", "a[x]", "{a,b}", "a*b?", "c#d", "e\\f", "p=1/q=__HIVE_DEFAULT_PARTITION__", "日本"]


@pytest.fixture(scope="module")
def session(spark):
    return build_session(spark, {})


def written(root: Path, path: str, rows: pa.Table, *values, deleted=()) -> LakeFile:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, root / path)
    return LakeFile(path, (root / path).stat().st_size, values, np.array(deleted, np.int64))


def lake(root: Path, columns: str, partitions: tuple[str, ...], *files: LakeFile) -> LakeFiles:
    schema = StructType.fromDDL(columns)
    return LakeFiles(open_storage(str(root)), LakeSchema(schema, schema, partitions), files)


@pytest.mark.parametrize(("root", "but"), [("t é[1]%41", ":"), ("t é:1%41", "[{*\\")])
def test_rows_get_the_values_of_their_own_file_whatever_characters_are_in_its_path(session, tmp_path, root, but):
    names = [name for name in ODD if not set(name) & set(but)]
    rows = [pa.table({"a": [i, -i]}) for i in range(len(names))]
    files = [written(tmp_path / root, f"{n}/0.parquet", r, n, deleted=[1]) for n, r in zip(names, rows, strict=True)]
    found = lake(tmp_path / root, "a bigint, n string", ("n",), *files)
    assert found.gone() == [] and len(names) > 6
    assert sorted(map(tuple, found.read(session).collect())) == list(enumerate(names))


def test_a_path_that_spark_cannot_open_is_refused(session, tmp_path):
    file = written(tmp_path, "a:b/c[1].parquet", pa.table({"a": [1]}))
    with pytest.raises(EtlError, match=r"a:b/c\[1\]\.parquet: Spark opens no path with a colon and one of"):
        lake(tmp_path, "a bigint", (), file).read(session)


def test_a_row_of_a_file_that_the_log_does_not_have_stops_the_job(session, tmp_path):
    files = [written(tmp_path, f"{n}.parquet", pa.table({"a": [n]}), n) for n in range(2)]
    found = lake(tmp_path, "a bigint, n int", ("n",), *files)
    rows = replace(found, files=found.files[:1])._join_log(found._stored_rows(session))
    with pytest.raises(Exception, match=r"the table's log does not have this file: .*/1\.parquet"):
        rows.collect()


def test_deleted_rows_are_those_at_their_positions_in_files_of_many_row_groups(session, tmp_path):
    deleted = sorted(np.random.default_rng(1).choice(5000, 2000, replace=False).tolist())
    pq.write_table(pa.table({"a": range(5000)}), tmp_path / "0.parquet", row_group_size=100, data_page_size=64)
    first = LakeFile("0.parquet", (tmp_path / "0.parquet").stat().st_size, (), np.array(deleted))
    second = written(tmp_path, "1.parquet", pa.table({"a": range(5000, 10000)}))
    found = lake(tmp_path, "a bigint", (), first, second).read(session)
    left = sorted(set(range(10000)) - set(deleted))
    assert sorted(row.a for row in found.collect()) == left
    assert found.where("a >= 4000").count() == sum(a >= 4000 for a in left)


def test_partition_values_of_every_type_are_the_logs(session, tmp_path):
    zone = dt.UTC
    values = {
        "string": ["é", "__HIVE_DEFAULT_PARTITION__", " a/b "],
        "date": [dt.date(1500, 2, 28), dt.date(9999, 12, 31), dt.date(1970, 1, 1)],
        "timestamp": [dt.datetime(1820, 1, 1, tzinfo=zone), dt.datetime(2024, 3, 31, 1, 30, 0, 1, zone), None],
        "timestamp_ntz": [dt.datetime(1820, 1, 1), dt.datetime(2024, 3, 31, 2, 30, 0, 1), None],
        "decimal(10,2)": [Decimal("1.20"), Decimal("-0.05"), Decimal("0.00")],
        "boolean": [True, False, None],
        "double": [0.1, float("-inf"), None],
        "tinyint": [1, -128, None],
        "bigint": [2**62, -1, None],
        "binary": [b"\x00\xff", b"", None],
    }
    names = [f"p {n}" for n in range(len(values))]
    columns = "a bigint, " + ", ".join(f"`{n}` {kind}" for n, kind in zip(names, values, strict=True))
    rows = list(zip(*values.values(), strict=True))
    files = [written(tmp_path, f"{n}.parquet", pa.table({"a": [n]}), *row) for n, row in enumerate(rows)]
    read = lake(tmp_path, columns, tuple(names), *files).read(session)
    assert [f.dataType.simpleString() for f in read.schema][1:] == list(values)
    found = [tuple(row.values())[1:] for row in read.toArrow().sort_by("a").to_pylist()]
    assert [tuple(v.astimezone(zone) if hasattr(v, "tzinfo") and v.tzinfo else v for v in row) for row in found] == rows


def test_columns_are_found_by_id_whatever_their_names_in_the_file_and_within_structs(session, tmp_path):
    def field(name: str, kind: pa.DataType, number: int) -> pa.Field:
        return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})

    inner = [field("x", pa.int64(), 3), field("y", pa.int64(), 4)]
    stored = pa.schema([field("b", pa.int64(), 1), field("s", pa.struct(inner), 2), field("a", pa.int64(), 5)])
    file = written(tmp_path, "0.parquet", pa.table([[1], [{"x": 10, "y": 20}], [2]], schema=stored))
    older = written(tmp_path, "1.parquet", pa.table([[3]], schema=pa.schema([field("old", pa.int64(), 1)])))

    def by_id(name: str, kind, number: int) -> StructField:
        return StructField(name, kind, metadata={FIELD_ID: number})

    within = StructType([by_id("y", LongType(), 3), by_id("x", LongType(), 4)])
    schema = StructType([by_id("a", LongType(), 1), by_id("s", within, 2), by_id("new", LongType(), 9)])
    columns = StructType.fromDDL("a bigint, s struct<y: bigint, x: bigint>, new bigint")
    found = LakeFiles(open_storage(str(tmp_path)), LakeSchema(columns, schema), (file, older))
    rows = sorted(found.read(session).collect(), key=lambda row: row.a)
    assert [row.asDict(recursive=True) for row in rows] == [
        {"a": 1, "s": {"y": 10, "x": 20}, "new": None},
        {"a": 3, "s": None, "new": None},
    ]
    assert found.read(session).schema == columns
    plain = written(tmp_path, "2.parquet", pa.table({"a": [1]}))
    with pytest.raises(Exception, match=r"(?s)field Ids"):
        replace(found, files=(plain,)).read(session).collect()


def test_a_column_that_a_file_does_not_have_is_null_and_case_is_sparks(session, tmp_path):
    files = [written(tmp_path, "0.parquet", pa.table({"a": [1]})), written(tmp_path, "1.parquet", pa.table({"b": [2]}))]
    found = lake(tmp_path, "a bigint, b bigint", (), *files).read(session)
    assert sorted(map(tuple, found.collect()), key=str) == [(1, None), (None, 2)]


def test_declared_types_that_are_not_the_tables_are_all_named(session):
    columns = StructType.fromDDL("a bigint, s struct<x: int, y: array<string>>, d decimal(10,2)")
    check_types("k", {"s": "STRUCT<x INT NOT NULL, y ARRAY<STRING>>", "a": "long", "d": "numeric(10, 2)"}, columns)
    with pytest.raises(EtlError) as caught:
        check_types("k", {"a": "int", "s": "struct<x: int>", "d": "decimal(10,2)"}, columns)
    assert str(caught.value) == (
        "k.columns: types are not the table's:\n"
        "  - column 'a' is bigint, declared int\n"
        "  - column 's' is struct<x:int,y:array<string>>, declared struct<x:int>"
    )


def test_dates_of_centuries_ago_are_read_as_they_were_written(session, tmp_path):
    moment = dt.datetime(1500, 2, 28, 12, tzinfo=dt.UTC)
    rows = pa.table({"d": [dt.date(1500, 2, 28)], "t": pa.array([moment], pa.timestamp("us", "UTC"))})
    found = lake(tmp_path, "d date, t timestamp", (), written(tmp_path, "0.parquet", rows)).read(session)
    assert found.selectExpr("d", "unix_micros(t)").collect()[0] == (
        dt.date(1500, 2, 28),
        int(moment.timestamp()) * 1_000_000,
    )


def test_a_table_without_files_and_one_without_columns_in_files_have_their_rows(session, tmp_path):
    found = lake(tmp_path, "a bigint, n string", ("n",))
    assert found.read(session).collect() == [] and found.read(session).columns == ["a", "n"]
    file = written(tmp_path, "0.parquet", pa.table({"a": [1, 2, 3]}), "x", deleted=[0])
    assert [row.n for row in lake(tmp_path, "n string", ("n",), file).read(session).collect()] == ["x", "x"]
