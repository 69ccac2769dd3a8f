"""Check what Parquet and ORC files say of their columns, so that a file that drifted is found before Spark reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc
from pyspark.sql.types import StructType

from sparkring.conf.errors import first_line
from sparkring.conf.storage import Storage
from sparkring.etl.sources.files.listing import FileList, SourceFile
from sparkring.etl.spark_platform.versions import type_of_arrow

FOOTER_THREADS = 16
NAMES = {"parquet": "Parquet", "orc": "ORC"}
ORC_TYPE = b"spark.sql.catalyst.type"  # what Spark notes of a column whose ORC type is not the whole of its own
ORC_UNNAMED = "_col"  # in files of old versions of Hive; Spark reads a file that has no other names by places

MOST_DIGITS = 38
# In the text of an Arrow type that Spark has none for -> why, and what to write instead.
UNKNOWN = {
    "timestamp[ns": ", which reads microseconds: in pandas, to_parquet(coerce_timestamps='us')",
    "time32[": ", which reads no time of day: write seconds as a number, or a text",
    "time64[": ", which reads no time of day: write seconds as a number, or a text",
    "halffloat": ": write float32",
    "arrow.uuid": ": write the text of it",
}
# Arrow's types that are stored as another one, and what Spark reads of them.
STORED: tuple[tuple[Callable[[pa.DataType], bool], pa.DataType], ...] = (
    (pa.types.is_duration, pa.int64()),
    (pa.types.is_uint8, pa.int16()),
    (pa.types.is_uint16, pa.int32()),
    (pa.types.is_uint32, pa.int64()),
    (pa.types.is_uint64, pa.decimal128(20)),
    (pa.types.is_null, pa.int32()),
    (pa.types.is_string_view, pa.string()),
    (pa.types.is_binary_view, pa.binary()),
)


@dataclass(frozen=True)
class Footer:
    """What was found in one file: how it differs from the declaration, and the partition columns it has itself.

    `lacking`: the declared columns that are not in it.
    """

    problems: list[str]
    partition_columns: list[str]
    lacking: list[str] = field(default_factory=list)


def check_footers(
    listed: FileList, kind: str, schema: StructType, partitions: StructType, may_lack: bool = False
) -> list[Footer]:
    """Compare the columns of every file with the declared ones, in the order of the files.

    Args:
        listed: files to check.
        kind: `parquet` or `orc`, the file format.
        schema: declared columns of the source.
        partitions: declared partition columns.
        may_lack: whether a column may be missing in a file.
    """
    look = partial(_check, listed.storage, kind=kind, declared=(schema, partitions), may_lack=may_lack)
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return list(pool.map(look, listed.files))


def _check(
    storage: Storage, file: SourceFile, kind: str, declared: tuple[StructType, StructType], may_lack: bool
) -> Footer:
    """Compare the columns of one file with the declared ones.

    Args:
        storage: storage that holds the file.
        file: one of the listed files.
        kind: `parquet` or `orc`, the file format.
        declared: declared columns, and declared partition columns.
        may_lack: whether a column may be missing in the file.
    """
    try:
        with storage.fs.open_input_file(file.full) as stream:
            found = parquet_schema(pq.ParquetFile(stream)) if kind == "parquet" else _orc_schema(orc.ORCFile(stream))
    except (pa.ArrowInvalid, OSError) as error:
        return Footer([f"{file.path}: not a readable {NAMES[kind]} file: {first_line(error)}"], [])
    columns, partitions = declared
    own = [f for f in partitions if f.name in found.names and f.name not in columns.names]
    problems, lacking = list[str](), list[str]()
    by_place = kind == "orc" and all(name.startswith(ORC_UNNAMED) for name in found.names)
    for column in [*columns, *own]:
        if alike := [n for n in found.names if n != column.name and n.lower() == column.name.lower()]:
            problems.append(
                f"{file.path}: has a column {alike[0]!r}, which Spark, as it ignores case, takes for the declared "
                f"{column.name!r}; rename it"
            )
            continue
        if column.name not in found.names:
            lacking.append(column.name)
            if may_lack and by_place:
                problems.append(
                    f"{file.path}: has the columns {found.names}, which are no names, so Spark would read them by "
                    "their places, and none as null; write the file with names"
                )
                break
            if not may_lack:
                problems.append(f"{file.path}: has no column {column.name!r}; it has {found.names}")
            continue
        stored, want = found.field(column.name), column.dataType.simpleString()
        have = spark_type(stored)
        if have != want:
            problems.append(f"{file.path}: column {column.name!r} is {have}, declared {want}")
    return Footer(problems, [f.name for f in partitions if f.name in found.names], lacking)


def _orc_schema(file: orc.ORCFile) -> pa.Schema:
    return pa.schema([_typed(field) for field in file.schema])


def parquet_schema(file: pq.ParquetFile) -> pa.Schema:
    """Return the columns with Arrow types as Spark reads them: the types of the Parquet schema.

    Spark does not see what pyarrow notes for itself (`ARROW:schema`: durations, dictionaries, views).
    """
    leaves = iter([file.schema.column(i) for i in range(len(file.schema))])
    return pa.schema([field.with_type(_as_stored(field.type, leaves)) for field in file.schema_arrow])


def _as_stored(kind: pa.DataType, leaves: Iterator[pq.ColumnSchema]) -> pa.DataType:
    """Convert a column's type to what Spark reads. `leaves`: Parquet columns, starting at its first."""
    if isinstance(kind, pa.BaseExtensionType) and pa.types.is_nested(kind.storage_type):
        return _as_stored(kind.storage_type, leaves)
    if pa.types.is_dictionary(kind):
        return _as_stored(kind.value_type, leaves)
    if pa.types.is_struct(kind):
        return pa.struct([inner.with_type(_as_stored(inner.type, leaves)) for inner in kind])
    if pa.types.is_map(kind):
        return pa.map_(_as_stored(kind.key_type, leaves), _as_stored(kind.item_type, leaves))
    if pa.types.is_nested(kind):  # a list of any layout
        return pa.list_(_as_stored(kind.value_type, leaves))
    leaf = next(leaves)
    if leaf.physical_type == "INT96":
        return pa.timestamp("us", "UTC")  # instants, Spark's default for timestamps
    if leaf.logical_type.type in ("ENUM", "JSON"):
        return pa.string()
    if leaf.converted_type == "INTERVAL":  # of 12 bytes
        return pa.month_day_nano_interval()
    if isinstance(kind, pa.BaseExtensionType):
        return kind if leaf.logical_type.type == "UUID" else _as_stored(kind.storage_type, iter([leaf]))
    return next((stored for is_kind, stored in STORED if is_kind(kind)), kind)


def _typed(field: pa.Field) -> pa.Field:
    """Convert ORC timestamps without a zone to Spark's types: instants or wall-clock times."""
    kind: pa.DataType = field.type
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_typed(inner) for inner in kind]))
    if pa.types.is_list(kind):
        return field.with_type(pa.list_(_typed(kind.value_field)))
    if pa.types.is_map(kind):
        return field.with_type(pa.map_(_typed(kind.key_field), _typed(kind.item_field)))
    if (field.metadata or {}).get(ORC_TYPE) == b"timestamp_ntz":  # kept as a bigint
        return field.with_type(pa.timestamp("us"))
    is_instant = pa.types.is_timestamp(kind) and kind.unit == "ns"
    return field.with_type(pa.timestamp("us", "UTC")) if is_instant else field


def spark_type(field: pa.Field) -> str:
    """Return Spark's name of a file column's type; if it has none, Arrow's name and a remedy."""
    arrow = field.type
    for sign, remedy in UNKNOWN.items():
        if sign in str(arrow):
            return f"{arrow} (unknown to Spark{remedy})"
    try:
        found = str(type_of_arrow(arrow).simpleString())
    except Exception:  # PySparkTypeError or its subclasses: a type Spark does not have
        return f"{arrow} (unknown to Spark)"
    if any(int(digits) > MOST_DIGITS for digits in re.findall(r"decimal\((\d+)", found)):
        return f"{found} (unknown to Spark, whose decimals have {MOST_DIGITS} digits: write fewer, or texts)"
    return found
