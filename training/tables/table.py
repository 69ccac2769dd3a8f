"""One table of rows by id. It knows no ranks: the same class holds a whole table, or the part of one rank.

A look-up stores nothing: the row of an id that is not stored is its initial row, a function of (seed, table, id). An id
is stored by the first push of its gradient, or by the `admit_after`-th. Everything that decides what is stored looks
at one bucket only, so that a table cut by buckets over ranks is, row by row, the table of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.tables.hashing import (
    BUCKETS,
    Ids,
    bucket_of,
    bucket_of_hash,
    hash_of,
    initial_rows,
    table_key,
)
from sparkring.training.tables.id_map import IdMap
from sparkring.training.tables.slab import Slab
from sparkring.training.tables.update_rules import UpdateRule

Array = NDArray[Any]
TRIMMED = 0.9  # a bucket that is too full is cut to this share of its rows, so that not every push evicts


@dataclass(frozen=True)
class TableSpec:
    """What a table is.

    scale: one number, or one per value of a row: initial values are uniform in [-scale, scale).
    max_rows: rows stored at most, over all ranks; each bucket has its equal share. None: no limit.
    admit_after: pushes of an id before its row is stored.
    """

    name: str
    dim: int
    scale: float | Sequence[float] = 0.0
    seed: int = 0
    rule: UpdateRule = field(default_factory=UpdateRule)
    dtype: str = "float32"
    max_rows: int | None = None
    admit_after: int = 1

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(f"table {self.name!r}: dim = {self.dim}: a row has at least 1 value")
        if np.ndim(self.scale) and np.shape(self.scale) != (self.dim,):
            raise ValueError(f"table {self.name!r}: scale has {np.size(self.scale)} values, a row has {self.dim}")
        if self.max_rows is not None and self.max_rows < BUCKETS:
            raise ValueError(
                f"table {self.name!r}: max_rows = {self.max_rows}: must be at least {BUCKETS}, a row for each bucket"
            )


@dataclass(frozen=True)
class TableDump:
    """The content of some buckets, in order of the ids' hashes: equal tables give equal dumps, on any world.

    buckets: (k,). starts: (k + 1,) rows of bucket i are starts[i] to starts[i + 1]. ids: (n,). rows: (n, dim + state).
    use: (n, 2) the push that last touched a row, and how many did. seen: (m, 2) ids that are not yet admitted, and how
    many pushes they had. counts: (k, 2) rows admitted and evicted so far. clock: (1,) pushes so far.
    """

    buckets: NDArray[np.int64]
    starts: NDArray[np.int64]
    ids: Ids
    rows: Array
    use: NDArray[np.int64]
    seen: NDArray[np.int64]
    counts: NDArray[np.int64]
    clock: NDArray[np.int64]


class Table:
    """Rows by id, their optimizer state, and what decides which are kept."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.scale = np.broadcast_to(np.asarray(spec.scale, spec.dtype), (spec.dim,))
        self.clock = 0  # pushes so far
        self.counts = np.zeros((BUCKETS, 2), np.int64)  # rows admitted, evicted
        self._key = table_key(spec.seed, spec.name)
        self._map, self._seen = IdMap(), IdMap()  # _seen: not yet admitted -> a slot of _pushes
        self._rows = Slab(spec.dim + spec.rule.state_width(spec.dim), spec.dtype)
        self._use = Slab(2, np.int64)  # last push, pushes: only with max_rows
        self._pushes = Slab(1, np.int64)
        self._free, self._free_seen = _FreeSlots(), _FreeSlots()
        self._in_bucket = np.zeros(BUCKETS, np.int64)

    def __len__(self) -> int:
        return self._map.live

    @property
    def bytes(self) -> int:
        """Memory of all that grows with the rows."""
        held = (self._map, self._seen, self._rows, self._use, self._pushes)
        return sum(each.bytes for each in held)

    def pull(self, ids: Ids) -> Array:
        """The rows' weights, (n, dim); ids may repeat."""
        slots = self._map.find(ids)
        known = slots >= 0
        if known.all():
            return self._rows.gather(slots)[:, : self.spec.dim]
        out = np.empty((len(ids), self.spec.dim), self.spec.dtype)
        out[known] = self._rows.gather(slots[known])[:, : self.spec.dim]
        out[~known] = self._initial(ids[~known])
        return out

    def push(self, ids: Ids, grads: Array, lr: float) -> None:
        """Apply the gradients (n, dim) of distinct ids (n,): the sums over a whole global batch, once a step."""
        most = self.spec.max_rows
        if most is not None and len(ids) > most:
            raise ValueError(
                f"table {self.spec.name!r}: one batch has {len(ids)} distinct ids, tables.max_rows = {most}; raise "
                "max_rows, or make train.global_batch smaller"
            )
        self.clock += 1
        slots = self._map.find(ids)
        new = slots < 0
        if new.any():
            if self.spec.admit_after > 1:
                kept = ~new
                kept[new] = self._admitted(ids[new])
                ids, grads, slots, new = ids[kept], grads[kept], slots[kept], new[kept]
            slots[new] = self._insert(ids[new], self._initial(ids[new]))
        self._rows.scatter(slots, self.spec.rule.updated(self._rows.gather(slots), grads, lr))
        if most is not None:
            use = self._use.gather(slots)
            use[:, 0], use[:, 1] = self.clock, use[:, 1] + 1
            self._use.scatter(slots, use)
            self._evict(most // BUCKETS)

    def begin_with(self, ids: Ids, weights: Array) -> None:
        """Store rows (n, dim) of ids that are not stored, with optimizer state 0: those of another model."""
        self._insert(ids, weights)
        if self.spec.max_rows is not None:
            self._evict(self.spec.max_rows // BUCKETS)

    def _initial(self, ids: Ids) -> Array:
        return initial_rows(self._key, ids, self.scale)

    def _insert(self, ids: Ids, weights: Array) -> NDArray[np.int32]:
        """Store new rows with state 0; returns their slots."""
        slots = self._free.take(len(ids))
        rows = np.zeros((len(ids), self._rows.width), self.spec.dtype)
        rows[:, : self.spec.dim] = weights
        self._store(ids, slots, rows, np.zeros((len(ids), 2), np.int64))
        self.counts[:, 0] += np.bincount(bucket_of(ids), minlength=BUCKETS)
        return slots

    def _store(self, ids: Ids, slots: NDArray[np.int32], rows: Array, use: NDArray[np.int64]) -> None:
        self._map.insert(ids, slots)
        self._rows.reserve(self._free.end)
        self._rows.scatter(slots, rows)
        if self.spec.max_rows is not None:
            self._use.reserve(self._free.end)
            self._use.scatter(slots, use)
        self._in_bucket += np.bincount(bucket_of(ids), minlength=BUCKETS)

    def _admitted(self, ids: Ids) -> NDArray[np.bool_]:
        """Count a push of ids that are not stored, (n,); which of them are to be stored now."""
        slots = self._seen.find(ids)
        new = slots < 0
        slots[new] = self._free_seen.take(int(new.sum()))
        self._pushes.reserve(self._free_seen.end)
        self._pushes.scatter(slots[new], np.zeros((int(new.sum()), 1), np.int64))
        self._seen.insert(ids[new], slots[new])
        pushes = self._pushes.gather(slots) + 1
        self._pushes.scatter(slots, pushes)
        enough = pushes[:, 0] >= self.spec.admit_after
        self._seen.remove(ids[enough])
        self._free_seen.give(slots[enough])
        return enough

    def _evict(self, most: int) -> None:
        """Cut buckets with more than `most` rows: those go whose last push is oldest, then the rarest, by id last."""
        full = np.flatnonzero(self._in_bucket > most)
        if not len(full):
            return
        ids, slots = self._map.items()
        bucket = bucket_of(ids)
        inside = np.isin(bucket, full)
        ids, slots, bucket = ids[inside], slots[inside], bucket[inside]
        use = self._use.gather(slots)
        order = np.lexsort((ids, use[:, 1], use[:, 0], bucket))
        place = np.arange(len(order)) - np.searchsorted(bucket[order], bucket[order])  # within the bucket
        surplus = self._in_bucket[bucket[order]] - max(1, int(TRIMMED * most))
        gone = order[place < surplus]
        self._map.remove(ids[gone])
        self._free.give(slots[gone])
        evicted = np.bincount(bucket[gone], minlength=BUCKETS)
        self._in_bucket -= evicted
        self.counts[:, 1] += evicted

    def dump(self, buckets: NDArray[np.int64]) -> TableDump:
        """Copy the content of `buckets`, (k,), which are sorted."""
        ids, slots, starts = _by_bucket(*self._map.items(), buckets)
        seen, seen_slots, _ = _by_bucket(*self._seen.items(), buckets)
        limited = self.spec.max_rows is not None
        return TableDump(
            buckets=buckets,
            starts=starts,
            ids=ids,
            rows=self._rows.gather(slots),
            use=self._use.gather(slots) if limited else np.zeros((0, 2), np.int64),
            seen=np.column_stack([seen, self._pushes.gather(seen_slots)]),
            counts=self.counts[buckets],
            clock=np.array([self.clock]),
        )

    def weights(self, buckets: NDArray[np.int64], at_once: int = 1 << 16) -> tuple[Ids, Iterator[Array]]:
        """The ids of `buckets`, in order of their hashes, and their weights (n, dim), some rows at a time."""
        ids, slots, _ = _by_bucket(*self._map.items(), buckets)
        starts = range(0, len(ids), at_once)
        return ids, (self._rows.gather(slots[start : start + at_once])[:, : self.spec.dim] for start in starts)

    def load(self, dump: TableDump) -> None:
        """Add the content of buckets that this table holds nothing of."""
        if dump.rows.shape[1] != self._rows.width:
            raise ValueError(
                f"table {self.spec.name!r}: stored rows have {dump.rows.shape[1]} values, a row has "
                f"{self._rows.width}: it was trained with another dim, or another tables.optimizer"
            )
        slots = self._free.take(len(dump.ids))
        use = dump.use if len(dump.use) else np.zeros((len(dump.ids), 2), np.int64)
        self._store(dump.ids, slots, dump.rows.astype(self.spec.dtype, copy=False), use)
        seen = self._free_seen.take(len(dump.seen))
        self._pushes.reserve(self._free_seen.end)
        self._pushes.scatter(seen, dump.seen[:, 1:])
        self._seen.insert(dump.seen[:, 0], seen)
        self.counts[dump.buckets] = dump.counts
        self.clock = int(dump.clock[0])


def _by_bucket(
    ids: Ids, slots: NDArray[np.int32], buckets: NDArray[np.int64]
) -> tuple[Ids, NDArray[np.int32], NDArray[np.int64]]:
    """Ids of `buckets` in order of their hashes, their slots, and (k + 1,) where each bucket begins."""
    hashes = hash_of(ids)
    bucket = bucket_of_hash(hashes)
    if len(buckets) < BUCKETS:
        inside = np.isin(bucket, buckets)
        ids, slots, bucket, hashes = ids[inside], slots[inside], bucket[inside], hashes[inside]
    order = np.argsort(hashes)
    counts = np.bincount(bucket, minlength=BUCKETS)[buckets]
    return ids[order], slots[order], np.concatenate([[0], np.cumsum(counts)])


class _FreeSlots:
    """Slots that hold no row: those given back, then new ones. `end`: above the largest slot ever taken."""

    def __init__(self) -> None:
        self.end = 0
        self._given: list[NDArray[np.int32]] = []

    def take(self, count: int) -> NDArray[np.int32]:
        parts, missing = [], count
        while missing and self._given:
            part = self._given.pop()
            if len(part) > missing:
                self._given.append(part[missing:])
            parts.append(part[:missing])
            missing -= len(parts[-1])
        parts.append(np.arange(self.end, self.end + missing, dtype=np.int32))
        self.end += missing
        return np.concatenate(parts)

    def give(self, slots: NDArray[np.int32]) -> None:
        if len(slots):
            self._given.append(slots)


def summed(ids: Ids, grads: Array) -> tuple[Ids, Array]:
    """Distinct ids (u,), sorted, and the sums of their gradients (u, dim), added in the order given."""
    # numpy would sum rows by an index ten times slower
    distinct, place = np.unique(ids, return_inverse=True)
    index = torch.from_numpy(place)[:, None].expand(-1, grads.shape[1])
    sums = torch.from_numpy(np.zeros((len(distinct), grads.shape[1]), grads.dtype))
    return distinct, sums.scatter_add_(0, index, torch.from_numpy(np.ascontiguousarray(grads))).numpy()
