"""Hashes of a day partition's keys, which find rows of other days with the same key.

A check `unique` counts equal rows within a day partition. Where the key does not hold the interval, equal rows may
be in two: each keeps the hashes of its distinct keys, and a window counts how many there are together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.shards.quarantine import PORTION
from sparkring.etl.shards.write import worker_uri
from sparkring.etl.spark_platform.hashes import hash_of
from sparkring.etl.spark_platform.versions import repartition_by_number

# 128 bits together: two of a billion keys have equal hashes with a probability of 2e-21.
HASHES = pa.schema({"first": pa.int64(), "second": pa.int64()})
HASHES_SQL = "first long, second long"
KEYS_OF_A_TASK = 1 << 18


def keys_across_parts(config: EtlConfig) -> dict[str, list[str]]:
    """Return the `unique` checks whose equal rows may be in two day partitions: columns by name."""
    assert config.interval is not None
    unique = {check.name: check.columns for check in config.checks if check.kind == "unique"}
    return {name: columns for name, columns in unique.items() if config.interval.column not in columns}


def write_keys(rows: DataFrame, columns: Sequence[str], storage: Storage, paths: Sequence[str]) -> list[int]:
    """Write the hashes of the distinct keys of each portion's rows as one file, sorted; returns how many they are.

    rows: with PORTION, the position of the portion's file in `paths`.
    """
    root = worker_uri(storage)
    keys = repartition_by_number(_hashes(rows, columns).distinct(), len(paths), PORTION)
    keys = keys.sortWithinPartitions(PORTION, *HASHES.names)
    schema = f"{PORTION} int, keys long"
    written = keys.mapInArrow(lambda batches: _write(root, paths, batches), schema).collect()
    found = {record[PORTION]: record["keys"] for record in written}
    for portion, path in enumerate(paths):
        if portion not in found:  # of no row Spark makes no task
            _store(root, path, iter(()))
    return [found.get(portion, 0) for portion in range(len(paths))]


def count_keys(spark: SparkSession, storage: Storage, distinct: Mapping[str, int]) -> int:
    """Count the distinct keys in the files of several day partitions; `distinct`: keys by file path."""
    root, tasks = worker_uri(storage), min(len(distinct), 1 + sum(distinct.values()) // KEYS_OF_A_TASK)
    files = spark.createDataFrame([(path,) for path in distinct], "path string").repartition(tasks, "path")
    return files.mapInArrow(lambda batches: _read(root, batches), HASHES_SQL).distinct().count()


Counts = Mapping[str, int]


def across_parts(failing: Counts, distinct: Counts, together: Counts) -> dict[str, int]:
    """Add to the failing rows of each check those whose key is in an earlier day partition too.

    failing: rows by check, counted within parts; distinct: keys, the sum over parts; together: keys of all parts.
    """
    return {name: count + distinct.get(name, 0) - together.get(name, 0) for name, count in failing.items()}


def _hashes(rows: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Hash each row's key; as in a window of Spark, nulls are equal to each other."""
    return rows.select(PORTION, *[hash_of(columns, seed).alias(name) for seed, name in enumerate(HASHES.names)])


def _write(root: str, paths: Sequence[str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        return
    portion = first.column(0)[0].as_py()
    keys = _store(root, paths[portion], (batch.select(HASHES.names) for batch in itertools.chain([first], batches)))
    yield pa.RecordBatch.from_pydict({PORTION: pa.array([portion], pa.int32()), "keys": [keys]})


def _store(root: str, path: str, batches: Iterator[pa.RecordBatch]) -> int:
    keys = 0
    with open_storage(root).create(path) as sink, pa.ipc.new_file(pa.PythonFile(sink, mode="w"), HASHES) as writer:
        for batch in batches:
            writer.write_batch(batch.cast(HASHES))
            keys += batch.num_rows
    return keys


def _read(root: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    storage = open_storage(root)
    for batch in batches:
        for path in batch.column(0).to_pylist():
            with storage.fs.open_input_file(storage.path(path)) as file:
                reader = pa.ipc.open_file(file)
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)
