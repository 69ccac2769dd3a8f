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
from pyspark import SparkFiles, TaskContext

from sparkring.conf.storage import open_storage
from sparkring.pipelines.predict.model import load
from sparkring.pipelines.serving import Predictor

ROW_GROUP = 1 << 17  # rows
LONG = "_sparkring_long"  # column: whether the row has long texts, which were not sent
NOT_FINITE = "no finite prediction"  # in `refused`, in the place of a column: of an infinite input, say
RESULT = pa.schema(
    {
        "path": pa.string(),
        "rows": pa.int64(),
        "bytes": pa.int64(),
        "sha256": pa.string(),
        "refused": pa.map_(pa.string(), pa.int64()),  # column -> rows
        "problem": pa.string(),
    }
)
RESULT_DDL = "path string, rows bigint, bytes bigint, sha256 string, refused map<string, bigint>, problem string"


@dataclass(frozen=True)
class About:
    """What stands beside each prediction."""

    model_name: str
    model_version: str
    scored_at: datetime  # with a time zone
    interval: str | None  # the start of the data interval

    def columns(self, rows: int) -> dict[str, pa.Array]:
        """The columns of `rows` rows."""
        types = {"scored_at": pa.timestamp("us", "UTC")}
        return {
            name: pa.repeat(pa.scalar(value, types.get(name, pa.string())), rows) for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class ScoreTask:
    """All a worker needs. Files go to the folder `root_uri`; `absent`: raw columns that are null in every row."""

    archive: str  # of the model, as Spark's files have it
    root_uri: str
    version: str  # in the names of files: those of another run differ
    keep: tuple[str, ...]
    about: About
    absent: tuple[str, ...] = ()


@dataclass
class Counts:
    """Of a partition, as it is scored."""

    rows: int = 0
    refused: dict[str, int] = field(default_factory=dict)


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
        record = {"path": "", "rows": 0, "bytes": 0, "sha256": "", "refused": {}, "problem": str(error)}
    record["refused"] = list(record["refused"].items())
    yield pa.RecordBatch.from_pylist([record], schema=RESULT)


def _write(task: ScoreTask, path: str, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    predictor, counts = loaded(SparkFiles.get(task.archive)), Counts()
    with open_storage(task.root_uri).create(path) as sink:
        writer: pq.ParquetWriter | None = None
        waiting: list[pa.Table] = []
        for batch in _chain(first, rest):
            waiting.append(score_batch(predictor, task, without_long(batch), counts))
            if sum(map(len, waiting)) >= ROW_GROUP:
                writer = _flush(writer, sink, waiting)
        writer = _flush(writer, sink, waiting)
        writer.close()
    return {"rows": counts.rows, "bytes": sink.bytes, "sha256": sink.sha256, "refused": counts.refused}


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _flush(writer: pq.ParquetWriter | None, sink: Any, waiting: list[pa.Table]) -> pq.ParquetWriter:
    """Write the tables as a row group, and forget them; the first ones decide the schema."""
    table = pa.concat_tables(waiting)
    waiting.clear()
    # Texts repeat. A dictionary of numbers, of which most differ, takes as long as the rest of the writing.
    texts = [column.name for column in table.schema if pa.types.is_string(column.type)]
    writer = writer or pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"), table.schema, use_dictionary=texts, write_page_checksum=True
    )
    writer.write_table(table, row_group_size=ROW_GROUP)
    return writer


@functools.lru_cache(maxsize=1)
def loaded(folder: str) -> Predictor:
    """The model, read once by each worker process, whose tasks are Spark's slots: one thread each."""
    torch.set_num_threads(1)
    return load(Path(folder))


def score_batch(predictor: Predictor, task: ScoreTask, batch: pa.RecordBatch, counts: Counts) -> pa.Table:
    """Score the rows of a batch that are not refused, and count both."""
    kept, refused = without_refused(batch, [n for n in predictor.refuses_null if n in batch.schema.names])
    for name, rows in refused.items():
        counts.refused[name] = counts.refused.get(name, 0) + rows
    raw: dict[str, Any] = {n: kept.column(n) for n in predictor.raw_columns if n in kept.schema.names}
    raw |= {name: pa.nulls(kept.num_rows) for name in task.absent}
    scores = predictor.scores(raw, kept.num_rows)
    finite = np.isfinite(scores).reshape(len(scores), -1).all(axis=1)
    if not finite.all():
        counts.refused[NOT_FINITE] = counts.refused.get(NOT_FINITE, 0) + int(np.count_nonzero(~finite))
        kept, scores = kept.filter(pa.array(finite)), scores[finite]
    counts.rows += kept.num_rows
    columns: Mapping[str, Any] = {name: kept.column(name) for name in task.keep}
    return pa.table({**columns, **predictor.predictions(scores), **task.about.columns(kept.num_rows)})


def without_long(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows whose texts were sent."""
    if LONG not in batch.schema.names:
        return batch
    long = batch.column(LONG)
    return batch.filter(pc.invert(long)) if pc.any(long).as_py() else batch


def without_refused(batch: pa.RecordBatch, columns: Sequence[str]) -> tuple[pa.RecordBatch, dict[str, int]]:
    """The rows without a null in `columns`, and how many others there are by the first column that is null."""
    refused, bad = dict[str, int](), np.zeros(batch.num_rows, bool)
    for name in columns:
        null = batch.column(name).is_null().to_numpy(zero_copy_only=False)
        if found := int(np.count_nonzero(null & ~bad)):
            refused[name] = found
            bad |= null
    return (batch.filter(pa.array(~bad)) if refused else batch), refused
