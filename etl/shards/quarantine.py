"""Write rows that failed a row-level rule as Parquet: one file per portion and rule, `quarantine/<rule>.parquet`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.shards.write import worker_uri

PORTION = "__portion"  # which of the folders that are written at once a row belongs to


def write_quarantine(bad: DataFrame, storage: Storage, folders: Sequence[str]) -> list[dict[str, int]]:
    """Write `bad`, which has PORTION and in its last column the rule; returns rows by rule, for each of the folders.

    One task per portion and rule, streaming.
    """
    root, rule = worker_uri(storage), bad.columns[-1]
    result = bad.select(PORTION, *[c for c in bad.columns if c != PORTION])
    result = result.repartition(PORTION, rule).sortWithinPartitions(PORTION, rule)
    schema = f"{PORTION} int, rule string, rows long"
    records = result.mapInArrow(lambda batches: _write(root, folders, batches), schema).collect()
    found: list[dict[str, int]] = [{} for _ in folders]
    for record in records:
        found[record[PORTION]][record["rule"]] = record["rows"]
    return found


def _write(root: str, folders: Sequence[str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    pieces = (piece for batch in batches for piece in _by_file(batch))
    piece = next(pieces, None)
    while piece is not None:
        file, rows = _file_of(piece), 0
        portion, rule = file
        stored = piece.schema.remove(0)
        path = f"{folders[portion]}/{rule}.parquet"
        with open_storage(root).create(path) as sink, pq.ParquetWriter(sink, stored) as writer:
            while piece is not None and _file_of(piece) == file:
                writer.write_batch(pa.RecordBatch.from_arrays(piece.columns[1:], schema=stored))
                rows += piece.num_rows
                piece = next(pieces, None)
        yield pa.RecordBatch.from_pylist(
            [{PORTION: portion, "rule": rule, "rows": rows}],
            schema=pa.schema({PORTION: pa.int32(), "rule": pa.string(), "rows": pa.int64()}),
        )


def _file_of(piece: pa.RecordBatch) -> tuple[int, str]:
    return piece.column(0)[0].as_py(), piece.column(-1)[0].as_py()


def _by_file(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch, whose rows are sorted by portion and rule, into slices of one of each."""
    encoded = list(zip(batch.column(0).to_pylist(), batch.column(-1).to_pylist(), strict=True))
    start = 0
    for end in range(1, len(encoded) + 1):
        if end == len(encoded) or encoded[end] != encoded[start]:
            yield batch.slice(start, end - start)
            start = end
