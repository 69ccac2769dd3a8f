"""Read the data files of a lake table as its log describes them: columns, partition values, deleted rows.

Files say none of this, and their paths say it wrongly (Spark decodes non-ASCII partition values byte by byte). So rows
are joined with what the log knows of their file, and a row of a file that the log does not know stops the job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.fs as pafs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, IntegerType, LongType, MapType, StringType, StructField, StructType

from sparkring.conf.storage import Storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.files.read import declared_schema, local_table, quoted
from sparkring.etl.sources.spark_path import as_glob
from sparkring.etl.spark_platform.paths import HOST
from sparkring.etl.spark_platform.session import BY_FIELD_ID

LIST_THREADS = 16
FIELD_ID = "parquet.field.id"  # in a field's metadata: the id that names the column in a file, whatever its name there
# Columns besides the table's own while rows are joined with the log; `file` is a file's position in the list.
PATH, LOG, FILE, ROW = "__lake_path", "__lake_log", "__lake_file", "__lake_row"
READ_OPTIONS = {
    "mergeSchema": "false",
    # Files without Spark's mark are of writers that have only ever used today's calendar.
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
}


@dataclass(frozen=True)
class LakeFile:
    """A data file of a table.

    `path` is below the table's storage, as on disk: decoded once from the log's URI. `partition` has a Python value
    (None is null) for each of the schema's `partitions`. `deleted`, int64 of shape (deleted rows,), are the positions
    in the file of rows that the table no longer has.
    """

    path: str
    bytes: int
    partition: tuple[Any, ...] = ()
    deleted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), compare=False)


@dataclass(frozen=True)
class LakeSchema:
    """The columns that are read: `columns` as the table names them, `stored` the same, in order, as its files do.

    Files are read by the names in `stored`, or by FIELD_ID where a field's metadata has it; of structs within, too.
    The columns in `partitions` are not read from files: the log has one value of each per file.
    """

    columns: StructType
    stored: StructType
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True)
class LakeFiles:
    """The data files of a table at one version, all below `storage`, in the order of their paths."""

    storage: Storage
    schema: LakeSchema
    files: tuple[LakeFile, ...]

    def __post_init__(self) -> None:
        paths = [file.path for file in self.files]
        if twice := [path for path, other in pairwise(sorted(paths)) if path == other]:
            raise EtlError(f"{self.storage.uri}: the log of this table lists {twice[0]} twice; repair it")

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def content(self) -> list[Any]:
        """Return all that decides the rows, as JSON-able values: data files never change or share a name."""
        schema = self.schema
        files = [
            [f.path, f.bytes, [v if v is None else str(v) for v in f.partition], _digest(f.deleted)] for f in self.files
        ]
        return [schema.columns.jsonValue(), schema.stored.jsonValue(), list(schema.partitions), files]

    def gone(self) -> list[str]:
        """List the paths of files that are no longer there with their size."""
        paths = {file.path: self.storage.path(file.path) for file in self.files}
        folders = {path.rpartition("/")[0] for path in paths.values()}
        with ThreadPoolExecutor(LIST_THREADS) as pool:
            found = {path: size for sizes in pool.map(self._sizes, folders) for path, size in sizes.items()}
        return [file.path for file in self.files if found.get(paths[file.path]) != file.bytes]

    def read(self, spark: SparkSession) -> DataFrame:
        """Make the DataFrame of the table's columns. `spark` must be a build's session, which reads by field id."""
        schema = self.schema
        if not self.files:
            return spark.createDataFrame([], schema.columns)
        assert spark.conf.get(BY_FIELD_ID) == "true", BY_FIELD_ID
        rows = self._stored_rows(spark)
        if schema.partitions or any(len(file.deleted) for file in self.files):
            rows = self._join_log(rows)
        if any(len(file.deleted) for file in self.files):
            rows = rows.withColumn(FILE, F.col(LOG)["file"])
            rows = rows.join(F.broadcast(self._deleted(spark)), [FILE, ROW], "left_anti")
        values = {name: F.col(LOG)[f"p{n}"] for n, name in enumerate(schema.partitions)}
        return rows.select(*[values.get(c, F.col(quoted(c))).alias(c) for c in schema.columns.names])

    def _stored_rows(self, spark: SparkSession) -> DataFrame:
        """Read all rows of the files: the table's stored columns, the file's PATH, the position ROW in it."""
        pairs = list(zip(self.schema.columns, self.schema.stored, strict=True))
        in_files = [(column, stored) for column, stored in pairs if column.name not in self.schema.partitions]
        reader = spark.read.options(**READ_OPTIONS).schema(StructType([stored for _, stored in in_files]))
        found = reader.parquet(*[as_glob(self._spark_path(file)) for file in self.files])
        place = found.metadataColumn("_metadata")
        return found.select(
            *[F.col(quoted(stored.name)).cast(column.dataType).alias(column.name) for column, stored in in_files],
            _plain_path(place["file_path"]).alias(PATH),
            place["row_index"].alias(ROW),
        )

    def _join_log(self, rows: DataFrame) -> DataFrame:
        """Add LOG, what the log knows of a row's file: its number `file`, and partition values `p0`, `p1`, ..."""
        types = {c.name: c.dataType for c in self.schema.columns}
        kinds = [types[name] for name in self.schema.partitions]
        names = ["file", *[f"p{n}" for n in range(len(kinds))]]
        fields = zip([PATH, *names], [StringType(), IntegerType(), *kinds], strict=True)
        schema = StructType([StructField(name, kind) for name, kind in fields])
        values = [[HOST.sub("", self._spark_path(file)), n, *file.partition] for n, file in enumerate(self.files)]
        log = local_table(rows.sparkSession, schema, list(zip(*values, strict=True)))
        log = log.select(PATH, F.struct(*names).alias(LOG))
        unknown = F.raise_error(F.concat(F.lit("the table's log does not have this file: "), F.col(PATH)))
        joined = rows.join(F.broadcast(log), PATH, "left")
        return joined.withColumn(LOG, F.coalesce(F.col(LOG), unknown.cast(log.schema[LOG].dataType)))

    def _deleted(self, spark: SparkSession) -> DataFrame:
        """Return the deleted rows (FILE, ROW). They pass through the driver, 12 bytes each."""
        files = np.repeat(np.arange(len(self.files), dtype=np.int32), [len(file.deleted) for file in self.files])
        schema = StructType([StructField(FILE, IntegerType()), StructField(ROW, LongType())])
        return local_table(spark, schema, [files, np.concatenate([file.deleted for file in self.files])])

    def _spark_path(self, file: LakeFile) -> str:
        """Return the file's path as in the decoded `_metadata.file_path`."""
        if self.storage.is_local:
            return f"file://{self.storage.path(file.path)}"
        return f"{self.storage.uri.partition('?')[0].rstrip('/')}/{file.path}"

    def _sizes(self, folder: str) -> dict[str, int]:
        infos = self.storage.fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
        return {info.path: info.size for info in infos if info.type == pafs.FileType.File}


def select_columns(key: str, names: Iterable[str], schema: LakeSchema) -> LakeSchema:
    """Select columns by name, all of them where there are no names. EtlError names those the table does not have."""
    wanted = list(names) or schema.columns.names
    if missing := [name for name in wanted if name not in schema.columns.names]:
        raise EtlError(f"{key}.columns: the table has no column {missing}; it has {schema.columns.names}")
    stored = dict(zip(schema.columns.names, schema.stored, strict=True))
    return LakeSchema(
        StructType([schema.columns[name] for name in wanted]),
        StructType([stored[name] for name in wanted]),
        tuple(name for name in schema.partitions if name in wanted),
    )


def check_types(key: str, declared: Mapping[str, str], columns: StructType) -> None:
    """Raise EtlError naming every column whose declared type is not the table's. Needs a Spark session: its parser."""
    wanted = map_fields(declared_schema(key, declared), plain_field)
    problems = [
        f"column {want.name!r} is {columns[want.name].dataType.simpleString()}, declared {want.dataType.simpleString()}"
        for want in wanted
        if want.dataType != columns[want.name].dataType
    ]
    if problems:
        raise EtlError(f"{key}.columns: types are not the table's:\n" + "\n".join(f"  - {p}" for p in problems))


def plain_field(field: StructField, kind: DataType) -> StructField:
    """Return the field with its name and type alone, for `map_fields`."""
    return StructField(field.name, kind)


def map_fields(schema: StructType, change: Callable[[StructField, DataType], StructField]) -> StructType:
    """Replace every field, at any depth, by `change(field, its changed type)`; whatever is within may be null."""

    def changed(kind: DataType) -> DataType:
        if isinstance(kind, StructType):
            return map_fields(kind, change)
        if isinstance(kind, ArrayType):
            return ArrayType(changed(kind.elementType))
        if isinstance(kind, MapType):
            return MapType(changed(kind.keyType), changed(kind.valueType))
        return kind

    return StructType([change(field, changed(field.dataType)) for field in schema])


def _plain_path(uri: Column) -> Column:
    """Decode the path of a percent-encoded Spark URI, without scheme and host, which differ from the log's."""
    # TRICK: url_decode is of forms, where a plus is a blank (tests: a folder called `a+b`).
    return F.regexp_replace(F.url_decode(F.replace(uri, F.lit("+"), F.lit("%2B"))), HOST.pattern, "")


def _digest(rows: np.ndarray) -> str:
    return hashlib.sha256(rows.tobytes()).hexdigest() if len(rows) else ""
