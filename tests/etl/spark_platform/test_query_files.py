"""What a query of Spark reads, looked up in its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkring.etl.spark_platform.query_files import condition_columns, folder_names, is_fixed, query_reads
from sparkring.etl.spark_platform.reads import OtherTable, ReadTable

pytestmark = pytest.mark.spark


@pytest.fixture
def table(spark: Any, tmp_path: Path) -> Any:
    session = spark.newSession()
    session.sql(
        f"CREATE TABLE read_files (a INT, p STRING) USING parquet PARTITIONED BY (p) LOCATION '{tmp_path}/x y%'"
    )
    session.sql("INSERT INTO read_files VALUES (1, 'é:% /='), (2, NULL), (3, 'null')")
    yield session.table("read_files")
    session.sql("DROP TABLE read_files")


def files_of(query: Any) -> dict[str, tuple[Any, ...]]:
    (found,) = query_reads(query).tables
    assert isinstance(found, ReadTable)
    return {file.path: (file.bytes, file.mtime_ms, file.partition) for file in found.files}


def test_files_have_their_size_time_and_partition(table: Any, tmp_path: Path) -> None:
    found, folder = files_of(table), tmp_path / "x y%"
    on_disk = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*.parquet")}
    assert {path: (size, mtime) for path, (size, mtime, _) in found.items()} == {
        path: (stat.st_size, stat.st_mtime_ns // 1_000_000) for path, stat in on_disk.items()
    }
    assert {values for _, _, values in found.values()} == {("é:% /=",), (None,), ("null",)}
    assert [values for _, _, values in files_of(table.where("p = 'null'")).values()] == [("null",)]


def test_a_folder_of_any_name_is_listed(table: Any, tmp_path: Path) -> None:
    folder = f"file:{tmp_path}/x y%"
    found = folder_names(table.sparkSession, [folder, f"file:{tmp_path}/nothing", "s3a://no-such-bucket/x"], folder)
    assert [*found] == [folder] and len(found[folder]) == 4  # three partitions and _SUCCESS; no jar of S3 here


def test_what_is_no_table_of_files_is_named(spark: Any) -> None:
    made = spark.createDataFrame(spark.sparkContext.parallelize([(1,)]), "a INT")
    assert query_reads(made).tables == (OtherTable("org.apache.spark.sql.execution.LogicalRDD"),)
    assert query_reads(spark.range(3).join(spark.sql("SELECT 1 AS x"))).tables == ()


@pytest.mark.parametrize(
    "value", ["rand()", "current_timestamp()", "(SELECT max(now()))", "current_catalog()", "date('today')"]
)
def test_what_differs_tomorrow_is_seen_wherever_it_stands(spark: Any, value: str) -> None:
    assert not is_fixed(spark.sql(f"SELECT {value} AS a FROM range(3)"))
    assert not is_fixed(spark.sql(f"SELECT id FROM range(3) WHERE string({value}) <> 'x'"))
    assert is_fixed(spark.sql("SELECT hash(id), DATE '2024-01-01' FROM range(3)"))


def test_the_columns_of_a_condition_are_known(table: Any) -> None:
    assert condition_columns(table.where("P = 'x' OR a + 1 > 2")) == ["a", "p"]
    assert condition_columns(table.where("p IN (SELECT max('x'))")) is None


def test_a_table_of_many_files_is_looked_up_in_a_few_calls(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call through py4j takes 0.1 ms: 20,000 of them would take seconds."""
    spark.sql(f"CREATE TABLE many_files (a INT) USING csv LOCATION '{tmp_path}'")
    for n in range(4000):
        (tmp_path / f"{n}.csv").write_text("1\n")
    (tmp_path / "_hidden.csv").write_text("1\n")
    try:
        query = spark.newSession().table("many_files")
        query._jdf.queryExecution().optimizedPlan()  # Spark's own listing
        client = spark._jvm._gateway_client
        calls: list[str] = []
        send = client.send_command

        def counted(command: str, *rest: Any, **more: Any) -> Any:
            if not command.startswith("m\n"):  # that an object of Java's is not used any more, of whatever test
                calls.append(command)
            return send(command, *rest, **more)

        monkeypatch.setattr(client, "send_command", counted)
        assert len(files_of(query)) == 4000
        assert len(calls) < 400
    finally:
        spark.sql("DROP TABLE many_files")
