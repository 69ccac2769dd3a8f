"""Tables and views of a catalog: pinned by the files that Spark would read, which must still be those afterwards."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar, Self

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from sparkring.conf.digest import digest
from sparkring.conf.errors import first_line
from sparkring.conf.plain_text import count_of
from sparkring.conf.sources import CatalogSource
from sparkring.etl.errors import EtlError, NoFiles, innermost
from sparkring.etl.sources.declared import select_declared
from sparkring.etl.sources.files.listing import LAKE_MARKS
from sparkring.etl.sources.snapshot import OpenSource, PinContext, SourceSnapshot
from sparkring.etl.spark_platform.capabilities import is_classic
from sparkring.etl.spark_platform.jvm import JavaThrew
from sparkring.etl.spark_platform.paths import HOST
from sparkring.etl.spark_platform.query_files import (
    condition_columns,
    folder_names,
    forget_listings,
    is_fixed,
    query_reads,
)
from sparkring.etl.spark_platform.reads import OtherTable, QueryReads, ReadFile, ReadTable
from sparkring.etl.spark_platform.versions import version_of

SAYS_TABLES = (4, 0)  # version of Spark
SHOWN = 5  # names in a message
EXPORT = "export its rows as Parquet with the engine that keeps it, and declare that folder"
# What the class or provider of a table that is not one of files has in its name -> what to write.
INSTEAD = {
    "delta": "write {{format: delta, path: {location}}}",
    "iceberg": "write {{format: iceberg, table: {name}}}",
    "jdbc": "write {{format: jdbc, url_env: NAME, dbtable: ...}} with the table as the database names it",
    "inmemoryrelation": "a table of it is cached in this Spark application, and may be old: UNCACHE TABLE it first",
}


@dataclass(frozen=True)
class CatalogSnapshot(SourceSnapshot):
    """The files of a table, or of all tables of a view, at one moment."""

    CHECKED_TOGETHER: ClassVar[bool] = True
    config: CatalogSource
    session: Callable[[], SparkSession]
    found: QueryReads

    @property
    def files(self) -> list[ReadFile]:
        return [file for table in self.found.tables if isinstance(table, ReadTable) for file in table.files]

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self.files]

    def read(self, spark: SparkSession) -> DataFrame:
        table, found = look_up(spark, self.key, self.config)
        self._compare(found)
        return table

    def check_unchanged(self) -> None:
        """Raise EtlError if a file or partition was added, removed or written, or a view defined again."""
        self._compare(look_up(self.session(), self.key, self.config)[1])

    def _compare(self, found: QueryReads) -> None:
        if found != self.found:
            raise EtlError(
                f"{self.key}.table = {self.config.table!r}: changed after it was pinned "
                f"({_difference(self.found, found)}); run again when it is at rest"
            )

    def lineage(self) -> dict[str, Any]:
        return {
            "table": self.config.table,
            "where": self.config.where,
            "read": sorted({table.name for table in self.found.tables}),
            "files": len(self.files),
            "bytes": sum(file.bytes for file in self.files),
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class OpenCatalog(OpenSource[CatalogSource]):
    """A table or view, which has no versions: pinned as it is at that moment."""

    session: Callable[[], SparkSession]

    @classmethod
    def open(cls, name: str, config: CatalogSource, context: PinContext | None) -> Self:
        assert context is not None
        return cls(name, context.session)

    def pin(self, config: CatalogSource) -> CatalogSnapshot:
        """Pin a table or view. Raises EtlError if it is missing, has no files, or is not made of files alone."""
        table, found = look_up(self.session(), f"etl.sources.{self.name}", config)
        return CatalogSnapshot(self.name, config, _fingerprint(table, found, config.where), self.session, found)


def look_up(spark: SparkSession, key: str, config: CatalogSource) -> tuple[DataFrame, QueryReads]:
    """Find the table's selected columns and what is read for them now; EtlError for what cannot be read exactly."""
    if not is_classic(spark) and version_of(spark.version) < SAYS_TABLES:
        raise EtlError(
            f"{key}.table = {config.table!r}: by Spark Connect, Spark {spark.version} does not say which files a table "
            "has, as 4.0 does; declare its folder, or run with a classic session"
        )
    forget_listings(spark)
    named, where = f"{key}.table = {config.table!r}", f"{key}.where = {config.where!r}"
    try:
        table = spark.table(config.table)
        _ = table.schema  # by Connect the table is looked for only now
    except (PySparkException, JavaThrew) as error:
        raise EtlError(f"{named}: {_why_no_table(spark, config.table, error)}") from error
    try:
        filtered = table if config.where is None else table.where(config.where)
        selected = select_declared(key, filtered, config.columns)
        found = query_reads(selected, config.where)
    except (PySparkException, JavaThrew) as error:
        raise EtlError(f"{where if config.where else named}: {innermost(error)}") from error
    if problem := _problem(spark, config.table, found):
        raise EtlError(f"{named}: {problem}")
    if not is_fixed(selected):
        raise EtlError(
            f"{named}: its rows, by its view or `where`, are others at another time (random, or of the current time "
            "or user); write the value there"
        )
    if config.where is not None:
        _check_condition(where, filtered, found)
    if not any(isinstance(table, ReadTable) and table.files for table in found.tables):
        raise NoFiles(f"{named}: has no files" + (f" where {config.where}" if config.where else ""))
    return selected, found


def _check_condition(where: str, filtered: DataFrame, found: QueryReads) -> None:
    """Check that the condition of a table selects whole partitions; a view has none of its own."""
    columns = condition_columns(filtered)
    if columns is None:
        raise EtlError(f"{where}: a subquery; write its values, or join in etl.views")
    if found.views:
        return
    partitions = {name for table in found.tables if isinstance(table, ReadTable) for name in table.partition_columns}
    if others := sorted(set(columns) - partitions):
        raise EtlError(
            f"{where}: {others[0]!r} is no partition column (those are {sorted(partitions)}); other conditions belong "
            "in etl.views"
        )


def _problem(spark: SparkSession, asked: str, found: QueryReads) -> str:
    """Return why the table cannot be read exactly by its files; "" if it can."""
    for view in found.views:
        if not view.text:
            return f"{view.name!r} is a temporary view; declare the tables that it is made of"
    for table in found.tables:
        if isinstance(table, OtherTable):
            return _not_files(table, asked)
        if lake := _lake_above(spark, table):
            kind, folder = lake
            words = INSTEAD.get(kind.lower(), EXPORT).format(location=folder, name=table.name)
            return f"its folder is a table of {kind}, which holds files of rows that were deleted or replaced; {words}"
    return ""


def _not_files(table: OtherTable, asked: str) -> str:
    what = f"{table.provider} {table.kind}".lower()
    words = next((words for name, words in INSTEAD.items() if name in what), EXPORT)
    words = words.format(location=table.location or "ITS_FOLDER", name=table.name or asked)
    kind = table.provider or table.kind.rpartition(".")[2]
    return f"{table.name or 'what it reads'} is no table of files ({kind}); {words}"


def _lake_above(spark: SparkSession, table: ReadTable) -> tuple[str, str] | None:
    """Find the table format whose log is in or above the table's folder: (format, folder)."""
    if not table.files:
        return None
    host = found[0] if (found := HOST.match(table.location)) else ""
    path = PurePosixPath(table.location.removeprefix(host))
    folders = [f"{host}{folder}".rstrip("/") for folder in (path, *path.parents)]
    root = table.location.rstrip("/")
    first = table.files[0].path if HOST.match(table.files[0].path) else f"{root}/{table.files[0].path}"
    names = folder_names(spark, [f"{folder}/{mark}" for folder in folders for mark in LAKE_MARKS], first)
    for folder in folders:
        for mark, (kind, sign) in LAKE_MARKS.items():
            if any(re.match(sign, name) for name in names.get(f"{folder}/{mark}", [])):
                return kind, folder
    return None


def _why_no_table(spark: SparkSession, table: str, error: PySparkException | JavaThrew) -> str:
    """Explain why Spark cannot open a table: its format, or its name."""
    database, dot, name = table.rpartition(".")
    within = f"{dot and ' IN '}{database}"
    if provider := re.search(r"DATA_SOURCE_NOT_FOUND\] Failed to find the data source: (\S+?)\. ", str(error)):
        (known,) = spark.sql(f"SHOW TABLE EXTENDED{within} LIKE '{name}'").collect()
        location = re.search(r"^Location: (.*)$", known.information, re.MULTILINE)
        return _not_files(OtherTable("", provider[1], table, location[1] if location else ""), table)
    if not isinstance(error, PySparkException) or error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
        return innermost(error)
    try:
        names = [row.tableName for row in spark.sql(f"SHOW TABLES{within}").collect()]
    except PySparkException as no_database:
        return f"no such table: {first_line(no_database)}"
    near = difflib.get_close_matches(name, names, SHOWN) or sorted(names)
    more = f" and {len(near) - SHOWN} more" if len(near) > SHOWN else ""
    return f"no such table; there {'is' if len(near) == 1 else 'are'} {near[:SHOWN]}{more}"


def _difference(before: QueryReads, after: QueryReads) -> str:
    if before.views != after.views:
        return "a view is defined again"
    old, new = ({file for table in reads.tables if isinstance(table, ReadTable) for file in table.files}
                for reads in (before, after))  # fmt: skip
    if old == new:
        return "how a table is read"
    paths = sorted({file.path for file in old ^ new})
    return f"{count_of(len(paths), 'file')} added, removed or written, such as {paths[0]}"


def _fingerprint(table: DataFrame, found: QueryReads, where: str | None) -> str:
    """Hash (sha256) types and all files' name, size, time and partition; for a view its text and table names too."""
    tables = [asdict(table) | {"location": ""} for table in found.tables]
    views: list[Any] = [[view.text, view.settings] for view in found.views]
    if views:
        views.append(where)  # of a table it says which files, and nothing else
    else:
        tables = [one | {"name": ""} for one in tables]
    return digest([table.schema.simpleString(), views, sorted(tables, key=lambda one: str(one["name"]))])
