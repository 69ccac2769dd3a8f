"""What `query_files` looks up in the JVM, by statements: for a session of Spark Connect, of Spark 4.0 or later.

A plan as text names the views and tables, DESCRIBE TABLE ... AS JSON says what they are, and Spark's source
`binaryFile` lists their files without opening them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pyspark.errors import AnalysisException, PySparkException

from sparkring.etl.spark_platform.paths import HOST, any_of, escaped
from sparkring.etl.spark_platform.reads import (
    HIDDEN,
    NO_FILES,
    OtherTable,
    QueryReads,
    ReadFile,
    ReadTable,
    ViewText,
    below,
    by_name,
    parsing_of,
    sorted_files,
    view_text,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NODE = re.compile(r"([ :+-]*)(.*)")  # a line of a plan: its depth, and the node
VIEW = re.compile(r"View \(([^,]+), \[")
RELATION = re.compile(r"Relation ([\w.`-]+)\[.*\] (\w+)$")
NAMED = re.compile(r"Relation ([\w.`-]+)\[|HiveTableRelation \[([^,]+),|RelationV2\[.*\] ([\w.`-]+)")
SUBQUERY = re.compile(r"\b(?:scalar-subquery|list|exists|dynamicpruning)#\d+ \[|\bsubquery#\d+")
FORMATS = ("parquet", "orc", "csv", "json", "text", "avro", "xml")
SESSIONS_OWN = "system"  # the catalog of temporary views
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
NO_PATH = "PATH_NOT_FOUND"
THREADS = 8  # statements at the same time
# What gives other rows tomorrow, as an analyzed plan writes it.
CHANGING = (
    "rand|randn|random|randstr|uniform|uuid|shuffle|monotonically_increasing_id|spark_partition_id|now|localtimestamp"
    "|user|session_user|java_method|reflect|try_reflect|unix_timestamp|input_file_\\w+|current_\\w+"
)
IS_CHANGING = re.compile(
    rf"(?<![\w.#])(?:{CHANGING})\((?!\w+#)|\bcast\((?:today|tomorrow|yesterday|now|epoch) as (?:date|timestamp\w*)\)",
    re.IGNORECASE,
)
# The value that Spark keeps of a partition, in SQL; of other types it is the value itself.
INTERNAL = {
    "float": "double(string({0}))",  # 0.1 as it is written
    "date": "unix_date({0})",
    "timestamp": "unix_micros({0})",
    "timestamp_ntz": "timestampdiff(MICROSECOND, TIMESTAMP_NTZ'1970-01-01 00:00:00', {0})",
}


@dataclass(frozen=True)
class PlanText:
    """The analyzed and the optimized plan of a query, one node a line."""

    analyzed: str
    optimized: str

    def views(self) -> list[str]:
        """List the views, from the top down."""
        return [found[1].replace("`", "") for _, node in nodes(self.analyzed) if (found := VIEW.match(node))]

    def leaves(self) -> list[str]:
        """List the nodes that read something."""
        found = [*nodes(self.optimized), (0, "")]
        leaves = [node for (depth, node), (next_depth, _) in pairwise(found) if next_depth <= depth]
        cached = [node for _, node in found if node.startswith("InMemoryRelation")]  # is shown with what it was made of
        return [node for node in cached + leaves if not node.startswith(NO_FILES)]

    @property
    def has_subquery(self) -> bool:
        return SUBQUERY.search(self.optimized) is not None


@dataclass(frozen=True)
class PartitionFolder:
    """A partition of a table, and its folder. A table without partitions is one, without values."""

    values: tuple[str | None, ...]
    folder: str


def nodes(plan: str) -> Iterator[tuple[int, str]]:
    """Split a plan into its nodes, each with its depth."""
    for line in plan.splitlines():
        if line.strip():
            found = NODE.fullmatch(line)
            assert found is not None
            yield len(found[1]), found[2]


def plan_of(query: DataFrame) -> PlanText:
    """Ask the server for the plans of a query."""
    text = query._explain_string(extended=True)  # type: ignore[operator]
    _, _, rest = text.partition("== Analyzed Logical Plan ==\n")
    analyzed, _, rest = rest.partition("== Optimized Logical Plan ==\n")
    return PlanText(analyzed.partition("\n")[2], rest.partition("== Physical Plan ==\n")[0])


def query_reads(query: DataFrame, where: str | None) -> QueryReads:
    """Look up what the query reads, as it is now.

    Of a view with a subquery, a table that is read twice is taken to be read whole.
    """
    spark, plan = query.sparkSession, plan_of(query)
    views = tuple(_view(spark, name) for name in plan.views())
    leaves = plan.leaves()
    tables = {leaf: _table(spark, leaf, None if views else where) for leaf in set(leaves)}
    if views:
        read = set(map(decoded, query.inputFiles()))  # by all but subqueries
        places = Counter(table.location for table in map(tables.__getitem__, leaves))
        tables = {leaf: _pruned(table, read, plan.has_subquery, places) for leaf, table in tables.items()}
    return QueryReads(views, by_name(tables[leaf] for leaf in leaves))


def is_fixed(query: DataFrame) -> bool:
    """Return whether the plan names no random, time or user function. It may miss unknown names."""
    return IS_CHANGING.search(plan_of(query).analyzed) is None


def condition_columns(filtered: DataFrame) -> list[str] | None:
    """List the columns in the condition of `table.where(...)`; None if it has a subquery."""
    condition = next(node for _, node in nodes(plan_of(filtered).analyzed))
    if SUBQUERY.search(condition):
        return None
    used = []
    for name in sorted(filtered.columns, key=len, reverse=True):  # one may be the end of another
        condition, count = re.subn(rf"{re.escape(name)}#\d+L?", "", condition, flags=re.IGNORECASE)
        used += [name] * bool(count)
    return [name for name in filtered.columns if name in used]


def folder_names(spark: SparkSession, folders: Iterable[str], is_there: str) -> dict[str, list[str]]:
    """List the file names in each of these folders that exists.

    `is_there`: an existing file. A path that does not exist is an error to Spark; a pattern that matches at least one
    is not.
    """
    names: dict[str, list[str]] = {}
    if any(":" in HOST.sub("", path) for path in (is_there, *folders)):
        return names  # Hadoop's patterns cannot have a colon
    for path, _, _ in _listed(spark, [any_of([is_there, *folders])]):
        folder, _, name = path.rpartition("/")
        names.setdefault(folder, []).append(name)
    return names


def decoded(uri: str) -> str:
    """Read a path of DataFrame.inputFiles, `file:///a%20b`, as Hadoop writes it elsewhere: `file:/a b`."""
    return re.sub(r"^([\w+.-]+:)///", r"\1/", unquote(uri))


def _view(spark: SparkSession, name: str) -> ViewText:
    found = _described(spark, name)
    if found.get("catalog_name") == SESSIONS_OWN or "view_text" not in found:
        return ViewText(name, "", "")
    namespace = found.get("view_catalog_and_namespace", "").replace("`", "")
    columns, settings = found.get("view_query_output_columns", []), found.get("view_creation_spark_configuration", {})
    return view_text(name, found["view_text"], namespace, columns, settings)


def _described(spark: SparkSession, name: str, partition: str = "") -> dict[str, Any]:
    """Return the catalog's JSON about a view, table or partition; {} if it has none."""
    try:
        (row,) = spark.sql(f"DESCRIBE TABLE EXTENDED {quoted(name)}{partition} AS JSON").collect()
    except PySparkException:  # of a table that is no table of files
        return {}
    found: dict[str, Any] = json.loads(row[0])
    return found


def _table(spark: SparkSession, leaf: str, where: str | None) -> ReadTable | OtherTable:
    name = next((part for part in found.groups() if part), "") if (found := NAMED.match(leaf)) else ""
    name = name.replace("`", "")
    known = _described(spark, name) if name else {}
    provider, location = known.get("provider", ""), known.get("location", "")
    relation = RELATION.match(leaf)
    if relation is None or relation[2] not in FORMATS or provider not in (relation[2], "hive"):
        return OtherTable(leaf.split("[")[0].split(" ")[0], provider or known.get("serde_library", ""), name, location)
    spark.catalog.refreshTable(quoted(name))
    schema, columns = spark.table(quoted(name)).schema, tuple(known.get("partition_columns", ()))
    types = {column: schema[column].dataType.simpleString() for column in columns}
    partitions = _partitions(spark, name, types, where) if columns else [PartitionFolder((), location)]
    parsing = parsing_of(relation[2], known.get("storage_properties", {}), schema.json())
    return ReadTable(name, location, columns, parsing, _files(spark, location, partitions))


def _pruned(
    table: ReadTable | OtherTable, read: set[str], has_subquery: bool, places: Mapping[str, int]
) -> ReadTable | OtherTable:
    """Omit files that the query certainly does not read; it is never certain for a subquery's."""
    if isinstance(table, OtherTable):
        return table
    root = table.location.rstrip("/")
    files = tuple(file for file in table.files if file.path in read or f"{root}/{file.path}" in read)
    if has_subquery and (not files or places[table.location] > 1):
        return table
    return replace(table, files=files)


def _files(spark: SparkSession, location: str, partitions: list[PartitionFolder]) -> tuple[ReadFile, ...]:
    """List the files of the partitions."""
    by_folder: dict[str, list[tuple[str, int, int]]] = {partition.folder: [] for partition in partitions}
    for path, size, at in _listed_folders(spark, [*by_folder]):
        folder, _, name = path.rpartition("/")
        if folder in by_folder and not name.startswith(HIDDEN):
            by_folder[folder].append((below(location, path), size, at))
    files = [ReadFile(*file, partition.values) for partition in partitions for file in by_folder[partition.folder]]
    return sorted_files(files)


def _listed_folders(spark: SparkSession, folders: list[str]) -> list[tuple[str, int, int]]:
    """List the files of the folders. A partition's may be gone, which Spark lets pass where it reads a table."""
    try:
        return _listed(spark, map(escaped, folders))
    except AnalysisException as error:
        if error.getCondition() != NO_PATH:
            raise
    with suppress(AnalysisException):
        return _listed(spark, [any_of(folders)])
    return []


def _listed(spark: SparkSession, patterns: Iterable[str]) -> list[tuple[str, int, int]]:
    """Return path, bytes and time of the files in or below what the patterns match."""
    if not (found := [*patterns]):
        return []
    files = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(found)
    return [tuple(row) for row in files.selectExpr("path", "length", "unix_millis(modificationTime)").collect()]


def _partitions(spark: SparkSession, name: str, types: Mapping[str, str], where: str | None) -> list[PartitionFolder]:
    """List the partitions that `where` keeps, each with its folder by a statement of its own."""
    specs = [_spec(row[0]) for row in spark.sql(f"SHOW PARTITIONS {quoted(name)}").collect()]
    kept = _kept(spark, specs, types, where)

    def folder(number: int) -> str:
        pairs = zip(types, specs[number], strict=True)
        words = ", ".join(f"`{column}` = {_literal(text)}" for column, text in pairs)
        return str(_described(spark, name, f" PARTITION ({words})")["location"])

    with ThreadPoolExecutor(THREADS) as pool:
        return [PartitionFolder(kept[n], found) for n, found in zip(kept, pool.map(folder, kept), strict=True)]


def _kept(
    spark: SparkSession, specs: list[tuple[str | None, ...]], types: Mapping[str, str], where: str | None
) -> dict[int, tuple[str | None, ...]]:
    """Return the numbers of the partitions the condition keeps, with their values as Spark shows them."""
    kinds = ", ".join(["number int", *(f"c{n} string" for n in range(len(types)))])
    rows = spark.createDataFrame([(n, *spec) for n, spec in enumerate(specs)], kinds)
    casts = [f"CAST(c{n} AS {kind}) AS `{name}`" for n, (name, kind) in enumerate(types.items())]
    typed = rows.selectExpr("number AS `partition number`", *casts)
    if where is not None:
        with suppress(AnalysisException):  # of other columns: the caller refuses it
            filtered = typed.where(where)
            _ = filtered.schema
            typed = filtered
    shown = [f"{INTERNAL.get(kind, '{0}').format(f'`{name}`')} AS `{name}`" for name, kind in types.items()]
    found = typed.selectExpr("`partition number`", *shown).collect()
    return {row[0]: tuple(None if value is None else str(value) for value in row[1:]) for row in found}


def _spec(text: str) -> tuple[str | None, ...]:
    """Read the values of `day=2024-01-31/country=a%2Fb`."""
    values = (part.partition("=")[2] for part in text.split("/"))
    return tuple(None if value == NULL_PARTITION else unquote(value) for value in values)


def _literal(text: str | None) -> str:
    if text is None:
        return "NULL"
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def quoted(name: str) -> str:
    """Quote each part of a table's name."""
    return ".".join(f"`{part}`" for part in name.split("."))
