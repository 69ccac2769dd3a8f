"""A day partition: the shards of one interval's rows, written once and shared by every window that spans it.

`<root>/parts/<name>/<interval>/<fingerprint[:12]>/_part.json` is written last; its files are in a folder of their build
next to it. Nothing in it depends on other day partitions.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial, reduce
from itertools import groupby
from typing import Annotated

from pyspark.sql import Column as Value
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, TimestampNTZType, TimestampType

from sparkring.conf.blocks.etl import EtlConfig, IntervalConfig
from sparkring.conf.code import code_digest
from sparkring.conf.digest import digest
from sparkring.conf.manifest import FORMAT_VERSION, PART_NAME, SPARK_SEMANTICS, Accounting, Column, DataFile, Lineage
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage
from sparkring.conf.stored import Count, FolderName, Label, RelativePath, Sha256, Stored, StoredError, read, up_to
from sparkring.etl.checks import Checked
from sparkring.etl.errors import EtlError
from sparkring.etl.fingerprint import PACKAGE, deciding_settings, declared
from sparkring.etl.rows import (
    Portion,
    RowsJob,
    Written,
    check_one_per,
    delete_dead_builds,
    deleted_on_failure,
    rows_of,
    write_rows,
)
from sparkring.etl.shards.duplicates import number_duplicates
from sparkring.etl.shards.quarantine import PORTION
from sparkring.etl.sources.own_code import own_modules
from sparkring.etl.sources.snapshot import SourceSnapshot
from sparkring.etl.spark_platform.application import application_id
from sparkring.etl.spark_platform.plans import plan_text
from sparkring.etl.split import SPLIT, UNDIVIDED, add_split
from sparkring.etl.windows.interval import Interval, before
from sparkring.etl.windows.keys import keys_across_parts, write_keys

log = logging.getLogger(__name__)

PART_VERSION = 1
SHOWN = 5  # files in a message
STRAY = "__stray"  # the split of rows that would be in no day partition
# What of a feature decides its state alone, and nothing that is stored or measured, by its kind.
FITTING = {"categorical": {"min_count", "max_size"}, "numeric": {"fill", "scale"}}


class PartKeys(Stored):
    """Hashes of a day partition's distinct keys, for a check `unique` whose keys may be in two."""

    path: RelativePath
    distinct: Count


class Part(Stored):
    """The description of a day partition. Paths are relative to its folder.

    `inputs`: Spark type by the column of a feature. `failing`: rows by check. `statistics`: of the rows that features
    may be fitted on. `keys`: by check. `classes`: rows by split and class, of a label of texts, or of 1, of several
    labels, with their `odd` rows. `weighted`: rows of a weight above 0 by split, where rows have weights.
    """

    part_version: Annotated[int, up_to(PART_VERSION)] = PART_VERSION
    interval: FolderName
    fingerprint: Sha256
    created_at: str
    columns: tuple[Column, ...]
    inputs: dict[str, str]
    files: tuple[DataFile, ...]
    splits: dict[FolderName, Count]
    statistics: RelativePath
    statistics_sha256: Sha256
    keys: dict[Label, PartKeys] = {}
    accounting: Accounting
    failing: dict[Label, Count]
    classes: dict[FolderName, dict[str, Count]] = {}
    odd: dict[str, Count] = {}
    weighted: dict[FolderName, Count] = {}
    lineage: Lineage


@dataclass(frozen=True)
class PartSources:
    """Sources of a day partition: `whole` ones, and interval sources (`cut`).

    Of each interval source there is one snapshot per interval, from the first of the look-back to its own; None if it
    has no file.
    """

    interval: Interval
    whole: Mapping[str, SourceSnapshot]
    cut: Mapping[str, Sequence[SourceSnapshot | None]]

    @property
    def snapshots(self) -> list[SourceSnapshot]:
        return [*self.whole.values(), *(s for each in self.cut.values() for s in each if s is not None)]

    def read(self, read: Callable[[SourceSnapshot], DataFrame]) -> dict[str, DataFrame]:
        tables = {name: read(source) for name, source in self.whole.items()}
        for name, snapshots in self.cut.items():
            tables[name] = reduce(lambda a, b: a.unionByName(b), [read(s) for s in snapshots if s is not None])
        return tables

    def own_rows(self, read: Callable[[SourceSnapshot], DataFrame], name: str) -> DataFrame:
        """Return the rows of an interval source in the partition's own interval."""
        snapshot = self.cut[name][-1]
        assert snapshot is not None
        return read(snapshot)

    @property
    def own_bytes(self) -> int:
        """How large the files are that the cut sources have in the day partition's own interval."""
        return sum(int(s.lineage()["bytes"]) for each in self.cut.values() if (s := each[-1]) is not None)

    def own_files(self) -> str:
        """List the first files of the interval sources in the partition's own interval."""
        own = {name: snapshots[-1] for name, snapshots in self.cut.items()}
        paths = [f"{name}: {path}" for name, snapshot in own.items() if snapshot for path in snapshot.paths]
        return ", ".join(paths[:SHOWN]) + (f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")


def part_fingerprint(config: EtlConfig, sources: PartSources, settings: Mapping[str, str]) -> str:
    """Hash (sha256) all that decides a day partition's files and statistics; not the window or fitted state."""
    interval = sources.interval
    prints = {name: source.fingerprint for name, source in sources.whole.items()}
    cut = {name: [s and s.fingerprint for s in each] for name, each in sources.cut.items()}
    which = [interval.label, interval.next.isoformat(), interval.start.isoformat(), interval.end.isoformat()]
    block = json.dumps(_deciding_block(config))
    code = [own_modules(config.rows), code_digest(PACKAGE), SPARK_SEMANTICS, deciding_settings(settings)]
    return digest([FORMAT_VERSION, PART_VERSION, which, prints, cut, block, *code])


def common_digest(config: EtlConfig, whole: Mapping[str, SourceSnapshot], settings: Mapping[str, str]) -> str:
    """Hash (sha256) what `part_fingerprint` has in common for all day partitions: a change rebuilds all."""
    prints = {name: source.fingerprint for name, source in whole.items()}
    code = [own_modules(config.rows), code_digest(PACKAGE), SPARK_SEMANTICS, deciding_settings(settings)]
    return digest([FORMAT_VERSION, PART_VERSION, prints, json.dumps(_deciding_block(config)), *code])


def _deciding_block(config: EtlConfig) -> dict[str, object]:
    """Return the etl block without window keys, and without what only decides the fitted state or what is allowed."""
    assert config.interval is not None
    block = declared(config)
    block["features"] = {
        name: {key: value for key, value in feature.items() if key not in FITTING.get(feature["kind"], ())}
        for name, feature in block["features"].items()
    }
    block["checks"] = [{k: v for k, v in check.items() if k != "max_share"} for check in block["checks"]]
    if config.split.kind == "time":
        del block["split"]
    for key in ("last", "window", "missing"):
        del block["interval"][key]
    return block


def part_folder(name: str, interval: str, fingerprint: str) -> str:
    """Return a day partition's folder below the root of datasets; `name` is the recipe's."""
    return f"parts/{name}/{interval}/{fingerprint[:12]}"


def find_part(storage: Storage, fingerprint: str) -> Part | None:
    """Read a day partition; None if it is not written yet, or a file is missing or of another size."""
    if not storage.exists(PART_NAME):
        return None
    try:
        part = read(Part, storage, PART_NAME)
    except StoredError as error:
        log.warning("writing the part anew: %s", error)
        return None
    damaged = [f.path for f in part.files if storage.size_bytes(f.path) != f.bytes]
    others = [part.statistics, *(keys.path for keys in part.keys.values())]
    damaged += [path for path in others if not storage.exists(path)]
    if damaged or part.fingerprint != fingerprint:
        why = f"damaged files {damaged[:3]}" if damaged else "other fingerprint"
        log.warning("writing the part %s anew: %s", storage.uri, why)
        return None
    return part


@dataclass(frozen=True)
class NewPart:
    """A day partition to be written to `folder`, of this build, in its folder `at` below the root of datasets."""

    at: str
    folder: str
    fingerprint: str
    sources: PartSources


def write_parts(job: RowsJob, new: Sequence[NewPart]) -> list[Part]:
    """Write the files of several day partitions at once, and publish each. EtlError for whatever the user must correct.

    job: of the root of all datasets.
    """
    snapshots = [snapshot for one in new for snapshot in one.sources.snapshots]
    with deleted_on_failure(job.storage, [f"{one.at}/{one.folder}" for one in new], snapshots):
        parts = _write(job, new)
        for snapshot in snapshots:
            snapshot.check_unchanged()
    return [_publish(job.storage.at(one.at), one.folder, part) for one, part in zip(new, parts, strict=True)]


def _write(job: RowsJob, new: Sequence[NewPart]) -> list[Part]:
    read = _Reader(job.spark)
    with job.timed("read"):
        made = [_PartRows.of(job, one, read) for one in new]
    parts = list[Part]()
    for _, alike in groupby(made, key=lambda one: [(f.name, f.dataType) for f in one.rows.schema.fields]):
        parts += _write_alike(job, list(alike))
    return parts


class _Reader:
    """Reads each snapshot once, for any number of day partitions."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._read: dict[int, DataFrame] = {}

    def __call__(self, snapshot: SourceSnapshot) -> DataFrame:
        if id(snapshot) not in self._read:
            self._read[id(snapshot)] = snapshot.read(self._spark)
        return self._read[id(snapshot)]


@dataclass(frozen=True)
class _PartRows:
    """A day partition's rows: as the views made them, and those of its interval, with rows of no interval."""

    part: NewPart
    read: _Reader
    tables: dict[str, DataFrame]
    made: DataFrame
    rows: DataFrame

    @classmethod
    def of(cls, job: RowsJob, part: NewPart, read: _Reader) -> _PartRows:
        tables = part.sources.read(read)
        made = rows_of(job, tables)
        return cls(part, read, tables, made, _of_part(made, job.config, part.sources.interval))

    def divided(self, numbered: DataFrame, config: EtlConfig) -> _PartRows:
        """Return it with SPLIT in its rows, which are `numbered`."""
        return replace(self, rows=_with_split(numbered, config, self.part.sources.interval))

    def count(self, config: EtlConfig, own_rows: int | None, checked: Checked) -> dict[str, int]:
        """Give the rows by split, in the order of storing. EtlError for rows that are not the interval's, or lost.

        `own_rows`: of the table that `one_per` names, in the partition's interval.
        """
        assert config.interval is not None
        if checked.splits.get(STRAY):
            raise EtlError(_stray_text(self.rows, config.interval, self.part.sources))
        if config.one_per is not None and own_rows is not None:
            check_one_per(config.one_per, own_rows, checked.rows_in)
        return dict(sorted(checked.splits.items(), key=lambda s: (s[0] != "train", s[0])))


def _write_alike(job: RowsJob, alike: Sequence[_PartRows]) -> list[Part]:
    """Write day partitions whose rows have equal columns."""
    config = job.config
    with job.timed("read"):
        numbered = number_duplicates([one.rows for one in alike], config)
        made = [one.divided(rows, config) for one, rows in zip(alike, numbered, strict=True)]
    keys: list[dict[str, PartKeys]] = [{} for _ in made]

    def write_all_keys(rows: DataFrame) -> None:
        for number, (name, columns) in enumerate(keys_across_parts(config).items()):
            files = [f"{one.part.folder}/keys-{number}.arrow" for one in made]
            paths = [f"{one.part.at}/{file}" for one, file in zip(made, files, strict=True)]
            distinct = write_keys(rows, columns, job.storage, paths)
            for own, file, count in zip(keys, files, distinct, strict=True):
                own[name] = PartKeys(path=file, distinct=count)

    with job.timed("check"):
        own_rows = _own_rows(made, config)
    portions = [
        Portion(one.rows, one.tables, partial(one.count, config, rows), one.part.at, one.part.folder, is_whole=False)
        for one, rows in zip(made, own_rows, strict=True)
    ]
    written = write_rows(job, portions, write_all_keys)
    return [_part(job, one, stored, own) for one, stored, own in zip(made, written, keys, strict=True)]


def _own_rows(made: Sequence[_PartRows], config: EtlConfig) -> list[int | None]:
    """Count, in one job, the rows of each interval in the table that `one_per` names; None without it."""
    name = config.one_per
    if name is None:
        return [None] * len(made)
    sources = [one.part.sources.own_rows(one.read, name) for one in made]
    counts = [frame.agg(F.count(F.lit(1)).alias("rows"), F.lit(n).alias(PORTION)) for n, frame in enumerate(sources)]
    found = {row[PORTION]: row["rows"] for row in reduce(lambda a, b: a.union(b), counts).collect()}
    return [found[number] for number in range(len(made))]


def _part(job: RowsJob, one: _PartRows, written: Written, keys: dict[str, PartKeys]) -> Part:
    """Store the measurements of a day partition, and describe it. `keys`: of checks for equal keys, by check."""
    profile, sources = written.profile, one.part.sources
    assert profile.statistics is not None
    checked = profile.checked
    statistics, path = profile.statistics.to_bytes(), f"{one.part.folder}/statistics.arrow"
    job.storage.at(one.part.at).put_atomic(path, statistics)
    return Part(
        interval=sources.interval.label,
        fingerprint=one.part.fingerprint,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        columns=tuple(written.columns),
        inputs=written.inputs,
        files=tuple(written.files),
        splits=checked.splits,
        statistics=path,
        statistics_sha256=hashlib.sha256(statistics).hexdigest(),
        keys=keys,
        accounting=Accounting(
            rows_in=checked.rows_in, rows_out=sum(checked.splits.values()), quarantined=checked.quarantined
        ),
        failing=checked.failing,
        classes={split: dict(counts) for split, counts in profile.classes.items()},
        odd=dict(profile.odd),
        weighted=dict(profile.weighted),
        lineage=Lineage(
            sources={name: source.lineage() for name, source in sources.whole.items()}
            | {name: [s and s.lineage() for s in each] for name, each in sources.cut.items()},
            logical_plan=plan_text(one.made),
            code_digest=code_digest(PACKAGE),
            application_id=application_id(job.spark),
            spark_version=job.spark.version,
        ),
    )


def _of_part(rows: DataFrame, config: EtlConfig, interval: Interval) -> DataFrame:
    """Keep the interval's rows, and those that would be in no day partition."""
    assert config.interval is not None
    _, own, end = _edges(rows, config.interval, interval)
    column = F.col(config.interval.column)
    return rows.where((column >= own) & (column < end) | _is_stray(rows, config.interval, interval))


def _with_split(rows: DataFrame, config: EtlConfig, interval: Interval) -> DataFrame:
    """Add SPLIT, which is STRAY for rows that would be in no day partition."""
    assert config.interval is not None
    undivided = config.split.kind == "time"
    divided = rows.withColumn(SPLIT, F.lit(UNDIVIDED)) if undivided else add_split(rows, config.split, config.key)
    is_stray = _is_stray(rows, config.interval, interval)
    return divided.withColumn(SPLIT, F.when(is_stray, STRAY).otherwise(F.col(SPLIT)))


def _is_stray(rows: DataFrame, config: IntervalConfig, interval: Interval) -> Value:
    """Mark rows outside the interval: if source and row columns disagree, a row would be in no partition."""
    start, _, end = _edges(rows, config, interval)
    column = F.col(config.column)
    return column.isNull() | ((column < start) | (column >= end) if config.sources else F.lit(False))


def of_interval(rows: DataFrame, config: IntervalConfig, interval: Interval) -> DataFrame:
    """Keep the rows of an interval."""
    _, own, end = _edges(rows, config, interval)
    return rows.where((F.col(config.column) >= own) & (F.col(config.column) < end))


def _edges(rows: DataFrame, config: IntervalConfig, interval: Interval) -> tuple[Value, Value, Value]:
    """Return the start of what is read, the interval's start and its end, in the type of the rows' column."""
    first = (before(config, interval, config.look_back) or [interval])[0]
    kind = {f.name: f.dataType for f in rows.schema.fields}.get(config.column)
    if isinstance(kind, TimestampType):
        return F.lit(first.start), F.lit(interval.start), F.lit(interval.end)
    if isinstance(kind, (DateType, TimestampNTZType)):
        start, own, end = (F.lit(day.isoformat()).cast(kind) for day in (first.first, interval.first, interval.next))
        return start, own, end
    found = f"missing; they have {rows.columns}" if kind is None else kind.simpleString()
    raise EtlError(f"etl.interval.column = {config.column!r}: must be a date or timestamp of the rows; it is {found}")


def _stray_text(rows: DataFrame, config: IntervalConfig, sources: PartSources) -> str:
    column = F.col(config.column)
    strays = rows.where(F.col(SPLIT) == STRAY)
    found = strays.agg(F.count(F.lit(1)), F.min(column).cast("string"), F.max(column).cast("string")).collect()[0]
    span = "null" if found[1] is None else f"from {found[1]} to {found[2]}"
    return (
        f"etl.interval.column = {config.column!r}: of the sources' interval {sources.interval.label} "
        f"{count_of(found[0], 'row is')} in no interval that the part reads ({config.column} {span}, in UTC; "
        f"the interval is of {config.time_zone}), so they would be in no part: correct the files "
        f"({sources.own_files()}), etl.interval.time_zone or etl.interval.column"
    )


def _publish(storage: Storage, folder: str, part: Part) -> Part:
    """Publish the day partition. If another writer was first, keep its partition and delete this one's files."""
    damaged = storage.exists(PART_NAME) and find_part(storage, part.fingerprint) is None
    if damaged:
        storage.delete(PART_NAME)
    if storage.put_new(PART_NAME, (part.model_dump_json(indent=1) + "\n").encode()):
        delete_dead_builds(storage, {folder})
        return part
    found = find_part(storage, part.fingerprint)
    if found is None:
        raise EtlError(f"{storage.uri}/{PART_NAME}: another writer's part appeared, damaged; run again")
    log.info("part %s was written by another job meanwhile: %s", part.interval, storage.uri)
    storage.delete(folder)
    return found
