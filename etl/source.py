"""Raw tables -> typed DataFrames, every file checked against the declared columns; a fingerprint of each table."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, StructField, StructType

from conf.manifest import digest
from conf.schema_etl import CsvOptions, SourceConfig
from conf.storage import Storage, open_storage
from etl import csv_file
from etl.errors import EtlError
from etl.values import arrow_type
from etl.write import worker_uri

TASK_BYTES = 128 << 20  # of csv read by one task, where its files are smaller
FOOTER_THREADS = 16
# Folder in which a table format keeps what belongs to the table -> the format, and a file there that says so.
LAKE_MARKS = {
    "_delta_log": ("Delta", r"[^/]+"),
    "metadata": ("Iceberg", r"(?:[^/]*\.metadata\.json|version-hint\.text)$"),
    ".hoodie": ("Hudi", r"[^/]+"),
}
HOST = re.compile(r"^[A-Za-z][\w+.-]*:(//[^/]*)?")  # scheme and host, which Spark may write in more ways than one
WILDCARDS = "*?["
ANY_FOLDERS = "**"
COMPRESSED = r"\.gz|\.bz2|\.zst"


@dataclass(frozen=True)
class SourceFile:
    """`path` is relative to the source's root and part of the fingerprint; `full` is what opens it."""

    path: str
    full: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Source:
    """A declared table and the files it has right now."""

    name: str
    config: SourceConfig
    storage: Storage
    files: tuple[SourceFile, ...]

    @property
    def key(self) -> str:
        return f"etl.sources.{self.name}"

    def spark_paths(self) -> list[str]:
        """Full paths as Spark wants them: `file:///...` locally, else what the user wrote down to the root."""
        if self.storage.is_local:
            return [f"file://{file.full}" for file in self.files]
        root = self.storage.uri.partition("?")[0].rstrip("/")
        return [root + file.full[len(self.storage.root.rstrip("/")) :] for file in self.files]


def find_source(name: str, config: SourceConfig) -> Source:
    """List the files of a source. Raises EtlError when there is none."""
    root, pattern = _split_glob(config.path)
    storage = open_storage(root)
    info = storage.fs.get_file_info(storage.root)
    if info.type == pafs.FileType.File:
        infos, prefix = [info], len(info.path) - len(info.base_name)
    else:
        deep = pattern is None or len(pattern) > 1 or pattern[0] == ANY_FOLDERS
        selector = pafs.FileSelector(storage.root, allow_not_found=True, recursive=deep)
        infos, prefix = storage.fs.get_file_info(selector), len(storage.root.rstrip("/")) + 1
    there = [i for i in sorted(infos, key=lambda i: i.path) if i.type == pafs.FileType.File]
    files = tuple(
        SourceFile(i.path[prefix:], i.path, i.size, i.mtime_ns or 0)
        for i in there
        if info.type == pafs.FileType.File or _wanted(i.path[prefix:], pattern, config.format)
    )
    if not files:
        what = "no such file or folder" if info.type == pafs.FileType.NotFound else _none_of(there, pattern, config)
        raise EtlError(f"etl.sources.{name}.path = {config.path!r}: {what}; the table {name!r} is missing")
    _refuse_lake_tables(name, config, storage, infos, [f.full for f in files])
    return Source(name, config, storage, files)


def _refuse_lake_tables(name: str, config: SourceConfig, storage: Storage, infos: list[Any], files: list[str]) -> None:
    """Raise EtlError where one of `files` lies in a folder that a table format keeps versions of a table in."""
    root = storage.root.rstrip("/")
    paths = [i.path for i in infos]
    for above in [root, *accumulate(root.split("/"), "{}/{}".format)]:
        with contextlib.suppress(OSError):  # who may read a folder need not be let into those above it
            for found in storage.fs.get_file_info([f"{above}/{mark}" for mark in LAKE_MARKS]):
                if found.type == pafs.FileType.Directory:
                    paths += [i.path for i in storage.fs.get_file_info(pafs.FileSelector(found.path))]
    for path in sorted(paths):
        for mark, (kind, sign) in LAKE_MARKS.items():
            match = re.search(rf"^(.*/){mark}/{sign}", path)
            if match and any(file.startswith(match[1]) for file in files):
                raise EtlError(
                    f"etl.sources.{name}.path = {config.path!r}: {match[1]} is a table of {kind}; beside its rows "
                    "it holds files of rows that were deleted or replaced. Export the rows with the engine that keeps "
                    "it (INSERT OVERWRITE DIRECTORY '...' USING parquet SELECT * FROM ...) and declare that folder"
                )


def _split_glob(path: str) -> tuple[str, list[str] | None]:
    """`data/2013-*/x.csv` -> (`data`, [`2013-*`, `x.csv`]). A URI's `?` begins its options, which are the root's."""
    is_uri = "://" in path and not path.startswith("file:")
    base, mark, query = path.partition("?") if is_uri else (path, "", "")
    parts = base.split("/")
    first = next((i for i, part in enumerate(parts) if any(c in part for c in WILDCARDS)), None)
    if first is None:
        return path, None
    return ("/".join(parts[:first]) or ("/" if first else ".")) + mark + query, parts[first:]


def _wanted(relative: str, pattern: list[str] | None, kind: str) -> bool:
    """Whether a file below the root belongs to the table: by the glob, else by the suffix of the format."""
    parts = relative.split("/")
    if any(part.startswith(("_", ".")) for part in parts):
        return False
    if pattern is None:
        return kind == "text" or re.search(rf"\.{kind}({COMPRESSED})?$", relative, re.IGNORECASE) is not None
    return _matches(parts, pattern)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Folder by folder: only `**` stands for any number of them."""
    if not pattern:
        return not parts
    if pattern[0] == ANY_FOLDERS:
        return any(_matches(parts[n:], pattern[1:]) for n in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _none_of(there: list[Any], pattern: list[str] | None, config: SourceConfig) -> str:
    if not there:
        return "no files below it"
    example = f"{len(there)} files lie there, such as {there[0].base_name!r}"
    if pattern is None:
        return f"no files named *.{config.format} below it ({example}: name them by a glob)"
    return f"no file matches it ({example}; a `*` stays within one folder, `**` stands for any folders)"


def fingerprint(source: Source) -> str:
    """sha256 over the declared columns, options and files: their bytes, or with `stat` their sizes and times."""
    if source.config.fingerprint == "stat":
        files = [[f.path, f.bytes, f.mtime_ns] for f in source.files]
    else:
        contents = Storage(source.storage.fs, "", source.storage.uri)
        with ThreadPoolExecutor(FOOTER_THREADS) as pool:
            hashes = pool.map(lambda f: _sha256(contents, f.full), source.files)
            files = [[f.path, f.bytes, h] for f, h in zip(source.files, hashes, strict=True)]
    declared = source.config.model_dump(mode="json", include={"format", "columns", "options", "fingerprint"})
    return digest([declared, list(source.config.columns), files])


def _sha256(storage: Storage, full: str) -> str:
    return Storage(storage.fs, full.rpartition("/")[0], storage.uri).sha256(full.rpartition("/")[2])


def read_source(spark: SparkSession, source: Source) -> DataFrame:
    """The typed table. Raises EtlError naming every file and column that does not match the declaration."""
    schema = _declared(source)
    if source.config.format == "csv":
        return _read_csv(spark, source, schema)
    if source.config.format == "text":
        return _read_text(spark, source)
    _check_footers(source, schema)
    return spark.read.schema(schema).parquet(*source.spark_paths()).select(*schema.names)


def _read_text(spark: SparkSession, source: Source) -> DataFrame:
    """One row per file: `path` below the source's root, `text`."""
    root = HOST.sub("", source.spark_paths()[0]).removesuffix(source.files[0].path)
    # The path is a URI, percent-encoded; unlike input_file_name() it counts as a deterministic column.
    uri = F.url_decode(F.replace(F.col("_metadata.file_path"), F.lit("+"), F.lit("%2B")))
    path = F.substr(F.regexp_replace(uri, HOST.pattern, ""), F.lit(len(root) + 1))
    found = spark.read.text(source.spark_paths(), wholetext=True).select(
        path.alias("path"), F.col("value").alias("text")
    )
    broken = found.where(~F.is_valid_utf8("text")).select("path").limit(20).collect()
    _raise(source, [f"{row['path']}: is not UTF-8; convert it, or leave it out by another glob" for row in broken])
    return found


def _declared(source: Source) -> StructType:
    fields = []
    for name, ddl in source.config.columns.items():
        try:
            fields.append(StructField(name, DataType.fromDDL(ddl)))
        except Exception as error:  # the parser's exceptions differ between Spark Classic and Connect
            raise EtlError(f"{source.key}.columns.{name} = {ddl!r}: not a Spark type ({_first_line(error)})") from error
    return StructType(fields)


# --- CSV: checked by line and value before the first row is used ------------------------------------------------


def _read_csv(spark: SparkSession, source: Source, schema: StructType) -> DataFrame:
    types = {f.name: _text_type(source, f) for f in schema.fields}
    task = CsvTask(worker_uri(source.storage), source.files, source.config.options or CsvOptions(), types)
    count = min(len(source.files), max(spark.sparkContext.defaultParallelism, _bytes(source) // TASK_BYTES))
    numbers = spark.sparkContext.parallelize(range(len(source.files)), count)
    files = spark.createDataFrame(numbers.map(lambda n: (n,)), "file int")
    found = files.mapInArrow(task.check, "file int, problem string").orderBy("file").collect()
    _raise(source, [row["problem"] for row in found])
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


def _bytes(source: Source) -> int:
    return sum(f.bytes for f in source.files)


def _text_type(source: Source, field: StructField) -> str:
    kind = field.dataType.simpleString()
    if arrow_type(kind) is None:
        raise EtlError(
            f"{source.key}.columns.{field.name} = {kind!r}: no value of a csv file is read as one; declare it string, "
            "and make the value in the recipe's SQL"
        )
    return kind


# --- Parquet: every footer, so that drift between files is found before Spark reads nulls or garbage ----------------


def _check_footers(source: Source, schema: StructType) -> None:
    _raise(source, _each(source.files, lambda f: _footer_problems(source, f, schema)))


def _footer_problems(source: Source, file: SourceFile, schema: StructType) -> list[str]:
    try:
        found: pa.Schema = pq.read_schema(file.full, filesystem=source.storage.fs)
    except (pa.ArrowInvalid, OSError) as error:
        return [f"{file.path}: not a readable Parquet file: {_first_line(error)}"]
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


def _each(files: Sequence[SourceFile], problems_of: Callable[[SourceFile], list[str]]) -> list[str]:
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return [problem for problems in pool.map(problems_of, files) for problem in problems]


def _raise(source: Source, problems: list[str]) -> None:
    if problems:
        shown = "\n".join(f"  - {p}" for p in problems[:20])
        more = f"\n  - and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise EtlError(f"{source.key}: files do not match the declared columns:\n{shown}{more}")


def _first_line(error: Any) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
