"""Raw tables -> typed DataFrames, every file checked against the declared columns; a fingerprint of each table."""

from __future__ import annotations

import csv
import fnmatch
import io
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import (
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from conf.manifest import digest
from conf.schema_etl import SourceConfig
from conf.storage import Storage, open_storage
from etl.errors import EtlError

BROKEN = "__broken_line"
FILE = "__file"
HEADER_BYTES = 1 << 20
FOOTER_THREADS = 16
HOST = re.compile(r"^[A-Za-z][\w+.-]*:(//[^/]*)?")  # scheme and host, which Spark may write in more ways than one
WILDCARDS = "*?["
ANY_FOLDERS = "**"
COMPRESSED = r"\.gz|\.bz2|\.zst"
NOT_DECODED = "\ufffd"  # what a reader puts in the place of bytes that are not of its encoding


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
    return Source(name, config, storage, files)


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


# --- CSV: read as strings, so that a value that does not parse is an error here and not a silent null -------------


def _read_csv(spark: SparkSession, source: Source, schema: StructType) -> DataFrame:
    _raise(source, _each(source.files, lambda f: _header_problems(source, f, schema.names)))
    names = [f.name for f in schema.fields]
    strings = StructType([StructField(n, StringType()) for n in [*names, BROKEN]])
    raw = (
        spark.read.schema(strings)
        .options(**source.config.options)
        .options(
            header=True, enforceSchema=True, mode="PERMISSIVE", columnNameOfCorruptRecord=BROKEN, columnPruning=False
        )
        .csv(source.spark_paths())
    )
    problems, undecoded = _value_problems(raw, schema)
    _raise(source, problems + (_encoding_problems(spark, source) if undecoded else []))
    return raw.select(*[F.col(_quoted(f.name)).cast(f.dataType).alias(f.name) for f in schema.fields])


def _header_problems(source: Source, file: SourceFile, declared: list[str]) -> list[str]:
    separator, quote = source.config.options.get("sep", ","), source.config.options.get("quote", '"')
    with source.storage.fs.open_input_stream(file.full, compression="detect") as stream:
        text = stream.read(HEADER_BYTES).decode(source.config.options.get("encoding", "utf-8"), errors="replace")
    if not text:
        return [f"{file.path}: is empty; a csv file begins with its header"]
    found = next(csv.reader(io.StringIO(text.lstrip("\ufeff")), delimiter=separator, quotechar=quote), [])
    missing = [f"{file.path}: has no column {c!r}; its header is {found}" for c in declared if c not in found]
    extra = [
        f"{file.path}: has a column {c!r} that is not declared; add it to columns" for c in found if c not in declared
    ]
    if missing or extra or found == declared:
        return missing + extra
    return [f"{file.path}: columns stand in another order, {found}, than declared, {declared}"]


def _value_problems(raw: DataFrame, schema: StructType) -> tuple[list[str], bool]:
    """One pass: values that do not parse, or parse as another value, by file and column, each with a count and an
    example; and whether any text holds NOT_DECODED."""
    tests: dict[str, tuple[str, Column, Column]] = {
        BROKEN: ("lines with another number of fields than the header", F.col(BROKEN).isNotNull(), F.col(BROKEN))
    }
    for field in schema.fields:
        if not isinstance(field.dataType, StringType):
            value = F.col(_quoted(field.name))
            bad = value.try_cast(field.dataType).isNull() | _changed(field.dataType, value)
            what = f"values in column {field.name!r} are not {field.dataType.simpleString()}"
            tests[field.name] = (what, value.isNotNull() & bad, value)
    keys = list(tests)
    aggregates = [F.count_if(tests[k][1]).alias(f"n{i}") for i, k in enumerate(keys)]
    aggregates += [F.min(F.when(tests[k][1], tests[k][2])).alias(f"x{i}") for i, k in enumerate(keys)]
    # Spark refuses a query that reads the broken lines only, which is all there is where every column is a string.
    aggregates.append(F.count(_quoted(schema.names[0])).alias("present"))
    texts = [F.coalesce(F.contains(F.col(_quoted(n)), F.lit(NOT_DECODED)), F.lit(False)) for n in schema.names]
    aggregates.append(F.bool_or(reduce(Column.__or__, texts)).alias("undecoded"))
    by_file = raw.withColumn(FILE, F.input_file_name()).groupBy(FILE).agg(*aggregates)
    suspect = by_file.where(" or ".join(["undecoded", *(f"n{i} > 0" for i in range(len(keys)))])).orderBy(FILE)
    rows = suspect.collect()
    problems = [
        f"{row[FILE]}: {row[f'n{i}']} {tests[k][0]}, such as {row[f'x{i}']!r}"
        for row in rows
        for i, k in enumerate(keys)
        if row[f"n{i}"]
    ]
    return problems, any(row["undecoded"] for row in rows)


def _changed(kind: DataType, value: Column) -> Column:
    """Where a text parses, but as another value: digits, a time of day or a zone cut off, a number beyond the range."""
    if isinstance(kind, DecimalType):
        other = value.try_cast("double") != value.try_cast(kind).cast("double")
        return F.when(value.rlike("[eE]"), other).otherwise(value.rlike(rf"\.\d{{{kind.scale}}}\d*[1-9]"))
    if isinstance(kind, (FloatType, DoubleType)):
        return (F.abs(value.try_cast(kind)) == F.lit(math.inf)) & ~value.rlike("(?i)inf")
    if isinstance(kind, DateType):
        return value.rlike(r"\d[ T].*[1-9]")
    if isinstance(kind, TimestampNTZType):
        return value.rlike(r"\.\d{6}\d*[1-9]|:\d.*[A-Za-z+-]")
    return value.rlike(r"\.\d{6}\d*[1-9]") if isinstance(kind, TimestampType) else F.lit(False)


def _encoding_problems(spark: SparkSession, source: Source) -> list[str]:
    """Spark's csv reader replaces bytes it cannot decode; whether that is what it did, the bytes themselves say."""
    encoding = source.config.options.get("encoding", "UTF-8")
    remedy = "convert the file, or set options.encoding to what it is"
    if encoding.upper().replace("-", "") != "UTF8":
        return [f"some bytes are not {encoding}: {remedy}"]
    lines = spark.read.text(source.spark_paths()).select(F.input_file_name().alias(FILE), "value")
    found = lines.where(~F.is_valid_utf8("value")).groupBy(FILE).agg(F.count("value"), F.min("value")).orderBy(FILE)
    return [f"{file}: {count} lines are not UTF-8, such as {line!r}; {remedy}" for file, count, line in found.collect()]


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


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _first_line(error: Any) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
