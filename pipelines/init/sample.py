"""Read the first rows of a table's files, with the types that the recipe will declare. Without Spark."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from sparkring.conf.errors import first_line
from sparkring.conf.load import ConfigError
from sparkring.conf.sources.files import CsvOptions
from sparkring.etl.sources.files import csv_file
from sparkring.etl.sources.files.footers import parquet_schema, spark_type
from sparkring.etl.sources.files.listing import WILDCARDS
from sparkring.etl.sources.files.partitions import NULL_NAME
from sparkring.etl.sources.values import convert
from sparkring.pipelines.init.text_types import TextType, count_texts, decide_type, text_type, without_nulls

MOST_ROWS = 1_000_000  # looked at
HEADER_BYTES = 1 << 20
ENDINGS = {".csv": "csv", ".tsv": "csv", ".csv.gz": "csv", ".parquet": "parquet"}
# What is no table that is read here, by its ending, and what to do.
OTHERS = {
    ".json": "JSON; save it as Parquet: pandas.read_json(FILE, lines=True).to_parquet(NEW)",
    ".jsonl": "JSON; save it as Parquet: pandas.read_json(FILE, lines=True).to_parquet(NEW)",
    ".xlsx": "a workbook of Excel; save its sheet as CSV UTF-8",
    ".xls": "a workbook of Excel; save its sheet as CSV UTF-8",
    ".zst": "compressed with zstd; decompress it first: unzstd FILE",
    ".zip": "compressed with zip; unpack it first: unzip FILE",
    ".bz2": "compressed with bzip2; decompress it first: bunzip2 FILE",
    ".xz": "compressed with xz; decompress it first: unxz FILE",
    ".orc": "ORC; save it as Parquet: pandas.read_orc(FILE).to_parquet(NEW)",
    ".avro": "Avro, which is not read; save it as Parquet",
    ".feather": "Feather; save it as Parquet: pandas.read_feather(FILE).to_parquet(NEW)",
}
# What a file that is called .csv begins with and is, and what to do.
BEGINNINGS = {
    b"PAR1": "is a Parquet file; call it .parquet",
    b"PK\x03\x04": "is a workbook of Excel, or a zip; save its sheet as CSV UTF-8, or unpack it",
    b"\x1f\x8b": "is compressed with gzip; call it .csv.gz",
    codecs.BOM_UTF32_LE: "is UTF-32; save it as CSV UTF-8",
    codecs.BOM_UTF32_BE: "is UTF-32; save it as CSV UTF-8",
}
RENAME_CSV = "in line 1 of the file"
RENAME_PARQUET = (
    "t = pyarrow.parquet.read_table(FILE); pyarrow.parquet.write_table(t.rename_columns([NAME, ...]), NEW_FILE)"
)
SEPARATORS = ",;\t|"
FOLDER = re.compile(r"([^=/]+)=(.*)")  # of a partition


@dataclass(frozen=True)
class TableSample:
    """The first rows of a table, with its columns' Spark types, and how a source of the recipe describes it."""

    path: Path
    format: str
    types: dict[str, str]
    options: dict[str, Any]
    rows: pa.Table
    is_whole: bool  # no row was left unread
    partitions: dict[str, str] = field(default_factory=dict)  # column -> type, of folders such as `day=2024-01-31`
    some_lack: tuple[str, ...] = ()  # columns that are not in every file
    texts: dict[str, TextType] = field(default_factory=dict)  # of a CSV: what its columns' texts are

    def source(self, columns: Container[str]) -> dict[str, Any]:
        """Return the recipe's source with these columns; CSV declares all columns of the file."""
        of_files = {n: t for n, t in self.types.items() if n not in self.partitions}
        kept = {n: t for n, t in of_files.items() if self.format == "csv" or n in columns}
        made: dict[str, Any] = {"path": str(self.path), "format": self.format}
        made |= {"options": self.options} if self.options else {}
        made |= {"partitions": self.partitions} if self.partitions else {}
        made |= {"missing_columns": "null"} if any(name in kept for name in self.some_lack) else {}
        return made | {"columns": kept}


def read_sample(data: str, most_rows: int = MOST_ROWS) -> TableSample:
    """Read a CSV or Parquet file, or a folder of them, up to `most_rows` rows. ConfigError where that is not one."""
    path = Path(data).resolve()
    files, kind = _files(path, data)
    if signs := set(WILDCARDS) & set(str(path)):
        raise ConfigError(
            data, [f"--data: a recipe takes {min(signs)} in a path for a pattern; rename the file or folder"]
        )
    folders = [_partition(path, file) for file in files]
    if odd := next((file for file, own in zip(files, folders, strict=True) if own.keys() != folders[0].keys()), None):
        raise ConfigError(data, [f"{odd} is not in folders of {[*folders[0]]}, as {files[0]} is; move it, or name one"])
    for file, own in zip(files, folders, strict=True):
        if bare := [name for name, text in own.items() if text == ""]:
            raise ConfigError(str(file), [f"its folder {bare[0]}= gives no value; null is {bare[0]}={NULL_NAME}"])
    texts = {name: pa.array([own[name] for own in folders], pa.string()) for name in folders[0]}
    partitions = {name: text_type(pc.drop_null(values)) for name, values in texts.items()}
    empty = TableSample(path, kind, partitions, {}, pa.table({}), False, partitions)
    return _read_parquet(empty, files, most_rows) if kind == "parquet" else _read_csv(empty, files, most_rows)


def read_columns(sample: TableSample, columns: list[str]) -> pa.Table:
    """Read every row of some columns, also beyond the sample. CSV values of a wrong type are null."""
    if sample.is_whole:
        return sample.rows.select(columns)
    files, _ = _files(sample.path, str(sample.path))
    if sample.format == "parquet":
        kinds = {field.name: field.type for field in sample.rows.schema}
        return pa.Table.from_batches([batch.select(columns) for batch in _parquet_batches(sample, files, kinds)])
    texts = (batch.select(columns) for batch in _csv_batches(sample, files))
    return _typed_table(sample, pa.Table.from_batches(list(texts)))


def _files(path: Path, data: str) -> tuple[list[Path], str]:
    if not path.exists():
        raise ConfigError(data, ["--data: no such file or folder"])
    below = sorted(p for p in path.rglob("*") if p.is_file() and _is_read(p, path)) if path.is_dir() else [path]
    found = [file for file in below if _kind(file)]
    kinds = {_kind(file) for file in found}
    if len(kinds) != 1:
        other = next((f"{f.name} is {words}" for f in below for end, words in OTHERS.items() if _ends(f, end)), "")
        what = f"holds {sorted(map(str, kinds))} files" if kinds else other or "is or holds no such file"
        raise ConfigError(data, [f"--data: {what}; a table is files of one kind: {', '.join(ENDINGS)}"])
    return found, str(kinds.pop())


def _is_read(file: Path, folder: Path) -> bool:
    """Return whether the ETL reads the file; it skips `.ipynb_checkpoints/a.csv` and `_temporary/a.csv`."""
    return not any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts)


def _partition(path: Path, file: Path) -> dict[str, str | None]:
    """Parse a file's partition values from its folders: `day=2024-01-31/country=DE`, None for null."""
    names = [FOLDER.fullmatch(name) for name in file.parent.relative_to(path).parts] if path.is_dir() else []
    return {m[1]: None if m[2] == NULL_NAME else unquote(m[2]) for m in names if m}


def _ends(path: Path, ending: str) -> bool:
    return path.name.lower().endswith(ending)


def _with_partition(sample: TableSample, file: Path, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add the partition columns, as constants of their type."""
    for name, text in _partition(sample.path, file).items():
        value = convert(pa.array([text], pa.string()), sample.partitions[name])[0]
        batch = batch.append_column(name, pa.repeat(value[0], batch.num_rows))
    return batch


def _kind(path: Path) -> str | None:
    return next((kind for ending, kind in ENDINGS.items() if _ends(path, ending)), None)


def _read_parquet(sample: TableSample, files: list[Path], most_rows: int) -> TableSample:
    """Read the columns of all files: one that only later files have is null in the others."""
    found: dict[str, pa.Field] = {}
    some_lack, where = list[str](), dict[str, Path]()
    for number, file in enumerate(files):
        with _readable(file, "parquet"):
            schema = parquet_schema(pq.ParquetFile(file))
        if problems := _same_names(schema.names):
            raise ConfigError(str(file), problems)
        some_lack += [name for name in schema.names if name not in found and number]
        some_lack += [name for name in found if name not in schema.names]
        for field_ in schema:
            first, name = found.setdefault(field_.name, field_), field_.name
            where.setdefault(name, file)
            if spark_type(first) != spark_type(field_):
                raise ConfigError(
                    str(file),
                    [
                        f"column {name!r} is {spark_type(field_)}, and {spark_type(first)} in {where[name]}; "
                        "files of one table have one type for it: write one of them again"
                    ],
                )
    if problems := _same_names([*found, *(name for name in sample.partitions if name not in found)]):
        raise ConfigError(str(sample.path), problems)
    for name, kind in sample.partitions.items():
        if name in found and spark_type(found[name]) != kind:
            words = f"column {name!r} is {spark_type(found[name])}, and {kind} by the names of its folders"
            raise ConfigError(str(where[name]), [f"{words}; write the files without it, as pandas and Spark do"])
    kinds = {name: one.type for name, one in found.items() if name not in sample.partitions}
    rows, is_whole = _first(sample.path, _parquet_batches(sample, files, kinds), most_rows)
    types = {name: spark_type(found[name]) for name in kinds} | sample.partitions
    return replace(sample, types=types, rows=rows, is_whole=is_whole, some_lack=tuple(dict.fromkeys(some_lack)))


def _parquet_batches(
    sample: TableSample, files: list[Path], kinds: Mapping[str, pa.DataType]
) -> Iterator[pa.RecordBatch]:
    """Read columns as Spark does: unsigned integers, durations and codes of dictionaries are its types."""
    names = [name for name in kinds if name not in sample.partitions]
    for path in files:
        with _readable(path, "parquet"):
            file = pq.ParquetFile(path)
            own = [name for name in names if name in file.schema_arrow.names]
            for batch in file.iter_batches(columns=own):
                arrays = [
                    _as_stored(batch.column(n), kinds[n]) if n in own else pa.nulls(batch.num_rows, kinds[n])
                    for n in names
                ]
                yield _with_partition(sample, path, pa.RecordBatch.from_arrays(arrays, names=names))


def _as_stored(array: pa.Array, kind: pa.DataType) -> pa.Array:
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    if array.type == kind or isinstance(kind, pa.BaseExtensionType):
        return array
    return storage.cast(kind)


def _read_csv(sample: TableSample, files: list[Path], most_rows: int) -> TableSample:
    with _readable(files[0], "csv"), _open(files[0]) as stream:
        head = stream.read(HEADER_BYTES)
    if what := next((what for beginning, what in BEGINNINGS.items() if head.startswith(beginning)), None):
        raise ConfigError(str(files[0]), [what])
    encoding = _encoding(head)
    if encoding != "utf-16" and b"\0" in head.split(b"\n", 1)[0]:
        raise ConfigError(str(files[0]), ["line 1 holds bytes of zero: it is no text, or UTF-16; save it as CSV UTF-8"])
    options, names = _header(files[0], head.decode(encoding, errors="replace"), encoding)
    if problems := _same_names([*names, *sample.partitions], RENAME_CSV):
        raise ConfigError(str(files[0]), problems)
    texts_of = replace(sample, types=dict.fromkeys(names, "string"), options=options.model_dump(exclude_defaults=True))
    texts, is_whole = _first(sample.path, _csv_batches(texts_of, files), most_rows)
    decided = {name: decide_type(count_texts(texts.column(name))) for name in names}
    types = {name: each.kind for name, each in decided.items()} | sample.partitions
    nulls = {name: sorted(each.nulls) for name, each in decided.items() if each.nulls}
    given = texts_of.options | ({"nulls": nulls} if nulls else {})
    made = replace(sample, types=types, options=given, is_whole=is_whole, texts=decided)
    return replace(made, rows=_typed_table(made, texts))


def _csv_batches(sample: TableSample, files: list[Path]) -> Iterator[pa.RecordBatch]:
    """Read all columns as texts. ConfigError for a file with another header than the first."""
    names = [name for name in sample.types if name not in sample.partitions]
    options = CsvOptions.model_validate(sample.options)
    for file in files:
        opener = partial(_open, file)
        with _readable(file, "csv"):
            if problems := csv_file.header_problems(opener, options, names):
                raise ConfigError(
                    str(file), [*problems, f"files of one table have one header; the first is {files[0]}"]
                )
            texts = dict.fromkeys(names, "string")
            try:
                for batch in csv_file.read(opener, options, texts):
                    yield _with_partition(sample, file, batch)
            except (pa.ArrowInvalid, UnicodeError) as error:
                raise ConfigError(str(file), csv_file.check(opener, options, texts) or [first_line(error)]) from error


def _typed_table(sample: TableSample, texts: pa.Table) -> pa.Table:
    columns = [
        column if name in sample.partitions else _typed(column, sample.types[name], sample.texts[name].nulls)
        for name, column in zip(texts.column_names, texts.columns, strict=True)
    ]
    return pa.table(dict(zip(texts.column_names, columns, strict=True)))


@contextmanager
def _readable(file: Path, kind: str) -> Iterator[None]:
    """Raise what readers of files raise as one ConfigError that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, ValueError, csv.Error) as error:
        raise ConfigError(str(file), [f"is no readable {kind} file: {first_line(error)}"]) from error


def _open(path: Path) -> Any:
    return pafs.LocalFileSystem().open_input_stream(str(path))  # decompresses by the name


def _encoding(head: bytes) -> str:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:
        head[: len(head) - 4 * (len(head) == HEADER_BYTES)].decode()  # a character may be cut at the end
    except UnicodeDecodeError as error:
        return "windows-1252" if error.end < len(head) - 4 or len(head) < HEADER_BYTES else "utf-8"
    return "utf-8"


def _header(path: Path, text: str, encoding: str) -> tuple[CsvOptions, list[str]]:
    """Find what separates the columns, and their names. ConfigError for names that no recipe can have."""
    first = re.split("[\r\n]", text.removeprefix("\ufeff"), maxsplit=1)[0]
    if re.fullmatch(r'"?sep=.?"?', first.strip(), re.IGNORECASE):
        raise ConfigError(
            str(path), [f"line 1 is {first.strip()!r}, a mark for Excel where the header should be; delete the line"]
        )
    separator = max(SEPARATORS, key=first.count)
    names = next(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), delimiter=separator, strict=True), [])
    problems = [f"column {i} of the header has no name; give it one" for i, name in enumerate(names, 1) if not name]
    problems += _same_names(names, RENAME_CSV)
    if problems or not names:
        raise ConfigError(str(path), problems or ["is empty; a csv file begins with its header"])
    return CsvOptions(sep=separator, encoding=encoding), names


def _same_names(names: list[str], how: str = RENAME_PARQUET) -> list[str]:
    """List names that are one name to Spark. `how`: a column of such a file is renamed."""
    lower = [name.lower() for name in names]
    return [
        f"columns {lower.index(name.lower()) + 1} and {i + 1} are {names[lower.index(name.lower())]!r} and {name!r}, "
        f"one name to Spark, which ignores case; rename one: {how}"
        for i, name in enumerate(names)
        if name and name.lower() in lower[:i]
    ]


def _first(path: Path, batches: Iterator[pa.RecordBatch], most: int) -> tuple[pa.Table, bool]:
    """Return the first rows as one table, and whether there were no more."""
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(batch)
        if sum(b.num_rows for b in kept) > most:
            return pa.Table.from_batches(kept).slice(0, most).combine_chunks(), False
    if not sum(b.num_rows for b in kept):
        raise ConfigError(str(path), ["there is no row in it"])
    return pa.Table.from_batches(kept).combine_chunks(), True


def _typed(texts: pa.ChunkedArray, kind: str, nulls: Mapping[str, int]) -> pa.Array:
    array = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    return convert(without_nulls(array, nulls), kind)[0]
