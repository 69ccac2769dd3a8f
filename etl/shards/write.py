"""Write the Arrow batches of one shard as one Parquet file with exact row groups, hashed while it is written.

Runs in Spark's Python workers; knows pyarrow and the storage, nothing of Spark.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.manifest import ROW_NUMBER, Column
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.columns.ragged import list_lengths, lists_of
from sparkring.etl.columns.statistics import NOT_MEASURED, Measured, StatisticsMerger, measure, nothing
from sparkring.etl.columns.types import arrow_field

SHARD = "__shard"
MEASURED_AT_ONCE = 1 << 16  # rows


class BadRows(ValueError):
    """A value that the declared column cannot hold; reported to the driver instead of failing, retrying, failing."""


@dataclass(frozen=True)
class WriteTask:
    """All a worker needs to write shards.

    `paths` are relative to `root_uri`. One per shard number are `paths`, `first_rows` (ROW_NUMBER of each file's first
    row), `row_groups` (rows of each of its row groups), and `statistics`, the path of its `measured` statistics or None
    if it is not measured. Empty: no shard is measured.
    """

    root_uri: str
    paths: tuple[str, ...]
    first_rows: tuple[int, ...]
    columns: tuple[Column, ...]
    row_groups: tuple[int, ...]
    compression: str
    measured: Measured = NOT_MEASURED
    statistics: tuple[str | None, ...] = ()


RESULT = pa.schema(
    {
        "shard": pa.int32(),
        "rows": pa.int64(),
        "bytes": pa.int64(),
        "sha256": pa.string(),
        "row_groups": pa.list_(pa.int32()),
        "problem": pa.string(),
    }
)


def write_shard(task: WriteTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the partition's rows to their shard's file; one result record, or none for an empty partition.

    Raises ValueError when the partition holds rows of two shards: the shuffle did not do what was planned.
    """
    first = next((b for b in batches if b.num_rows), None)
    if first is None:
        return
    shard = first.column(SHARD)[0].as_py()
    record: dict[str, Any] = {"shard": shard, "problem": None}
    try:
        record |= _write(task, shard, _tables(task, shard, first, batches))
    except BadRows as error:
        record |= {"rows": 0, "bytes": 0, "sha256": "", "row_groups": [], "problem": str(error)}
        for _ in batches:  # Spark waits until its side of the pipe has been read
            pass
    yield pa.RecordBatch.from_pylist([record], schema=RESULT)


def _tables(task: WriteTask, shard: int, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield tables of exactly `row_group` rows in the stored schema; the last may be smaller."""
    schema = pa.schema([arrow_field(column) for column in task.columns])
    waiting: list[pa.RecordBatch] = []
    rows, row_group = 0, task.row_groups[shard]
    for batch in itertools.chain([first], rest):
        if batch.num_rows and (batch.column(SHARD)[0].as_py() != shard or batch.column(SHARD)[-1].as_py() != shard):
            raise ValueError(f"rows of shard {batch.column(SHARD)[-1].as_py()} arrived with those of shard {shard}")
        waiting.append(batch)
        rows += batch.num_rows
        while rows >= row_group:
            table = pa.Table.from_batches(waiting)
            yield _stored(table.slice(0, row_group), task.columns, schema)
            waiting = table.slice(row_group).to_batches()
            rows -= row_group
    if rows:
        yield _stored(pa.Table.from_batches(waiting), task.columns, schema)


def _stored(table: pa.Table, columns: tuple[Column, ...], schema: pa.Schema) -> pa.Table:
    arrays = []
    for column, field in zip(columns, schema, strict=True):
        array = table.column(column.name)
        array = array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks)
        arrays.append(_checked(array, column).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _checked(array: pa.Array, column: Column) -> pa.Array:
    """Round float16 values; raise BadRows for nulls, wrong lengths and half-precision overflow."""
    if column.nulls == "refuse" and array.null_count:
        raise BadRows(
            f"column {column.name!r} has nulls (at least {array.null_count}); declare `nulls: mask` or `nulls: fill`, "
            "or quarantine those rows with a row-level check"
        )
    inner, sizes = array, list(column.shape)
    while pa.types.is_list(inner.type):
        lengths = list_lengths(inner)
        if column.layout == "vector":
            wanted = sizes.pop(0)
            wrong = (lengths != wanted) & inner.is_valid().to_numpy(zero_copy_only=False)
            if wrong.any():
                got = int(lengths[wrong][0])
                raise BadRows(
                    f"column {column.name!r} has shape {list(column.shape)}: found {count_of(got, 'value')} for "
                    f"{wanted}"
                )
        inner = inner.flatten()
        if inner.null_count:
            raise BadRows(f"column {column.name!r} has nulls inside its arrays; remove them with filter() in SQL")
    if column.dtype == "string":
        _check_text(inner, column.name)
    return _as_half(array, inner, column.name) if column.dtype == "float16" else array


def _check_text(array: pa.Array, name: str) -> None:
    """Raise BadRows for bytes that are no text: Spark's strings may hold any, other readers of Parquet refuse them."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise BadRows(
            f"column {name!r} is text and holds bytes that are not UTF-8 ({error}); decode() them in the recipe's SQL"
        ) from None


def _as_half(array: pa.Array, inner: pa.Array, name: str) -> pa.Array:
    values = inner.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16).astype(np.float32)
    if (np.isinf(half) & np.isfinite(values)).any():
        worst = float(np.nanmax(np.abs(values[np.isfinite(values)])))
        raise BadRows(
            f"column {name!r} does not fit float16: it holds {worst:g}, the largest half is 65504; keep float32"
        )
    if inner is array:
        return pa.array(half, pa.float32(), mask=array.is_null().to_numpy(zero_copy_only=False))
    return _with_values(array, pa.array(half, pa.float32()))


def _with_values(array: pa.Array, values: pa.Array) -> pa.Array:
    """Replace the innermost values of a list array; lengths and nulls are kept."""
    if not pa.types.is_list(array.type):
        return values
    lengths = list_lengths(array)
    lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return lists_of(_with_values(array.flatten(), values), lengths, mask=array.is_null())


def _write(task: WriteTask, shard: int, tables: Iterator[pa.Table]) -> dict[str, Any]:
    row_number = pa.field(ROW_NUMBER, pa.int64(), nullable=False)
    schema = pa.schema([*(arrow_field(column) for column in task.columns), row_number])
    groups: list[int] = []
    storage, statistics = open_storage(task.root_uri), _Measurer(task, shard)
    with storage.create(task.paths[shard]) as sink:
        # Dictionary pages help texts and repeated values; floats, tokens and images only pay for them, twice.
        coded = [c.name for c in task.columns if not c.dtype.startswith("float") and c.layout == "scalar"]
        with pq.ParquetWriter(
            pa.PythonFile(sink, mode="w"),
            schema,
            compression=task.compression,
            use_dictionary=coded,
            column_encoding={ROW_NUMBER: "DELTA_BINARY_PACKED"},
            store_schema=False,
            write_page_checksum=True,
        ) as writer:
            for table in tables:
                first = task.first_rows[shard] + sum(groups)
                numbers = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
                writer.write_table(table.append_column(row_number, numbers), row_group_size=task.row_groups[shard])
                groups.append(table.num_rows)
                statistics.add(table)
    statistics.store(storage)
    return {"rows": sum(groups), "bytes": sink.bytes, "sha256": sink.sha256, "row_groups": groups}


class _Measurer:
    """Measures the tables of a shard, several row groups at once: small ones would cost more than their rows."""

    def __init__(self, task: WriteTask, shard: int) -> None:
        self._wanted, self._path = task.measured, task.statistics[shard] if task.statistics else None
        self._waiting: list[pa.Table] = []
        self._merger = StatisticsMerger()
        self._merger.add(nothing(self._wanted))

    def add(self, table: pa.Table) -> None:
        if self._path is not None:
            self._waiting.append(table.select(self._wanted.columns))
            if sum(t.num_rows for t in self._waiting) >= MEASURED_AT_ONCE:
                self._measure()

    def store(self, storage: Storage) -> None:
        if self._path is not None:
            self._measure()
            storage.put_atomic(self._path, self._merger.result().to_bytes())

    def _measure(self) -> None:
        if self._waiting:
            self._merger.add(measure(pa.concat_tables(self._waiting), self._wanted))
            self._waiting = []


def worker_uri(storage: Storage) -> str:
    """Return the storage's address for workers: absolute, because their working directory differs."""
    return storage.root if storage.is_local else storage.uri
