"""Read listed files as a typed DataFrame, after checking every file against the declared columns."""

from __future__ import annotations

import logging
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StringType, StructField, StructType, TimestampNTZType, TimestampType

from sparkring.conf.errors import first_line
from sparkring.conf.plain_text import count_of
from sparkring.conf.sources import FilesSource
from sparkring.conf.sources.files import CsvOptions
from sparkring.etl.errors import EtlError
from sparkring.etl.shards.write import worker_uri
from sparkring.etl.sources.files import json_file
from sparkring.etl.sources.files.footers import check_footers
from sparkring.etl.sources.files.listing import FileList
from sparkring.etl.sources.files.task import FOUND, CsvFormat, FileTask, JsonFormat, LineFormat
from sparkring.etl.sources.spark_path import as_glob
from sparkring.etl.sources.values import arrow_type
from sparkring.etl.spark_platform.application import default_parallelism, numbered_rows
from sparkring.etl.spark_platform.paths import HOST
from sparkring.etl.spark_platform.versions import arrow_schema, arrow_table, is_valid_text, type_of_ddl

log = logging.getLogger(__name__)
CHECKED_HERE_BYTES = 1 << 20  # of csv or json checked by the driver itself: a job of Spark's would take longer
TASK_BYTES = 128 << 20  # of csv or json read by one task, where its files are smaller
SHOWN = 20  # problems in a message
FILE, JOINED, PATH = "__file", "__joined", "__path"  # a row's file: as Spark names it, as listed, below the root
JAVA_PLAIN = frozenset(string.ascii_letters + string.digits + "_-!.~'()*:@&=+$,;/")  # in the path of a java.net.URI
BY_CLOCK = (TimestampType, TimestampNTZType)  # of these Python's constants depend on the driver's time zone
BLANK = ("Zs", "Zl", "Zp", "Cc")  # Unicode's categories of blanks and control characters


def read_files(spark: SparkSession, key: str, config: FilesSource, listed: FileList) -> DataFrame:
    """Read the typed table `key` declares. EtlError names every file and column that does not match."""
    schema = declared_schema(key, config.columns)
    partitions = declared_schema(key, config.partitions, "partitions")
    if config.format in ("csv", "json"):
        return _read_lines(spark, key, line_format(key, config, schema), listed, partitions)
    if config.format == "text":
        return _read_text(spark, key, listed, partitions)
    if config.format == "binaryFile":
        found = _with_files(spark, _scan(spark, "binaryFile", listed).drop("path"), listed, partitions)
        found = found.select(F.col(PATH).alias("path"), "content", *map(quoted, partitions.names))
        return found.unionByName(_empty_files(spark, listed, partitions))
    _check_columns(spark, key, config, listed, (schema, partitions))
    inside = StructType([f for f in schema if f.name not in partitions.names])
    found = _scan(spark, config.format, listed, inside)
    if partitions.names:
        found = _with_partitions(spark, found, listed, partitions)
    return found.select(*map(quoted, dict.fromkeys([*schema.names, *partitions.names])))


def quoted(name: str) -> str:
    """Quote a column's name for Spark SQL, whatever it contains."""
    return "`" + name.replace("`", "``") + "`"


def declared_schema(key: str, columns: Mapping[str, str], block: str = "columns") -> StructType:
    """Make Spark's schema of the columns `key` declares in `block`. Raises EtlError for what is no type of Spark."""
    fields = []
    for name, ddl in columns.items():
        try:
            fields.append(StructField(name, type_of_ddl(ddl)))
        except Exception as error:  # the parser's exceptions differ between Spark Classic and Connect
            raise EtlError(f"{key}.{block}.{name} = {ddl!r}: not a Spark type ({first_line(error)})") from error
    return StructType(fields)


# --- CSV and JSON: checked by line and value before the first row is used


def line_format(key: str, config: FilesSource, schema: StructType) -> LineFormat:
    """Return the format of a csv or json source. EtlError for a type that such files cannot hold."""
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
        spark: Spark session of the job.
        key: key of the source, for errors.
        format: line format of the files.
        listed: files to read.
        partitions: columns with values from the folders.
    """
    fields = {f.name: f for f in [*format.schema, *partitions]}
    task = FileTask(worker_uri(listed.storage), listed.files, format, partitions, tuple(fields))
    count = min(len(listed.files), max(default_parallelism(spark), listed.bytes // TASK_BYTES))
    files = numbered_rows(spark, "file", len(listed.files), count)
    if listed.bytes <= CHECKED_HERE_BYTES:
        every = pa.record_batch({"file": pa.array(range(len(listed.files)), pa.int32())})
        found = [row for batch in task.check(iter([every])) for row in batch.to_pylist()]
    else:
        rows = files.mapInArrow(task.check, FOUND).collect()
        found = sorted((row.asDict() for row in rows), key=itemgetter("file"))
    _raise(key, [row["problem"] for row in found if row["problem"] is not None])
    undeclared: Counter[str] = Counter()
    for row in found:
        undeclared[row["key"]] += row["records"]
    if undeclared:
        shown = ", ".join(f"{name!r} (in {count_of(count, 'record')})" for name, count in undeclared.most_common(SHOWN))
        log.warning("%s: %d keys are not declared, and not read: %s", key, len(undeclared), shown)
    return files.mapInArrow(task.read, StructType(list(fields.values())))


# --- Parquet, ORC and text: read by Spark, joined with what is known of each row's file


def _scan(spark: SparkSession, kind: str, listed: FileList, schema: StructType | None = None) -> DataFrame:
    reader = spark.read.schema(schema) if schema is not None else spark.read.option("wholetext", True)
    found = reader.format(kind).load([as_glob(path) for path in listed.spark_paths()])
    # Unlike input_file_name() it counts as a deterministic column.
    return found.select("*", F.col("_metadata.file_path").alias(FILE))


def _read_text(spark: SparkSession, key: str, listed: FileList, partitions: StructType) -> DataFrame:
    """Read one row per file: `path` below the source's root, `text`, and its partition's values."""
    found = _with_files(spark, _scan(spark, "text", listed).withColumnRenamed("value", "text"), listed, partitions)
    rows = found.select(F.col(PATH).alias("path"), "text", *map(quoted, partitions.names))
    broken = rows.where(~is_valid_text("text")).select("path").limit(SHOWN).collect()
    _raise(key, [f"{row['path']}: is not UTF-8; convert it, or leave it out by another glob" for row in broken])
    return rows


def _empty_files(spark: SparkSession, listed: FileList, partitions: StructType) -> DataFrame:
    """Make the rows of empty files, which Spark silently leaves out."""
    schema = StructType([StructField("path", StringType()), StructField("content", BinaryType()), *partitions])
    rows = [(file.path, b"", *file.partition) for file in listed.files if not file.bytes]
    return local_table(spark, schema, list(zip(*rows, strict=True)) or [[] for _ in schema])


def _check_columns(
    spark: SparkSession, key: str, config: FilesSource, listed: FileList, declared: tuple[StructType, StructType]
) -> None:
    """Raise EtlError where a file has other columns, or partition columns of its own with other values.

    Args:
        spark: Spark session of the job.
        key: key of the source, for errors.
        config: source of parquet or orc files.
        listed: files to check.
        declared: declared columns, and declared partition columns.
    """
    footers = check_footers(listed, config.format, *declared, may_lack=config.missing_columns == "null")
    _raise(key, [problem for footer in footers for problem in footer.problems])
    if config.where is None:  # else these are some of the table's files, as of one day
        nowhere = set.intersection(*(set(footer.lacking) for footer in footers))
        _raise(key, [f"no file has a column {name!r}" for name in sorted(nowhere)])
    for field in declared[1]:
        have = zip(listed.files, footers, strict=True)
        some = replace(listed, files=tuple(file for file, footer in have if field.name in footer.partition_columns))
        if not some.files:
            continue
        own = F.col(quoted(f"__own_{field.name}"))
        scan = _scan(spark, config.format, some, StructType([field])).withColumnRenamed(
            field.name, f"__own_{field.name}"
        )
        found = _with_files(spark, scan, some, declared[1])
        differ = found.where(~own.eqNullSafe(F.col(quoted(field.name)))).select(PATH, own.cast("string").alias("value"))
        wrong = [(row[PATH], row["value"] or "null") for row in differ.limit(SHOWN).collect()]
        _raise(key, [f"{p}: has the partition column {field.name!r} itself, and there it is {v!r}" for p, v in wrong])


def _with_partitions(spark: SparkSession, scan: DataFrame, listed: FileList, partitions: StructType) -> DataFrame:
    """Add the partition columns: as constants where all files are of one partition, as those of a day are."""
    folders = {file.partition for file in listed.files}
    if len(folders) > 1 or any(isinstance(field.dataType, BY_CLOCK) for field in partitions):
        return _with_files(spark, scan, listed, partitions)
    (values,) = folders
    constants = {f.name: F.lit(v).cast(f.dataType) for f, v in zip(partitions, values, strict=True)}
    return scan.withColumns(constants)


def _with_files(spark: SparkSession, scan: DataFrame, listed: FileList, partitions: StructType) -> DataFrame:
    """Add the path of each row's file, and its partition columns, which Spark itself decodes wrongly beyond ASCII.

    A row of a file that is not found among the listed ones stops the job: the names of files are joined as text.
    """
    rows = [
        (_as_java(HOST.sub("", address)), file.path, *file.partition)
        for address, file in zip(listed.spark_paths(), listed.files, strict=True)
    ]
    files = StructType([StructField(JOINED, StringType()), StructField(PATH, StringType()), *partitions])
    table = F.broadcast(local_table(spark, files, list(zip(*rows, strict=True))))
    begin = F.expr(f"locate('/', {FILE}, locate('://', {FILE}) + 3)")  # behind scheme and host
    found = scan.join(table, F.substr(FILE, begin) == F.col(JOINED), "left")
    unknown = F.raise_error(F.concat(F.lit("a row of a file that was not listed: "), F.col(FILE)))
    known = [
        F.when(F.col(JOINED).isNotNull(), F.col(quoted(name))).otherwise(unknown).alias(name)
        for name in (PATH, *partitions.names)
    ]
    return found.select(*(quoted(name) for name in scan.columns if name != FILE), *known)


def local_table(spark: SparkSession, schema: StructType, columns: Sequence[Any]) -> DataFrame:
    """Make a table that is part of the plan, so that reading it again costs nothing; `columns`: values or arrays."""
    arrow = arrow_schema(schema)
    arrays = [pa.array(values, kind) for values, kind in zip(columns, arrow.types, strict=True)]
    return arrow_table(spark, pa.Table.from_arrays(arrays, schema=arrow), schema)


def _as_java(path: str) -> str:
    """Write the path as Java does in a URI: beyond ASCII only blanks and control characters are encoded."""
    plain = {c for c in set(path) if c in JAVA_PLAIN or (c > "\x7f" and unicodedata.category(c) not in BLANK)}
    return "".join(c if c in plain else quote(c) for c in path)


def _raise(key: str, problems: list[str]) -> None:
    if problems:
        shown = "\n".join(f"  - {p}" for p in problems[:SHOWN])
        more = f"\n  - and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise EtlError(f"{key}: files do not match the declared columns:\n{shown}{more}")
