"""A dataset over a window of intervals: a manifest over day partitions, found or written one by one.

Its fingerprint, feature state, order and shards are the same whether its parts were written night by night or all at
once in an empty folder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from sparkring.conf.blocks.etl import EtlConfig, IntervalConfig
from sparkring.conf.code import code_digest
from sparkring.conf.digest import digest
from sparkring.conf.manifest import FORMAT_VERSION, DataFile, WindowPart
from sparkring.conf.plain_text import count_of
from sparkring.conf.sources import VERSION_KEYS, SourceConfig
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.build import PinnedDataset, StoredRows, pinned_sources
from sparkring.etl.checks import Checked
from sparkring.etl.columns.statistics import Statistics, measured_by, nothing
from sparkring.etl.errors import EtlError, NoFiles
from sparkring.etl.fingerprint import PACKAGE
from sparkring.etl.profile import Profile, merged
from sparkring.etl.rows import RowsJob, Written, new_folder
from sparkring.etl.sources.pin import OpenTables, open_source, pin_sources
from sparkring.etl.sources.snapshot import PinContext, SourceSnapshot
from sparkring.etl.split import split_names
from sparkring.etl.windows.independence import prove_independent
from sparkring.etl.windows.interval import Interval, before, beginning, window_of
from sparkring.etl.windows.keys import across_parts, count_keys
from sparkring.etl.windows.parts import (
    PART_NAME,
    NewPart,
    Part,
    PartSources,
    common_digest,
    find_part,
    part_fingerprint,
    part_folder,
    write_parts,
)

log = logging.getLogger(__name__)

PARTS_AT_ONCE, BYTES_AT_ONCE = 32, 256 << 20  # that are written in one pass


@dataclass(frozen=True)
class PinnedPart:
    """A day partition of a window. `sources` is None where it is known and whole, so that nothing was looked at."""

    interval: Interval
    fingerprint: str
    sources: PartSources | None


@dataclass(frozen=True)
class PinnedWindow(PinnedDataset):
    """The day partitions of a window."""

    parts: tuple[PinnedPart, ...]
    fingerprint: str
    missing: tuple[str, ...] = ()
    shared_digest: str = ""

    @property
    def snapshots(self) -> list[SourceSnapshot]:
        """The day partitions whose sources were looked at."""
        return [source for part in self.parts if part.sources is not None for source in part.sources.snapshots]

    @property
    def part_fingerprints(self) -> dict[str, str]:
        return {part.interval.label: part.fingerprint for part in self.parts}

    @property
    def contents(self) -> dict[str, str]:
        return {f"the part {label}": fingerprint for label, fingerprint in self.part_fingerprints.items()}

    @contextmanager
    def stored(self, job: RowsJob, name: str) -> Iterator[StoredRows]:
        prove_independent(job, name, [part.sources for part in self.parts if part.sources is not None])
        found = _find_or_write(job, name, self.parts)
        parts = [one.part for one in found]
        check_alike(parts)
        written = [one.written(job) for one in found]
        profile = merged([one.profile for one in written])
        checked = replace(profile.checked, failing=_failing(job, profile.checked.failing, found))
        yield StoredRows(
            written,
            replace(profile, checked=checked),
            sources_of(parts),
            parts[-1].lineage.logical_plan,
            parts[-1].lineage.application_id,
            listed=tuple(one.listed() for one in found),
            new=tuple(one.part.interval for one in found if one.is_new),
        )


@dataclass(frozen=True)
class PartFolder:
    """A day partition in its folder, below the root of datasets."""

    part: Part
    folder: str
    is_new: bool

    def listed(self) -> WindowPart:
        """Return the entry for the window's manifest."""
        part = self.part
        return WindowPart(
            interval=part.interval, fingerprint=part.fingerprint, folder=self.folder, rows=part.accounting.rows_out
        )

    def written(self, job: RowsJob) -> Written:
        """Return its rows as the window lists them: paths from the root, in the split that the window decides.

        EtlError for statistics that are damaged, or not what the features are fitted on.
        """
        part, config = self.part, job.config
        split = split_of(config, part.interval)
        statistics = None
        if split in (None, "train"):
            statistics = read_statistics(job.storage.at(self.folder), part)
            check_measured(part, statistics, config)
        checked = Checked(part.accounting.rows_in, part.accounting.quarantined, part.splits, part.failing)
        profile = Profile(checked, statistics, part.classes, part.odd, part.weighted).in_split(split)
        return Written(part.columns, self.files(split), profile, part.inputs)

    def files(self, split: str | None) -> list[DataFile]:
        """List its files by paths from the root. `split`: that the window decides; None: each file has its own."""
        return [
            file.model_copy(update={"path": f"{self.folder}/{file.path}", "split": split or file.split})
            for file in self.part.files
        ]


@dataclass(frozen=True)
class KnownParts:
    """Parts that need not be looked at again: `fingerprints` by the interval's first day, of the recipe `name`."""

    root_uri: str = ""
    name: str = ""
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def find(self, interval: Interval) -> str | None:
        """Return the fingerprint of a known, intact day partition, or None."""
        known = self.fingerprints.get(interval.label)
        if known is None:
            return None
        storage = open_storage(self.root_uri).at(part_folder(self.name, interval.label, known))
        return known if find_part(storage, known) is not None else None


NONE_KNOWN = KnownParts()


def pin_dataset(
    config: EtlConfig,
    settings: Mapping[str, str],
    context: PinContext | None = None,
    known: KnownParts = NONE_KNOWN,
) -> PinnedDataset:
    """Pin the sources of a dataset, of one with intervals those of each interval. Nothing is written for that.

    Args:
        config: the etl block.
        settings: the recipe's `spark.conf`.
        context: for sources that need Spark.
        known: day partitions whose sources are not looked at again, where they are whole.
    """
    if config.interval is not None:
        return pin_window(config, settings, context, known)
    return pinned_sources(config, pin_sources(config.sources, context), settings)


def pin_window(
    config: EtlConfig,
    settings: Mapping[str, str],
    context: PinContext | None = None,
    known: KnownParts = NONE_KNOWN,
) -> PinnedWindow:
    """Pin the sources of every interval, each interval of a source once. No day partition is written or read for that.

    Raises EtlError for intervals that are missing, unless the recipe skips them.

    Args:
        config: the etl block, with `interval`.
        settings: the recipe's `spark.conf`.
        context: for sources that need Spark.
        known: day partitions whose sources are not looked at again, where they are whole.
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
        parts.append(PinnedPart(interval, part_fingerprint(config, part, settings), part))
    sources.check_together()
    _check_missing(interval_config, missing, len(intervals))
    fingerprint = _window_fingerprint(config, parts, list(missing))
    looked_at = [part.sources for part in parts if part.sources is not None]
    shared = common_digest(config, looked_at[-1].whole, settings) if looked_at else ""
    return PinnedWindow(tuple(parts), fingerprint, tuple(missing), shared)


def _find_or_write(job: RowsJob, name: str, pinned: Sequence[PinnedPart]) -> list[PartFolder]:
    """Find the day partitions of the recipe `name`, and write those that are missing; oldest first."""
    found, new = dict[str, PartFolder](), list[NewPart]()
    for one in pinned:
        at = part_folder(name, one.interval.label, one.fingerprint)
        storage = job.storage.at(at)
        if (part := find_part(storage, one.fingerprint)) is not None:
            found[part.interval] = PartFolder(part, at, is_new=False)
        elif one.sources is None:
            raise EtlError(f"{storage.uri}: the part was whole when the window was pinned, and is not now; run again")
        else:
            new.append(NewPart(at, new_folder(), one.fingerprint, one.sources))
    for batch in batches([one.sources.own_bytes for one in new]):
        together = [new[number] for number in batch]
        for one_new, part in zip(together, write_parts(job, together), strict=True):
            log.info("part %s: %d rows", part.interval, part.accounting.rows_out)
            found[part.interval] = PartFolder(part, one_new.at, is_new=True)
    return [found[one.interval.label] for one in pinned]


def batches(sizes: Sequence[int]) -> list[range]:
    """Group day partitions to write at once, by the bytes of each.

    Small ones share a pass, because each Spark pass has a fixed cost; large ones go alone, so that a failed pass loses
    less.
    """
    found: list[range] = []
    for number, size in enumerate(sizes):
        last = found[-1] if found else range(0)
        if found and len(last) < PARTS_AT_ONCE and sum(sizes[i] for i in last) + size <= BYTES_AT_ONCE:
            found[-1] = range(last.start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _failing(job: RowsJob, failing: Mapping[str, int], found: Sequence[PartFolder]) -> dict[str, int]:
    """Count rows by check that fail within day partitions, or against a row of an earlier one."""
    distinct, together = dict[str, int](), dict[str, int]()
    for name in found[0].part.keys:
        keys = [(one.folder, one.part.keys[name]) for one in found]
        of_file = {f"{folder}/{own.path}": own.distinct for folder, own in keys}
        distinct[name] = sum(of_file.values())
        together[name] = count_keys(job.spark, job.storage, of_file)
    return across_parts(failing, distinct, together)


def sources_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Summarize the lineage of a window's sources; each day partition has the details."""
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
    """Raise EtlError for a day partition whose columns or types differ from those of the one before it."""
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
    """Raise EtlError for a day partition whose statistics are not those that the recipe's features need."""
    wanted = nothing(measured_by(config.features, part.inputs, config.weight)).measured
    if found.measured != wanted:
        raise EtlError(
            f"the part {part.interval} was measured for other features ({found.measured}, not {wanted}); a window "
            "needs parts of one recipe: do not name it as known"
        )


def split_of(config: EtlConfig, label: str) -> str | None:
    """Return the split of all rows of an interval if time decides it; None if each row has its own."""
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


def read_statistics(storage: Storage, part: Part) -> Statistics:
    """Read a day partition's statistics. `storage`: its folder. StoredError where they are not what was written."""
    data, where = storage.read_bytes(part.statistics), f"{storage.uri}/{part.statistics}"
    if hashlib.sha256(data).hexdigest() != part.statistics_sha256:
        raise EtlError(f"{where}: is not what was written; delete {storage.uri}, and the part is written anew")
    return Statistics.from_bytes(data, where)


def _window_fingerprint(config: EtlConfig, parts: Sequence[PinnedPart], missing: Sequence[str]) -> str:
    """Hash (sha256) the day partitions and what the window decides: splits, fitted state, allowed failures."""
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
        f"etl.interval: {len(missing)} of {count_of(count, 'interval has')} no file: {', '.join(shown)}{more}; {remedy}"
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
