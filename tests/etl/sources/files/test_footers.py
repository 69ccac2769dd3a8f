"""What footers say of columns, as files of pyarrow have them. Those that Spark writes: tests/spark."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc
from pyspark.sql.types import (
    ArrayType,
    DateType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from sparkring.conf.sources import FilesSource
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.files.footers import NAMES, check_footers
from sparkring.etl.sources.files.listing import list_files
from sparkring.etl.sources.pin import pin
from sparkring.etl.spark_platform.session import build_session

DECLARED = StructType([StructField("a", LongType()), StructField("b", StringType())])
DAY = StructType([StructField("day", DateType())])


@pytest.mark.parametrize("kind", ["parquet", "orc"])
def test_each_file_is_compared_with_the_declaration(tmp_path, kind):
    tables = [{"a": [1], "b": ["x"]}, {"a": ["1"], "B": ["x"]}, {"a": [1], "b": ["x"], "c": [1], "day": [1]}]
    for number, table in enumerate(tables):
        write = pq.write_table if kind == "parquet" else orc.write_table
        write(pa.table(table), tmp_path / f"{number}.{kind}")
    (tmp_path / f"3.{kind}").write_text("no such file")
    listed = list_files("t", FilesSource(path=str(tmp_path), format=kind, columns={"a": "bigint", "b": "string"}))
    good, other, own, broken = check_footers(listed, kind, DECLARED, DAY)
    assert not good.problems and not good.partition_columns
    assert other.problems == [
        f"1.{kind}: column 'a' is string, declared bigint",
        f"1.{kind}: has a column 'B', which Spark, as it ignores case, takes for the declared 'b'; rename it",
    ]
    assert own.problems == [f"2.{kind}: column 'day' is bigint, declared date"] and own.partition_columns == ["day"]
    assert len(broken.problems) == 1 and broken.problems[0].startswith(f"3.{kind}: not a readable {NAMES[kind]} file: ")


def test_int96_is_a_timestamp_and_nanoseconds_without_a_zone_are_none(tmp_path):
    """INT96 is what Spark writes timestamps in by default, inside arrays and structs too."""
    moment = pa.array([0], pa.timestamp("ns"))
    inside = pa.StructArray.from_arrays([moment], ["at"])
    table = pa.table({"a": [1], "at": moment, "inside": inside, "all": pa.array([[0]], pa.list_(moment.type))})
    pq.write_table(table, tmp_path / "0.parquet", use_deprecated_int96_timestamps=True)
    pq.write_table(table, tmp_path / "1.parquet")
    at = StructField("at", TimestampType())
    declared = StructType([at, StructField("inside", StructType([at])), StructField("all", ArrayType(TimestampType()))])
    listed = list_files("t", FilesSource(path=str(tmp_path), format="parquet", columns={"at": "timestamp"}))
    int96, nanoseconds = check_footers(listed, "parquet", declared, StructType())
    assert not int96.problems
    assert nanoseconds.problems[0].startswith(
        "1.parquet: column 'at' is timestamp[ns] (unknown to Spark, which reads micro"
    )
    assert len(nanoseconds.problems) == 3


@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
def test_nanoseconds_are_refused_as_spark_does_not_read_them(tmp_path, zone):
    """pandas writes them where a frame has them."""
    pq.write_table(pa.table({"at": pa.array([0], pa.timestamp("ns", zone))}), tmp_path / "0.parquet")
    listed = list_files("t", FilesSource(path=str(tmp_path), format="parquet", columns={"at": "timestamp"}))
    for kind in (TimestampType(), TimestampNTZType()):
        (found,) = check_footers(listed, "parquet", StructType([StructField("at", kind)]), StructType())
        assert "to_parquet(coerce_timestamps='us')" in found.problems[0]


@pytest.mark.parametrize("kind", ["parquet", "orc"])
def test_a_column_that_later_files_have_is_null_in_earlier_ones_where_the_recipe_says_so(spark, tmp_path, kind):
    write = pq.write_table if kind == "parquet" else orc.write_table
    write(pa.table({"a": [1, 2]}), tmp_path / f"0.{kind}")
    write(pa.table({"b": ["x"], "a": [3]}), tmp_path / f"1.{kind}")

    def rows(**changes):
        source = FilesSource(path=str(tmp_path), format=kind, columns={"a": "bigint", "b": "string"}, **changes)
        return sorted(map(tuple, pin("t", source).read(build_session(spark, {})).collect()))

    assert rows(missing_columns="null") == [(1, None), (2, None), (3, "x")]
    with pytest.raises(EtlError, match=rf"0\.{kind}: has no column 'b'"):
        rows()
    write(pa.table({"a": [1], "b": [2]}), tmp_path / f"2.{kind}")
    with pytest.raises(EtlError, match=rf"2\.{kind}: column 'b' is bigint, declared string"):
        rows(missing_columns="null")
    (tmp_path / f"1.{kind}").unlink()
    (tmp_path / f"2.{kind}").unlink()
    with pytest.raises(EtlError, match="no file has a column 'b'"):
        rows(missing_columns="null")


def test_an_orc_file_without_names_is_refused_where_columns_may_be_missing(spark, tmp_path):
    """Spark would read its columns by their places."""
    orc.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "0.orc")
    orc.write_table(pa.table({"_col0": [2], "_col1": ["y"]}), tmp_path / "1.orc")
    columns = {"b": "string", "a": "bigint"}
    source = FilesSource(path=str(tmp_path), format="orc", columns=columns, missing_columns="null")
    with pytest.raises(EtlError, match=r"1\.orc: has the columns \['_col0', '_col1'\], which are no names"):
        pin("t", source).read(build_session(spark, {}))
    orc.write_table(pa.table({"_col0": [2], "c": ["y"]}), tmp_path / "1.orc")  # has a name: read by names
    rows = {tuple(row) for row in pin("t", source).read(build_session(spark, {})).collect()}
    assert rows == {(None, None), ("x", 1)}
