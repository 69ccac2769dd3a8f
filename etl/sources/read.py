"""Read listed files as a typed DataFrame, after checking every file against the declared columns."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StringType, StructField, StructType

from sparkring.conf.errors import first_line
from sparkring.conf.sources import CsvOptions, FilesSource
from sparkring.etl.errors import EtlError
from sparkring.etl.sources import json_file
from sparkring.etl.sources.file_task import FOUND, CsvFormat, FileTask, JsonFormat, LineFormat
from sparkring.etl.sources.files import FileList
from sparkring.etl.sources.footers import check_footers
from sparkring.etl.sources.values import arrow_type
from sparkring.etl.write import worker_uri

log = logging.getLogger(__name__)
TASK_BYTES = 128 << 20  # of csv or json read by one task, where its files are smaller
SHOWN = 20  # problems in a message
HOST = re.compile(r"^[A-Za-z][\w+.-]*:(//[^/]*)?")  # scheme and host, which Spark may write in more ways than one
FILE = "__file"  # the address of a row's file while its partition values are looked up


def read_files(spark: SparkSession, key: str, config: FilesSource, listed: FileList) -> DataFrame:
    """Read the typed table `key` declares. EtlError names every file and column that does not match."""
    schema = declared_schema(key, config.columns)
    partitions = declared_schema(key, config.partitions, "partitions")
    if config.format in ("csv", "json"):
        return _read_lines(spark, key, _line_format(key, config, schema), listed, partitions)
    if config.format == "text":
        return _read_text(spark, key, listed, partitions)
    _check_columns(spark, key, config.format, listed, (schema, partitions))
    inside = StructType([f for f in schema if f.name not in partitions.names])
    found = _with_partitions(spark, _scan(spark, config.format, listed, inside), listed, partitions)
    return found.select(*dict.fromkeys([*schema.names, *partitions.names]))


def declared_schema(key: str, columns: Mapping[str, str], block: str = "columns") -> StructType:
    """Make Spark's schema of the columns `key` declares in `block`. Raises EtlError for what is no type of Spark."""
    fields = []
    for name, ddl in columns.items():
        try:
            fields.append(StructField(name, DataType.fromDDL(ddl)))
        except Exception as error:  # the parser's exceptions differ between Spark Classic and Connect
            raise EtlError(f"{key}.{block}.{name} = {ddl!r}: not a Spark type ({first_line(error)})") from error
    return StructType(fields)


# --- CSV and JSON: checked by line and value before the first row is used


def _line_format(key: str, config: FilesSource, schema: StructType) -> LineFormat:
    for f in schema:
        kind = f.dataType.simpleString()
        why = json_file.check_type(f.dataType) if config.format == "json" else "" if arrow_type(kind) else kind
        if why:
            raise EtlError(
                f"{key}.columns.{f.name} = {kind!r}: no value of a {config.format} file is read as one; declare it "
                "string, and make the value in the recipe's SQL"
            )
    return JsonFormat(schema) if config.format == "json" else CsvFormat(schema, config.options or CsvOptions())


def _read_lines(
    spark: SparkSession, key: str, format: LineFormat, listed: FileList, partitions: StructType
) -> DataFrame:
    """Check and read the files in tasks of whole files.

    Args:
        spark: the session.
        key: names the source in errors.
        format: of the files.
        listed: the files.
        partitions: the columns whose values are those of the folders.
    """
    fields = {f.name: f for f in [*format.schema, *partitions]}
    task = FileTask(worker_uri(listed.storage), listed.files, format, partitions, tuple(fields))
    count = min(len(listed.files), max(spark.sparkContext.defaultParallelism, listed.bytes // TASK_BYTES))
    numbers = spark.sparkContext.parallelize(range(len(listed.files)), count)
    files = spark.createDataFrame(numbers.map(lambda n: (n,)), "file int")
    found = files.mapInArrow(task.check, FOUND).orderBy("file").collect()
    _raise(key, [row["problem"] for row in found if row["problem"] is not None])
    undeclared: Counter[str] = Counter()
    for row in found:
        undeclared[row["key"]] += row["records"]
    if undeclared:
        shown = ", ".join(f"{name!r} (in {count} records)" for name, count in undeclared.most_common(SHOWN))
        log.warning("%s: %d keys are not declared, and not read: %s", key, len(undeclared), shown)
    return files.mapInArrow(task.read, StructType(list(fields.values())))


# --- Parquet, ORC and text: read by Spark, with the address of each row's file


def _scan(spark: SparkSession, kind: str, listed: FileList, schema: StructType | None = None) -> DataFrame:
    reader = spark.read.schema(schema) if schema is not None else spark.read.option("wholetext", True)
    # TRICK: an option of Spark's own, not documented: the paths are of files, and a bracket in one is a bracket.
    found = reader.option("__globPaths__", "false").format(kind).load(listed.spark_paths())
    # A URI, percent-encoded; unlike input_file_name() it counts as a deterministic column.
    return found.select("*", F.col("_metadata.file_path").alias(FILE))


def _read_text(spark: SparkSession, key: str, listed: FileList, partitions: StructType) -> DataFrame:
    """One row per file: `path` below the source's root, `text`, and its partition's values."""
    root = HOST.sub("", listed.spark_paths()[0]).removesuffix(listed.files[0].path)
    found = _with_partitions(spark, _scan(spark, "text", listed).withColumnRenamed("value", "text"), listed, partitions)
    address = F.url_decode(F.replace(F.col(FILE), F.lit("+"), F.lit("%2B")))
    path = F.substr(F.regexp_replace(address, HOST.pattern, ""), F.lit(len(root) + 1))
    rows = found.select(path.alias("path"), "text", *partitions.names)
    broken = rows.where(~F.is_valid_utf8("text")).select("path").limit(SHOWN).collect()
    _raise(key, [f"{row['path']}: is not UTF-8; convert it, or leave it out by another glob" for row in broken])
    return rows


def _check_columns(
    spark: SparkSession, key: str, kind: str, listed: FileList, declared: tuple[StructType, StructType]
) -> None:
    """Raise EtlError where a file has other columns, or partition columns of its own with other values.

    Args:
        spark: the session.
        key: names the source in errors.
        kind: parquet or orc.
        listed: the files.
        declared: the columns, and the partition columns.
    """
    footers = check_footers(listed, kind, *declared)
    _raise(key, [problem for footer in footers for problem in footer.problems])
    for field in declared[1]:
        have = tuple(
            file for file, footer in zip(listed.files, footers, strict=True) if field.name in footer.partition_columns
        )
        if not have:
            continue
        some, own = replace(listed, files=have), f"__own_{field.name}"
        scan = _scan(spark, kind, some, StructType([field])).withColumnRenamed(field.name, own)
        found = _with_partitions(spark, scan, some, declared[1])
        differ = found.where(~F.col(own).eqNullSafe(F.col(field.name))).select(
            FILE, F.col(own).cast("string").alias(own)
        )
        _raise(
            key,
            [
                f"{_decoded(row[FILE])}: has the partition column {field.name!r} itself, and there it is {row[own]!r}"
                for row in differ.limit(SHOWN).collect()
            ],
        )


def _with_partitions(spark: SparkSession, scan: DataFrame, listed: FileList, partitions: StructType) -> DataFrame:
    """Add the partition columns, by each row's file: Spark itself decodes names of folders wrongly beyond ASCII."""
    if not partitions.names:
        return scan
    values = {HOST.sub("", path): f.partition for path, f in zip(listed.spark_paths(), listed.files, strict=True)}
    address = f"{FILE}_of"
    rows = [(uri, *values[_decoded(uri)]) for uri in scan.inputFiles()]
    table = spark.createDataFrame(rows, StructType([StructField(address, StringType()), *partitions]))
    found = scan.join(F.broadcast(table), F.col(FILE) == F.col(address), "left")
    unknown = F.raise_error(F.concat(F.lit("a file that was not listed: "), F.col(FILE)))
    return found.select(
        *scan.columns,
        *(F.when(F.col(address).isNotNull(), F.col(name)).otherwise(unknown).alias(name) for name in partitions.names),
    )


def _decoded(uri: str) -> str:
    """The path of a file that Spark names by a percent-encoded URI, without scheme and host."""
    return unquote(HOST.sub("", uri))


def _raise(key: str, problems: list[str]) -> None:
    if problems:
        shown = "\n".join(f"  - {p}" for p in problems[:SHOWN])
        more = f"\n  - and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise EtlError(f"{key}: files do not match the declared columns:\n{shown}{more}")
