"""A dataset over a window of intervals: a manifest over parts, which are found or written one by one.

Its fingerprint, feature state, order and shards are the same whether its parts were written night by night or all at
once in an empty folder.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from pyspark.sql import SparkSession

from sparkring.conf.blocks.etl import EtlConfig, IntervalConfig
from sparkring.conf.code import code_digest
from sparkring.conf.digest import digest
from sparkring.conf.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Accounting,
    DataFile,
    DatasetManifest,
    Lineage,
    SplitInfo,
    WindowPart,
)
from sparkring.conf.sources import VERSION_KEYS, SourceConfig
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.build import BuildRequest, Built, find_dataset
from sparkring.etl.checks import Checked, add, judge
from sparkring.etl.classes import added, fit_label
from sparkring.etl.errors import EtlError, NoFiles
from sparkring.etl.fingerprint import PACKAGE, made_of
from sparkring.etl.fit import fit
from sparkring.etl.flags import fit_flags
from sparkring.etl.rows import RowsJob
from sparkring.etl.session import build_session
from sparkring.etl.sources.pin import OpenTables, open_source
from sparkring.etl.sources.snapshot import PinContext, SourceSnapshot
from sparkring.etl.split import UNDIVIDED, check_splits, split_names
from sparkring.etl.statistics import Statistics, measured_by, merge, nothing
from sparkring.etl.weights import check_weighted, fit_weight
from sparkring.etl.windows.independence import prove_independent
from sparkring.etl.windows.interval import Interval, before, beginning, window_of
from sparkring.etl.windows.keys import across_parts, count_keys
from sparkring.etl.windows.parts import (
    PART_NAME,
    NewPart,
    Part,
    PartSources,
    find_part,
    part_fingerprint,
    part_folder,
    write_parts,
)

log = logging.getLogger(__name__)

PARTS_AT_ONCE, BYTES_AT_ONCE = 32, 256 << 20  # that are written in one pass


@dataclass(frozen=True)
class PinnedPart:
    """A part of a window. `sources` is None where the part is known and whole, so that nothing was looked at."""

    interval: Interval
    fingerprint: str
    sources: PartSources | None


@dataclass(frozen=True)
class PinnedWindow:
    """The parts of a window, known before anything is built, and the intervals that the recipe allows to be missing."""

    parts: tuple[PinnedPart, ...]
    missing: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True)
class KnownParts:
    """Parts that need not be looked at again: `fingerprints` by the interval's first day, of the recipe `name`."""

    root_uri: str = ""
    name: str = ""
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def find(self, interval: Interval) -> str | None:
        """The fingerprint of a known part that is whole."""
        known = self.fingerprints.get(interval.label)
        if known is None:
            return None
        storage = open_storage(self.root_uri).at(part_folder(self.name, interval.label, known))
        return known if find_part(storage, known) is not None else None


NONE_KNOWN = KnownParts()


def pin_window(
    config: EtlConfig,
    spark_version: str,
    settings: Mapping[str, str],
    context: PinContext | None = None,
    known: KnownParts = NONE_KNOWN,
) -> PinnedWindow:
    """Pin the sources of every interval, each interval of a source once. No part is written or read for that.

    Raises EtlError for intervals that are missing, unless the recipe skips them.

    Args:
        config: the etl block, with `interval`.
        spark_version: of the session that would build.
        settings: the recipe's `spark.conf`.
        context: for sources that need Spark.
        known: parts whose sources are not looked at again, where they are whole.
    """
    interval_config = _interval_of(config)
    intervals = window_of(interval_config)
    check_boundaries(config, intervals)
    sources = _SourcePins(config, context)
    parts, missing = list[PinnedPart](), dict[str, str]()
    for interval in intervals:
        if (fingerprint := known.find(interval)) is not None:
            parts.append(PinnedPart(interval, fingerprint, None))
            continue
        found = {name: sources.of(name, interval) for name in interval_config.sources}
        if lacking := [name for name, snapshot in found.items() if snapshot is None]:
            missing[interval.label] = lacking[0]
            continue
        earlier = before(interval_config, interval, interval_config.look_back)
        cut = {name: [*(sources.of(name, e) for e in earlier), own] for name, own in found.items()}
        part = PartSources(interval, sources.whole(), cut)
        parts.append(PinnedPart(interval, part_fingerprint(config, part, spark_version, settings), part))
    sources.check_together()
    _check_missing(interval_config, missing, len(intervals))
    return PinnedWindow(tuple(parts), tuple(missing), _window_fingerprint(config, parts, list(missing)))


def build_window(spark: SparkSession, request: BuildRequest, pinned: PinnedWindow) -> Built:
    """Write the parts that are not there, and publish the manifest over all of them; or find it."""
    root = open_storage(request.root_uri)
    storage = root.at(f"{request.name}-{pinned.fingerprint[:12]}")
    if (manifest := find_dataset(storage, pinned.fingerprint)) is not None:
        log.info("dataset %s is built already: %s", request.name, storage.uri)
        return Built(manifest, storage.uri, rebuilt=False)
    job = RowsJob(request.config, build_session(spark, request.settings), root, "")
    looked_at = [part.sources for part in pinned.parts if part.sources is not None]
    prove_independent(job, request.name, looked_at)
    parts, written = _find_or_write(job, request.name, pinned.parts)
    manifest = assemble(job, request, pinned, parts)
    request.before_publish("the dataset")
    storage.put_atomic(MANIFEST_NAME, manifest.to_json().encode())
    rows, new, all_parts = manifest.accounting.rows_out, len(written), len(parts)
    log.info("dataset %s: %d rows in %d parts, %d of them new: %s", request.name, rows, all_parts, new, storage.uri)
    return Built(manifest, storage.uri, rebuilt=True, seconds=job.seconds, written_parts=written)


def _find_or_write(job: RowsJob, name: str, pinned: Sequence[PinnedPart]) -> tuple[list[Part], tuple[str, ...]]:
    """Find the parts of the recipe `name`, and write those that are not there: the parts, and the intervals written.

    job: of the root of all datasets.
    """
    found, new = dict[str, Part](), list[NewPart]()
    for one in pinned:
        at = part_folder(name, one.interval.label, one.fingerprint)
        storage = job.storage.at(at)
        if (part := find_part(storage, one.fingerprint)) is not None:
            found[one.interval.label] = part
        elif one.sources is None:
            raise EtlError(f"{storage.uri}: the part was whole when the window was pinned, and is not now; run again")
        else:
            new.append(NewPart(at, f"data-{uuid.uuid4().hex[:12]}", one.fingerprint, one.sources))
    for batch in batches([one.sources.own_bytes for one in new]):
        for part in write_parts(job, [new[number] for number in batch]):
            log.info("part %s: %d rows", part.interval, part.accounting.rows_out)
            found[part.interval] = part
    return [found[one.interval.label] for one in pinned], tuple(one.sources.interval.label for one in new)


def batches(sizes: Sequence[int]) -> list[range]:
    """Which parts are written at once, by the bytes of each: several small ones, for every pass of Spark takes time
    whatever it reads; large ones alone, so that less is lost with a pass that fails."""
    found: list[range] = []
    for number, size in enumerate(sizes):
        last = found[-1] if found else range(0)
        if found and len(last) < PARTS_AT_ONCE and sum(sizes[i] for i in last) + size <= BYTES_AT_ONCE:
            found[-1] = range(last.start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def assemble(job: RowsJob, request: BuildRequest, pinned: PinnedWindow, parts: Sequence[Part]) -> DatasetManifest:
    """Make the manifest over the parts. EtlError for parts that do not fit together; ChecksFailed as for a dataset."""
    config, root = request.config, job.storage
    check_alike(parts)
    folders = [part_folder(request.name, part.interval, part.fingerprint) for part in parts]
    assigned = [split_of(config, part.interval) for part in parts]
    checked = add(_as_checked(part, split) for part, split in zip(parts, assigned, strict=True))
    checked = replace(checked, failing=_failing(job, checked.failing, parts, folders))
    report = judge(checked, config.checks)
    splits = check_splits(checked.splits, config.split)
    files = list_files(parts, folders, assigned, list(splits))
    trained = [part for part, split in zip(parts, assigned, strict=True) if split in (None, "train")]
    fitted = [read_statistics(root.at(part_folder(request.name, p.interval, p.fingerprint)), p) for p in trained]
    for part, found in zip(trained, fitted, strict=True):
        check_measured(part, found, config)
    classes = added(
        {own or split: counts for split, counts in part.classes.items()}
        for part, own in zip(parts, assigned, strict=True)
    )
    odd = Counter[str]()
    for part in parts:
        odd.update(part.odd)
    weighted = Counter[str]()
    for part, own in zip(parts, assigned, strict=True):
        for split, rows in part.weighted.items():
            weighted[own or split] += rows
    check_weighted(config.weight, weighted, splits)
    train = merge(fitted)
    last = parts[-1].lineage
    return DatasetManifest(
        name=request.name,
        fingerprint=pinned.fingerprint,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        columns=parts[0].columns,
        files=tuple(files),
        splits={s: SplitInfo(rows=n, files=sum(f.split == s for f in files)) for s, n in splits.items()},
        accounting=Accounting(
            rows_in=checked.rows_in, rows_out=sum(checked.splits.values()), quarantined=checked.quarantined
        ),
        features=fit(train, config.features, parts[0].inputs)
        | fit_label(parts[0].columns, classes, config.classes, splits)
        | fit_flags(parts[0].columns, classes, odd, splits)
        | fit_weight(config.weight, train),
        checks=report,
        lineage=Lineage(
            sources=sources_of(parts),
            logical_plan=last.logical_plan,
            code_commit=request.code_commit,
            code_digest=code_digest(PACKAGE),
            config_digest=request.config_digest,
            application_id=last.application_id,
            made_of=made_of(config, contents_of(pinned), job.spark.version, request.settings),
        ),
        parts=tuple(
            WindowPart(interval=p.interval, fingerprint=p.fingerprint, folder=folder, rows=p.accounting.rows_out)
            for p, folder in zip(parts, folders, strict=True)
        ),
        missing=pinned.missing,
    )


def contents_of(pinned: PinnedWindow) -> dict[str, str]:
    """The fingerprint of each part, as `made_of` names it."""
    return {f"the part {part.interval.label}": part.fingerprint for part in pinned.parts}


def _failing(job: RowsJob, failing: Mapping[str, int], parts: Sequence[Part], folders: Sequence[str]) -> dict[str, int]:
    """Rows by check that fail within parts, or for a row of an earlier part."""
    distinct, together = dict[str, int](), dict[str, int]()
    for name in parts[0].keys:
        of_file = {
            f"{folder}/{part.keys[name].path}": part.keys[name].distinct
            for part, folder in zip(parts, folders, strict=True)
        }
        distinct[name] = sum(of_file.values())
        together[name] = count_keys(job.spark, job.storage, of_file)
    return across_parts(failing, distinct, together)


def list_files(
    parts: Sequence[Part], folders: Sequence[str], assigned: Sequence[str | None], splits: Iterable[str]
) -> list[DataFile]:
    """List the files of each split, part after part, with paths from the root and rows numbered through.

    Args:
        parts: oldest first.
        folders: of the parts, below the root.
        assigned: the split of a part that its window decides; None where the part has its own.
        splits: in the order of storing.
    """
    files = []
    for split in splits:
        offset = 0
        for part, folder, own in zip(parts, folders, assigned, strict=True):
            mine = [f for f in part.files if (own or f.split) == split]
            files += [
                f.model_copy(update={"path": f"{folder}/{f.path}", "split": split, "row_offset": offset}) for f in mine
            ]
            offset += sum(f.rows for f in mine)
    return files


def sources_of(parts: Sequence[Part]) -> dict[str, Any]:
    """The lineage of a window's sources: a summary of those read by interval, whose details each part has."""
    found: dict[str, Any] = {}
    for name, read in parts[-1].lineage.sources.items():
        if not isinstance(read, list):
            found[name] = read
            continue
        own = [part.lineage.sources[name][-1] for part in parts]
        found[name] = {
            "intervals": len(parts),
            "first_interval": parts[0].interval,
            "last_interval": parts[-1].interval,
            "files": sum(one["files"] for one in own),
            "bytes": sum(one["bytes"] for one in own),
            "details": f"{PART_NAME} of each part",
        }
        for key in VERSION_KEYS & own[-1].keys():
            found[name][key] = {part.interval: one.get(key) for part, one in zip(parts, own, strict=True)}
    return found


def check_alike(parts: Sequence[Part]) -> None:
    """Raise EtlError for a part whose columns, or their types, are not those of the part before it."""
    for a, b in pairwise(parts):
        if (a.columns, a.inputs) != (b.columns, b.inputs):
            old, new = (
                {f"feature's column {name!r}": kind for name, kind in part.inputs.items()}
                | {f"stored column {c.name!r}": f"{c.logical} as {c.layout} {c.dtype}" for c in part.columns}
                for part in (a, b)
            )
            differ = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            shown = [f"{name} was {old.get(name, 'not there')}, is {new.get(name, 'not there')}" for name in differ]
            raise EtlError(
                f"the parts {a.interval} and {b.interval} do not fit: {'; '.join(shown) or 'columns differ in order'}; "
                "a window needs parts of one recipe, and of sources that kept their types: cast in etl.views"
            )


def check_measured(part: Part, found: Statistics, config: EtlConfig) -> None:
    """Raise EtlError for a part whose statistics are not what the recipe's features are fitted on."""
    wanted = nothing(measured_by(config.features, part.inputs, config.weight)).measured
    if found.measured != wanted:
        raise EtlError(
            f"the part {part.interval} was measured for other features ({found.measured}, not {wanted}); a window "
            "needs parts of one recipe: do not name it as known"
        )


def split_of(config: EtlConfig, label: str) -> str | None:
    """The split of all rows of an interval where it is decided by time; else None: each row has its own."""
    if config.split.kind != "time":
        return None
    later = [name for name, first in config.split.boundaries.items() if label >= first]
    return later[-1] if later else split_names(config.split)[0]


def check_boundaries(config: EtlConfig, intervals: Sequence[Interval]) -> None:
    """Raise EtlError for boundaries of a split by time that are not first days of intervals of the window."""
    if config.split.kind != "time":
        return
    interval = _interval_of(config)
    days = [beginning(f"etl.split.boundaries.{name}", text, interval) for name, text in config.split.boundaries.items()]
    if days[0] <= intervals[0].first or days[-1] > intervals[-1].first:
        raise EtlError(
            f"etl.split.boundaries: {config.split.boundaries}: every split must have an interval of the window, which "
            f"is {intervals[0].label} to {intervals[-1].label}"
        )


def _interval_of(config: EtlConfig) -> IntervalConfig:
    assert config.interval is not None, "the recipe has no etl.interval"
    return config.interval


def _as_checked(part: Part, split: str | None) -> Checked:
    counts = part.splits if split is None or not part.splits else {split: part.splits[UNDIVIDED]}
    return Checked(part.accounting.rows_in, dict(part.accounting.quarantined), dict(counts), dict(part.failing))


def read_statistics(storage: Storage, part: Part) -> Statistics:
    """Read a part's statistics. `storage`: its folder. StoredError where they are not what was written."""
    data, where = storage.read_bytes(part.statistics), f"{storage.uri}/{part.statistics}"
    if hashlib.sha256(data).hexdigest() != part.statistics_sha256:
        raise EtlError(f"{where}: is not what was written; delete {storage.uri}, and the part is written anew")
    return Statistics.from_bytes(data, where)


def _window_fingerprint(config: EtlConfig, parts: Sequence[PinnedPart], missing: Sequence[str]) -> str:
    """sha256 over the parts and what is decided for the window: splits, the fitted state and what checks allow."""
    block = config.model_dump(mode="json", include={"features", "split", "checks"})
    shared = [(part.interval.label, part.fingerprint) for part in parts]
    return digest([FORMAT_VERSION, block, list(config.features), code_digest(PACKAGE), shared, list(missing)])


def _check_missing(config: IntervalConfig, missing: Mapping[str, str], count: int) -> None:
    if not missing or (config.missing == "skip" and len(missing) < count):
        if missing:
            log.warning("etl.interval: no part of %s: a source has no file there", ", ".join(missing))
        return
    shown = [f"{label} (etl.sources.{source})" for label, source in list(missing.items())[:10]]
    more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
    key = "etl.interval.missing (schedule.missing where there is a schedule)"
    remedy = "add the files" if config.missing == "skip" else f"add the files, or set {key} to skip"
    raise EtlError(
        f"etl.interval: {len(missing)} of {count} intervals have no file: {', '.join(shown)}{more}; {remedy}"
    )


class _SourcePins:
    """Pins each source once, or once per interval."""

    def __init__(self, config: EtlConfig, context: PinContext | None) -> None:
        self._config, self._interval, self._context = config, _interval_of(config), context
        self._whole: dict[str, SourceSnapshot] | None = None
        self._cut: dict[tuple[str, Interval], SourceSnapshot | None] = {}
        self._opened: dict[str, Callable[[SourceConfig], SourceSnapshot]] = {}
        self._tables: OpenTables = {}

    def whole(self) -> dict[str, SourceSnapshot]:
        if self._whole is None:
            wanted = {n: s for n, s in self._config.sources.items() if n not in self._interval.sources}
            self._whole = {name: self._open(name)(source) for name, source in wanted.items()}
        return self._whole

    def of(self, name: str, interval: Interval) -> SourceSnapshot | None:
        """Pin a source's interval; None where it has no file."""
        if (name, interval) not in self._cut:
            self._cut[name, interval] = self._pin(name, interval)
        return self._cut[name, interval]

    def check_together(self) -> None:
        """Raise EtlError for a table without versions that changed while its intervals were pinned one by one.

        Rows may have moved from one interval to another, and then they would be in both or in neither.
        """
        found = [snapshot for snapshot in self._cut.values() if snapshot is not None and snapshot.CHECKED_TOGETHER]
        for snapshot in found if len(found) > 1 else ():
            snapshot.check_unchanged()

    def _pin(self, name: str, interval: Interval) -> SourceSnapshot | None:
        source = self._config.sources[name]
        try:
            snapshot = self._open(name)(source.cut(interval.condition(self._interval.sources[name])))
        except NoFiles:
            return None
        return None if snapshot.is_empty else snapshot

    def _open(self, name: str) -> Callable[[SourceConfig], SourceSnapshot]:
        if name not in self._opened:
            self._opened[name] = open_source(name, self._config.sources[name], self._context, self._tables)
        return self._opened[name]
