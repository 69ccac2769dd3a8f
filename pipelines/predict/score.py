"""Score the Arrow batches of one Spark partition into one Parquet file. Runs in Spark's Python workers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from pyspark import TaskContext

from sparkring.conf.blocks.predict import CONTRIBUTIONS, POSITIVE
from sparkring.conf.storage import open_storage
from sparkring.pipelines.predict.model import load
from sparkring.pipelines.serving import TablePredictor
from sparkring.training.model.contributions import Contributions

ROW_GROUP = 1 << 17  # rows
MOST_WAITING = 64 << 20  # bytes of rows that wait for their row group
WHOLE_ROWS = 64  # torch's loops round the rows that fill no vector register otherwise
EXPLAINED = 4096  # rows whose contributions are computed at once
LONG = "_sparkring_long"  # column: whether the row has long texts, which were not sent
NOT_FINITE = "no finite prediction"  # in `refused`, in the place of a column: of an infinite input, say
RESULT = pa.schema(
    {
        "path": pa.string(),
        "rows": pa.int64(),
        "bytes": pa.int64(),
        "sha256": pa.string(),
        "refused": pa.map_(pa.string(), pa.int64()),  # column -> rows
        "missed": pa.int64(),  # rows whose contributions do not sum to their raw prediction
        "problem": pa.string(),
    }
)
RESULT_DDL = (
    "path string, rows bigint, bytes bigint, sha256 string, refused map<string, bigint>, missed bigint, problem string"
)


@dataclass(frozen=True)
class About:
    """What stands next to each prediction."""

    model_name: str
    model_version: str
    scored_at: datetime  # with a time zone
    interval: str | None  # the start of the data interval
    positive_class: str = ""  # whose probability `prediction` is; "": there is no such column

    def columns(self, rows: int) -> dict[str, pa.Array]:
        """Return the columns of `rows` rows."""
        types = {"scored_at": pa.timestamp("us", "UTC")}
        shown = {name: value for name, value in vars(self).items() if name != POSITIVE or value}
        return {name: pa.repeat(pa.scalar(value, types.get(name, pa.string())), rows) for name, value in shown.items()}


@dataclass(frozen=True)
class ScoreTask:
    """All a worker needs. Files go to the folder `root_uri`; `absent`: raw columns that are null in every row."""

    archive: str  # of the model, as Spark's files have it
    root_uri: str
    version: str  # in the names of files: those of another run differ
    keep: tuple[str, ...]
    about: About
    absent: tuple[str, ...] = ()
    contributions: bool = False


@dataclass
class Counts:
    """Of a partition, as it is scored."""

    rows: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    missed: int = 0


def score_partition(task: ScoreTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Score a partition's rows into a file; one result record, or none for an empty partition."""
    first = next((b for b in batches if b.num_rows), None)
    if first is None:
        return
    context = TaskContext.get()
    assert context is not None, "runs in a task of Spark"
    # The attempt is in the name: a task that Spark repeats does not write to the file of the first try.
    name = f"part-{context.partitionId():05d}-{task.version}-{context.taskAttemptId()}.parquet"
    try:
        record = _write(task, name, first, batches)
        record |= {"path": name, "problem": None}
    except (ValueError, TypeError) as error:  # of the rows: another try would end the same way
        for _ in batches:  # Spark waits until its side of the pipe has been read
            pass
        record = {"path": "", "rows": 0, "bytes": 0, "sha256": "", "refused": {}, "missed": 0, "problem": str(error)}
    record["refused"] = list(record["refused"].items())
    yield pa.RecordBatch.from_pylist([record], schema=RESULT)


def _write(task: ScoreTask, path: str, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    from pyspark import SparkFiles  # of a worker: a client of Spark Connect alone has none

    predictor, counts = loaded(SparkFiles.get(task.archive)), Counts()
    with open_storage(task.root_uri).create(path) as sink:
        writer: pq.ParquetWriter | None = None
        waiting: list[pa.Table] = []
        for batch in _chain(first, rest):
            for part in parts_of(without_long(batch), task):
                waiting.append(score_batch(predictor, task, part, counts))
                if sum(map(len, waiting)) >= ROW_GROUP or sum(table.nbytes for table in waiting) >= MOST_WAITING:
                    writer = _flush(writer, sink, waiting)
        if waiting or writer is None:
            writer = _flush(writer, sink, waiting)
        writer.close()
    about = {"rows": counts.rows, "refused": counts.refused, "missed": counts.missed}
    return about | {"bytes": sink.bytes, "sha256": sink.sha256}


def parts_of(batch: pa.RecordBatch, task: ScoreTask) -> list[pa.RecordBatch]:
    """Split the batch if rows have contributions, of which there may be thousands."""
    if not task.contributions:
        return [batch]
    return [batch.slice(first, EXPLAINED) for first in range(0, max(batch.num_rows, 1), EXPLAINED)]


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _flush(writer: pq.ParquetWriter | None, sink: Any, waiting: list[pa.Table]) -> pq.ParquetWriter:
    """Write the tables as a row group, and forget them; the first ones decide the schema."""
    table = pa.concat_tables(waiting)
    waiting.clear()
    # Texts repeat. A dictionary of numbers, of which most differ, takes as long as the rest of the writing.
    texts = [path for column in table.schema for path in text_paths(column.name, column.type)]
    writer = writer or pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"), table.schema, use_dictionary=texts, write_page_checksum=True
    )
    writer.write_table(table, row_group_size=ROW_GROUP)
    return writer


def text_paths(name: str, kind: pa.DataType) -> list[str]:
    """List the texts of a column by Parquet's names: itself, or the keys of maps."""
    if pa.types.is_map(kind):
        inner = f"{name}.key_value"
        return [*text_paths(f"{inner}.key", kind.key_type), *text_paths(f"{inner}.value", kind.item_type)]
    return [name] if pa.types.is_string(kind) else []


@functools.lru_cache(maxsize=1)
def loaded(folder: str) -> TablePredictor:
    """Load the model once per worker process, with one thread: tasks are Spark's slots."""
    torch.set_num_threads(1)
    return load(Path(folder))


def score_batch(predictor: TablePredictor, task: ScoreTask, batch: pa.RecordBatch, counts: Counts) -> pa.Table:
    """Score the rows of a batch that are not refused, and count both."""
    kept, refused = without_refused(batch, [n for n in predictor.refuses_null if n in batch.schema.names])
    for name, rows in refused.items():
        counts.refused[name] = counts.refused.get(name, 0) + rows
    raw: dict[str, Any] = {n: kept.column(n) for n in predictor.raw_columns if n in kept.schema.names}
    raw |= {name: pa.nulls(kept.num_rows) for name in task.absent}
    scores = predictor.scores(*filled(raw, kept.num_rows))[: kept.num_rows]
    finite = np.isfinite(scores).all(axis=tuple(range(1, scores.ndim)))
    if not finite.all():
        counts.refused[NOT_FINITE] = counts.refused.get(NOT_FINITE, 0) + int(np.count_nonzero(~finite))
        kept, scores = kept.filter(pa.array(finite)), scores[finite]
        raw = {name: values.filter(pa.array(finite)) for name, values in raw.items()}
    counts.rows += kept.num_rows
    columns: Mapping[str, Any] = {name: kept.column(name) for name in task.keep}
    made = predictor.predictions(scores)
    if task.contributions:
        found = predictor.contributions(raw, kept.num_rows)
        counts.missed += int(np.count_nonzero(found.misses()))
        made |= contribution_columns(found, predictor.raw_columns, predictor.output_names(found))
    return pa.table({**columns, **made, **task.about.columns(kept.num_rows)})


def filled(raw: Mapping[str, Any], rows: int) -> tuple[Mapping[str, Any], int]:
    """Repeat the last row up to a multiple of WHOLE_ROWS, so that a score does not depend on the batch; the new count.

    Not of images, each of which costs more than the others' last bits are worth.
    """
    more = -rows % WHOLE_ROWS if rows else 0
    if not more or any(pa.types.is_binary(values.type) for values in raw.values()):
        return raw, rows
    wanted = pa.array(np.minimum(np.arange(rows + more), rows - 1))
    return {name: values.take(wanted) for name, values in raw.items()}, rows + more


def contribution_columns(found: Contributions, features: Sequence[str], outputs: Sequence[str]) -> dict[str, pa.Array]:
    """Return the columns CONTRIBUTIONS: a map by feature and a number; maps of them by output if several.

    Args:
        found: contributions of the rows.
        features: names, in the order of `found.values`.
        outputs: names of the classes or labels; [] for one output.
    """
    rows, names = len(found.values), np.array(features, object)
    by_feature = map_column(names, np.ascontiguousarray(found.values.transpose(0, 2, 1)).ravel())
    if not outputs:
        return dict(zip(CONTRIBUTIONS, (by_feature, pa.array(np.full(rows, found.base[0]))), strict=True))
    of_outputs = np.array(outputs, object)
    maps = map_column(of_outputs, by_feature), map_column(of_outputs, np.tile(found.base, rows))
    return dict(zip(CONTRIBUTIONS, maps, strict=True))


def map_column(keys: np.ndarray, values: Any) -> pa.MapArray:
    """Make maps with the same keys in every row. `values`: of all rows, one after the other."""
    rows = len(values) // len(keys)
    offsets = np.arange(rows + 1, dtype=np.int32) * len(keys)
    return pa.MapArray.from_arrays(offsets, pa.array(np.tile(keys, rows), pa.string()), pa.array(values))


def without_long(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows whose texts were sent."""
    if LONG not in batch.schema.names:
        return batch
    long = batch.column(LONG)
    return batch.filter(pc.invert(long)) if pc.any(long).as_py() else batch


def without_refused(batch: pa.RecordBatch, columns: Sequence[str]) -> tuple[pa.RecordBatch, dict[str, int]]:
    """Return rows without null in `columns`, and count the others by their first null column."""
    refused, bad = dict[str, int](), np.zeros(batch.num_rows, bool)
    for name in columns:
        null = batch.column(name).is_null().to_numpy(zero_copy_only=False)
        if found := int(np.count_nonzero(null & ~bad)):
            refused[name] = found
            bad |= null
    return (batch.filter(pa.array(~bad)) if refused else batch), refused
