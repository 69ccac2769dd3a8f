"""Land rows that can be read only once as Parquet files whose bytes depend on the rows alone.

A landing is the folder `<datasets>/landed/<id>/`; its `_landed.json`, written last, makes it whole. It is needed while
one job builds: landings, and what killed jobs left of them, are deleted by a later one when they are a day old.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from math import ceil
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark import StorageLevel, TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, DataType, StringType, StructField, StructType

from sparkring.conf.digest import digest
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.shards.write import worker_uri
from sparkring.etl.sources.files.listing import spark_paths
from sparkring.etl.spark_platform.application import GONE

log = logging.getLogger(__name__)

FOLDER, MARKER = "landed", "_landed.json"
LANDING_AGE = timedelta(days=1)
FILE_BYTES, ROW_GROUP_BYTES, ROW_GROUP_ROWS = 256 << 20, 32 << 20, 1 << 16
FIXED_BYTES = 8  # of a value that is not a text


@dataclass(frozen=True)
class LandedFile:
    path: str  # below the landing
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Landing:
    """Rows as files. The fingerprint, of their types and the files' hashes, is of the rows."""

    folder: Storage
    schema: StructType
    files: tuple[LandedFile, ...]

    @property
    def fingerprint(self) -> str:
        return digest([self.schema.json(), [[file.rows, file.sha256] for file in self.files]])

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def spark_paths(self) -> list[str]:
        return spark_paths(self.folder, [self.folder.path(file.path) for file in self.files])

    def is_whole(self) -> bool:
        """Return whether all its files are still there."""
        return self.folder.exists(MARKER) and all(self.folder.size_bytes(f.path) == f.bytes for f in self.files)


def land(rows: DataFrame, datasets_uri: str) -> Landing:
    """Write the rows, which are computed once, sorted into files of planned sizes. Nothing is left where it fails."""
    datasets = open_storage(datasets_uri)
    sweep(datasets, datetime.now(UTC) - LANDING_AGE)
    folder = datasets.at(FOLDER).at(f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:12]}")
    held = rows.persist(StorageLevel.DISK_ONLY)
    try:
        schema = StructType([StructField(field.name, field.dataType) for field in rows.schema])
        landing = Landing(folder, schema, tuple(_write(held, folder)))
        folder.put_atomic(MARKER, json.dumps([asdict(file) for file in landing.files], indent=1).encode())
    except BaseException:
        folder.delete("")
        raise
    finally:
        with suppress(*GONE):
            held.unpersist()
    return landing


def sweep(datasets: Storage, limit: datetime) -> None:
    """Delete landings to which nothing was written since `limit`; none behind a link or a mount point."""
    root = datasets.at(FOLDER)
    if datasets.way_out_on(FOLDER):
        return
    selector = pafs.FileSelector(root.root, allow_not_found=True, recursive=True)
    newest: dict[str, datetime] = {}
    for info in root.fs.get_file_info(selector):
        name = info.path[len(root.root) + 1 :].split("/")[0]
        newest[name] = max(newest.get(name, info.mtime), info.mtime)
    for name in sorted(name for name, at in newest.items() if at < limit):
        log.info("deleting %s: a landing of an earlier job", root.at(name).uri)
        datasets.delete(f"{FOLDER}/{name}")


def _write(rows: DataFrame, folder: Storage) -> Iterator[LandedFile]:
    """Choose the files by counts and sizes of the rows alone, and their rows by a hash: not by partitions or hosts."""
    names = rows.columns
    rows = rows.toDF(*[f"c{n}" for n in range(len(names))])  # mapInArrow takes no name with a dot or backquote
    size = sum((_bytes(F.col(f.name), f.dataType) for f in rows.schema), F.lit(0))
    total = rows.agg(F.count(F.lit(1)).alias("rows"), F.sum(size).alias("bytes")).collect()[0]
    if not total["rows"]:
        return
    row_bytes = max(total["bytes"] / total["rows"], 1)
    row_group = max(1, min(ROW_GROUP_ROWS, int(ROW_GROUP_BYTES / row_bytes)))
    # Equal to Spark's order, but not the same bytes: 0.0 and -0.0.
    floats = [f.name for f in rows.schema if re.search("float|double", f.dataType.simpleString())]
    signs = [F.col(name).cast("string") for name in floats]
    count = ceil(total["bytes"] / FILE_BYTES)
    arranged = rows.repartition(count, *rows.columns).sortWithinPartitions(*rows.columns, *signs)
    write = partial(_write_file, worker_uri(folder), names, row_group)
    records = arranged.mapInArrow(write, "path string, rows bigint, bytes bigint, sha256 string").collect()
    landed = sorted((LandedFile(**record.asDict()) for record in records), key=lambda file: file.path)
    assert sum(file.rows for file in landed) == total["rows"], (landed, total)
    yield from landed


def _bytes(value: Column, kind: DataType) -> Column:
    """Estimate the bytes of a value."""
    if not isinstance(kind, (StringType, BinaryType, ArrayType)):
        return F.lit(FIXED_BYTES)
    text = value.cast("string") if isinstance(kind, ArrayType) else value
    return F.coalesce(F.octet_length(text).cast("long"), F.lit(0)) + FIXED_BYTES


def _write_file(
    root_uri: str, names: list[str], row_group: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the sorted rows of one partition to a file; one record of it, or none for no rows."""
    tables = (table.rename_columns(names) for table in _row_groups(batches, row_group))
    first = next(tables, None)
    if first is None:
        return
    context = TaskContext.get()
    assert context is not None
    record: dict[str, Any] = {"path": f"{context.partitionId():05d}.parquet", "rows": 0}
    with (
        open_storage(root_uri).create(record["path"]) as sink,
        pq.ParquetWriter(pa.PythonFile(sink, mode="w"), first.schema, compression="zstd") as writer,
    ):
        for table in chain([first], tables):
            writer.write_table(table, row_group_size=row_group)
            record["rows"] += table.num_rows
    record |= {"bytes": sink.bytes, "sha256": sink.sha256}
    yield pa.RecordBatch.from_pylist([record])


def _row_groups(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Yield tables of exactly `rows` rows, each contiguous; the last may be smaller."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        waiting.append(batch)
        count += batch.num_rows
        while count >= rows:
            table = pa.Table.from_batches(waiting)
            yield table.slice(0, rows).combine_chunks()
            waiting, count = table.slice(rows).to_batches(), count - rows
    if count:
        yield pa.Table.from_batches(waiting).combine_chunks()
