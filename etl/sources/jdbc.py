"""Tables of a database: read once by Spark, in one snapshot where the database gives one, and landed as Parquet.

A database has no cheap fingerprint, and does not stay as it is: what is landed is hashed, and is what is read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from math import floor
from typing import Any, Self

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DateType, NumericType, StructField, StructType, TimestampNTZType, TimestampType

from sparkring.conf.secrets import hide_values, url_secrets
from sparkring.conf.sources import JdbcSource
from sparkring.etl.errors import EtlError, innermost
from sparkring.etl.sources.declared import select_declared
from sparkring.etl.sources.landing import Landing, land
from sparkring.etl.sources.snapshot import OpenSource, PinContext, SourceSnapshot
from sparkring.etl.sources.spark_path import as_glob
from sparkring.etl.spark_platform.application import default_parallelism
from sparkring.etl.spark_platform.capabilities import JDBC_SNAPSHOTS, can
from sparkring.etl.spark_platform.jvm import JavaThrew, jvm_of

log = logging.getLogger(__name__)

# By the URL's second word: the driver's class, and the package that has it.
DRIVERS = {
    "postgresql": ("org.postgresql.Driver", "org.postgresql:postgresql:42.7.8"),
    "mysql": ("com.mysql.cj.jdbc.Driver", "com.mysql:mysql-connector-j:9.4.0"),
    "mariadb": ("org.mariadb.jdbc.Driver", "org.mariadb.jdbc:mariadb-java-client:3.5.6"),
    "sqlserver": ("com.microsoft.sqlserver.jdbc.SQLServerDriver", "com.microsoft.sqlserver:mssql-jdbc:13.2.0.jre11"),
    "oracle": ("oracle.jdbc.OracleDriver", "com.oracle.database.jdbc:ojdbc11:23.9.0.25.07"),
    "db2": ("com.ibm.db2.jcc.DB2Driver", "com.ibm.db2:jcc:12.1.2.0"),
    "derby": ("org.apache.derby.iapi.jdbc.AutoloadedDriver", "org.apache.derby:derby:10.16.1.1"),
    "h2": ("org.h2.Driver", "com.h2database:h2:2.3.232"),
}
LOCK_LIMIT_S = 60
IMPORT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT '{snapshot}'"
IN_UTC = "SET TIME ZONE 'UTC'"  # the driver sets that of its machine, by which a query may cast
READ_COMMITTED = 2  # java.sql.Connection
BACKQUOTED = ("mysql", "databricks", "hive2")
# Zones of Java in which no hour was ever left out. UTC+01:00, Etc/GMT-1 and +01:00 are.
FIXED_ZONE = re.compile(r"(?:(?:Etc/)?(?:UTC|UCT|UT|GMT|Zulu|Universal|Greenwich)|Z)?0?(?:[+-]\d{1,2}(?::?\d\d){0,2})?")
LONGEST = 2**63
RANGED = (NumericType, DateType, TimestampType, TimestampNTZType)


@dataclass(frozen=True)
class JdbcSnapshot(SourceSnapshot):
    """Rows of a database, as they were landed."""

    config: JdbcSource
    landing: Landing

    def read(self, spark: SparkSession) -> DataFrame:
        if not self.landing.files:
            return spark.createDataFrame([], self.landing.schema)
        return spark.read.schema(self.landing.schema).parquet(*map(as_glob, self.landing.spark_paths()))

    def check_unchanged(self) -> None:
        """Raise EtlError if the landing was deleted: the rows themselves cannot change any more."""
        if not self.landing.is_whole():
            raise EtlError(f"{self.key}: {self.landing.folder.uri} was deleted while it was read; run again")

    def lineage(self) -> dict[str, Any]:
        return {
            "format": "jdbc",
            "url_env": self.config.url_env,
            "dbtable": self.config.dbtable,
            "query": self.config.query,
            "consistency": self.config.consistency,
            "rows": self.landing.rows,
            "files": len(self.landing.files),
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class Database:
    """Where a database is and who reads it. `names` has the variable of each secret, which is shown in its place."""

    driver: str
    options: Mapping[str, str] = field(repr=False)  # Spark's `url`, `driver`; all else is a property of connections
    names: Mapping[str, str] = field(repr=False)  # secret -> variable

    @property
    def kind(self) -> str:
        """Its name in the URL: `postgresql`."""
        return self.options["url"].split(":")[1]

    def hide(self, text: str) -> str:
        """Replace the values of variables by their names."""
        return hide_values(text, self.names)


@dataclass(frozen=True)
class OpenJdbc(OpenSource[JdbcSource]):
    """A table of a database; what is landed of it is what is pinned."""

    context: PinContext

    @classmethod
    def open(cls, name: str, config: JdbcSource, context: PinContext | None) -> Self:
        assert context is not None
        return cls(name, context)

    def pin(self, config: JdbcSource) -> JdbcSnapshot:
        """Read the table and land it. Raises EtlError, without a secret, if that fails."""
        key = f"etl.sources.{self.name}"
        database = find_database(key, config, os.environ)
        spark = self.context.session()
        is_snapshot = config.consistency == "snapshot"
        if not is_snapshot:
            log.warning("%s: consistency: none: rows written while it is read may come twice, in part or never", key)
        is_exported = is_snapshot and can(spark, JDBC_SNAPSHOTS)
        if is_snapshot and not is_exported:
            check_one_statement(key, config)
        with database_errors(key, database), ExitStack() as held:
            first = [held.enter_context(exported_snapshot(spark, database, config))] if is_exported else []
            options = {**database.options, "fetchsize": str(config.fetchsize), "preferTimestampNTZ": "true"}
            statements = [*first, *[IN_UTC] * (database.kind == "postgresql")]
            options |= {"sessionInitStatement": "; ".join(statements)} if statements else {}
            read = read_rows(spark, key, config, options)
            check_types(key, read.schema)
            rows = select_declared(key, read, config.columns)
            check_zones(key, rows)
            landing = land(rows, self.context.datasets_uri)
        return JdbcSnapshot(self.name, config, landing.fingerprint, landing)


def find_database(key: str, config: JdbcSource, environment: Mapping[str, str]) -> Database:
    """Find the database in the environment; EtlError for what is missing there, or cannot be read as declared."""
    found = {}
    for option in ("url", "user", "password"):
        variable = getattr(config, f"{option}_env")
        if variable is not None and not environment.get(variable):
            raise EtlError(f"{key}: the variable {variable!r} is not set, which by {option}_env holds the {option}")
        if variable is not None:
            found[option] = environment[variable]
    url, names = found["url"], {found[option]: getattr(config, f"{option}_env") for option in found}
    kind = match[1] if (match := re.match(r"jdbc:(\w+):", url)) else ""
    if not kind:
        raise EtlError(f"{key}.url_env = {config.url_env!r}: holds no URL of the form jdbc:postgresql://host/database")
    names = dict.fromkeys(url_secrets(url), config.url_env) | names
    driver = config.driver or DRIVERS.get(kind, ("", ""))[0]
    if not driver:
        raise EtlError(f"{key}.driver: name the Java class of the driver; known without it: {sorted(DRIVERS)}")
    if config.consistency == "snapshot" and kind != "postgresql":
        raise EtlError(
            f"{key}.consistency = 'snapshot': {kind} gives no snapshot that several connections read; write "
            "`consistency: none`, and read when nothing is written: rows that change meanwhile may come twice or never"
        )
    if config.consistency == "snapshot":
        # For every connection: TRUNCATE waits for the one that holds the snapshot, and the others wait for TRUNCATE.
        found["options"] = f"-c lock_timeout={LOCK_LIMIT_S * 1000}"
    return Database(driver, found | {"driver": driver}, names)


@contextmanager
def database_errors(key: str, database: Database) -> Iterator[None]:
    """Turn what Spark and the driver raise into one error with the source's key and without a secret."""
    try:
        yield
    except (JavaThrew, PySparkException) as error:
        # Without `from`: the original has the secrets that were taken out.
        if "ClassNotFoundException" in str(error):
            package = DRIVERS.get(database.kind, ("", ""))[1] or "group:artifact:version"
            raise EtlError(
                f"{key}: no jar of Spark's has the driver {database.driver}; add to spark.conf "
                f"`spark.jars.packages: {package}`, or `spark.jars: /path/to/its.jar`, by Connect to the server's"
            ) from None
        raise EtlError(f"{key}: its database cannot be read: {database.hide(innermost(error))}") from None


def check_one_statement(key: str, config: JdbcSource) -> None:
    """Raise EtlError where more than one statement would read the rows: without a JVM none share a snapshot."""
    if config.partitionColumn is not None:
        raise EtlError(
            f"{key}.partitionColumn = {config.partitionColumn!r}: with Spark Connect, several partitions cannot "
            "read one snapshot; leave it and numPartitions out (one statement sees one moment), write `consistency: "
            "none`, or run with a classic session"
        )


@contextmanager
def exported_snapshot(spark: SparkSession, database: Database, config: JdbcSource) -> Iterator[str]:
    """Hold a snapshot for the block; gives the statement by which connections read it."""
    with connected(spark, database) as connection:
        begin(connection)
        lock(connection, config)
        yield IMPORT.format(snapshot=export_snapshot(connection))


@contextmanager
def connected(spark: SparkSession, database: Database) -> Iterator[Any]:
    """Open a java.sql.Connection in the driver's JVM, closed at the end."""
    jvm = jvm_of(spark)
    jvm.org.apache.spark.sql.execution.datasources.jdbc.DriverRegistry.register(database.driver)
    properties = jvm.java.util.Properties()
    for option in database.options.keys() & {"user", "password", "options"}:
        properties.setProperty(option, database.options[option])
    connection = jvm.java.sql.DriverManager.getConnection(database.options["url"], properties)
    try:
        yield connection
    finally:
        with suppress(JavaThrew):  # the server may have gone; another error reports that
            connection.close()


def begin(connection: Any) -> None:
    """Open the transaction whose snapshot all partitions will read. It stays open, idle, until they have."""
    connection.setAutoCommit(False)
    connection.setTransactionIsolation(READ_COMMITTED)  # a snapshot of its own for each statement
    connection.createStatement().execute("SET LOCAL idle_in_transaction_session_timeout = 0")


def lock(connection: Any, config: JdbcSource) -> None:
    """Lock the tables against TRUNCATE and ALTER TABLE, before a snapshot is taken.

    Databases do not undo those for an older snapshot, which would see an empty table.
    """
    asked = config.dbtable or f"({config.query}) asked"
    connection.createStatement().executeQuery(f"SELECT * FROM {asked} WHERE 1 = 0")


def export_snapshot(connection: Any) -> str:
    """Export a snapshot of now."""
    rows = connection.createStatement().executeQuery("SELECT pg_export_snapshot()")
    rows.next()
    return str(rows.getString(1))


def check_types(key: str, schema: StructType) -> None:
    """Raise EtlError for columns whose values Spark would not keep, by what its reader says of the database's types."""
    problems = []
    for column in schema:
        name, kind = column.name, column.dataType.simpleString()
        if found := re.search(r"decimal\(\d+,(\d+)\)", kind):
            digits, kept = column.metadata.get("scale", int(found[1])), int(found[1])
            if digits > kept or digits <= 0 < kept:  # as of a numeric without precision and scale
                problems.append(
                    f"column {name!r} is a numeric that a {found[0]} need not hold; cast it in a query: "
                    f"CAST({name} AS numeric(18,2)) AS {name}, say"
                )
        if column.metadata.get("logical_time_type"):
            problems.append(
                f"column {name!r} is a time, which Spark reads as a timestamp of 1970; cast it in a query: "
                f"CAST({name} AS varchar) AS {name}, say"
            )
    if problems:
        raise EtlError(f"{key}: " + "\n  ".join(problems))


def check_zones(key: str, rows: DataFrame) -> None:
    """Raise EtlError where Java would move a wall-clock time, which it reads by its machine's zone."""
    walls = [name for name, kind in rows.dtypes if "timestamp_ntz" in kind]
    if not walls:
        return
    spark = rows.sparkSession
    count = default_parallelism(spark)
    tasks = spark.range(0, count, 1, count)
    of_executors = tasks.selectExpr("java_method('java.time.ZoneId', 'systemDefault') AS zone").distinct().collect()
    if moving := [zone for zone in sorted({row.zone for row in of_executors}) if not FIXED_ZONE.fullmatch(zone)]:
        raise EtlError(
            f"{key}: column {walls[0]!r} is a timestamp without time zone, which Java reads in its machine's zone "
            f"({moving[0]}), where some hours do not exist; add `-Duser.timezone=UTC` to "
            "spark.driver.extraJavaOptions and spark.executor.extraJavaOptions, or cast it in a query: "
            f"CAST({walls[0]} AS varchar) AS {walls[0]}"
        )


def read_rows(spark: SparkSession, key: str, config: JdbcSource, options: Mapping[str, str]) -> DataFrame:
    """Read the table, in ranges of the partition column where there is one."""
    reader = spark.read.format("jdbc").options(**options)
    if config.query is not None:
        return reader.option("query", config.query).load()
    assert config.dbtable is not None
    whole = reader.option("dbtable", config.dbtable).load()
    if config.partitionColumn is None:
        return whole
    column = next((f for f in whole.schema if f.name.lower() == config.partitionColumn.lower()), None)
    if column is None or not isinstance(column.dataType, RANGED):
        what = "is no column" if column is None else f"is {column.dataType.simpleString()}"
        raise EtlError(
            f"{key}.partitionColumn = {config.partitionColumn!r}: {what}; it must be a number, date or timestamp, of "
            f"{whole.columns}"
        )
    given = None if config.lowerBound is None else (str(config.lowerBound), str(config.upperBound))
    bounds = given or column_bounds(spark, config.dbtable, column, options)
    if bounds is None:  # no rows, or nulls alone
        return whole
    ranges = {"lowerBound": bounds[0], "upperBound": bounds[1], "numPartitions": str(config.numPartitions)}
    return reader.options(dbtable=config.dbtable, partitionColumn=column.name, **ranges).load()


def column_bounds(
    spark: SparkSession, dbtable: str, column: StructField, options: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return the least and greatest value in the form of Spark's bounds; None without values."""
    name = quoted_name(options["url"], column.name)
    query = f"SELECT min({name}) AS low, max({name}) AS high FROM {dbtable}"
    found = spark.read.format("jdbc").options(**options).option("query", query).load()
    low, high = found.select(*[found[name].cast("string") for name in found.columns]).collect()[0]
    if low is None:
        return None
    return (whole_number(low), whole_number(high)) if isinstance(column.dataType, NumericType) else (low, high)


def quoted_name(url: str, name: str) -> str:
    """Quote the name of a column as Spark does for this database."""
    quote = "`" if url.split(":")[1] in BACKQUOTED else '"'
    return f"{quote}{name}{quote}"


def whole_number(text: str) -> str:
    """Round to a whole number at or near this one: bounds only say where to split ranges."""
    value = Decimal(text)
    return str(min(max(floor(value), -LONGEST), LONGEST - 1)) if value.is_finite() else "0"
