"""Check what Parquet and ORC files say of their columns, so that a file that drifted is found before Spark reads it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructType

from sparkring.conf.errors import first_line
from sparkring.conf.storage import Storage
from sparkring.etl.sources.files import FileList, SourceFile

FOOTER_THREADS = 16
NAMES = {"parquet": "Parquet", "orc": "ORC"}
ORC_TYPE = b"spark.sql.catalyst.type"  # what Spark notes of a column whose ORC type is not the whole of its own


@dataclass(frozen=True)
class Footer:
    """What was found in one file: how it differs from the declaration, and the partition columns it has itself."""

    problems: list[str]
    partition_columns: list[str]


def check_footers(listed: FileList, kind: str, schema: StructType, partitions: StructType) -> list[Footer]:
    """Compare the columns of every Parquet or ORC (`kind`) file with the declared ones; in the order of the files."""
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return list(pool.map(lambda file: _check(listed.storage, file, kind, (schema, partitions)), listed.files))


def _check(storage: Storage, file: SourceFile, kind: str, declared: tuple[StructType, StructType]) -> Footer:
    try:
        with storage.fs.open_input_file(file.full) as stream:
            found = _parquet_schema(pq.ParquetFile(stream)) if kind == "parquet" else _orc_schema(orc.ORCFile(stream))
    except (pa.ArrowInvalid, OSError) as error:
        return Footer([f"{file.path}: not a readable {NAMES[kind]} file: {first_line(error)}"], [])
    columns, partitions = declared
    own = [f for f in partitions if f.name in found.names and f.name not in columns.names]
    problems = []
    for field in [*columns, *own]:
        if alike := [n for n in found.names if n != field.name and n.lower() == field.name.lower()]:
            problems.append(
                f"{file.path}: has a column {alike[0]!r}, which Spark, as it ignores case, takes for the declared "
                f"{field.name!r}; rename it"
            )
            continue
        if field.name not in found.names:
            problems.append(f"{file.path}: has no column {field.name!r}; it has {found.names}")
            continue
        stored, want = found.field(field.name), field.dataType.simpleString()
        have = spark_type(stored)
        if have != want:
            problems.append(f"{file.path}: column {field.name!r} is {have}, declared {want}")
    return Footer(problems, [f.name for f in partitions if f.name in found.names])


def parquet_types(file: pq.ParquetFile) -> dict[str, str]:
    """Name Spark's type of every column of a Parquet file."""
    return {field.name: spark_type(field) for field in _parquet_schema(file)}


def _orc_schema(file: orc.ORCFile) -> pa.Schema:
    return pa.schema([_typed(field) for field in file.schema])


def _parquet_schema(file: pq.ParquetFile) -> pa.Schema:
    """The columns. pyarrow gives INT96 no time zone, though it holds instants: Spark's default for timestamps."""
    leaves = [file.schema.column(i) for i in range(len(file.schema))]
    instants = [leaf.path for leaf in leaves if leaf.physical_type == "INT96"]

    def is_instant(field: pa.Field) -> bool:
        return any(f"{path}.".startswith(f"{field.name}.") for path in instants)

    return pa.schema([_typed(field) if is_instant(field) else field for field in file.schema_arrow])


def _typed(field: pa.Field) -> pa.Field:
    """A column with Spark's type, where the file's is without a zone: ORC's instants and wall-clock times, INT96."""
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
    """Name Spark's type of a column as a file has it."""
    arrow = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if "timestamp[ns" in str(arrow):
        return f"{arrow} (unknown to Spark, which reads microseconds: in pandas, to_parquet(coerce_timestamps='us'))"
    try:
        return str(from_arrow_type(arrow, prefer_timestamp_ntz=True).simpleString())
    except Exception:  # PySparkTypeError or its subclasses: a type Spark does not have
        return f"{arrow} (unknown to Spark)"
