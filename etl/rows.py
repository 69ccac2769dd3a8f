"""From the rows of the views to shards: marked, counted, quarantined, written. The same for datasets and parts."""

from __future__ import annotations

import logging
import operator
import re
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkring.conf.config import EtlConfig
from sparkring.conf.features import State
from sparkring.conf.manifest import Column, DataFile, tensor_columns
from sparkring.conf.schema import same_but_for_case
from sparkring.conf.storage import Storage
from sparkring.etl import checks, fit, table, text
from sparkring.etl.checks import Checked
from sparkring.etl.columns import fixed_row_bytes
from sparkring.etl.errors import EtlError
from sparkring.etl.layout import COUNTED_BITS
from sparkring.etl.quarantine import write_quarantine
from sparkring.etl.session import batches_to_python
from sparkring.etl.shard import (
    BUCKET,
    ORDER,
    Buckets,
    bucket_of,
    hashes_of,
    number_rows,
    plan_files,
    take_statistics,
    with_order,
    write_shards,
)
from sparkring.etl.split import SPLIT
from sparkring.etl.statistics import Measured, Statistics, measured_by, nothing
from sparkring.etl.views import build_rows
from sparkring.etl.write import SHARD

log = logging.getLogger(__name__)

DEAD_BUILD_AGE = timedelta(days=1)
PLAN_CHARACTERS = 20_000
TEXT_BYTES = "text_bytes"
COLUMNAR, ROW_BY_ROW = {"Parquet", "ORC"}, {"Project", "Filter", "Union"}  # Spark's names


@dataclass(frozen=True)
class RowsJob:
    """Rows on their way to shards: the session, the folder below `storage` that is written to, seconds by stage."""

    config: EtlConfig
    spark: SparkSession
    storage: Storage
    folder: str
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[f"{stage}_s"] = self.seconds.get(f"{stage}_s", 0.0) + time.monotonic() - started


@dataclass(frozen=True)
class Written:
    """The stored rows. `statistics` and `inputs` (Spark type by column) are of a table, `text` is of packed text."""

    columns: list[Column]
    files: list[DataFile]
    rows_by_split: dict[str, int]
    statistics: Statistics | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)


OnCounted = Callable[[Checked, DataFrame], dict[str, int]]
"""Given the counts and the marked rows, raises EtlError where they must not become shards, else gives the rows by
split, in the order of storing."""


def rows_of(job: RowsJob, tables: dict[str, DataFrame]) -> DataFrame:
    """The rows that the views make of the tables. EtlError for names that cannot be stored."""
    rows = build_rows(job.spark, tables, job.config.views, job.config.rows)
    _check_names(rows)
    if missing := [c for c in job.config.key if c not in rows.columns]:
        raise EtlError(f"etl.key: rows have no column {missing[0]!r}; they have {rows.columns}")
    return rows


def write_rows(
    job: RowsJob, rows: DataFrame, tables: dict[str, DataFrame], on_counted: OnCounted
) -> tuple[Checked, Written]:
    """Count the rows, which have SPLIT, by the recipe's checks; quarantine the bad ones and write the others."""
    config, key = job.config, job.config.key or [c for c in rows.columns if c != SPLIT]
    marked = checks.mark(rows, config.checks, tables, key)
    stored = stored_table(checks.good(marked), config) if config.text is None else None
    # What rules about the whole dataset need is counted once; later passes need only the rules that judge each row.
    judged = checks.mark(rows, config.checks, tables, key, levels=["row"])
    is_kept = not is_cheap(judged)
    if is_kept:
        judged = marked.persist(StorageLevel.DISK_ONLY)
    try:
        with job.timed("check"):
            found = _counted(with_order(marked, key, config.shard.seed), config, stored)
            checked = checks.checked_of(found, config.checks)
            splits = on_counted(checked, judged)
            if checked.quarantined:
                quarantined = write_quarantine(checks.bad(judged), job.storage, f"{job.folder}/quarantine")
                assert quarantined == checked.quarantined, (quarantined, checked.quarantined)
        good = checks.good(with_order(judged, key, config.shard.seed))
        if stored is None:
            return checked, _write_text(job, good, splits)
        return checked, _write_table(job, good, stored, splits, found)
    finally:
        if is_kept:
            marked.unpersist()


@dataclass(frozen=True)
class StoredTable:
    """What is stored of a table's rows, and measured of it; `inputs`: Spark type by the column of a feature."""

    columns: list[Column]
    features: State
    inputs: dict[str, str]
    measured: Measured

    @property
    def texts(self) -> list[str]:
        return [c.name for c in self.columns if c.dtype == "string"]

    def row_bytes(self, text_bytes: int) -> int | None:
        """Bytes of a row, of which `text_bytes` are texts; None where rows hold arrays or binary values."""
        sizes = [fixed_row_bytes(c) for c in self.columns if c.dtype != "string"]
        return None if None in sizes else text_bytes + sum(size or 0 for size in sizes)


def stored_table(rows: DataFrame, config: EtlConfig) -> StoredTable:
    """Decide what is stored of the rows. EtlError for what cannot be."""
    inputs = fit.check_inputs(rows, config.features)
    features = fit.unfitted(config.features, inputs)
    return StoredTable(
        table.stored_columns(rows, config, features), features, inputs, measured_by(config.features, inputs)
    )


def _counted(ordered: DataFrame, config: EtlConfig, stored: StoredTable | None) -> pa.Table:
    """Count the rows by check, and those of a table by bucket, with the bytes of the longest texts of a row."""
    if stored is None:
        return checks.counted(ordered, config.checks)
    texts = [F.coalesce(F.octet_length(F.col(f"`{name}`")), F.lit(0)) for name in stored.texts]
    longest = F.max(reduce(operator.add, texts, F.lit(0))).alias(TEXT_BYTES)
    return checks.counted(ordered, config.checks, [bucket_of(COUNTED_BITS)], [hashes_of(), longest])


def is_cheap(rows: DataFrame) -> bool:
    """Whether rows cost less to read again than to keep: columns of Parquet or ORC files, of which a pass reads those
    that it needs; no window, Python, random number, or join but with a table that is part of the plan, as that of the
    files and their partitions is."""
    plan = rows._jdf.queryExecution().optimizedPlan()
    nodes = [plan]
    for node in nodes:  # grows as it goes
        below = [node.children().apply(number) for number in range(node.children().size())]
        if node.nodeName() == "LogicalRelation":
            relation = node.relation()
            is_files = relation.getClass().getSimpleName() == "HadoopFsRelation"
            if not is_files or relation.fileFormat().toString() not in COLUMNAR:
                return False
        elif node.nodeName() == "Join":
            sides = below
            below = [side for side in sides if side.nodeName() != "LocalRelation"]
            if len(below) == len(sides):
                return False
        elif node.nodeName() not in ROW_BY_ROW:
            return False
        nodes += below
    return bool(plan.deterministic())


def _write_table(
    job: RowsJob, good: DataFrame, stored: StoredTable, splits: dict[str, int], counted: pa.Table
) -> Written:
    """Write the good rows, which have ORDER, as they were counted."""
    config, columns, features = job.config, stored.columns, stored.features
    if not splits:
        return Written(columns, [], {}, nothing(stored.measured), stored.inputs)
    with job.timed("write"):
        # Sized by what a reader holds of a row, so that another encoding of files does not move rows between them.
        tensors = list(tensor_columns(columns, features))
        plan = plan_files(table.to_stored(good, config, features, columns), splits, tensors, config.shard)
        of_good = counted.filter(pc.is_null(counted[checks.RULE]))
        buckets = Buckets(COUNTED_BITS, of_good.sort_by(BUCKET))
        numbered = number_rows(good, plan.shards, buckets)
        rows = table.to_stored(numbered, config, features, columns, carry=[ORDER, SHARD])
        with batches_to_python(job.spark, stored.row_bytes(pc.max(of_good[TEXT_BYTES]).as_py())):
            files = write_shards(rows, columns, plan, job.storage, job.folder, stored.measured)
        statistics = take_statistics(job.storage, job.folder, files, stored.measured)
    return Written(columns, files, splits, statistics, stored.inputs)


def _write_text(job: RowsJob, good: DataFrame, splits: dict[str, int]) -> Written:
    config = job.config
    assert config.text is not None
    with job.timed("fit"):
        packed = text.pack(good, config.text, splits)
    rows = packed.rows.persist(StorageLevel.DISK_ONLY)
    try:
        with job.timed("write"):
            plan = plan_files(rows, packed.rows_by_split, packed.columns, config.shard)
            numbered = number_rows(with_order(rows, ["sequence"], config.shard.seed), plan.shards)
            files = write_shards(numbered, packed.columns, plan, job.storage, job.folder)
    finally:
        rows.unpersist()
        packed.held.unpersist()
    return Written(packed.columns, files, packed.rows_by_split, text=packed.info)


def _check_names(rows: DataFrame) -> None:
    if twice := same_but_for_case(rows.columns):
        raise EtlError(
            f"etl.rows: two columns are called {twice[0]!r} and {twice[1]!r}; Spark does not tell names apart by case: "
            "rename one, or select one of them"
        )
    if taken := [c for c in rows.columns if c.startswith("__")]:
        raise EtlError(
            f"etl.rows: names with two underscores before them, as {taken[0]!r}, are the job's own; rename it"
        )


def check_one_per(name: str, wanted: int, rows_in: int) -> None:
    """Raise EtlError unless the table `name`, of `wanted` rows, gave as many rows."""
    if wanted != rows_in:
        verb = "multiplied" if rows_in > wanted else "lost"
        raise EtlError(
            f"etl.one_per = {name!r}: the table has {wanted} rows, etl.rows {rows_in}: joins {verb} rows; "
            "join on a unique key, and with LEFT JOIN"
        )


def plan_text(rows: DataFrame) -> str:
    """How Spark understood the views, for the lineage."""
    plan = rows._jdf.queryExecution().analyzed().toString()
    return re.sub(r"#\d+L?", "", plan)[:PLAN_CHARACTERS]


def delete_dead_builds(storage: Storage, used: Container[str]) -> None:
    """Delete the folders of killed builds below a dataset or part, but for those `used`, when they are a day old:
    no build can still be writing to them."""
    storage.sweep()
    limit = datetime.now(UTC) - DEAD_BUILD_AGE
    newest: dict[str, datetime] = {}
    for info in storage.fs.get_file_info(pafs.FileSelector(storage.root, recursive=True)):
        top = info.path[len(storage.root) + 1 :].split("/")[0]
        if top.startswith("data-") and top not in used and info.mtime is not None:
            newest[top] = max(newest.get(top, info.mtime), info.mtime)
    for top in sorted(t for t, at in newest.items() if at < limit):
        log.info("deleting %s: left by a build that was killed", storage.at(top).uri)
        storage.delete(top)
