"""Tables as named tensors: in checkpoints, whose buckets any world can take, and in a finished model.

It knows no file format: a tensor of a file is anything with a shape whose rows can be read (`RowFile`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.tables.hashing import BUCKETS, Ids, bucket_of, hash_of
from sparkring.training.tables.table import TableDump

Array = NDArray[Any]
AT_ONCE = 64  # buckets that are read at once: memory holds so much of a table twice


class RowFile(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_rows(self, start: int, stop: int) -> torch.Tensor: ...


def to_tensors(dump: TableDump) -> dict[str, torch.Tensor]:
    """Return the dump's arrays by name, as tensors."""
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in vars(dump).items()}


def stored_dumps(table: str, files: Sequence[Mapping[str, RowFile]], wanted: NDArray[np.int64]) -> Iterator[TableDump]:
    """Read the `wanted` buckets, sorted, some at a time, from files of some ranks' dumps and of later changes.

    Only their rows are read. ValueError where the files do not hold each bucket once, with all of its changes.
    """
    parts = [_Part(span) for span in check_whole(table, files)]
    for start in range(0, len(wanted), AT_ONCE):
        buckets = wanted[start : start + AT_ONCE]
        found = [part.dump(picked) for part in parts if len(picked := np.flatnonzero(np.isin(part.buckets, buckets)))]
        yield found[0] if len(found) == 1 else newest(buckets, found)


def newest(buckets: NDArray[np.int64], dumps: Sequence[TableDump]) -> TableDump:
    """Return the final content of sorted `buckets` after applying `dumps`, oldest first."""
    rows = _latest([dump.ids for dump in dumps], [dump.removed for dump in dumps])
    seen = _latest([np.ascontiguousarray(dump.seen[:, 0]) for dump in dumps], [dump.forgotten for dump in dumps])
    ids = np.concatenate([dump.ids for dump in dumps])[rows]
    use = np.concatenate([dump.use for dump in dumps])
    counts = np.zeros((BUCKETS, 2), np.int64)
    for dump in dumps:
        counts[dump.buckets] = dump.counts
    return TableDump(
        buckets=buckets,
        starts=np.concatenate([[0], np.cumsum(np.bincount(bucket_of(ids), minlength=BUCKETS)[buckets])]),
        ids=ids,
        rows=np.concatenate([dump.rows for dump in dumps])[rows],
        use=use[rows] if len(use) else use,
        seen=np.concatenate([dump.seen for dump in dumps])[seen],
        counts=counts[buckets],
        clock=dumps[-1].clock,
    )


def joined(dumps: Sequence[TableDump]) -> TableDump:
    """Merge dumps of disjoint buckets, all taken at one step."""
    if len(dumps) == 1:
        return dumps[0]
    every = {name: np.concatenate([getattr(dump, name) for dump in dumps]) for name in vars(dumps[0])}
    buckets, order = np.sort(every["buckets"]), np.argsort(hash_of(every["ids"]))
    ids, seen = every["ids"][order], every["seen"]
    return TableDump(
        buckets=buckets,
        starts=np.concatenate([[0], np.cumsum(np.bincount(bucket_of(ids), minlength=BUCKETS)[buckets])]),
        ids=ids,
        rows=every["rows"][order],
        use=every["use"][order] if len(every["use"]) else every["use"],
        seen=seen[np.argsort(hash_of(np.ascontiguousarray(seen[:, 0])))],
        counts=every["counts"][np.argsort(every["buckets"])],
        clock=dumps[0].clock,
        removed=every["removed"][np.argsort(hash_of(every["removed"]))],
        forgotten=every["forgotten"][np.argsort(hash_of(every["forgotten"]))],
        since=dumps[0].since,
    )


def _latest(ids: Sequence[Ids], gone: Sequence[Ids]) -> NDArray[np.int64]:
    """Find each id's latest entry among all `ids` that is not removed later by `gone`, in hash order.

    Within one dump, removals come before additions.
    """
    each = np.concatenate([*ids, *gone])
    ages = [np.full(len(part), 2 * age + 1) for age, part in enumerate(ids)]
    ages += [np.full(len(part), 2 * age) for age, part in enumerate(gone)]
    hashes = hash_of(each)
    order = np.lexsort((np.concatenate(ages), hashes))
    last = order[np.append(np.diff(hashes[order].view(np.int64)) != 0, True)[: len(order)]]
    return last[last < sum(map(len, ids))]


class _Span:
    """What a file of a table is of. `since`: None where it has its buckets' whole content."""

    def __init__(self, file: Mapping[str, RowFile]) -> None:
        self.file = file
        self.buckets, self.clock = whole(file["buckets"]), int(whole(file["clock"])[0])
        since = whole(file["since"]) if "since" in file else np.zeros(0, np.int64)  # older checkpoints are whole
        self.since = int(since[0]) if len(since) else None


class _Part:
    """A file of a table in a checkpoint."""

    def __init__(self, span: _Span) -> None:
        self._file, self.buckets, self.clock = span.file, span.buckets, span.clock
        file = span.file
        self._starts, self._seen, self._counts = (whole(file[name]) for name in ("starts", "seen", "counts"))
        self._gone = {name: whole(file[name]) for name in ("removed", "forgotten") if name in file}

    def dump(self, picked: NDArray[np.int64]) -> TableDump:
        """Read the buckets at positions `picked` of the file."""
        runs = np.split(picked, np.flatnonzero(np.diff(picked) > 1) + 1)  # buckets that are neighbors are read at once
        spans = [(int(self._starts[run[0]]), int(self._starts[run[-1] + 1])) for run in runs]
        buckets = self.buckets[picked]

        def rows(name: str) -> Array:
            parts = [self._file[name].read_rows(start, stop).numpy() for start, stop in spans]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        def inside(ids: Array) -> NDArray[np.bool_]:
            return np.isin(bucket_of(np.ascontiguousarray(ids)), buckets)

        return TableDump(
            buckets=buckets,
            starts=np.concatenate([[0], np.cumsum(np.diff(self._starts)[picked])]),
            ids=rows("ids"),
            rows=rows("rows"),
            use=rows("use") if self._file["use"].shape[0] else np.zeros((0, 2), np.int64),
            seen=self._seen[inside(self._seen[:, 0])],
            counts=self._counts[picked],
            clock=np.array([self.clock]),
            **{name: ids[inside(ids)] for name, ids in self._gone.items()},
        )


def check_whole(table: str, files: Sequence[Mapping[str, RowFile]]) -> list[_Span]:
    """Describe the files, oldest first. ValueError unless each bucket has its content once and all changes."""
    parts = sorted((_Span(file) for file in files), key=lambda part: (part.clock, part.since is not None, part.since))
    times, clocks, follows = np.zeros(BUCKETS, np.int64), np.full(BUCKETS, -1), np.ones(BUCKETS, np.bool_)
    for part in parts:
        if part.since is None:
            times[part.buckets] += 1
        else:
            follows[part.buckets] &= clocks[part.buckets] == part.since
        clocks[part.buckets] = part.clock
    follows &= clocks == clocks.max()  # all ranks save at one step
    odd = np.flatnonzero((times != 1) | ~follows)
    if len(odd):
        how = "missing" if not times[odd[0]] else "stored twice" if times[odd[0]] > 1 else "without some of its changes"
        raise ValueError(
            f"table {table!r}: {len(odd)} of {BUCKETS} buckets are not there once and whole, the first is bucket "
            f"{odd[0]}, {how}; the checkpoint is damaged"
        )
    return parts


def whole(file: RowFile) -> Array:
    """Read all values of a tensor in a file."""
    found: Array = file.read_rows(0, file.shape[0]).numpy()
    return found
