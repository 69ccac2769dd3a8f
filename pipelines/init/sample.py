"""Read the first rows of a table's files, with the types that the recipe will declare. Without Spark."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from sparkring.conf.errors import first_line
from sparkring.conf.load import ConfigError
from sparkring.conf.sources import CsvOptions
from sparkring.etl.sources import csv_file
from sparkring.etl.sources.footers import parquet_schema, spark_type
from sparkring.etl.sources.values import convert

MOST_ROWS = 1_000_000  # looked at
HEADER_BYTES = 1 << 20
ENDINGS = {".csv": "csv", ".tsv": "csv", ".csv.gz": "csv", ".parquet": "parquet"}
SEPARATORS = ",;\t|"
# what files say for a null
NULLS = (
    "NA",
    "N/A",
    "n/a",
    "na",
    "#N/A",
    "null",
    "NULL",
    "Null",
    "NaN",
    "nan",
    "None",
    "none",
    "\\N",
    "?",
    "-",
    "--",
    ".",
)
TEXT_TYPES = ("bigint", "double", "boolean", "date", "timestamp")  # tried in this order; else string
CODE = re.compile(r"[+-]?0[0-9]+")  # a zip code, not a number: as a number it would lose its zero


@dataclass(frozen=True)
class TableSample:
    """The first rows of a table, with its columns' Spark types, and how a source of the recipe describes it."""

    path: Path
    format: str
    types: dict[str, str]
    options: dict[str, str]
    rows: pa.Table
    is_whole: bool  # no row was left unread


def read_sample(data: str, most_rows: int = MOST_ROWS) -> TableSample:
    """Read a CSV or Parquet file, or a folder of them, up to `most_rows` rows. ConfigError where that is not one."""
    path = Path(data).resolve()
    files, kind = _files(path, data)
    try:
        return _read_parquet(path, files, most_rows) if kind == "parquet" else _read_csv(path, files, most_rows)
    except (pa.ArrowException, OSError, ValueError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(data, [f"is no readable {kind} file: {first_line(error)}"]) from error


def read_columns(sample: TableSample, columns: list[str]) -> pa.Table:
    """Every row of some columns, also beyond the sample. A CSV's values that are not of their type are null there."""
    if sample.is_whole:
        return sample.rows.select(columns)
    files, _ = _files(sample.path, str(sample.path))
    if sample.format == "parquet":
        return pa.Table.from_batches(list(_parquet_batches(files, columns))).select(columns)
    texts_of = dict.fromkeys(sample.types, "string")
    options, null = CsvOptions.model_validate(sample.options), sample.options.get("nullValue")
    texts = (b for file in files for b in csv_file.read(lambda file=file: _open(file), options, texts_of))  # type: ignore[misc]
    made = [[_typed(batch.column(name), sample.types[name], null) for name in columns] for batch in texts]
    return pa.Table.from_batches([pa.RecordBatch.from_arrays(arrays, names=columns) for arrays in made])


def _files(path: Path, data: str) -> tuple[list[Path], str]:
    if not path.exists():
        raise ConfigError(data, ["--data: no such file or folder"])
    found = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p)) if path.is_dir() else [path]
    kinds = {_kind(file) for file in found}
    if len(kinds) != 1 or None in kinds:
        what = f"holds {sorted(map(str, kinds))} files" if len(kinds) > 1 else "is or holds no such file"
        raise ConfigError(data, [f"--data: {what}; a table is files of one kind: {', '.join(ENDINGS)}"])
    return found, str(kinds.pop())


def _kind(path: Path) -> str | None:
    return next((kind for ending, kind in ENDINGS.items() if path.name.lower().endswith(ending)), None)


def _read_parquet(path: Path, files: list[Path], most_rows: int) -> TableSample:
    types = {field.name: spark_type(field) for field in parquet_schema(pq.ParquetFile(files[0]))}
    rows, is_whole = _first(_parquet_batches(files, list(types)), most_rows)
    return TableSample(path, "parquet", types, {}, rows, is_whole)


def _parquet_batches(files: list[Path], columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Read columns as Spark does: unsigned integers, durations and codes of dictionaries are its types."""
    for path in files:
        file = pq.ParquetFile(path)
        stored = parquet_schema(file)
        for batch in file.iter_batches(columns=columns):
            arrays = [_as_stored(batch.column(name), stored.field(name).type) for name in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=columns)


def _as_stored(array: pa.Array, kind: pa.DataType) -> pa.Array:
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    return array if array.type == kind or isinstance(kind, pa.BaseExtensionType) else storage.cast(kind)


def _read_csv(path: Path, files: list[Path], most_rows: int) -> TableSample:
    with _open(files[0]) as stream:
        head = stream.read(HEADER_BYTES)
    encoding = _encoding(head)
    options, names = _header(path, head.decode(encoding, errors="replace"), encoding)
    texts_of = dict.fromkeys(names, "string")
    batches = (batch for file in files for batch in csv_file.read(lambda file=file: _open(file), options, texts_of))  # type: ignore[misc]
    texts, is_whole = _first(batches, most_rows)
    distinct = {name: pc.drop_null(pc.unique(texts.column(name))) for name in names}
    null = _null_text(distinct)
    types = {name: text_type(_without(values, null)) for name, values in distinct.items()}
    given = options.model_dump(exclude_defaults=True) | ({"nullValue": null} if null else {})
    columns = [_typed(texts.column(name), types[name], null) for name in names]
    return TableSample(path, "csv", types, given, pa.table(dict(zip(names, columns, strict=True))), is_whole)


def _open(path: Path) -> Any:
    return pafs.LocalFileSystem().open_input_stream(str(path))  # decompresses by the name


def _encoding(head: bytes) -> str:
    try:
        head[: len(head) - 4 * (len(head) == HEADER_BYTES)].decode()  # a character may be cut at the end
    except UnicodeDecodeError as error:
        return "windows-1252" if error.end < len(head) - 4 or len(head) < HEADER_BYTES else "utf-8"
    return "utf-8"


def _header(path: Path, text: str, encoding: str) -> tuple[CsvOptions, list[str]]:
    """Find what separates the columns, and their names. ConfigError for names that no recipe can have."""
    first = text.removeprefix("\ufeff").split("\n", 1)[0]
    separator = max(SEPARATORS, key=first.count)
    names = next(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), delimiter=separator, strict=True), [])
    lower = [name.lower() for name in names]
    problems = [f"column {i} of the header has no name; give it one" for i, name in enumerate(names, 1) if not name]
    problems += [
        f"two columns are called {name!r}, upper and lower case aside; rename one"
        for i, name in enumerate(names)
        if name and name.lower() in lower[:i]
    ]
    if problems or not names:
        raise ConfigError(str(path), problems or ["is empty; a csv file begins with its header"])
    return CsvOptions(sep=separator, encoding=encoding), names


def _first(batches: Iterator[pa.RecordBatch], most: int) -> tuple[pa.Table, bool]:
    """The first rows as one table, and whether there were no more."""
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(batch)
        if sum(b.num_rows for b in kept) > most:
            return pa.Table.from_batches(kept).slice(0, most).combine_chunks(), False
    if not sum(b.num_rows for b in kept):
        raise ValueError("there is no row in it")
    return pa.Table.from_batches(kept).combine_chunks(), True


def _null_text(distinct: dict[str, pa.Array]) -> str | None:
    """The text by which, taken for a null, most columns become numbers, dates or booleans; None if there is none."""

    texts = [values for values in distinct.values() if text_type(values) == "string"]
    held = [(values, {*NULLS} & {*values.to_pylist()}) for values in texts]
    gains = {
        null: sum(null in nulls and text_type(_without(values, null)) != "string" for values, nulls in held)
        for null in NULLS
    }
    best = max(gains, key=lambda null: gains[null])
    return best if gains[best] else None


def _without(values: pa.Array, null: str | None) -> pa.Array:
    return values if null is None else values.filter(pc.not_equal(values, null))


def text_type(values: pa.Array) -> str:
    """The narrowest of TEXT_TYPES that all of these texts are values of, by the reader of the ETL; else string."""
    if not len(values) or any(CODE.fullmatch(text) for text in values.to_pylist()):
        return "string"
    return next((kind for kind in TEXT_TYPES if _all_are(values, kind)), "string")


def _all_are(values: pa.Array, kind: str) -> bool:
    return not convert(values.slice(0, 100), kind)[1] and not convert(values, kind)[1]


def _typed(texts: pa.ChunkedArray, kind: str, null: str | None) -> pa.Array:
    array = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    if null is not None:
        array = pc.if_else(pc.equal(array, null), None, array)
    return convert(array, kind)[0]
