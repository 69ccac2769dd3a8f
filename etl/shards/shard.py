"""Cut rows into equal shards, in a stored order that is a seeded hash of each row's key, whatever their partitions.

Rows are counted by the first bits of their hash while they are checked, and one cheap pass over the key finds, exactly,
the hash at which every shard begins; then one shuffle brings each shard to one task, which sorts and writes it. No row
ever reaches the driver: it sees counts per hash bucket and hashes of the buckets a shard begins in (at most 2^18 of
either, or 16 per file), and one record per file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from sparkring.conf.blocks.etl import ShardConfig
from sparkring.conf.errors import first_line
from sparkring.conf.manifest import Column, DataFile
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage
from sparkring.etl.columns.statistics import NOT_MEASURED, Measured, Statistics, StatisticsMerger, nothing
from sparkring.etl.columns.types import fixed_row_bytes
from sparkring.etl.errors import EtlError
from sparkring.etl.shards.layout import (
    HASH_BITS,
    SMALLEST_ROW_GROUP,
    Cut,
    Shard,
    cut_table,
    locate,
    next_depth,
    plan_shards,
    row_group_rows,
    shard_count,
)
from sparkring.etl.shards.write import RESULT, SHARD, WriteTask, worker_uri, write_shard
from sparkring.etl.spark_platform.versions import repartition_by_number, spark_schema, to_arrow
from sparkring.etl.split import FITTED, SPLIT

log = logging.getLogger(__name__)

ORDER = "__order"
RANK = "__rank"
BUCKET = "__bucket"
STATISTICS = "statistics"


@dataclass(frozen=True)
class ShardPlan:
    """The files of a dataset: which rows each holds, rows per row group, and the compression of their pages."""

    shards: list[Shard]
    row_group: int
    compression: str


def with_order(rows: DataFrame, key: list[str], seed: int) -> DataFrame:
    """Add ORDER, the hash that decides a row's place: the same key and seed always give the same place."""
    try:
        return rows.withColumn(ORDER, F.xxhash64(F.lit(seed), *[F.col(c) for c in key]))
    except Exception as error:
        raise EtlError(f"etl.key = {key}: {first_line(error)}") from error


def plan_files(rows: DataFrame, rows_by_split: dict[str, int], columns: list[Column], config: ShardConfig) -> ShardPlan:
    """Choose sizes from the number of rows and the width of a row of tensors; runs one job if the width varies."""
    if not rows_by_split:
        return ShardPlan([], SMALLEST_ROW_GROUP, config.compression)
    row_bytes = float(sum(fixed_row_bytes(c) or 0 for c in columns)) + _varying_bytes(rows, columns)
    row_group = config.row_group or row_group_rows(max(rows_by_split.values()), row_bytes)
    given = config.shards or {}
    if unknown := sorted(given.keys() - rows_by_split.keys()):
        raise EtlError(f"etl.shard.shards: {unknown} are no splits; there are {list(rows_by_split)}")
    counts = {
        split: given.get(split) or shard_count(n, row_bytes, config.target_bytes) for split, n in rows_by_split.items()
    }
    return ShardPlan(plan_shards(rows_by_split, counts), row_group, config.compression)


def _varying_bytes(rows: DataFrame, columns: list[Column]) -> float:
    """Measure the mean bytes per row of ragged, nested and binary columns."""
    varying = [c for c in columns if fixed_row_bytes(c) is None]
    if not varying:
        return 0.0
    sizes = []
    for column in varying:
        value = F.col(column.name)
        if column.layout == "binary":
            sizes.append(F.octet_length(value).cast("long"))
            continue
        for _ in range(column.logical.count("array<") - 1):
            value = F.flatten(value)
        sizes.append(F.size(value).cast("long") * 8)
    row = rows.agg(F.count(F.lit(1)).alias("n"), *[F.sum(s).alias(f"s{i}") for i, s in enumerate(sizes)]).collect()[0]
    return sum(row[f"s{i}"] or 0 for i in range(len(sizes))) / max(row["n"], 1)


@dataclass(frozen=True)
class Target:
    """Where some rows are written: `plan`'s files to `folder`, which is in the folder `at` below the storage of all."""

    at: str
    folder: str
    plan: ShardPlan

    @property
    def paths(self) -> list[str]:
        """Of the files, below `at`."""
        return [f"{self.folder}/{s.split}-{s.index:05d}.parquet" for s in self.plan.shards]

    def storage_of(self, storage: Storage) -> Storage:
        return storage.at(self.at) if self.at else storage


def write_shards(
    rows: DataFrame,
    columns: list[Column],
    targets: Sequence[Target],
    storage: Storage,
    measured: Measured = NOT_MEASURED,
) -> list[list[DataFile]]:
    """Write every shard as one file; returns the files of each target, in its plan's order.

    Raises EtlError for values a column cannot hold, or when rows changed between the passes.

    Args:
        rows: the stored columns, ORDER and SHARD, which numbers the shards of all targets through.
        columns: the stored columns.
        targets: files to write, by folder.
        storage: the folder that all targets are in.
        measured: statistics wanted of the rows that features are fitted on, for `take_statistics`.
    """
    stored = [c.name for c in columns]
    shards = [shard for target in targets for shard in target.plan.shards]
    chosen = rows.select(*stored, SHARD, ORDER)
    arranged = (
        repartition_by_number(chosen, len(shards), SHARD)
        # Rows of equal hashes are ordered by their own values; rows equal in everything may stand in any order.
        .sortWithinPartitions(ORDER, *stored)
        .drop(ORDER)
    )
    paths = tuple(f"{target.at}/{path}".lstrip("/") for target in targets for path in target.paths)
    (compression,) = {target.plan.compression for target in targets}
    task = WriteTask(
        worker_uri(storage),
        paths,
        tuple(shard.first for shard in shards),
        tuple(columns),
        tuple(target.plan.row_group for target in targets for _ in target.plan.shards),
        compression,
        measured,
        tuple(
            _statistics_path(p) if measured.columns and s.split in FITTED else None
            for s, p in zip(shards, paths, strict=True)
        ),
    )
    records = arranged.mapInArrow(lambda batches: write_shard(task, batches), spark_schema(RESULT)).collect()
    if problems := sorted({r["problem"] for r in records if r["problem"]}):
        raise EtlError("\n".join(problems))
    by_shard = {record["shard"]: record for record in records}
    written, first = [], 0
    for target in targets:
        own = [by_shard.get(first + number) for number in range(len(target.plan.shards))]
        files = _data_files(target.plan, target.paths, own)
        _verify_footers(target.storage_of(storage), files, target.plan)
        written.append(files)
        first += len(own)
    return written


def _data_files(plan: ShardPlan, paths: Sequence[str], records: Sequence[Any]) -> list[DataFile]:
    """Make the manifest's entries of each shard's record. EtlError where they are not what was planned."""
    files = []
    for shard, path, record in zip(plan.shards, paths, records, strict=True):
        if record is None or record["rows"] != shard.rows:
            got = 0 if record is None else record["rows"]
            raise EtlError(
                f"{path}: {count_of(got, 'row was')} written, {shard.rows} were planned; the rows changed between two "
                "passes over them: a source changed while it was read, or a view is not deterministic"
            )
        groups = tuple(record["row_groups"])
        size, sha256 = record["bytes"], record["sha256"]
        files.append(
            DataFile(path=path, split=shard.split, rows=shard.rows, bytes=size, sha256=sha256, row_groups=groups)
        )
    return files


def take_statistics(storage: Storage, folder: str, files: Sequence[DataFile], measured: Measured) -> Statistics:
    """Merge what was measured of the files while they were written, and delete it from the build's own folder."""
    merger = StatisticsMerger()
    merger.add(nothing(measured))
    paths = [_statistics_path(file.path) for file in files if file.split in FITTED and measured.columns]
    with ThreadPoolExecutor(16) as pool:
        for path, data in zip(paths, pool.map(storage.read_bytes, paths), strict=True):
            merger.add(Statistics.from_bytes(data, f"{storage.uri}/{path}"))
    storage.delete(f"{folder}/{STATISTICS}")
    return merger.result()


def _statistics_path(path: str) -> str:
    """Return where a shard's statistics are kept during the build; not Parquet, so not read as rows."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{STATISTICS}/{name.removesuffix('.parquet')}.arrow"


@dataclass(frozen=True)
class Buckets:
    """Rows counted by the `depth` leading bits of their hash.

    table: SPLIT, BUCKET in rising order, the `rows` of each, and at most how many `hashes` those have.
    """

    depth: int
    table: pa.Table


def bucket_of(depth: int) -> Expression:
    """Compute BUCKET of rows with ORDER."""
    return F.shiftright(ORDER, HASH_BITS - depth).alias(BUCKET)


def hashes_of() -> Expression:
    """Aggregate the `hashes` of a bucket."""
    return F.when(F.min(ORDER) == F.max(ORDER), 1).otherwise(F.count(F.lit(1))).alias("hashes")


def number_rows(rows: DataFrame, shards: list[Shard], counted: Buckets | None = None) -> DataFrame:
    """Add SHARD, the position of the row's shard in `shards`, to rows that have SPLIT and ORDER.

    One pass over the key where they were `counted`, else two.
    """
    starts: dict[str, list[int]] = {}
    for shard in shards:
        starts.setdefault(shard.split, []).append(shard.first)
    places = _find_cuts(rows, shards, {split: s[1:] for split, s in starts.items() if len(s) > 1}, counted)
    split_at = {cut.value for found in places.values() for cut in found if cut.below}
    ranked = _ranked(rows, sorted(split_at))
    firsts = {s: i for i, s in reversed(list(enumerate(s.split for s in shards)))}
    table = cut_table([places.get(split, []) for split in starts], [firsts[split] for split in starts])
    which = " ".join(f"WHEN '{split}' THEN {number}" for number, split in enumerate(starts))
    return ranked.withColumn(SHARD, F.expr(table.sql(f"CASE {SPLIT} {which} END", ORDER, RANK)))


def _find_cuts(
    rows: DataFrame, shards: list[Shard], starts: dict[str, list[int]], counted: Buckets | None
) -> dict[str, list[Cut]]:
    """Find where shards start, by counting rows on more and more leading bits of their hash.

    Each pass looks only into the buckets in which a shard starts. Two passes, and more from some hundred million rows
    on, so that the driver's memory does not grow with the rows.
    """
    if not starts:
        return {}
    keyed = rows.select(SPLIT, ORDER).where(F.col(SPLIT).isin(list(starts)))
    crowd, most = sum(s.rows for s in shards), max(len(s) for s in starts.values())
    if counted is None:
        depth = next_depth(0, crowd, most)
        counted = Buckets(depth, _counted(keyed, depth))
    above, depth, table = 0, counted.depth, counted.table
    opened = {split: {0: 0} for split in starts}
    found: dict[str, list[tuple[int, int]]] = {}
    while True:
        for split in starts:
            counts = [(b >> (depth - above) if above else 0, b, n) for b, n, _ in _of_split(table, split)]
            found[split] = locate(opened[split], counts, starts[split])
            opened[split] = dict(found[split])
        if depth == HASH_BITS:
            break
        bucket = bucket_of(depth)
        wanted = reduce(or_, ((F.col(SPLIT) == s) & bucket.isin(list(buckets)) for s, buckets in opened.items()))
        most = sum(len(buckets) for buckets in opened.values())
        # Rows of one hash are one hash to collect, however many they are.
        crowd = sum(hashes for s in starts for b, _, hashes in _of_split(table, s) if b in opened[s])
        above, depth = depth, next_depth(depth, crowd, most)
        table = _counted(keyed.where(wanted), depth)
    return {
        s: [Cut(value, start - before) for start, (value, before) in zip(starts[s], found[s], strict=True)]
        for s in starts
    }


def _counted(keyed: DataFrame, depth: int) -> pa.Table:
    """Count rows for the table of `Buckets`."""
    counted = keyed.groupBy(SPLIT, bucket_of(depth)).agg(F.count(F.lit(1)).alias("rows"), hashes_of())
    return to_arrow(counted).sort_by(BUCKET)


def _of_split(table: pa.Table, split: str) -> list[Any]:
    mine = table.filter(pa.compute.equal(table[SPLIT], split)).select([BUCKET, "rows", "hashes"])
    return list(zip(*[column.to_pylist() for column in mine.columns], strict=True))


def _ranked(rows: DataFrame, split_at: list[int]) -> DataFrame:
    """Add RANK, the tie-break among rows of equal hash at a shard boundary; 0 elsewhere."""
    if not split_at:
        return rows.withColumn(RANK, F.lit(0))
    tied = F.col(ORDER).isin(split_at)
    everything = [c for c in rows.columns if c not in (SPLIT, ORDER)]
    place = F.row_number().over(Window.partitionBy(SPLIT, ORDER).orderBy(*everything))
    return rows.where(~tied).withColumn(RANK, F.lit(0)).unionByName(rows.where(tied).withColumn(RANK, place))


def _verify_footers(storage: Storage, files: list[DataFile], plan: ShardPlan) -> None:
    """Read every footer back: its rows, row groups and row numbers must be the planned ones."""
    with ThreadPoolExecutor(16) as pool:
        footers = list(pool.map(lambda f: pq.read_metadata(storage.path(f.path), filesystem=storage.fs), files))
    for file, footer, shard in zip(files, footers, plan.shards, strict=True):
        found = [footer.row_group(i) for i in range(footer.num_row_groups)]
        groups = tuple(group.num_rows for group in found)
        exact = all(g == plan.row_group for g in groups[:-1])
        if footer.num_rows != file.rows or groups != file.row_groups or not exact:
            raise EtlError(
                f"{file.path}: its footer has row groups {groups}, {count_of(file.rows, 'row was')} written in "
                f"{file.row_groups}"
            )
        numbered = [group.column(group.num_columns - 1).statistics for group in found]
        starts = list(accumulate(groups, initial=shard.first))
        if [(s.min, s.max + 1) for s in numbered] != list(pairwise(starts)):
            raise EtlError(f"{file.path}: its row groups are not numbered from {shard.first} on in steps of {groups}")
