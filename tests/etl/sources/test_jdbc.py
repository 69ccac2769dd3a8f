"""Tables of a database, on a real PostgreSQL: one snapshot, exact values, no secret anywhere, nothing left behind."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sparkring.conf.secrets import redact
from sparkring.conf.sources import JdbcSource
from sparkring.etl.errors import EtlError
from sparkring.etl.sources import jdbc
from sparkring.etl.sources.jdbc import DRIVERS, FIXED_ZONE, JdbcSnapshot, find_database, quoted_name, whole_number
from sparkring.etl.sources.pin import pin
from sparkring.etl.sources.snapshot import PinContext
from sparkring.etl.spark_platform.session import build_session
from tests.etl.sources.postgres import PASSWORD, USER, PostgresServer, running
from tests.spark_connect import connect_session, needs_connect

pytestmark = pytest.mark.spark
UTC = ZoneInfo("UTC")
FULL = bool(os.environ.get("SPARKRING_FULL"))  # the long proof: all reads and examples
ENVIRONMENT = {"LAKE_USER": USER, "LAKE_PASSWORD": PASSWORD}


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with running() as server:
        yield server


class Lake:
    """Pins sources of one server, with their credentials in the environment."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark, self.session = spark, build_session(spark, {})
        self.datasets = folder / "datasets"

    def pin(self, **keys: Any) -> JdbcSnapshot:
        found = pin("t", source(**keys), PinContext(lambda: self.session, str(self.datasets)))
        assert isinstance(found, JdbcSnapshot)
        return found

    def rows(self, **keys: Any) -> list[tuple[Any, ...]]:
        return sorted(tuple(row) for row in self.pin(**keys).read(self.session).collect())

    def landings(self) -> list[str]:
        return sorted(path.name for path in self.datasets.glob("landed/*"))


@pytest.fixture
def lake(spark: Any, postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    for name, value in {**ENVIRONMENT, "LAKE_URL": postgres.url}.items():
        monkeypatch.setenv(name, value)
    return Lake(spark, tmp_path)


@pytest.fixture
def either(session_kind: str, lake: Lake) -> Iterator[Lake]:
    """The database read by either kind of session."""
    if session_kind == "classic":
        yield lake
        return
    with connect_session(lake.spark) as session:
        lake.session = build_session(session, {})
        yield lake


def source(**keys: Any) -> JdbcSource:
    connection = {"url_env": "LAKE_URL", "user_env": "LAKE_USER", "password_env": "LAKE_PASSWORD"}
    return JdbcSource.model_validate({"format": "jdbc", **connection, **keys})


PARTS = {"dbtable": "account", "partitionColumn": "id", "numPartitions": 8}


@contextmanager
def transfers(server: PostgresServer) -> Iterator[None]:
    """Money moves between random accounts, about a thousand times a second."""
    server.sql("DROP TABLE IF EXISTS account")
    server.sql("CREATE TABLE account AS SELECT id, 1000 AS balance FROM generate_series(1, 10000) id")
    server.sql("CREATE UNIQUE INDEX ON account (id)")
    loop = """DO $$ DECLARE a int; b int; BEGIN LOOP
        a := 1 + floor(random() * 10000); b := 1 + floor(random() * 10000);
        UPDATE account SET balance = balance - 7 WHERE id = a;
        UPDATE account SET balance = balance + 7 WHERE id = b;
        COMMIT; PERFORM pg_sleep(0.0005);
    END LOOP; END $$"""
    command, environment = server.client("-c", loop)
    bank = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'DO %'")
        bank.wait(30)


def test_eight_partitions_read_one_moment_of_a_bank_at_work(lake: Lake, postgres: PostgresServer) -> None:
    with transfers(postgres):
        seen = set()
        for _ in range(20 if FULL else 2):
            rows = lake.rows(**PARTS)
            assert len(rows) == 10_000 and sum(balance for _, balance in rows) == 10_000_000
            seen.add(tuple(rows))
        assert len(seen) > 1  # money did move


def test_without_a_snapshot_a_warning_says_what_that_means(
    lake: Lake, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    postgres.table("still", "SELECT 7 AS id")
    with caplog.at_level(logging.WARNING):
        assert lake.rows(dbtable="still") == [(7,)]
        assert not caplog.records
        assert lake.rows(dbtable="still", consistency="none") == [(7,)]
    assert "etl.sources.t: consistency: none: rows written while it is read may come twice" in caplog.text


def test_rows_beyond_the_bounds_and_nulls_are_read(lake: Lake, postgres: PostgresServer) -> None:
    postgres.table("wide", "SELECT nullif(id, 50) AS id FROM generate_series(1, 100) id")
    found = lake.pin(dbtable="wide", partitionColumn="id", numPartitions=4, lowerBound=10, upperBound=20)
    rows = [row.id for row in found.read(lake.session).collect()]
    assert rows.count(None) == 1 and sorted(row for row in rows if row) == [n for n in range(1, 101) if n != 50]


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("numeric(20,4)", "-12345678.5", "9999.25"),
        ("double precision", "-1e300", "1e300"),
        ("date", "0044-03-15", "2024-02-29"),
        ("timestamptz", "1969-12-31 23:59:59.999999+00", "2024-02-29 12:00+05:30"),
        ("timestamp", "1969-12-31 23:59:59.999999", "2024-02-29 12:00"),
        ("bigint", "-9223372036854775808", "9223372036854775807"),
    ],
)
def test_bounds_that_are_not_given_are_looked_up(
    either: Lake, postgres: PostgresServer, kind: str, low: str, high: str
) -> None:
    postgres.table("ends", f"SELECT v::{kind} AS id FROM (VALUES ('{low}'), ('{high}')) ends (v)")
    asked = {"dbtable": "ends", "partitionColumn": "ID", "numPartitions": 3, "consistency": "none"}
    rows = either.rows(**asked)
    assert rows == either.rows(dbtable="ends") and len(rows) == 2


def test_a_table_without_rows_has_its_columns(either: Lake, postgres: PostgresServer) -> None:
    postgres.sql("DROP TABLE IF EXISTS nothing; CREATE TABLE nothing (id int, day date)")
    found = either.pin(dbtable="nothing", partitionColumn="id", numPartitions=2, consistency="none").read(
        either.session
    )
    assert found.count() == 0 and found.dtypes == [("id", "int"), ("day", "date")]


def test_equal_rows_have_one_fingerprint_wherever_they_are_and_however_they_are_read(
    lake: Lake, postgres: PostgresServer
) -> None:
    zero = "CASE WHEN id % 3 = 0 THEN '0' ELSE '-0' END::float8 AS zero"
    for table, series in {"up": "1, 5000", "down": "5000, 1, -1", "more": "1, 5001"}.items():
        postgres.table(table, f"SELECT id % 50 AS id, {zero}, 'x' || id % 9 AS t FROM generate_series({series}) id")
    first = lake.pin(dbtable="up")
    again = lake.pin(query="SELECT * FROM down", fetchsize=7)
    parted = lake.pin(dbtable="down", partitionColumn="id", numPartitions=5, consistency="none")
    assert first.landing.files == again.landing.files == parted.landing.files
    assert first.fingerprint == again.fingerprint == parted.fingerprint != lake.pin(dbtable="more").fingerprint
    assert lake.pin(query="SELECT id::bigint, zero, t FROM up").fingerprint != first.fingerprint


def test_declared_columns_are_read_and_others_are_refused(either: Lake, postgres: PostgresServer) -> None:
    postgres.table("item", "SELECT 1 AS id, 'a'::text AS name, 2.5::numeric(6,2) AS price")
    assert either.pin(dbtable="item", columns={"price": "decimal(6,2)", "id": "int"}).read(either.session).columns == [
        "price",
        "id",
    ]
    with pytest.raises(EtlError) as caught:
        either.pin(dbtable="item", columns={"id": "bigint", "nam": "string"})
    assert str(caught.value) == (
        "etl.sources.t: the table does not match the declared columns:\n  - column 'id' is int, declared bigint\n"
        "  - has no column 'nam'; it has ['id', 'name', 'price']"
    )
    assert len(either.landings()) == 1


def test_types_that_spark_would_not_keep_are_refused_with_the_cast(either: Lake, postgres: PostgresServer) -> None:
    columns = "a numeric, b numeric(50,2), c time, d numeric[], e numeric(38,18)"
    postgres.sql(f"DROP TABLE IF EXISTS odd; CREATE TABLE odd ({columns})")
    with pytest.raises(EtlError) as caught:
        either.pin(dbtable="odd")
    message = str(caught.value)
    assert message.count("column '") == 4 and "CAST(a AS numeric(18,2)) AS a" in message
    assert "column 'c' is a time" in message and "'e'" not in message
    postgres.sql("INSERT INTO odd (a, c) VALUES (1.005, '12:30')")
    cast = "SELECT CAST(a AS numeric(18,2)) AS a, CAST(c AS varchar) AS c FROM odd"
    assert either.rows(query=cast) == [(Decimal("1.01"), "12:30:00")]


def test_truncate_waits_for_the_snapshot(lake: Lake, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not undone for an older snapshot: partitions read after it would find no rows."""
    postgres.table("kept", "SELECT id FROM generate_series(1, 100) id")
    exported, tried = jdbc.export_snapshot, []

    def export(connection: Any) -> str:
        found = exported(connection)
        tried.append(postgres.psql("SET lock_timeout = '300ms'; TRUNCATE kept", check=False).stderr)
        return found

    monkeypatch.setattr(jdbc, "export_snapshot", export)
    assert len(lake.rows(dbtable="kept", partitionColumn="id", numPartitions=2)) == 100
    assert "lock timeout" in tried[0]


def test_a_table_that_is_to_be_truncated_ends_the_read_in_time(
    lake: Lake, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRUNCATE waits for our transaction, and our partitions wait behind TRUNCATE: for ever, without a limit."""
    postgres.table("kept", "SELECT id FROM generate_series(1, 100) id")
    exported, waiting = jdbc.export_snapshot, []

    def export(connection: Any) -> str:
        command, environment = postgres.client("-c", "TRUNCATE kept")
        waiting.append(subprocess.Popen(command, env=environment))
        while postgres.sql("SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'") != "1":
            time.sleep(0.05)
        return exported(connection)

    monkeypatch.setattr(jdbc, "export_snapshot", export)
    monkeypatch.setattr(jdbc, "LOCK_LIMIT_S", 1)
    with pytest.raises(EtlError, match=r"etl\.sources\.t: its database cannot be read: .*lock timeout"):
        lake.pin(dbtable="kept")
    assert waiting[0].wait(30) == 0 and lake.landings() == []


def test_connect_lands_what_a_classic_session_lands_and_a_snapshot_by_one_statement(
    lake: Lake, postgres: PostgresServer
) -> None:
    needs_connect()
    postgres.table(
        "pairs",
        "SELECT id, (id * 0.5)::numeric(9,3) AS half, now() AS at, 'x' || id AS t FROM generate_series(1, 99) id",
    )
    parted = {"dbtable": "pairs", "partitionColumn": "id", "numPartitions": 3}
    expected = lake.pin(**parted)
    with connect_session(lake.spark) as session:
        lake.session = build_session(session, {})
        assert lake.pin(dbtable="pairs").fingerprint == expected.fingerprint
        assert lake.pin(**parted, consistency="none").fingerprint == expected.fingerprint
        with pytest.raises(
            EtlError, match=r"partitionColumn = 'id': with Spark Connect, several partitions cannot read"
        ):
            lake.pin(**parted)


def test_connect_reads_one_moment_of_a_bank_at_work(lake: Lake, postgres: PostgresServer) -> None:
    needs_connect()  # before the transfers, which a skipped block would leave behind
    with transfers(postgres), connect_session(lake.spark) as session:
        lake.session = build_session(session, {})
        found = lake.pin(dbtable="account").read(lake.session).selectExpr("sum(balance)").collect()
        assert found[0][0] == 10_000_000


@pytest.mark.parametrize("kind", sorted(DRIVERS))
def test_names_are_quoted_as_by_spark(spark: Any, kind: str) -> None:
    url = f"jdbc:{kind}:x"
    dialect = spark._jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(url)
    assert quoted_name(url, "A b") == dialect.quoteIdentifier("A b")


def test_zones_without_gaps_are_those_of_java(spark: Any) -> None:
    ids = spark._jvm.java.time.ZoneId
    names = [str(name) for name in ids.getAvailableZoneIds().toArray()]
    names += ["Z", "+05:30", "-01", "UTC+3", "GMT-01:00", "UT+18:00"]
    fixed = {name for name in names if ids.of(name).getRules().isFixedOffset()}
    assert {name for name in names if FIXED_ZONE.fullmatch(name)} == fixed - {"EST", "HST", "MST"} - {
        n for n in fixed if n.startswith("SystemV/")
    }


# --- values


def text_of(value: Any) -> str:
    """A value in COPY's text format."""
    if value is None:
        return r"\N"
    if isinstance(value, bytes):
        return r"\\x" + value.hex()
    if isinstance(value, list):
        words = ("NULL" if v is None else '"' + str(v).replace("\\", "\\\\").replace('"', '\\"') + '"' for v in value)
        value = "{" + ",".join(words) + "}"
    escapes = {"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"}
    return "".join(escapes.get(c, c) for c in str(value))


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
REFORM = date(1582, 10, 5), date(1582, 10, 14)  # days that Java's older calendar leaves out: 1582-10-10 comes as 20
DATES = st.dates(date(1, 1, 1), date(9999, 12, 31)).filter(lambda day: not REFORM[0] <= day <= REFORM[1])
WALLS = st.builds(
    datetime.combine, DATES.filter(lambda day: day.year < 9999), st.times().map(lambda t: t.replace(fold=0))
)
INSTANTS = WALLS.map(lambda wall: wall.replace(tzinfo=UTC))
FLOATS = st.floats(width=64)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "real": st.floats(width=32),
    "double precision": FLOATS,
    "numeric(12,3)": st.decimals(-(10**8), 10**8, places=3),
    "numeric(38,0)": st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal),
    "text": TEXTS,
    "varchar(12)": TEXTS,
    "char(12)": TEXTS.map(lambda text: text.ljust(12)),
    "uuid": st.uuids().map(str),
    "date": DATES,
    "timestamp": WALLS,
    "timestamptz": INSTANTS,
    "bytea": st.binary(max_size=12),
    "integer[]": st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=4),
    "text[]": st.lists(st.none() | TEXTS, max_size=4),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[tuple[Any, ...]]]:
    kinds = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=10))
    values = [st.none() | VALUES[kind] for kind in kinds]
    return kinds, draw(st.lists(st.tuples(*values), max_size=20))


EVERY = [(None,) * len(VALUES)]


@settings(max_examples=200 if FULL else 3)
@given(table=tables())
@example(table=(sorted(VALUES), EVERY))
@example(
    table=(["timestamptz", "date", "double precision"], [(datetime(1, 1, 1, tzinfo=UTC), date(1582, 10, 4), -0.0)])
)
def test_random_tables_come_back_as_they_are(
    lake: Lake, postgres: PostgresServer, table: tuple[list[str], list[tuple[Any, ...]]]
) -> None:
    kinds, rows = table
    columns = ", ".join(f'"C {n}" {kind}' for n, kind in enumerate(kinds))
    postgres.sql(f"DROP TABLE IF EXISTS random; CREATE TABLE random ({columns})")
    postgres.copy("random", "".join("\t".join(map(text_of, row)) + "\n" for row in rows))
    landing = lake.pin(dbtable="random").landing
    found = [row for file in landing.files for row in pq.read_table(landing.folder.path(file.path)).to_pylist()]
    assert sorted(repr(tuple(row.values())) for row in found) == sorted(map(repr, rows))


# --- secrets, and what goes wrong


def test_a_wrong_password_is_one_error_without_it(
    either: Lake, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAKE_PASSWORD", "wr0ng-secret")
    with pytest.raises(EtlError) as caught:
        either.pin(dbtable="account")
    message = str(caught.value)
    assert message.startswith("etl.sources.t: its database cannot be read: FATAL: password authentication failed")
    assert '"$LAKE_USER"' in message and caught.value.__cause__ is None and caught.value.__suppress_context__
    shown = message + "".join(capfd.readouterr())
    assert not [s for s in ("wr0ng-secret", PASSWORD, USER, postgres.url, str(postgres.port)) if s in shown]


def test_no_secret_is_in_a_plan_the_lineage_or_a_landing(lake: Lake, postgres: PostgresServer) -> None:
    postgres.table("still", "SELECT 7 AS id")
    found = lake.pin(dbtable="still")
    plan = found.read(lake.session)._jdf.queryExecution().toString()
    marker = (Path(found.landing.folder.root) / "_landed.json").read_text()
    shown = " ".join([plan, marker, repr(found), str(found.lineage())])
    assert not [s for s in (PASSWORD, USER, postgres.url, str(postgres.port)) if s in shown]
    assert found.lineage()["dbtable"] == "still" and found.lineage()["rows"] == 1


def test_a_server_that_dies_is_one_error_and_leaves_no_landing(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        monkeypatch.setenv("LAKE_URL", server.url)
        server.table("slow", "SELECT id FROM generate_series(1, 4000) id")

        def kill() -> None:
            busy = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%slowly%WHERE%id%'"
            while int(server.sql(busy)) < 3:  # two partitions, and this one
                time.sleep(0.1)
            server.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        table = "(SELECT id, 'x' || pg_sleep(0.005)::text AS t FROM slow) AS slowly"
        with pytest.raises(EtlError) as caught:
            lake.pin(dbtable=table, partitionColumn="id", numPartitions=4, lowerBound=1, upperBound=4000)
        killer.join()
        assert str(caught.value).startswith("etl.sources.t: its database cannot be read: ")
        assert str(server.port) not in str(caught.value) and lake.landings() == []


def test_a_table_that_is_not_there_is_named(either: Lake, postgres: PostgresServer) -> None:
    with pytest.raises(
        EtlError, match=r'etl\.sources\.t: its database cannot be read: .*relation "acount" does not exist'
    ):
        either.pin(dbtable="acount")


def test_a_landing_that_was_deleted_is_noticed(lake: Lake, postgres: PostgresServer) -> None:
    postgres.table("still", "SELECT 7 AS id")
    found = lake.pin(dbtable="still")
    found.check_unchanged()
    found.landing.folder.delete("_landed.json")
    with pytest.raises(EtlError, match=r"etl\.sources\.t: .*/landed/.* was deleted while it was read"):
        found.check_unchanged()


@pytest.mark.parametrize("zone", ["America/New_York", pytest.param("Asia/Kolkata", marks=pytest.mark.slow)])
def test_timestamps_do_not_depend_on_the_zone_of_the_machine(lake: Lake, zone: str) -> None:
    """02:30 of this day is no hour of New York, 01:30 of the other is two."""
    select = "SELECT t::timestamptz AS instant, t::date AS day{} FROM (VALUES ('{}'), ('{}')) v (t)"
    days = ("2024-03-10 02:30:00.000001", "2024-11-03 01:30")
    instants, walls = ({"query": select.format(more, *days)} for more in ("", ", ARRAY[t::timestamp] AS wall"))
    zones = lake.session.sparkContext._jvm.java.util.TimeZone
    expected, expected_walls, before = lake.pin(**instants), lake.pin(**walls), zones.getDefault()
    row = expected_walls.read(lake.session).orderBy("day").selectExpr("string(wall[0])").collect()[0]
    assert row[0] == "2024-03-10 02:30:00.000001"
    try:
        zones.setDefault(zones.getTimeZone(zone))
        assert lake.pin(**instants).fingerprint == expected.fingerprint
        with pytest.raises(EtlError, match=rf"column 'wall' is a timestamp without time zone.* \({zone}\), where some"):
            lake.pin(**walls)
    finally:
        zones.setDefault(before)


# --- without a server: what is decided before Spark is asked


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "give dbtable or query, one of them"),
        ({"dbtable": "t", "query": "SELECT 1"}, "give dbtable or query, one of them"),
        ({"dbtable": "t", "partitionColumn": "id"}, "partitionColumn = 'id' and numPartitions = 1 go together"),
        ({"dbtable": "t", "numPartitions": 4}, "partitionColumn = None and numPartitions = 4 go together"),
        ({"query": "SELECT 1", "partitionColumn": "id", "numPartitions": 4}, r"write dbtable: \(SELECT ...\) AS rows"),
        ({"dbtable": "t", "lowerBound": 1, "upperBound": 2}, "lowerBound and upperBound go together, and with"),
        ({"dbtable": "t", "partitionColumn": "i", "numPartitions": 2, "lowerBound": 1}, "lowerBound and upperBound go"),
        ({"dbtable": "t", "url_env": "jdbc:postgresql://host/db"}, "String should match pattern"),
        ({"dbtable": "t", "password": "hunter2"}, "Extra inputs are not permitted"),
    ],
)
def test_options_that_do_not_go_together_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        source(**keys)
    assert "hunter2" not in str(caught.value)


def refusal(url: str | None, **keys: Any) -> str:
    environment = ENVIRONMENT | ({} if url is None else {"LAKE_URL": url})
    with pytest.raises(EtlError) as caught:
        find_database("etl.sources.t", source(dbtable="t", **keys), environment)
    return str(caught.value)


def test_what_the_environment_lacks_is_named() -> None:
    assert refusal(None) == "etl.sources.t: the variable 'LAKE_URL' is not set, which by url_env holds the url"
    said = refusal("jdbc:postgresql://h/d", password_env="NOWHERE")
    assert "'NOWHERE' is not set, which by password_env holds the password" in said and redact(said) == said
    assert "holds no URL of the form" in refusal("postgresql://h/d")


def test_another_database_must_say_that_it_gives_no_snapshot() -> None:
    assert "consistency = 'snapshot': mysql gives no snapshot" in refusal("jdbc:mysql://h/d")
    config = source(dbtable="t", consistency="none")
    database = find_database("etl.sources.t", config, {**ENVIRONMENT, "LAKE_URL": "jdbc:mysql://h/d"})
    assert database.driver == DRIVERS["mysql"][0]
    assert "name the Java class of the driver" in refusal("jdbc:own://h/d", consistency="none")


def test_secrets_are_hidden_by_the_names_of_their_variables() -> None:
    url = "jdbc:postgresql://db.internal:5432/shop?ssl=true"
    database = find_database("k", source(dbtable="t"), {**ENVIRONMENT, "LAKE_URL": url})
    said = f"{url}: user {USER!r}, {PASSWORD}: connection to db.internal:5432 refused; a lake_reader_2 is there"
    assert database.hide(said) == (
        "$LAKE_URL: user '$LAKE_USER', $LAKE_PASSWORD: connection to $LAKE_URL refused; a lake_reader_2 is there"
    )
    assert not [s for s in (url, USER, PASSWORD) if s in repr(database)]
    url = "jdbc:postgresql://h1,h2:1/shop?user=me&password=a%2Fb&ssl=true"
    database = find_database("k", source(dbtable="t", user_env=None, password_env=None), {"LAKE_URL": url})
    assert database.hide("me: a/b, a%2Fb at h1,h2:1") == "$LAKE_URL: $LAKE_URL, $LAKE_URL at $LAKE_URL"


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("jdbc:sqlserver://h;user=sa;Password=hunter2Zq;encrypt=true", ["hunter2Zq"]),
        ("jdbc:sqlserver://h;User Id=sa;PWD = hunter2Zq", ["hunter2Zq"]),
        ("jdbc:sqlserver://h;password={hun;ter}}2Zq};x=1", ["hun;ter}2Zq", "{hun;ter}}2Zq}"]),
        ("jdbc:sqlserver://h;trustStorePassword=hunter2Zq;keyStoreSecret=0therZq", ["hunter2Zq", "0therZq"]),
        ("jdbc:sqlserver://h;accessToken=hunter2Zq", ["hunter2Zq"]),
        ("jdbc:oracle:thin:scott/hunter2Zq@//h:1521/x", ["hunter2Zq", "scott/hunter2Zq", "SCOTT"]),
        ('jdbc:oracle:thin:scott/"hun@ter2Zq"@h:1521:x', ["hun@ter2Zq"]),
        ("jdbc:oracle:thin:[app]scott/hunter2Zq@tcps://h:1/x?wallet_password=0therZq", ["hunter2Zq", "0therZq"]),
        ("jdbc:mysql://(host=h,user=u,password=hunter2Zq)/d", ["hunter2Zq"]),
        ("jdbc:mysql://address=(host=h)(user=u)(password=hunter2Zq)/d", ["hunter2Zq"]),
        ("jdbc:mysql://u:hunter2Zq@h1,v:0therZq@h2/d", ["hunter2Zq", "0therZq"]),
        ("jdbc:mysql://u:hun@ter/2Zq@h/d", ["hun@ter/2Zq"]),
        ("jdbc:mysql://h/d?password1=hunter2Zq&password2=0therZq", ["hunter2Zq", "0therZq"]),
        ("jdbc:mariadb://h/d?user=u&PASSWORD=hunter2Zq", ["hunter2Zq", "HUNTER2ZQ"]),
        ("jdbc:postgresql://h/d?user=u&password=hun%26ter%2B2Zq", ["hun&ter+2Zq", "hun%26ter%2b2Zq"]),
        ("jdbc:postgresql://h/d?%70assword=hunter2Zq&sslpassword=0therZq", ["hunter2Zq", "0therZq"]),
        ("jdbc:db2://h:50000/d:user=u;password=hunter2Zq;", ["hunter2Zq"]),
        ("jdbc:h2:tcp://h/d;USER=sa;PASSWORD='hun ter2Zq'", ["hun ter2Zq"]),
        ("jdbc:derby://h/d;user=u;password=hun,ter2Zq;bootPassword=0therZq", ["hun,ter2Zq", "0therZq"]),
        ("jdbc:snowflake://h/?private_key_file_pwd=hunter2Zq", ["hunter2Zq"]),
    ],
)
def test_a_password_in_a_url_is_hidden_however_it_is_written_and_repeated(url: str, secrets: list[str]) -> None:
    config = source(dbtable="t", user_env=None, password_env=None, consistency="none", driver="a.B")
    database = find_database("k", config, {"LAKE_URL": url})
    for secret in [url, *secrets]:
        for said in (
            f"login failed with {secret}",
            f"{secret!r}: bad",
            f"at {secret}, password={secret}",
            f"({secret})",
        ):
            shown = database.hide(said)
            assert not re.search(re.escape(secret), shown, re.IGNORECASE) and "2Zq" not in shown, shown
    assert not re.search("hun|ter2|0ther", redact(f"cannot connect to {url}"), re.IGNORECASE)


def test_a_bound_is_a_whole_number_near_the_value() -> None:
    assert [whole_number(text) for text in ("-1.5", "7", "1E3", "NaN", "1e300")] == [
        "-2",
        "7",
        "1000",
        "0",
        str(2**63 - 1),
    ]


# --- another database: Derby, whose driver comes with Spark


def test_another_database_is_read_without_a_snapshot(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"jdbc:derby:memory:{tmp_path.name};create=true"
    spark.sparkContext._jvm.java.lang.Class.forName(DRIVERS["derby"][0])
    connection = spark.sparkContext._jvm.java.sql.DriverManager.getConnection(url)
    for sql in ("CREATE TABLE t (id INT, name VARCHAR(9))", "INSERT INTO t VALUES (1, 'a'), (2, NULL)"):
        connection.createStatement().execute(sql)
    connection.close()
    monkeypatch.setenv("LAKE_URL", url)
    lake = Lake(spark, tmp_path)
    keys = {"consistency": "none", "user_env": None, "password_env": None, "partitionColumn": "ID", "numPartitions": 2}
    assert lake.rows(dbtable="t", **keys) == [(1, "a"), (2, None)]


def test_a_missing_driver_is_named_with_its_package(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**ENVIRONMENT, "LAKE_URL": "jdbc:mysql://h/d"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EtlError, match=r"com\.mysql\.cj\.jdbc\.Driver; add to spark\.conf `spark\.jars\.packages: com"):
        Lake(spark, tmp_path).pin(dbtable="t", consistency="none")
