"""The files that a query of Spark reads, and what else decides its rows: its views, and how each table is parsed.

By private parts of Spark's JVM, as they are in Spark 3.5 to 4.3. Unlike `DataFrame.inputFiles` it
sees the tables of subqueries, and the files of Hive tables that Spark reads by their SerDe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from sparkring.etl.spark_platform import query_text
from sparkring.etl.spark_platform.capabilities import PLAN_INSPECTION, QUERY_FILES, can, is_classic
from sparkring.etl.spark_platform.jvm import JavaThrew, java_session, jvm_of, plans_of
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

SPARKS_OWN = ("org.apache.spark.sql.execution.", "org.apache.spark.sql.hive.", "org.apache.spark.sql.avro.")
STATUS = re.compile(r".*?\{path=(.*); isDirectory=false; length=(\d+); .*?modification_time=(\d+);.*", re.DOTALL)


def query_reads(query: DataFrame, where: str | None = None) -> QueryReads:
    """Look up what the query reads, as it is now. Of a partitioned table these are the partitions left by `where`.

    `where`: the condition that is in the query already.
    """
    if not can(query.sparkSession, QUERY_FILES):
        return query_text.query_reads(query, where)
    return QueryReads(tuple(_views(query)), by_name(_tables(query)))


def forget_listings(spark: SparkSession) -> None:
    """Make the session list the files of its tables again when they are next asked for; by Connect it always does."""
    if is_classic(spark):
        java_session(spark).sessionState().catalog().invalidateAllCachedTables()


def _views(query: DataFrame) -> list[ViewText]:
    found = []
    for node in _nodes(plans_of(query).analyzed()):
        if _class(node) == "View":
            view = node.desc()
            text = "" if node.isTempView() else _option(view.viewText()) or ""
            namespace = _text(view.viewCatalogAndNamespace(), ".").replace("`", "")
            columns, settings = [*_items(view.viewQueryColumnNames())], _mapping(view.viewSQLConfigs())
            found.append(view_text(view.identifier().unquotedString(), text, namespace, columns, settings))
    return found


def is_fixed(query: DataFrame) -> bool:
    """Return whether the same tables give the same rows tomorrow: no `rand()`, `current_date()` or 'yesterday'.

    With Connect functions are known by their names alone.
    """
    if not can(query.sparkSession, PLAN_INSPECTION):
        return query_text.is_fixed(query)
    catalyst, plan = jvm_of(query.sparkSession).org.apache.spark.sql.catalyst, plans_of(query).analyzed()
    if plan.containsPattern(catalyst.trees.TreePattern.CURRENT_LIKE()):
        return False
    day_by_name = catalyst.optimizer.SpecialDatetimeValues  # replaces 'today' and the like, compared with a date
    return all(node.deterministic() and day_by_name.apply(node).fastEquals(node) for node in _nodes(plan))


def condition_columns(filtered: DataFrame) -> list[str] | None:
    """List the columns in the condition of `table.where(...)`; None if it has a subquery."""
    if not is_classic(filtered.sparkSession):
        return query_text.condition_columns(filtered)
    node = plans_of(filtered).analyzed()
    if node.subqueries().size():
        return None
    used = {reference.name().lower() for reference in _items(node.condition().references().toSeq())}
    return [name for name in filtered.columns if name.lower() in used]


def folder_names(spark: SparkSession, folders: list[str], is_there: str) -> Mapping[str, list[str]]:
    """List the names in each of these folders of a storage that exists and is readable.

    `is_there`: a file of that storage, without which Connect could not ask.
    """
    if not is_classic(spark):
        return query_text.folder_names(spark, folders, is_there)
    return {folder: names for folder in folders if (names := _names(spark, folder))}


def _names(spark: SparkSession, uri: str) -> list[str]:
    path = jvm_of(spark).org.apache.hadoop.fs.Path(uri)
    try:
        fs = path.getFileSystem(java_session(spark).sessionState().newHadoopConf())
        return [status.getPath().getName() for status in fs.listStatus(path)] if fs.exists(path) else []
    except JavaThrew:
        return []


def _tables(query: DataFrame) -> Iterator[ReadTable | OtherTable]:
    for node in _nodes(plans_of(query).optimizedPlan()):
        if not node.children().size() and _class(node) not in NO_FILES:
            yield _table(query, node)


def _table(query: DataFrame, leaf: Any) -> ReadTable | OtherTable:
    if _class(leaf) == "HiveTableRelation":
        return _serde_table(query, leaf)
    if _class(leaf).startswith("DataSourceV2"):
        table = leaf.table()
        known = [str(table.properties().get(name) or "") for name in ("provider", "location")]
        return OtherTable(_full_class(table), known[0], table.name(), known[1])
    table = _option(leaf.catalogTable()) if _class(leaf) == "LogicalRelation" else None
    if table is None:
        return OtherTable(_full_class(leaf))
    relation, parts = leaf.relation(), [leaf.relation()]
    if _class(relation) == "HadoopFsRelation":
        parts = [relation.fileFormat(), relation.location()]
        if all(_full_class(part).startswith(SPARKS_OWN) for part in parts):
            folders = relation.location().listFiles(_seq(query, []), _seq(query, []))
            return _read_table(query.sparkSession, table, relation.partitionSchema(), folders, relation.toString())
    location = _option(table.storage().locationUri())
    return OtherTable(_full_class(parts[-1]), _option(table.provider()) or "", _name(table), str(location or ""))


def _serde_table(query: DataFrame, leaf: Any) -> ReadTable:
    """Read the folders of a Hive table whose format only Hive's SerDe knows; its files are unknown."""
    spark, table = query.sparkSession, leaf.tableMeta()
    jvm, state = jvm_of(spark), java_session(spark).sessionState()
    schema = table.partitionSchema()
    if leaf.isPartitioned():
        pruned = _option(leaf.prunedPartitions())
        if pruned is None:  # there is no `where`
            pruned = state.catalog().listPartitions(table.identifier(), jvm.scala.Option.empty())
        rows = [(part.toRow(schema, "UTC"), part.location()) for part in _items(pruned)]
    else:
        rows = [(jvm.org.apache.spark.sql.catalyst.InternalRow.empty(), table.location())]
    directories = jvm.java.util.ArrayList()
    for values, location in rows:
        path = jvm.org.apache.hadoop.fs.Path(location)
        statuses = path.getFileSystem(state.newHadoopConf()).listStatus(path)
        directories.add(jvm.org.apache.spark.sql.execution.datasources.PartitionDirectory.apply(values, statuses))
    format_name = f"{table.storage().inputFormat()} {table.storage().serde()}"
    return _read_table(spark, table, schema, _seq(query, directories), format_name)


def _read_table(spark: SparkSession, table: Any, partition_schema: Any, folders: Any, format_name: str) -> ReadTable:
    """Make a ReadTable of Spark's objects.

    Args:
        spark: a session of the application.
        table: CatalogTable of the table.
        partition_schema: StructType of the values of `folders`.
        folders: Seq of PartitionDirectory objects.
        format_name: format of its files.
    """
    location = jvm_of(spark).org.apache.hadoop.fs.Path(table.location()).toString()
    files = []
    for folder in _items(folders):
        values = tuple(None if v is None else str(v) for v in _items(folder.values().toSeq(partition_schema)))
        files += [ReadFile(below(location, path), size, at, values) for path, size, at in _statuses(folder.files())]
    columns = tuple(_items(table.partitionColumnNames()))
    schema = StructType.fromJson(json.loads(table.schema().json())).json()  # as Python writes it, by Connect too
    parsing = parsing_of(format_name, _mapping(table.storage().properties()), schema)
    return ReadTable(_name(table), location, columns, parsing, sorted_files(files))


def _statuses(files: Any) -> Iterator[tuple[str, int, int]]:
    """Yield path, bytes and time of each file by one call: a call takes 0.1 ms, and tables have 100,000 files."""
    for text in _text(files, "\0").split("\0") if files.size() else []:
        status = STATUS.fullmatch(text)
        if status is None:
            assert "isDirectory=true" in text, text
            continue
        if not status[1].rpartition("/")[2].startswith(HIDDEN):
            yield status[1], int(status[2]), int(status[3])


# --- Scala through py4j


def _nodes(plan: Any) -> Iterator[Any]:
    """Yield the plan and all nodes below it, subqueries included."""
    yield plan
    for part in (plan.children(), plan.subqueries()):
        for child in _items(part):
            yield from _nodes(child)


def _seq(query: DataFrame, items: Any) -> Any:
    return jvm_of(query.sparkSession).PythonUtils.toSeq(items)


def _items(seq: Any) -> Iterator[Any]:
    return (seq.apply(i) for i in range(seq.size()))


def _text(seq: Any, between: str) -> str:
    return str(seq.mkString(between))


def _mapping(items: Any) -> dict[str, str]:
    return {str(pair._1()): str(pair._2()) for pair in _items(items.toSeq())}


def _option(option: Any) -> Any:
    return option.get() if option.isDefined() else None


def _class(thing: Any) -> str:
    return str(thing.getClass().getSimpleName())


def _full_class(thing: Any) -> str:
    return str(thing.getClass().getName())


def _name(table: Any) -> str:
    return str(table.identifier().unquotedString())
