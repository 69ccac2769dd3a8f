"""Keys of a part's rows as hashes, in which rows of other parts with the same key are found.

A check `unique` counts equal rows within a part. Where the key does not hold the interval, equal rows may be in two
parts: each part keeps the hashes of its distinct keys, and a window counts how many there are together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkring.conf.config import EtlConfig
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.write import worker_uri

# 128 bits together: two of a billion keys have equal hashes with a probability of 2e-21.
HASHES = pa.schema({"first": pa.int64(), "second": pa.int64()})
HASHES_SQL = "first long, second long"
KEYS_OF_A_TASK = 1 << 18


def keys_across_parts(config: EtlConfig) -> dict[str, list[str]]:
    """The checks `unique` by name, with their columns, whose equal rows may be in two parts."""
    assert config.interval is not None
    unique = {check.name: check.columns for check in config.checks if check.kind == "unique"}
    return {name: columns for name, columns in unique.items() if config.interval.column not in columns}


def write_keys(rows: DataFrame, columns: Sequence[str], storage: Storage, path: str) -> int:
    """Write the hashes of the distinct keys of the rows as one file, sorted; returns how many there are."""
    root = worker_uri(storage)
    keys = _hashes(rows, columns).distinct().coalesce(1).sortWithinPartitions("first", "second")
    written = keys.mapInArrow(lambda batches: _write(root, path, batches), "keys long").collect()
    if not written:  # of no row Spark makes no task
        list(_write(root, path, iter(())))
    return sum(record["keys"] for record in written)


def count_keys(spark: SparkSession, storage: Storage, distinct: Mapping[str, int]) -> int:
    """Count the distinct keys in the files of several parts; `distinct`: keys by the file's path."""
    root, tasks = worker_uri(storage), min(len(distinct), 1 + sum(distinct.values()) // KEYS_OF_A_TASK)
    files = spark.createDataFrame([(path,) for path in distinct], "path string").repartition(tasks, "path")
    return files.mapInArrow(lambda batches: _read(root, batches), HASHES_SQL).distinct().count()


Counts = Mapping[str, int]


def across_parts(failing: Counts, distinct: Counts, together: Counts) -> dict[str, int]:
    """Add to the failing rows of each check those whose key is in an earlier part too.

    failing: rows by check, counted within parts; distinct: keys, the sum over parts; together: keys of all parts.
    """
    return {name: count + distinct.get(name, 0) - together.get(name, 0) for name, count in failing.items()}


def _hashes(rows: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Hash each row's key; as in a window of Spark, nulls are equal to each other."""
    values = [F.col(f"`{name}`") for name in columns]
    # xxhash64 passes over a null as if it were not there, so which values are null is hashed beside them.
    row = [*values, *[value.isNull() for value in values]]
    return rows.select(*[F.xxhash64(F.lit(seed), *row).alias(name) for seed, name in enumerate(HASHES.names)])


def _write(root: str, path: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = 0
    with open_storage(root).create(path) as sink, pa.ipc.new_file(pa.PythonFile(sink, mode="w"), HASHES) as writer:
        for batch in batches:
            writer.write_batch(batch.cast(HASHES))
            rows += batch.num_rows
    yield pa.RecordBatch.from_pydict({"keys": [rows]})


def _read(root: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    storage = open_storage(root)
    for batch in batches:
        for path in batch.column(0).to_pylist():
            with storage.fs.open_input_file(storage.path(path)) as file:
                reader = pa.ipc.open_file(file)
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)
