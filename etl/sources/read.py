"""Read listed files as a typed DataFrame, after checking every file against the declared columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, StructField, StructType

from sparkring.conf.errors import first_line
from sparkring.conf.sources import CsvOptions, FilesSource
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources import csv_file
from sparkring.etl.sources.files import FileList, SourceFile
from sparkring.etl.sources.values import arrow_type
from sparkring.etl.write import worker_uri

TASK_BYTES = 128 << 20  # of csv read by one task, where its files are smaller
FOOTER_THREADS = 16
SHOWN = 20  # problems in a message
HOST = re.compile(r"^[A-Za-z][\w+.-]*:(//[^/]*)?")  # scheme and host, which Spark may write in more ways than one


def read_files(spark: SparkSession, key: str, config: FilesSource, listed: FileList) -> DataFrame:
    """Read the typed table `key` declares. EtlError names every file and column that does not match."""
    schema = declared_schema(key, config.columns)
    if config.format == "csv":
        return _read_csv(spark, key, config, listed, schema)
    if config.format == "text":
        return _read_text(spark, key, listed)
    _check_footers(key, listed, schema)
    return spark.read.schema(schema).parquet(*listed.spark_paths()).select(*schema.names)


def _read_text(spark: SparkSession, key: str, listed: FileList) -> DataFrame:
    """One row per file: `path` below the source's root, `text`."""
    root = HOST.sub("", listed.spark_paths()[0]).removesuffix(listed.files[0].path)
    # The path is a URI, percent-encoded; unlike input_file_name() it counts as a deterministic column.
    uri = F.url_decode(F.replace(F.col("_metadata.file_path"), F.lit("+"), F.lit("%2B")))
    path = F.substr(F.regexp_replace(uri, HOST.pattern, ""), F.lit(len(root) + 1))
    found = spark.read.text(listed.spark_paths(), wholetext=True).select(
        path.alias("path"), F.col("value").alias("text")
    )
    broken = found.where(~F.is_valid_utf8("text")).select("path").limit(SHOWN).collect()
    _raise(key, [f"{row['path']}: is not UTF-8; convert it, or leave it out by another glob" for row in broken])
    return found


def declared_schema(key: str, columns: Mapping[str, str]) -> StructType:
    """Make Spark's schema of the columns `key` declares. Raises EtlError for what is no type of Spark."""
    fields = []
    for name, ddl in columns.items():
        try:
            fields.append(StructField(name, DataType.fromDDL(ddl)))
        except Exception as error:  # the parser's exceptions differ between Spark Classic and Connect
            raise EtlError(f"{key}.columns.{name} = {ddl!r}: not a Spark type ({first_line(error)})") from error
    return StructType(fields)


# --- CSV: checked by line and value before the first row is used


def _read_csv(spark: SparkSession, key: str, config: FilesSource, listed: FileList, schema: StructType) -> DataFrame:
    types = {f.name: _text_type(key, f) for f in schema.fields}
    task = CsvTask(worker_uri(listed.storage), listed.files, config.options or CsvOptions(), types)
    count = min(len(listed.files), max(spark.sparkContext.defaultParallelism, listed.bytes // TASK_BYTES))
    numbers = spark.sparkContext.parallelize(range(len(listed.files)), count)
    files = spark.createDataFrame(numbers.map(lambda n: (n,)), "file int")
    found = files.mapInArrow(task.check, "file int, problem string").orderBy("file").collect()
    _raise(key, [row["problem"] for row in found])
    return files.mapInArrow(task.read, schema)


@dataclass(frozen=True)
class CsvTask:
    """What a worker needs to check or read files, which come as batches of their numbers."""

    root_uri: str
    files: tuple[SourceFile, ...]
    options: CsvOptions
    types: csv_file.Types

    def check(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, file, opener in self._files(batches):
            problems = [f"{file.path}: {p}" for p in csv_file.check(opener, self.options, self.types)]
            numbers = pa.array([number] * len(problems), pa.int32())
            yield pa.RecordBatch.from_pydict({"file": numbers, "problem": pa.array(problems, pa.string())})

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _, _, opener in self._files(batches):
            yield from csv_file.read(opener, self.options, self.types)

    def _files(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, SourceFile, csv_file.Opener]]:
        fs = open_storage(self.root_uri).fs
        for batch in batches:
            for number in batch.column("file").to_pylist():
                file = self.files[number]
                yield number, file, partial(fs.open_input_stream, file.full, compression="detect")


def _text_type(key: str, field: StructField) -> str:
    kind = field.dataType.simpleString()
    if arrow_type(kind) is None:
        raise EtlError(
            f"{key}.columns.{field.name} = {kind!r}: no value of a csv file is read as one; declare it string, "
            "and make the value in the recipe's SQL"
        )
    return kind


# --- Parquet: every footer is checked, so that drift between files is found before Spark reads nulls or garbage


def _check_footers(key: str, listed: FileList, schema: StructType) -> None:
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        problems = pool.map(lambda file: _footer_problems(listed.storage, file, schema), listed.files)
        _raise(key, [problem for found in problems for problem in found])


def _footer_problems(storage: Storage, file: SourceFile, schema: StructType) -> list[str]:
    try:
        found: pa.Schema = pq.read_schema(file.full, filesystem=storage.fs)
    except (pa.ArrowInvalid, OSError) as error:
        return [f"{file.path}: not a readable Parquet file: {first_line(error)}"]
    problems = []
    for field in schema.fields:
        if alike := [n for n in found.names if n != field.name and n.lower() == field.name.lower()]:
            problems.append(
                f"{file.path}: has a column {alike[0]!r}, which Spark, as it ignores case, takes for the declared "
                f"{field.name!r}; rename it"
            )
            continue
        if field.name not in found.names:
            problems.append(f"{file.path}: has no column {field.name!r}; it has {found.names}")
            continue
        have = _spark_type(found.field(field.name).type)
        if have != field.dataType.simpleString():
            want = field.dataType.simpleString()
            problems.append(f"{file.path}: column {field.name!r} is {have}, declared {want}")
    return problems


def _spark_type(arrow: pa.DataType) -> str:
    if pa.types.is_dictionary(arrow):
        arrow = arrow.value_type
    try:
        return str(from_arrow_type(arrow, prefer_timestamp_ntz=True).simpleString())
    except Exception:  # PySparkTypeError or its subclasses: a type Spark does not have
        return f"{arrow} (unknown to Spark)"


def _raise(key: str, problems: list[str]) -> None:
    if problems:
        shown = "\n".join(f"  - {p}" for p in problems[:SHOWN])
        more = f"\n  - and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise EtlError(f"{key}: files do not match the declared columns:\n{shown}{more}")
