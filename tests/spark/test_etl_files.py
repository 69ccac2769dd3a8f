"""Partitioned files of every format: the right values on every row, the right files opened, contradictions named."""

import datetime as dt
import itertools
import json
import logging
import random
from collections import Counter
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from sparkring.conf.sources import FilesSource
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.files.partitions import NULL_NAME
from sparkring.etl.sources.pin import pin
from sparkring.etl.spark_platform.session import build_session

pytestmark = pytest.mark.spark
FORMATS = ["csv", "json", "orc", "parquet", "text"]


def source(path, kind, columns, partitions, where=None):
    declared = {"path": str(path), "format": kind, "columns": columns, "partitions": partitions, "where": where}
    return pin("t", FilesSource.model_validate(declared))


def write(session, path, kind, rows, columns, by):
    """Write with Spark itself, in folders of the columns `by`."""
    writer = session.createDataFrame(rows, columns).repartition(1).write.partitionBy(*by)
    writer.format(kind).options(header=True).save(str(path))


ROWS = [(1, dt.date(2024, 1, 30), "é/ü"), (2, dt.date(2024, 1, 31), None), (3, dt.date(2024, 1, 31), "a b=%41+")]


@pytest.mark.parametrize("kind", FORMATS)
def test_each_row_has_the_values_of_its_folders(spark, tmp_path, kind):
    session = build_session(spark, {})
    rows = [(str(n) if kind == "text" else n, *rest) for n, *rest in ROWS]
    write(
        session,
        tmp_path / "t",
        kind,
        rows,
        f"v {'string' if kind == 'text' else 'int'}, day date, country string",
        ["day", "country"],
    )
    columns = {} if kind == "text" else {"v": "int"}
    found = source(tmp_path / "t", kind, columns, {"day": "date", "country": "string"}).read(session)
    names = ["text" if kind == "text" else "v", "day", "country"]
    assert found.columns == (["path", *names] if kind == "text" else names)
    assert [f.dataType.simpleString() for f in found.schema][-2:] == ["date", "string"]
    kept = sorted(tuple(row[name] for name in names) for row in found.collect())
    assert kept == ([(f"{v}\n", *rest) for v, *rest in rows] if kind == "text" else rows)
    days = found.groupBy("day").count().orderBy("day").collect()  # the values count as known in any query
    assert [tuple(row) for row in days] == [(dt.date(2024, 1, 30), 1), (dt.date(2024, 1, 31), 2)]


# Spark writes null, the empty text and the name of null itself into one folder: they are null, as Spark reads them.
SAME_AS_NULL = (None, "", NULL_NAME)


ODD_TEXTS = [
    "", NULL_NAME, NULL_NAME.lower(), NULL_NAME + " ", "null", "NULL", " ", "  x ", "x ", "\tx\n", ".", "..", "a.",
    "..a", "_x", "\x7f", "\ufeff", "\u202e", "e\u0301", "\u00e9", "%", "%%", "%41", "%2F", "%25", "%é", "é:%", "/",
    "//", "a/", "a b/c=d", "=", "p=x", ":", "a\\b", "'", '"', "{a}", "[a]", "*", "?", "#", "a&b+c", "~", "!$",
    "x" * 250, "é" * 120, "😀" * 62, "/" * 84, " " * 80,  # the name of a file has 255 bytes at most
]  # fmt: skip


def random_texts(count):
    draw = random.Random(7)
    ranges = [(1, 0x80)] * 4 + [(0x80, 0x250), (0x370, 0x530), (0x3040, 0x30FF), (0x1F300, 0x1F5FF), (0xE000, 0xE010)]
    texts = set(ODD_TEXTS)
    while len(texts) < count:
        length = draw.randint(1, draw.choice([8, 8, 8, 60]))
        texts.add("".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(length)))
    return [None, *sorted(texts)]


def lost_or_wrong(session, path, texts):
    """Texts that Spark wrote as partitions and that are not read back as they were, and the rows that are missing."""
    rows = [(n, text, text) for n, text in enumerate(texts)]
    same = [row for row in rows if row[1] in SAME_AS_NULL]
    for some in ([row for row in rows if row not in same], *([row] for row in same)):  # Spark cannot write them at once
        frame = session.createDataFrame(some, "n int, kept string, p string").coalesce(1)
        frame.write.mode("append").partitionBy("p").parquet(str(path))
    found = source(path, "parquet", {"n": "int", "kept": "string"}, {"p": "string"}).read(session).collect()
    wrong = [(r["kept"], r["p"]) for r in found if r["p"] != (None if r["kept"] in SAME_AS_NULL else r["kept"])]
    return wrong, Counter(range(len(texts))) - Counter(row["n"] for row in found), len(found) - len(texts)


def test_random_texts_that_spark_wrote_as_partitions_are_read_back(spark, tmp_path):
    assert lost_or_wrong(build_session(spark, {}), tmp_path / "t", random_texts(70)) == ([], Counter(), 0)


@pytest.mark.slow
def test_a_thousand_random_texts_that_spark_wrote_as_partitions_are_read_back(spark, tmp_path):
    assert lost_or_wrong(build_session(spark, {}), tmp_path / "t", random_texts(1000)) == ([], Counter(), 0)


def test_percent_codes_of_other_writers_are_utf8(spark, tmp_path):
    """pyarrow, deltalake and DuckDB write é as %C3%A9, which Spark reads as Ã©."""
    session = build_session(spark, {})
    table = pa.table({"v": [1, 2], "p": ["é:%", "日本 😀"]})
    pq.write_to_dataset(table, tmp_path / "t", partition_cols=["p"], basename_template="x[1]{{a}}+%41 {i}.parquet")
    found = source(tmp_path / "t", "parquet", {"v": "bigint"}, {"p": "string"}).read(session)
    assert sorted(map(tuple, found.collect())) == [(1, "é:%"), (2, "日本 😀")]


def test_partition_values_of_every_type_are_as_spark_wrote_them(spark, tmp_path):
    session = build_session(spark, {})
    kinds = {
        "a": "boolean",
        "b": "tinyint",
        "c": "bigint",
        "d": "decimal(6,2)",
        "e": "date",
        "f": "timestamp",
        "g": "timestamp_ntz",
        "h": "double",
    }
    noon = dt.datetime(2024, 1, 31, 12, 0, 0, 250_000)
    row = (1, True, -128, -(2**63), Decimal("1.50"), dt.date(1, 1, 1), noon.replace(tzinfo=dt.UTC), noon, 0.1)
    declared = "v int, " + ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    write(session, tmp_path / "t", "orc", [row, (2, *[None] * 8)], declared, list(kinds))
    found = source(tmp_path / "t", "orc", {"v": "int"}, kinds).read(session)
    assert {f.name: f.dataType.simpleString() for f in found.schema} == {"v": "int", **kinds}
    again = session.createDataFrame([row, (2, *[None] * 8)], declared)
    assert found.exceptAll(again).count() == 0 and again.exceptAll(found).count() == 0


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_where_on_a_year_opens_the_28_files_it_names_and_no_other(spark, tmp_path, kind):
    days = [dt.date(2024, 1, 1) + dt.timedelta(days=n) for n in range(365)]
    asked = set(days[60:88])
    for number, day in enumerate(days):
        folder = tmp_path / f"t/day={day}"
        folder.mkdir(parents=True)
        if day not in asked:
            (folder / f"x.{kind}").write_text("neither Parquet nor JSON")
        elif kind == "json":
            (folder / "x.json").write_text(json.dumps({"v": number}))
        else:
            pq.write_table(pa.table({"v": [number]}), folder / "x.parquet")
    where = f"day BETWEEN '{min(asked)}' AND '{max(asked)}'"
    snapshot = source(tmp_path / "t", kind, {"v": "bigint"}, {"day": "date"}, where)
    found = snapshot.read(build_session(spark, {}))
    assert [tuple(row) for row in found.orderBy("v").collect()] == [(n, d) for n, d in enumerate(days) if d in asked]
    if kind == "parquet":
        names = {f"day={day}/x.parquet" for day in asked}
        assert {"/".join(uri.rsplit("/", 2)[1:]) for uri in found.inputFiles()} == names
    snapshot.check_unchanged()


def contradiction(session, path, kind, own):
    """A folder day=2024-01-31 whose file holds a column `day` with the dates `own`."""
    rows = [(n, None if day is None else dt.date.fromisoformat(day)) for n, day in enumerate(own)]
    frame = session.createDataFrame(rows, "v int, day date").coalesce(1)
    frame.write.format(kind).options(header=True).save(str(path / "day=2024-01-31"))
    columns = {"v": "int"} | ({"day": "date"} if kind == "csv" else {})
    return source(path, kind, columns, {"day": "date"})


@pytest.mark.parametrize("kind", ["csv", "json", "orc", "parquet"])
def test_a_partition_column_that_is_also_in_the_file_must_say_the_same(spark, tmp_path, kind):
    session = build_session(spark, {})
    same = contradiction(session, tmp_path / "same", kind, ["2024-01-31"] * 2).read(session)
    assert sorted(map(tuple, same.select("v", "day").collect())) == [(n, dt.date(2024, 1, 31)) for n in (0, 1)]
    shown = rf"day=2024-01-31/.*\.{kind}: has the partition column 'day' itself, and there it is '2024-02-01'"
    with pytest.raises(EtlError, match=shown):
        contradiction(session, tmp_path / "other", kind, ["2024-01-31", "2024-02-01"]).read(session)
    if kind != "json":  # where a key that is missing cannot contradict
        with pytest.raises(EtlError, match="has the partition column 'day' itself, and there it is 'null'"):
            contradiction(session, tmp_path / "null", kind, [None]).read(session)


@pytest.mark.parametrize("kind", ["json", "orc", "parquet"])
def test_a_partition_column_that_is_in_the_file_with_another_type_is_named(spark, tmp_path, kind):
    session = build_session(spark, {})
    session.createDataFrame([(1, 5)], "v int, day int").write.format(kind).save(str(tmp_path / "t/day=2024-01-31"))
    with pytest.raises(EtlError, match=r"column 'day' is (int, declared date|date, and cannot keep '5')"):
        source(tmp_path / "t", kind, {"v": "int"}, {"day": "date"}).read(session)


def test_json_values_and_keys_are_checked_by_the_workers(spark, tmp_path, caplog):
    (tmp_path / "a.json").write_text('{"v": 1, "l": [{"x": 1.5}, null], "b": 1}\n{"v": 2, "m": {"k": "z"}}\n')
    (tmp_path / "b.json").write_text('{"v": 3, "b": null, "c": 2}\n')
    columns = {"v": "bigint", "l": "array<struct<x:double>>", "m": "map<string,string>"}
    with caplog.at_level(logging.WARNING):
        rows = source(tmp_path, "json", columns, {}).read(spark).orderBy("v").collect()
    assert [row["v"] for row in rows] == [1, 2, 3] and rows[0]["l"][0]["x"] == 1.5 and rows[0]["l"][1] is None
    assert rows[1]["m"] == {"k": "z"} and rows[1]["l"] is None
    assert "etl.sources.t: 2 keys are not declared, and not read: 'b' (in 2 records), 'c' (in 1 record)" in caplog.text
    (tmp_path / "c.json").write_text('{"v": 4}\n{"V": 5}\n{"v": 6.5}\n')
    with pytest.raises(EtlError) as caught:
        source(tmp_path, "json", columns, {}).read(spark)
    assert "c.json: line 3: column 'v' is bigint, and cannot keep '6.5'" in str(caught.value)
    assert "c.json: has a key 'V' (in 1 record), which differs from the declared 'v' by case alone" in str(caught.value)
    with pytest.raises(
        EtlError, match=r"etl\.sources\.t\.columns\.v = 'binary': no value of a json file is read as one"
    ):
        source(tmp_path, "json", {"v": "binary"}, {}).read(spark)


ORC = {
    "a": "boolean",
    "b": "tinyint",
    "c": "smallint",
    "d": "int",
    "e": "bigint",
    "f": "float",
    "g": "double",
    "h": "decimal(9,3)",
}
ORC |= {
    "i": "date",
    "j": "timestamp",
    "k": "timestamp_ntz",
    "l": "string",
    "m": "binary",
    "n": "array<struct<x:int,y:string>>",
}


def test_orc_columns_of_every_type_are_read(spark, tmp_path):
    session = build_session(spark, {})
    written = session.range(3).select(
        F.expr("id = 1").alias("a"),
        *(F.col("id").cast(ORC[name]).alias(name) for name in "bcdefgh"),
        F.expr("date_add(DATE '2024-01-30', CAST(id AS int))").alias("i"),
        F.expr("timestamp_seconds(id)").alias("j"),
        F.expr("CAST(timestamp_seconds(id) AS timestamp_ntz)").alias("k"),
        F.expr("CAST(id AS string)").alias("l"),
        F.expr("CAST(CAST(id AS string) AS binary)").alias("m"),
        F.expr("array(named_struct('x', CAST(id AS int), 'y', 'é'))").alias("n"),
    )
    written.write.orc(str(tmp_path / "t"))
    found = source(tmp_path / "t", "orc", ORC, {}).read(session)
    assert {f.name: f.dataType.simpleString() for f in found.schema} == ORC
    assert found.exceptAll(written).count() == 0 and found.count() == 3


@pytest.mark.parametrize("days", [1, 2], ids=["a constant", "by file"])
def test_columns_of_any_name_are_read(spark, tmp_path, days):
    session = build_session(spark, {})
    names = ["petal.length", "a`b", "c d"]
    table = pa.table({name: [1, 2] for name in names})
    for day in range(days):
        folder = tmp_path / "t" / f"the.day={day}"
        folder.mkdir(parents=True)
        pq.write_table(table, folder / "rows.parquet")
    found = source(tmp_path / "t", "parquet", dict.fromkeys(names, "bigint"), {"the.day": "int"}).read(session)
    assert found.columns == [*names, "the.day"]
    assert sorted(map(tuple, found.collect())) == sorted((v, v, v, day) for day in range(days) for v in (1, 2))


@pytest.mark.parametrize(
    ("written", "declared"),
    [p for p in itertools.product(["int", "bigint", "timestamp", "timestamp_ntz", "string"], repeat=2) if p[0] != p[1]],
)
def test_an_orc_file_of_another_type_is_named(spark, tmp_path, written, declared):
    session = build_session(spark, {})
    for name, kind in (("0", declared), ("1", written)):
        session.sql(f"SELECT CAST(NULL AS {kind}) AS v").write.orc(str(tmp_path / "t" / name))
    with pytest.raises(EtlError, match=rf"1/part-.*\.orc: column 'v' is {written}, declared {declared}"):
        source(tmp_path / "t", "orc", {"v": declared}, {}).read(session)


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_small_files_are_checked_without_a_job_and_large_ones_in_tasks_with_the_same_findings(
    spark, tmp_path, monkeypatch, caplog, kind
):
    """Problems of several files come in the order of the files, and so do the counts of undeclared keys."""
    session, context = build_session(spark, {}), spark.sparkContext
    lines = {
        "csv": {"bad": "v\nx\n", "good": "v\n1\n"},
        "json": {"bad": '{"v": "x"}\n', "good": '{"v": 1, "u": 2}\n'},
    }[kind]
    for name, file in (("good", "a"), ("bad", "b"), ("bad", "c")):
        (tmp_path / f"{file}.{kind}").write_text(lines[name])
    said = {}
    for limit in (1 << 20, 0):
        monkeypatch.setattr("sparkring.etl.sources.files.read.CHECKED_HERE_BYTES", limit)
        context.setLocalProperty("spark.jobGroup.id", f"checked {kind} {limit}")
        try:
            with pytest.raises(EtlError) as caught:
                source(tmp_path, kind, {"v": "int"}, {}).read(session)
            jobs = len(context.statusTracker().getJobIdsForGroup(f"checked {kind} {limit}"))
        finally:
            context.setLocalProperty("spark.jobGroup.id", None)
        said[limit] = str(caught.value)
        assert jobs == (0 if limit else 1)
    assert said[0] == said[1 << 20] and said[0].index("b." + kind) < said[0].index("c." + kind)
    for file in "bc":
        (tmp_path / f"{file}.{kind}").write_text(lines["good"])
    for limit in (1 << 20, 0):
        monkeypatch.setattr("sparkring.etl.sources.files.read.CHECKED_HERE_BYTES", limit)
        assert [row.v for row in source(tmp_path, kind, {"v": "int"}, {}).read(session).collect()] == [1, 1, 1]
    assert caplog.text.count("'u' (in 3 records)") == (2 if kind == "json" else 0)
