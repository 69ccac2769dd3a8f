"""Tables of a catalog: pinned by their files, refused where files are not the table, noticed where they change."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.sources import CatalogSource
from sparkring.etl.build import BuildRequest, build_dataset, pinned_sources
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.catalog.source import CatalogSnapshot
from sparkring.etl.sources.pin import pin
from sparkring.etl.sources.snapshot import PinContext
from sparkring.etl.spark_platform.jvm import is_loadable
from sparkring.etl.spark_platform.session import build_session
from tests.spark_connect import connect_session, needs_connect

pytestmark = pytest.mark.spark


class Catalog:
    """A database of Spark's session catalog, below a folder of the test's own."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.name, self.folder = f"db_{folder.name}".lower(), folder / "warehouse"
        self.writer, self.session = spark.newSession(), build_session(spark, {})
        self.spark = spark
        self.sql(f"CREATE DATABASE {self.name} LOCATION '{self.folder}'")
        self.sql(f"USE {self.name}")

    def sql(self, text: str) -> Any:
        return self.writer.sql(text.replace("DB.", f"{self.name}."))

    def days(self, table: str, days: Iterator[int] | range, using: str = "parquet") -> None:
        """A table with one partition per day of January, each with two rows."""
        values = ", ".join(f"({day * 10 + n}, DATE '2024-01-{day:02d}')" for day in days for n in (0, 1))
        self.sql(f"CREATE TABLE {table} (id INT, day DATE) USING {using} PARTITIONED BY (day)")
        self.sql(f"INSERT INTO {table} VALUES {values}")

    def pin(self, table: str, where: str | None = None, **keys: Any) -> CatalogSnapshot:
        config = CatalogSource.model_validate({"table": f"{self.name}.{table}", "where": where, **keys})
        found = pin("t", config, PinContext(lambda: self.session, ""))
        assert isinstance(found, CatalogSnapshot)
        return found

    def rows(self, snapshot: CatalogSnapshot) -> list[tuple[Any, ...]]:
        return sorted(tuple(row) for row in snapshot.read(build_session(self.session, {})).collect())

    def refusal(self, table: str, where: str | None = None, **keys: Any) -> str:
        with pytest.raises(EtlError) as caught:
            self.pin(table, where, **keys)
        return str(caught.value)


@pytest.fixture
def classic(spark: Any, tmp_path: Path) -> Iterator[Catalog]:
    made = Catalog(spark, tmp_path)
    yield made
    made.sql("USE default")
    made.sql(f"DROP DATABASE {made.name} CASCADE")


@pytest.fixture
def catalog(session_kind: str, classic: Catalog) -> Iterator[Catalog]:
    """The catalog read by either kind of session."""
    if session_kind == "classic":
        yield classic
        return
    with connect_session(classic.spark) as session:
        classic.session = build_session(session, {})
        yield classic


@pytest.mark.parametrize("using", ["parquet", "orc", "csv", "json"])
def test_only_the_partitions_of_where_are_pinned_and_read(catalog: Catalog, using: str) -> None:
    catalog.days("events", range(1, 8), using)
    found = catalog.pin("events", "day BETWEEN '2024-01-02' AND '2024-01-03'")
    folders = {file.path.split("/")[0] for file in found.files}
    assert folders == {"day=2024-01-02", "day=2024-01-03"} and len(catalog.pin("events").files) > len(found.files)
    read = found.read(catalog.session)
    assert {re.search("day=[^/]*", path)[0] for path in read.inputFiles()} == folders  # type: ignore[index]
    assert [row.id for row in read.orderBy("id").collect()] == [20, 21, 30, 31]


def test_equal_files_have_one_fingerprint_and_others_another(catalog: Catalog) -> None:
    catalog.days("events", range(1, 4))
    where = "day < '2024-01-03'"
    first = catalog.pin("events", where)
    catalog.sql("INSERT INTO events VALUES (99, DATE '2024-01-03')")  # not of the partitions that are read
    assert catalog.pin("events", where).fingerprint == first.fingerprint
    place = f"LOCATION '{catalog.folder}/events'"
    catalog.sql(f"CREATE TABLE other (id INT, day DATE) USING parquet PARTITIONED BY (day) {place}")
    catalog.sql("MSCK REPAIR TABLE other")
    assert catalog.pin("other", where).fingerprint == first.fingerprint
    assert catalog.pin("other", "NOT day >= '2024-01-03'").fingerprint == first.fingerprint
    prints = {catalog.pin("events").fingerprint, catalog.pin("events", where, columns={"id": "int"}).fingerprint}
    for change in (
        "ALTER TABLE events DROP PARTITION (day = '2024-01-02')",  # files of a managed table go with it
        "INSERT INTO events VALUES (98, DATE '2024-01-01')",
        "ALTER TABLE other PARTITION (day = '2024-01-01') SET LOCATION '{}/events/day=2024-01-03'",
    ):
        catalog.sql(change.format(catalog.folder))
        prints.add(catalog.pin("other" if "other" in change else "events", where).fingerprint)
    assert len({first.fingerprint, *prints}) == 6


def test_how_a_table_is_parsed_is_part_of_its_fingerprint(catalog: Catalog) -> None:
    catalog.sql("CREATE TABLE t (a STRING) USING csv OPTIONS (sep ';')")
    catalog.sql("INSERT INTO t VALUES ('x')")
    before = catalog.pin("t")
    catalog.sql("ALTER TABLE t SET SERDEPROPERTIES ('sep' = ',')")
    assert catalog.pin("t").fingerprint != before.fingerprint
    with pytest.raises(EtlError, match=r"changed after it was pinned \(how a table is read\)"):
        before.check_unchanged()


def test_declared_columns_are_read_and_others_are_refused(catalog: Catalog) -> None:
    catalog.days("events", range(1, 3))
    found = catalog.pin("events", "day = '2024-01-01'", columns={"id": "int"})
    assert catalog.rows(found) == [(10,), (11,)]
    said = catalog.refusal("events", columns={"id": "bigint", "dya": "date"})
    assert "column 'id' is int, declared bigint" in said and "has no column 'dya'; it has ['id', 'day']" in said
    assert "columns.id = 'integr': not a Spark type" in catalog.refusal("events", columns={"id": "integr"})


def test_the_lineage_says_what_was_read(catalog: Catalog) -> None:
    catalog.days("events", range(1, 3))
    found = catalog.pin("events", "day = '2024-01-01'")
    lineage = found.lineage()
    assert lineage["table"] == f"{catalog.name}.events" and lineage["where"] == "day = '2024-01-01'"
    assert lineage["files"] == len(found.files) and lineage["bytes"] == sum(file.bytes for file in found.files) > 0
    assert lineage["read"] == [f"spark_catalog.{catalog.name}.events"] and lineage["fingerprint"] == found.fingerprint


def pinned(catalog: Catalog, table: str, where: str | None) -> tuple[Any, ...]:
    found = catalog.pin(table, where)
    return found.found, found.paths, found.lineage()


ASKED = [
    ("kinds", None),
    ("kinds", "n > 1 AND s <> 'x'"),
    ("kinds", "s IS NULL OR f < 0"),
    ("moved", None),
    ("flat", None),
    ("above", None),
    ("above", "d = '2024-02-29'"),
]


def test_connect_finds_what_a_classic_session_has_pinned(classic: Catalog) -> None:
    needs_connect()  # before tables are written
    kinds = "d DATE, at TIMESTAMP, wall TIMESTAMP_NTZ, n INT, m DECIMAL(6, 2), f FLOAT, ok BOOLEAN, s STRING"
    parts = "d, at, wall, n, m, f, ok, s"
    first = (
        "DATE '2024-02-29', TIMESTAMP '2024-03-10 02:30:00.5', TIMESTAMP_NTZ '2024-03-10 02:30:00', 7, 1.50, 0.1, true"
    )
    classic.sql(f"CREATE TABLE kinds (v DOUBLE, b CHAR(3), {kinds}) USING parquet PARTITIONED BY ({parts})")
    classic.sql(f"INSERT INTO kinds VALUES (1, 'a', {first}, 'é:% /=\\'')")
    classic.sql("INSERT INTO kinds VALUES (2, NULL, NULL, NULL, NULL, 2, NULL, -0.1, false, NULL)")
    folder = classic.folder
    classic.days("moved", range(1, 4))
    classic.sql(f"ALTER TABLE moved PARTITION (day = '2024-01-02') SET LOCATION '{folder}/moved/day=2024-01-03'")
    classic.sql(f"CREATE TABLE flat (a STRING COMMENT 'x') USING csv OPTIONS (sep ';') LOCATION '{folder}/x y%'")
    classic.sql("INSERT INTO flat VALUES ('1')")
    classic.sql("CREATE VIEW under AS SELECT k.d, n, v, a FROM kinds k JOIN flat ON a < n")
    classic.sql("CREATE VIEW above AS SELECT v + 1 AS v, d, a FROM under WHERE n > (SELECT min(id) - 100 FROM moved)")
    expected = {asked: pinned(classic, *asked) for asked in ASKED}
    with connect_session(classic.spark) as session:
        classic.session = build_session(session, {})
        assert {asked: pinned(classic, *asked) for asked in ASKED} == expected


def test_connect_knows_which_connectors_the_server_has(classic: Catalog) -> None:
    with connect_session(classic.spark) as session:
        assert is_loadable(session, "java.lang.String") and not is_loadable(session, "io.delta.sql.NotHere")


def test_a_server_too_old_to_say_what_a_table_is_made_of_is_named() -> None:
    session: Any = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session", "version": "3.5.9"})()
    with pytest.raises(
        EtlError, match=r"etl\.sources\.t\.table = 'd\.t': by Spark Connect, Spark 3\.5\.9 does not say"
    ):
        pin("t", CatalogSource(table="d.t"), PinContext(lambda: session, ""))


# --- what changes after the pin


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "INSERT INTO events VALUES (99, DATE '2024-01-02')",
            "1 file added, removed or written, such as day=",
        ),
        ("INSERT INTO events VALUES (99, DATE '2024-01-09')", "such as day=2024-01-09"),
        ("ALTER TABLE events DROP PARTITION (day = '2024-01-01')", "such as day=2024-01-01/"),
        ("DROP TABLE events", "no such table; there is ['seen']"),
        ("CREATE OR REPLACE VIEW seen AS SELECT id FROM events", "a view is defined again"),
    ],
)
def test_a_change_after_the_pin_is_noticed_before_and_after_reading(catalog: Catalog, change: str, said: str) -> None:
    catalog.days("events", range(1, 3))
    catalog.sql("CREATE VIEW seen AS SELECT id FROM events WHERE id > 10")
    table = "seen" if "VIEW" in change else "events"
    found = catalog.pin(table)
    found.check_unchanged()
    catalog.sql(change)
    with pytest.raises(EtlError) as late:
        found.check_unchanged()
    with pytest.raises(EtlError) as early:
        found.read(build_session(catalog.session, {}))
    assert str(late.value) == str(early.value) and said in str(late.value)
    assert f"etl.sources.t.table = '{catalog.name}.{table}'" in str(late.value)


def drop_while_it_is_read(tables: dict[str, Any]) -> Any:
    """`etl.rows` of the test below."""
    tables["t"].sparkSession.sql(f"DROP TABLE {os.environ['TABLE_TO_DROP']}")
    return tables["t"]


def test_a_table_dropped_while_it_is_read_is_named(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog.days("events", range(1, 3))
    monkeypatch.setenv("TABLE_TO_DROP", f"{catalog.name}.events")
    block = {"sources": {"t": {"table": f"{catalog.name}.events"}}, "rows": f"{__name__}:drop_while_it_is_read"}
    config = EtlConfig.model_validate(block | {"features": {"id": {"kind": "numeric"}}})
    request = BuildRequest(
        config, pinned_sources(config, {"t": catalog.pin("events")}, {}), "d", str(tmp_path / "datasets")
    )
    with pytest.raises(EtlError, match=rf"etl\.sources\.t\.table = '{catalog.name}\.events': no such table"):
        build_dataset(catalog.session, request)
    assert not list(tmp_path.glob("datasets/*/data-*"))


def test_a_file_written_over_is_noticed(catalog: Catalog) -> None:
    catalog.sql("CREATE TABLE flat USING parquet AS SELECT 1 AS a")
    found = catalog.pin("flat")
    (file,) = catalog.folder.glob("flat/*.parquet")
    content = file.read_bytes()
    file.write_bytes(content)
    with pytest.raises(EtlError, match=f"1 file added, removed or written, such as {file.name}"):
        found.check_unchanged()


# --- views


def test_a_view_is_pinned_by_all_tables_of_its_plan(catalog: Catalog) -> None:
    catalog.days("events", range(1, 4))
    catalog.sql("CREATE TABLE names USING orc AS SELECT 10 AS id, 'ten' AS name UNION ALL SELECT 20, 'twenty'")
    catalog.sql("CREATE TABLE most USING parquet AS SELECT 20 AS top")
    catalog.sql("CREATE VIEW below AS SELECT e.*, name FROM events e LEFT JOIN names USING (id)")
    catalog.sql("CREATE VIEW above AS SELECT * FROM below WHERE id <= (SELECT max(top) FROM most)")
    found = catalog.pin("above", "day = '2024-01-02'")
    assert [row[0] for row in catalog.rows(found)] == [20]
    assert found.lineage()["read"] == [f"spark_catalog.{catalog.name}.{name}" for name in ("events", "most", "names")]
    assert {file.path.split("/")[0] for file in found.files if "day=" in file.path} == {"day=2024-01-02"}
    catalog.sql("INSERT INTO most VALUES (30)")  # of the subquery alone
    with pytest.raises(EtlError, match="changed after it was pinned"):
        found.check_unchanged()


def test_the_text_of_a_view_within_is_part_of_the_fingerprint(catalog: Catalog) -> None:
    catalog.days("events", range(1, 3))
    catalog.sql("CREATE VIEW inner_view AS SELECT id FROM events WHERE id > 10")
    catalog.sql("CREATE VIEW outer_view AS SELECT id FROM inner_view")
    first = catalog.pin("outer_view")
    assert catalog.pin("outer_view").fingerprint == first.fingerprint
    catalog.sql("CREATE OR REPLACE VIEW inner_view AS SELECT id FROM events WHERE id > 11")
    assert catalog.pin("outer_view").fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "value", ["rand()", "current_date()", "current_user()", "now()", "uuid()", "(SELECT date('today'))"]
)
def test_a_view_that_gives_other_rows_tomorrow_is_refused(catalog: Catalog, value: str) -> None:
    catalog.days("events", range(1, 3))
    catalog.sql(f"CREATE VIEW moving AS SELECT id, {value} AS v FROM events")
    assert "are others at another time" in catalog.refusal("moving")


def test_a_temporary_view_and_a_cached_table_are_refused(catalog: Catalog) -> None:
    catalog.days("events", range(1, 3))
    catalog.sql("CREATE GLOBAL TEMPORARY VIEW passing AS SELECT id FROM DB.events")
    config = CatalogSource(table="global_temp.passing")
    with pytest.raises(EtlError, match=r"'global_temp\.passing' is a temporary view; declare the tables"):
        pin("t", config, PinContext(lambda: catalog.session, ""))
    catalog.sql("DROP VIEW global_temp.passing")
    catalog.sql("CACHE TABLE DB.events")
    assert "UNCACHE TABLE it first" in catalog.refusal("events")
    catalog.sql("UNCACHE TABLE DB.events")


# --- what cannot be read by files


def test_a_missing_table_is_named_with_those_like_it(catalog: Catalog) -> None:
    catalog.days("events", range(1, 3))
    assert catalog.refusal("event") == (
        f"etl.sources.t.table = '{catalog.name}.event': no such table; there is ['events']"
    )
    config = CatalogSource(table="no_such_database.t")
    with pytest.raises(EtlError, match=r"no such table: .*no_such_database.* cannot be found"):
        pin("t", config, PinContext(lambda: catalog.session, ""))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("id = 10", "'id' is no partition column (those are ['day'])"),
        ("day = 'yesterday'", "are others at another time"),
        ("day = 'Sunday'", "etl.sources.t.where"),
        ("day IN (SELECT DATE 'tomorrow')", "a subquery"),
        ("dya = '2024-01-01'", "`dya`"),
        ("day", "etl.sources.t.where"),
        ("day = current_date()", "are others at another time"),
        ("day IN (SELECT DATE '2024-01-01')", "a subquery"),
        ("day > '2025-01-01'", "has no files where day > '2025-01-01'"),
        ("1 = 2", "has no files where 1 = 2"),
    ],
)
def test_a_where_that_does_not_name_partitions_is_refused(catalog: Catalog, where: str, said: str) -> None:
    catalog.days("events", range(1, 3))
    assert said in catalog.refusal("events", where)


def test_an_empty_table_is_refused(catalog: Catalog) -> None:
    catalog.sql("CREATE TABLE nothing (a INT) USING parquet")
    assert catalog.refusal("nothing").endswith(".nothing': has no files")


def test_a_table_behind_jdbc_is_refused_with_the_line_to_write(catalog: Catalog) -> None:
    options = "url 'jdbc:derby:memory:behind;create=true', dbtable 'SYS.SYSTABLES'"
    catalog.sql(f"CREATE TABLE behind USING jdbc OPTIONS ({options})")
    assert "behind is no table of files (jdbc); write {format: jdbc, url_env: NAME" in catalog.refusal("behind")


def test_the_folder_of_a_lake_table_is_refused_whatever_the_catalog_calls_it(catalog: Catalog) -> None:
    for mark, line in {
        "_delta_log/0.json": "a table of Delta, .*write {format: delta, path: file:.*/lake}",
        "metadata/v1.metadata.json": "a table of Iceberg, .*write {format: iceberg, table: ",
        ".hoodie/x": "a table of Hudi, .*export its rows as Parquet",
    }.items():
        catalog.sql(f"CREATE TABLE inside USING parquet LOCATION '{catalog.folder}/lake/inside' AS SELECT 1 AS a")
        sign = catalog.folder / "lake" / mark
        sign.parent.mkdir(parents=True)
        sign.write_text("{}")
        assert re.search(line, catalog.refusal("inside"))
        catalog.sql("DROP TABLE inside")
        shutil.rmtree(catalog.folder / "lake")


def test_a_table_whose_connector_is_missing_is_refused_with_the_line_to_write(catalog: Catalog) -> None:
    """As another engine has left it in a metastore that it shares with Spark."""
    jvm, session = catalog.spark._jvm, catalog.spark._jsparkSession
    catalog.sql("CREATE TABLE lake USING parquet AS SELECT 1 AS a")
    store = session.sharedState().externalCatalog()
    table = store.getTable(catalog.name, "lake")
    provider = next(i for i in range(table.productArity()) if table.productElementName(i) == "provider")
    parts = [table.productElement(i) for i in range(table.productArity())]
    parts[provider] = jvm.scala.Option.apply("delta")
    store.alterTable(table.copy(*parts))
    line = f"{{format: delta, path: file:{catalog.folder}/lake}}"
    assert f"{catalog.name}.lake is no table of files (delta); write {line}" in catalog.refusal("lake")
