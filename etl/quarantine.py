"""Write rows that failed a row-level rule as Parquet: one file per rule, `quarantine/<rule>.parquet`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.write import worker_uri


def write_quarantine(bad: DataFrame, storage: Storage, folder: str) -> dict[str, int]:
    """Write `bad` (its last column is the rule) and return rows by rule. One task per rule, streaming."""
    root, rule = worker_uri(storage), bad.columns[-1]
    result = bad.repartition(rule).sortWithinPartitions(rule)
    records = result.mapInArrow(lambda batches: _write(root, folder, batches), "rule string, rows long").collect()
    return {record["rule"]: record["rows"] for record in records}


def _write(root: str, folder: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    parts = (part for batch in batches for part in _by_rule(batch))
    part = next(parts, None)
    while part is not None:
        rule, schema, rows = part.column(-1)[0].as_py(), part.schema, 0
        with open_storage(root).create(f"{folder}/{rule}.parquet") as file, pq.ParquetWriter(file, schema) as writer:
            while part is not None and part.column(-1)[0].as_py() == rule:
                writer.write_batch(part)
                rows += part.num_rows
                part = next(parts, None)
        yield pa.RecordBatch.from_pydict({"rule": [rule], "rows": [rows]})


def _by_rule(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch, whose rows are sorted by rule, into slices of one rule each."""
    encoded = batch.column(-1).to_pylist()
    start = 0
    for end in range(1, len(encoded) + 1):
        if end == len(encoded) or encoded[end] != encoded[start]:
            yield batch.slice(start, end - start)
            start = end
