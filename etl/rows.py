"""Mark, count, quarantine and write the views' rows as shards, for datasets and for day partitions."""

from __future__ import annotations

import logging
import math
import operator
import re
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.features import State
from sparkring.conf.manifest import Column, DataFile, tensor_columns
from sparkring.conf.plain_text import count_of
from sparkring.conf.schema import same_but_for_case
from sparkring.conf.storage import Storage
from sparkring.etl import checks
from sparkring.etl.checks import Checked
from sparkring.etl.classes import check_listed, count_classes, text_label
from sparkring.etl.columns import fit, table
from sparkring.etl.columns.statistics import Measured, measured_by
from sparkring.etl.columns.types import fixed_row_bytes
from sparkring.etl.errors import EtlError
from sparkring.etl.flags import check_flags, flag_counts, odd_rows, ones, several_labels
from sparkring.etl.profile import Profile, unfitted_labels
from sparkring.etl.shards.duplicates import DUPLICATE, remark_duplicates
from sparkring.etl.shards.layout import COUNTED_BITS, Shard
from sparkring.etl.shards.quarantine import PORTION, write_quarantine
from sparkring.etl.shards.shard import (
    BUCKET,
    ORDER,
    Buckets,
    Target,
    bucket_of,
    hashes_of,
    number_rows,
    plan_files,
    take_statistics,
    with_order,
    write_shards,
)
from sparkring.etl.shards.write import SHARD
from sparkring.etl.sources.snapshot import SourceSnapshot
from sparkring.etl.spark_platform.application import GONE, described
from sparkring.etl.spark_platform.jvm import JavaThrew
from sparkring.etl.spark_platform.plans import is_cheap
from sparkring.etl.spark_platform.session import batches_to_python
from sparkring.etl.split import SPLIT
from sparkring.etl.text import sequences as text
from sparkring.etl.views import build_rows
from sparkring.etl.weights import check_weight_type, check_weighted, check_weights, weight_counts, weighted_rows

log = logging.getLogger(__name__)

STAGES = {"read": "read sources", "check": "check rows", "write": "write shards", "fit": "fit features"}
DEAD_BUILD_AGE = timedelta(days=1)
BUILD = re.compile(r"data-[0-9a-f]{12}")  # the folder of a build, below its dataset or day partition
TEXT_BYTES = "text_bytes"
DUPLICATES = "duplicates"
LIMIT_SALT, LIMIT_BUCKETS = "sparkring.limit", 1_000_000_000  # of the hash; apart from those of split and order


@dataclass(frozen=True)
class RowsJob:
    """Rows on their way to shards: the session, the root of all datasets, seconds by stage."""

    config: EtlConfig
    spark: SparkSession
    storage: Storage
    seconds: dict[str, float] = field(default_factory=dict)
    on_label: Callable[[Sequence[Column], State], None] = lambda columns, state: None  # as BuildRequest's

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Measure the block's seconds as `stage`, which Spark's UI and the job's progress show too."""
        started = time.monotonic()
        with described(self.spark, STAGES[stage]):
            yield
        self.seconds[f"{stage}_s"] = self.seconds.get(f"{stage}_s", 0.0) + time.monotonic() - started


@dataclass(frozen=True)
class Written:
    """Rows in files, and what is known of them.

    The paths of `files` are relative to the folder that the portion is `at`. `inputs`: Spark type by the column of a
    feature; `text`: of packed text.
    """

    columns: Sequence[Column]
    files: Sequence[DataFile]
    profile: Profile
    inputs: dict[str, str] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Portion:
    """Rows, with SPLIT, that become files of their own: a dataset's, or a day partition's.

    Files go to `folder`, which is in the folder `at` below the job's storage; `tables` are what checks refer to.
    `on_counted`, given the counts, raises EtlError where the rows must not become shards, else gives the rows by split,
    in the order of storing. `is_whole`: these are all rows of the dataset, so that what is wrong with a split or a
    label is known before anything is written; of a day partition only the window knows.
    """

    rows: DataFrame
    tables: dict[str, DataFrame]
    on_counted: Callable[[Checked], dict[str, int]]
    at: str
    folder: str
    is_whole: bool

    @property
    def path(self) -> str:
        """Of the folder, below the job's storage."""
        return f"{self.at}/{self.folder}"


def new_folder() -> str:
    """Return a new name for a build's folder, below its dataset or day partition."""
    return f"data-{uuid.uuid4().hex[:12]}"


@contextmanager
def deleted_on_failure(storage: Storage, paths: Sequence[str], sources: Iterable[SourceSnapshot]) -> Iterator[None]:
    """Delete folders if what is done within fails. If Spark or a file failed, EtlError names a source that changed."""
    try:
        yield
    except BaseException as error:
        for path in paths:
            storage.delete(path)
        if isinstance(error, (PySparkException, JavaThrew, OSError)):
            for source in sources:  # a file that has gone is why it could not be read
                source.check_unchanged()
        raise


def rows_of(job: RowsJob, tables: dict[str, DataFrame]) -> DataFrame:
    """Return the rows that the views make of the tables. EtlError for names that cannot be stored."""
    rows = build_rows(job.spark, tables, job.config.views, job.config.rows)
    _check_names(rows)
    if missing := [c for c in job.config.key if c not in rows.columns]:
        raise EtlError(f"etl.key: rows have no column {missing[0]!r}; they have {rows.columns}")
    return rows


def limited(rows: DataFrame, key: list[str], limit: int | None) -> DataFrame:
    """Keep about `limit` rows, the same in every pass; all where there are no more. They are counted for that."""
    if limit is None or (total := rows.count()) <= limit:
        return rows
    hashed = F.pmod(F.xxhash64(F.lit(LIMIT_SALT), *[F.col(f"`{name}`") for name in key]), F.lit(LIMIT_BUCKETS))
    return rows.where(hashed < math.ceil(limit / total * LIMIT_BUCKETS))


def write_rows(
    job: RowsJob, portions: Sequence[Portion], on_counted: Callable[[DataFrame], None] = lambda rows: None
) -> list[Written]:
    """Count the rows by the recipe's checks, quarantine the bad ones and write the others, all portions in one pass.

    The portions' rows must have equal columns. With `text` there is one portion. `on_counted` is called with the rows
    of all, which have PORTION, once they may become shards.
    """
    config = job.config
    key = config.key or [c for c in portions[0].rows.columns if c != SPLIT]
    marked = _together([checks.mark(p.rows, config.checks, p.tables, key) for p in portions])
    # What rules about the whole dataset need is counted once; later passes need only the rules that judge each row.
    judged = _together([checks.mark(p.rows, config.checks, p.tables, key, levels=["row"]) for p in portions])
    stored = stored_table(checks.good(marked), config) if config.text is None else None
    is_kept = not is_cheap(judged)
    if is_kept:
        judged = marked.persist(StorageLevel.DISK_ONLY)
    try:
        with job.timed("check"):
            found = _counted(with_order(marked, key, config.shard.seed), config, stored)
            several = [] if stored is None else several_labels(stored.columns)
            counted = [
                _count_portion(p, found.filter(pc.equal(found[PORTION], n)), config, several)
                for n, p in enumerate(portions)
            ]
            if config.weight is not None:
                check_weights(config.weight, found)
                for one in counted:
                    if one.portion.is_whole:
                        check_weighted(config.weight, one.profile.weighted, one.splits)
            check_flags(several, found)
            on_counted(judged)
            if DUPLICATE in marked.columns:
                of_good = found.filter(pc.is_null(found[checks.RULE]))
                remark_duplicates(pc.sum(of_good[DUPLICATES]).as_py(), pc.sum(of_good["rows"]).as_py(), config.split)
            if any(one.profile.checked.quarantined for one in counted):
                folders = [f"{p.path}/quarantine" for p in portions]
                quarantined = write_quarantine(checks.bad(judged).drop(DUPLICATE), job.storage, folders)
                assert quarantined == [one.profile.checked.quarantined for one in counted], (quarantined, counted)
        good = checks.good(with_order(judged, key, config.shard.seed))
        if stored is None:
            return [_write_text(job, good.drop(PORTION), counted[0])]
        if (label := text_label(stored.columns)) is not None:
            with job.timed("check"):
                classes = count_classes(good, label, len(portions))
            check_listed(label.name, classes, config.classes)
            counted = [one.knowing(classes=counts) for one, counts in zip(counted, classes, strict=True)]
        for one in counted:
            if one.portion.is_whole:
                job.on_label(stored.columns, unfitted_labels(stored.columns, one.profile, config.classes))
        return _write_table(job, counted, good, stored, found)
    finally:
        if is_kept:
            with suppress(*GONE):
                marked.unpersist()


@dataclass(frozen=True)
class _Counted:
    """A portion, and what was counted of its rows."""

    portion: Portion
    profile: Profile

    @property
    def splits(self) -> dict[str, int]:
        """Rows by split, in the order of storing."""
        return self.profile.checked.splits

    def knowing(self, **more: Any) -> _Counted:
        """Return it with more of its profile known."""
        return replace(self, profile=replace(self.profile, **more))


def _count_portion(portion: Portion, found: pa.Table, config: EtlConfig, several: Sequence[str]) -> _Counted:
    """Sum what was counted of a portion. EtlError where its rows must not become shards."""
    checked = checks.checked_of(found, config.checks)
    profile = Profile(
        replace(checked, splits=portion.on_counted(checked)),
        classes=ones(several, found) if several else {},
        odd=odd_rows(several, found),
        weighted=weighted_rows(found) if config.weight is not None else {},
    )
    return _Counted(portion, profile)


def _together(frames: Sequence[DataFrame]) -> DataFrame:
    """Combine the rows of all portions, numbered by PORTION."""
    return reduce(
        lambda above, below: above.unionByName(below),
        [frame.withColumn(PORTION, F.lit(n)) for n, frame in enumerate(frames)],
    )


@dataclass(frozen=True)
class StoredTable:
    """What is stored of a table's rows, and measured of it; `inputs`: Spark type by the column of a feature."""

    columns: list[Column]
    features: State
    inputs: dict[str, str]
    measured: Measured

    @property
    def texts(self) -> list[str]:
        return [c.name for c in self.columns if c.dtype == "string" and c.layout == "scalar"]

    def row_bytes(self, text_bytes: int) -> int | None:
        """Return the bytes per row, `text_bytes` of them texts; None with array or binary columns."""
        sizes = [fixed_row_bytes(c) for c in self.columns if c.name not in self.texts]
        return None if None in sizes else text_bytes + sum(size or 0 for size in sizes)


def stored_table(rows: DataFrame, config: EtlConfig) -> StoredTable:
    """Decide what is stored of the rows. EtlError for what cannot be."""
    inputs = fit.check_inputs(rows, config.features)
    if config.weight is not None:
        check_weight_type(rows, config.weight)
    features = fit.unfitted(config.features, inputs)
    columns = table.stored_columns(rows, config, features)
    several_labels(columns)
    if config.classes is not None and text_label(columns) is None:
        raise EtlError("etl.classes: the label is no text; cast it to string in the recipe's SQL, or remove the list")
    return StoredTable(columns, features, inputs, measured_by(config.features, inputs, config.weight))


def _counted(ordered: DataFrame, config: EtlConfig, stored: StoredTable | None) -> pa.Table:
    """Count the rows by check, and those of a table by bucket, with the bytes of the longest texts of a row."""
    if stored is None:
        return checks.counted(ordered, config.checks, [F.col(PORTION)])
    texts = [F.coalesce(F.octet_length(F.col(f"`{name}`")), F.lit(0)) for name in stored.texts]
    longest = F.max(reduce(operator.add, texts, F.lit(0))).alias(TEXT_BYTES)
    further = [hashes_of(), longest, *(weight_counts(config.weight) if config.weight is not None else [])]
    further += flag_counts(several_labels(stored.columns))
    if DUPLICATE in ordered.columns:
        further.append(F.count(DUPLICATE).alias(DUPLICATES))
    return checks.counted(ordered, config.checks, [F.col(PORTION), bucket_of(COUNTED_BITS)], further)


def _write_table(
    job: RowsJob, portions: Sequence[_Counted], good: DataFrame, stored: StoredTable, counted: pa.Table
) -> list[Written]:
    """Write the good rows of all portions.

    Args:
        job: job whose storage holds all folders.
        portions: destination of each portion's rows.
        good: rows to write, with PORTION and ORDER.
        stored: layout of the stored table.
        counted: row counts by check and bucket.
    """
    config, columns, features = job.config, stored.columns, stored.features
    tensors = list(tensor_columns(columns, features))
    with job.timed("write"):
        targets, numbered_shards = [], list[Shard]()
        for number, one in enumerate(portions):
            # Sized by what a reader holds of a row, so that another encoding of files does not move rows between them.
            own = table.to_stored(good.where(F.col(PORTION) == number), config, features, columns)
            plan = plan_files(own, one.splits, tensors, config.shard)
            targets.append(Target(one.portion.at, one.portion.folder, plan))
            numbered_shards += [replace(s, split=_label(len(portions), number, s.split)) for s in plan.shards]
        files: list[list[DataFile]] = [[] for _ in portions]
        if numbered_shards:
            of_good = counted.filter(pc.is_null(counted[checks.RULE]))
            labels = zip(of_good[PORTION].to_pylist(), of_good[SPLIT].to_pylist(), strict=True)
            named = pa.array([_label(len(portions), number, split) for number, split in labels], pa.string())
            buckets = of_good.set_column(of_good.schema.get_field_index(SPLIT), SPLIT, named)
            label = F.concat_ws("/", PORTION, SPLIT) if len(portions) > 1 else F.col(SPLIT)
            numbered = number_rows(
                good.withColumn(SPLIT, label).drop(PORTION),
                numbered_shards,
                Buckets(COUNTED_BITS, buckets.sort_by(BUCKET)),
            )
            rows = table.to_stored(numbered, config, features, columns, carry=[ORDER, SHARD])
            with batches_to_python(job.spark, stored.row_bytes(pc.max(of_good[TEXT_BYTES]).as_py())):
                files = write_shards(rows, columns, targets, job.storage, stored.measured)
        return [
            Written(
                columns,
                own,
                replace(
                    one.profile,
                    statistics=take_statistics(
                        job.storage.at(one.portion.at), one.portion.folder, own, stored.measured
                    ),
                ),
                stored.inputs,
            )
            for one, own in zip(portions, files, strict=True)
        ]


def _label(portions: int, number: int, split: str) -> str:
    """Name a portion's split while rows are numbered."""
    return f"{number}/{split}" if portions > 1 else split


def _write_text(job: RowsJob, good: DataFrame, counted: _Counted) -> Written:
    config, portion = job.config, counted.portion
    assert config.text is not None
    with job.timed("fit"):
        packed = text.pack(good, config.text, counted.splits)
    rows = packed.rows.persist(StorageLevel.DISK_ONLY)
    try:
        with job.timed("write"):
            plan = plan_files(rows, packed.rows_by_split, packed.columns, config.shard)
            numbered = number_rows(with_order(rows, ["sequence"], config.shard.seed), plan.shards)
            target = Target(portion.at, portion.folder, plan)
            (files,) = write_shards(numbered, packed.columns, [target], job.storage)
    finally:
        with suppress(*GONE):
            rows.unpersist()
            packed.held.unpersist()
    return Written(packed.columns, files, counted.profile, text=packed.info)


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
    check_plain("etl.rows", rows.columns)


def check_plain(key: str, names: Iterable[str]) -> None:
    """Raise EtlError for a name that Spark, where it hands rows to Python, takes for a path into a struct."""
    if odd := [name for name in names if "." in name or "`" in name]:
        held = odd[0].replace("`", "``")
        other = odd[0].replace(".", "_").replace("`", "_")
        raise EtlError(
            f"{key}: the column {odd[0]!r} has a dot or a backquote in its name, by which Spark finds the fields of "
            f"structs; rename it in etl.views: SELECT `{held}` AS {other}"
        )


def check_one_per(name: str, wanted: int, rows_in: int) -> None:
    """Raise EtlError unless the table `name`, of `wanted` rows, gave as many rows."""
    if wanted != rows_in:
        verb = "multiplied" if rows_in > wanted else "lost"
        raise EtlError(
            f"etl.one_per = {name!r}: the table has {count_of(wanted, 'row')}, etl.rows {rows_in}: joins {verb} rows; "
            "join on a unique key, and with LEFT JOIN"
        )


def delete_dead_builds(storage: Storage, used: Container[str]) -> None:
    """Delete folders of killed builds below a dataset or day partition, except those `used`, after a day.

    By then no build can still be writing to them.
    """
    storage.sweep()
    limit = datetime.now(UTC) - DEAD_BUILD_AGE
    newest: dict[str, datetime] = {}
    for info in storage.fs.get_file_info(pafs.FileSelector(storage.root, recursive=True)):
        top = info.path[len(storage.root) + 1 :].split("/")[0]
        if BUILD.fullmatch(top) and top not in used and info.mtime is not None:
            newest[top] = max(newest.get(top, info.mtime), info.mtime)
    for top in sorted(t for t, at in newest.items() if at < limit):
        log.info("deleting %s: left by a build that was killed", storage.at(top).uri)
        storage.delete(top)
