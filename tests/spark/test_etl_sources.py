"""Files that do not match their declaration are errors that name file and column; those that do give typed rows."""

import datetime as dt
import os
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.sources import FilesSource
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.pin import pin
from sparkring.etl.views import build_rows

pytestmark = pytest.mark.spark
COLUMNS = {"id": "int", "day": "date", "price": "decimal(6,2)", "note": "string"}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def csv_source(tmp_path, **files):
    for name, text in files.items():
        write(tmp_path / "t" / f"{name}.csv", text)
    config = {"path": str(tmp_path / "t"), "columns": COLUMNS, "options": {"nullValue": "NA"}}
    return pin("t", FilesSource.model_validate(config))


def test_csv_rows_are_typed_and_nulls_are_nulls(spark, tmp_path):
    source = csv_source(tmp_path, a="id,day,price,note\n1,2024-02-29,3.50,x\n", b="id,day,price,note\nNA,NA,NA,\n")
    rows = sorted(source.read(spark).collect(), key=lambda r: r.id or 0)
    assert tuple(rows[0]) == (None, None, None, None)
    assert rows[1].day == dt.date(2024, 2, 29) and str(rows[1].price) == "3.50"


def test_bad_values_are_counted_by_file_and_column_with_an_example(spark, tmp_path):
    good = "id,day,price,note\n1,2024-01-01,1.00,x\n"
    bad = "id,day,price,note\n1.5,2024-01-01,1.00,x\n2,2024-13-01,1.00,x\nseven,2024-01-01,99999.00,x\n"
    with pytest.raises(EtlError) as caught:
        csv_source(tmp_path, good=good, bad=bad).read(spark)
    message = str(caught.value)
    assert "etl.sources.t" in message and "good.csv" not in message
    assert "bad.csv: line 2: column 'id' is int, and cannot keep '1.5' (and 1 more)" in message
    assert "bad.csv: line 3: column 'day' is date, and cannot keep '2024-13-01'\n" in message
    assert "bad.csv: line 4: column 'price' is decimal(6,2), and cannot keep '99999.00'" in message


def test_csv_values_of_every_type_come_through_spark(spark, tmp_path):
    kinds = {"a": "boolean", "b": "tinyint", "c": "smallint", "d": "bigint", "e": "float", "f": "double"}
    kinds |= {"g": "decimal(38,3)", "h": "date", "i": "timestamp", "j": "timestamp_ntz", "k": "binary", "l": "string"}
    line = "yes,-128,32767,-9223372036854775808,0.1,0.1,1234.5,0001-01-01,"
    line += '1969-12-31 23:59:59.9+01:00,2024-02-29 12:00,é,"a ""b""\n"'
    write(tmp_path / "t.csv", ",".join(kinds) + "\n" + line + "\n" + "," * 11 + "\n")
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    read = pin("t", FilesSource(path=f"{tmp_path}/t.csv", columns=kinds)).read(session)
    assert {f.name: f.dataType.simpleString() for f in read.schema} == kinds
    asked = "a", "b", "c", "d", "e = float(0.1)", "f", "g", "h", "unix_micros(i)", "unix_micros(timestamp(j))", "k", "l"
    found, empty = (tuple(row) for row in read.selectExpr(*asked).collect())
    noon = dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC).timestamp() * 1_000_000
    assert found[:6] == (True, -128, 32767, -(2**63), True, 0.1) and empty == (None,) * 12
    assert found[6:] == (Decimal("1234.500"), dt.date(1, 1, 1), -3600_100_000, noon, "é".encode(), 'a "b"\n')


def test_a_csv_table_is_never_taken_for_a_small_one_in_a_join(spark, tmp_path):
    """Spark sends what it believes small to every executor; of files it does not read itself it must not guess so."""
    source = csv_source(tmp_path, a="id,day,price,note\n1,2024-01-01,1.00,x\n")
    tables = [source.read(spark).alias(name) for name in "xy"]
    plan = tables[0].join(tables[1], "id")._jdf.queryExecution().sparkPlan().toString()
    assert "SortMergeJoin" in plan and "Broadcast" not in plan


def test_a_type_no_csv_value_has_is_refused(spark, tmp_path):
    write(tmp_path / "t.csv", "a\n1\n")
    for kind in ("array<int>", "varchar(3)", "interval day"):
        source = pin("t", FilesSource(path=f"{tmp_path}/t.csv", columns={"a": kind}))
        with pytest.raises(EtlError, match=r"etl\.sources\.t\.columns\.a = .*declare it string"):
            source.read(spark)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("id,day,price", "a.csv: has no column 'note'"),
        ("id,day,price,note,extra", "a.csv: has a column 'extra' that is not declared"),
        ("day,id,price,note", "columns stand in another order"),
    ],
)
def test_csv_headers_must_be_the_declared_columns(spark, tmp_path, header, words):
    with pytest.raises(EtlError, match=words):
        csv_source(tmp_path, a=header + "\n").read(spark)


def test_an_empty_csv_file_is_named(spark, tmp_path):
    with pytest.raises(EtlError, match=r"b\.csv: is empty"):
        csv_source(tmp_path, a="id,day,price,note\n", b="").read(spark)


def test_every_parquet_footer_is_checked(spark, tmp_path):
    os.makedirs(tmp_path / "p")
    pq.write_table(pa.table({"a": pa.array([1], pa.int32()), "b": ["x"]}), tmp_path / "p/0.parquet")
    pq.write_table(pa.table({"a": pa.array([1], pa.int64()), "c": ["x"]}), tmp_path / "p/1.parquet")
    (tmp_path / "p/2.parquet").write_bytes(b"PAR1 not really")
    config = FilesSource(path=str(tmp_path / "p"), format="parquet", columns={"a": "int", "b": "string"})
    with pytest.raises(EtlError) as caught:
        pin("p", config).read(spark)
    message = str(caught.value)
    assert "1.parquet: column 'a' is bigint, declared int" in message and "0.parquet" not in message
    assert "1.parquet: has no column 'b'" in message and "2.parquet: not a readable Parquet file" in message


def test_a_parquet_column_that_differs_by_case_is_named(spark, tmp_path):
    for name, table in {"beside": {"v": [1], "V": [2]}, "instead": {"V": [1]}}.items():
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
        config = FilesSource(path=f"{tmp_path}/{name}.parquet", format="parquet", columns={"v": "bigint"})
        with pytest.raises(EtlError, match=rf"{name}\.parquet: has a column 'V', which Spark.* declared 'v'"):
            pin("p", config).read(spark)


def test_a_parquet_table_is_read_by_its_declared_columns(spark, tmp_path):
    pq.write_table(pa.table({"b": ["x"], "a": [1], "c": [0.5]}), tmp_path / "p.parquet")
    config = FilesSource(path=str(tmp_path / "p.parquet"), format="parquet", columns={"a": "bigint", "b": "string"})
    assert [tuple(r) for r in pin("p", config).read(spark).collect()] == [(1, "x")]


def test_text_documents_have_path_and_text(spark, tmp_path):
    write(tmp_path / "docs/a/one.py", "first\nsecond\n")
    write(tmp_path / "docs/two.txt", "other")
    write(tmp_path / f"docs{tmp_path}/docs/a b+.py", "its path repeats the root's")
    found = pin("d", FilesSource(path=f"{tmp_path}/docs/**/*.py", format="text"))
    rows = {r.path: r.text for r in found.read(spark).collect()}
    again = f"{tmp_path}/docs/a b+.py".lstrip("/")
    assert rows == {"a/one.py": "first\nsecond\n", again: "its path repeats the root's"}


def test_binary_files_have_path_and_content_and_the_values_of_their_folders(spark, tmp_path):
    (tmp_path / "photos/kind=a b").mkdir(parents=True)
    (tmp_path / "photos/kind=c").mkdir()
    cells = {"kind=a b/é 1%20.png": bytes(range(256)), "kind=c/2.jpg": b"", "kind=c/3": b"\xff\x00"}
    for name, cell in cells.items():
        (tmp_path / "photos" / name).write_bytes(cell)
    (tmp_path / "photos/kind=c/_hidden").write_bytes(b"no")
    config = FilesSource(path=f"{tmp_path}/photos", format="binaryFile", partitions={"kind": "string"})
    found = pin("p", config).read(spark)
    assert [(f.name, f.dataType.simpleString()) for f in found.schema] == [
        ("path", "string"), ("content", "binary"), ("kind", "string"),
    ]  # fmt: skip
    rows = {row.path: (bytes(row.content), row.kind) for row in found.collect()}
    assert rows == {name: (cell, name.partition("/")[0][5:]) for name, cell in cells.items()}
    flat = FilesSource(path=f"{tmp_path}/photos/*/*.*", format="binaryFile")
    assert sorted(row.path for row in pin("p", flat).read(spark).collect()) == sorted(cells)[:2]


def test_a_type_that_is_none_is_named(spark, tmp_path):
    write(tmp_path / "t.csv", "a\n1\n")
    with pytest.raises(EtlError, match=r"etl\.sources\.t\.columns\.a = 'integr'"):
        pin("t", FilesSource(path=str(tmp_path / "t.csv"), columns={"a": "integr"})).read(spark)


def test_views_build_on_each_other_and_errors_have_the_key(spark):
    session = spark.newSession()
    tables = {"t": session.createDataFrame([(1,), (2,)], "a int")}
    rows = build_rows(session, tables, {"u": "select a + 1 as b from t", "v": "select b from u where b > 2"}, "v")
    assert [r.b for r in rows.collect()] == [3]
    with pytest.raises(EtlError, match=r"etl\.views\.u: .*UNRESOLVED_COLUMN.*`aa`"):
        build_rows(session, tables, {"u": "select aa from t"}, "u")
    with pytest.raises(
        EtlError,
        match=r"etl\.views\.u: .*Syntax error at or near .selec.",
    ):
        build_rows(session, tables, {"u": "selec a from t"}, "u")
    with pytest.raises(EtlError, match="random"):
        build_rows(session, tables, {"u": "select a, rand() r from t"}, "u")
    with pytest.raises(EtlError, match="or the current time or user"):
        build_rows(session, tables, {"v": "select a from t where current_date() > date'2020-01-01'"}, "v")
    with pytest.raises(EtlError, match=r"etl\.rows = 'nowhere:f': cannot be imported"):
        build_rows(session, tables, {}, "nowhere:f")


def test_rows_may_be_a_python_function(spark, tmp_path, monkeypatch):
    write(
        tmp_path / "my_rows.py",
        "def make(tables):\n    return tables['t'].where('a > 1')\n\ndef wrong(tables):\n    return 7\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    tables = {"t": spark.createDataFrame([(1,), (2,)], "a int")}
    assert [r.a for r in build_rows(spark.newSession(), tables, {}, "my_rows:make").collect()] == [2]
    with pytest.raises(EtlError, match="returned int, not a DataFrame"):
        build_rows(spark.newSession(), tables, {}, "my_rows:wrong")
