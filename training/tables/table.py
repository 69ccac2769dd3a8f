"""One table of rows by id. It knows no ranks: the same class holds a whole table, or the shard of one rank.

A look-up stores nothing: the row of an id that is not stored is its initial row, a function of (seed, table, id). An id
is stored by the first push of its gradient, or by the `admit_after`-th. Everything that decides what is stored looks
at one bucket only, so that a table cut by buckets over ranks is, row by row, the table of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from sparkring.training.tables.held import HeldIds
from sparkring.training.tables.id_map import Slots
from sparkring.training.tables.slab import Slab
from sparkring.training.tables.update_rules import UpdateRule

Array = NDArray[Any]
WAITING = 4096  # ids of a bucket at most that are seen and not admitted yet


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


def _no_ids() -> Ids:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class TableDump:
    """The content of some buckets, in order of the ids' hashes: equal tables give equal dumps, on any world.

    buckets: (k,). starts: (k + 1,) rows of bucket i are starts[i] to starts[i + 1]. ids: (n,). rows: (n, dim + state).
    use: (n, 2) the push that last touched a row, and how many did. seen: (m, 3) ids that are not yet admitted, how
    many pushes they had, and the last one, which older checkpoints lack. counts: (k, 2) rows admitted and evicted so
    far. clock: (1,) pushes so far.

    Of changes since another dump of the same buckets: ids, rows, use and seen have those that changed, `removed` and
    `forgotten` the ids that were evicted, and those that were no longer waiting, before these were stored. since: (1,)
    the step of the dump before; (0,) where this is the whole content.
    """

    buckets: NDArray[np.int64]
    starts: NDArray[np.int64]
    ids: Ids
    rows: Array
    use: NDArray[np.int64]
    seen: NDArray[np.int64]
    counts: NDArray[np.int64]
    clock: NDArray[np.int64]
    removed: Ids = field(default_factory=_no_ids)
    forgotten: Ids = field(default_factory=_no_ids)
    since: NDArray[np.int64] = field(default_factory=_no_ids)

    def only(self, buckets: NDArray[np.int64]) -> TableDump:
        """Return the dump restricted to some sorted buckets."""
        kept = np.isin(self.buckets, buckets)
        ids, seen, removed, forgotten = (
            np.isin(bucket_of(np.ascontiguousarray(each)), buckets)
            for each in (self.ids, self.seen[:, 0], self.removed, self.forgotten)
        )
        return replace(
            self,
            buckets=self.buckets[kept],
            starts=np.concatenate([[0], np.cumsum(np.diff(self.starts)[kept])]),
            ids=self.ids[ids],
            rows=self.rows[ids],
            use=self.use[ids] if len(self.use) else self.use,
            seen=self.seen[seen],
            counts=self.counts[kept],
            removed=self.removed[removed],
            forgotten=self.forgotten[forgotten],
        )


class Table:
    """Rows by id, their optimizer state, and what decides which are kept."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.scale = np.broadcast_to(np.asarray(spec.scale, spec.dtype), (spec.dim,))
        self.clock = 0  # pushes so far
        self.counts = np.zeros((BUCKETS, 2), np.int64)  # rows admitted, evicted
        self._saved_at: int | None = None  # the step of the last checkpoint
        self._key = table_key(spec.seed, spec.name)
        self._held = HeldIds(None if spec.max_rows is None else spec.max_rows // BUCKETS)
        self._waiting = HeldIds(WAITING)  # to be admitted
        self._rows = Slab(spec.dim + spec.rule.state_width(spec.dim), spec.dtype)

    def __len__(self) -> int:
        return self._held.map.live

    @property
    def bytes(self) -> int:
        """Memory of all that grows with the rows."""
        return self._held.bytes + self._waiting.bytes + self._rows.bytes

    def pull(self, ids: Ids) -> Array:
        """Return the rows' weights, (n, dim); ids may repeat."""
        slots = self._held.map.find(ids)
        known = slots >= 0
        if known.all():
            return self._rows.gather(slots)[:, : self.spec.dim]
        out = np.empty((len(ids), self.spec.dim), self.spec.dtype)
        out[known] = self._rows.gather(slots[known])[:, : self.spec.dim]
        out[~known] = self._initial(ids[~known])
        return out

    def stores(self, ids: Ids) -> NDArray[np.bool_]:
        """Mark the ids that have a row, (n,)."""
        stored: NDArray[np.bool_] = self._held.map.find(ids) >= 0
        return stored

    def push(self, ids: Ids, grads: Array, lr: float) -> Ids:
        """Apply the gradients (n, dim) of distinct ids (n,): the sums over a whole global batch, once a step.

        Those of ids that are not admitted yet, or that their bucket has no room for, are dropped. Returns the ids that
        are evicted.
        """
        self.clock += 1
        evicted = _no_ids()
        slots = self._held.map.find(ids)
        new = slots < 0
        self._held.touch(slots[~new], self.clock)
        if new.any():
            kept = ~new
            kept[new] = self._admitted(ids[new])
            fits, evicted = self._held.make_room(ids[kept & new], self.clock)
            self.counts[:, 1] += np.bincount(bucket_of(evicted), minlength=BUCKETS)
            kept[kept & new] = fits
            ids, grads, slots, new = ids[kept], grads[kept], slots[kept], new[kept]
            slots[new] = self._insert(ids[new], self._initial(ids[new]), (self.clock, 1))
        self._rows.scatter(slots, self.spec.rule.updated(self._rows.gather(slots), grads, lr))
        return evicted

    def begin_with(self, ids: Ids, weights: Array) -> None:
        """Store rows (n, dim) of ids that are not stored, with optimizer state 0: those of another model.

        In the order of their hashes, until their buckets are full.
        """
        order = np.argsort(hash_of(ids))
        kept = order[self._held.first(ids[order])]
        self._insert(ids[kept], weights[kept], (0, 0))

    def _initial(self, ids: Ids) -> Array:
        return initial_rows(self._key, ids, self.scale)

    def _insert(self, ids: Ids, weights: Array, use: tuple[int, int]) -> NDArray[np.int32]:
        """Store new rows with state 0; returns their slots."""
        rows = np.zeros((len(ids), self._rows.width), self.spec.dtype)
        rows[:, : self.spec.dim] = weights
        self.counts[:, 0] += np.bincount(bucket_of(ids), minlength=BUCKETS)
        return self._store(ids, rows, np.tile(np.array(use), (len(ids), 1)))

    def _store(self, ids: Ids, rows: Array, use: NDArray[np.int64]) -> NDArray[np.int32]:
        slots = self._held.add(ids, use)
        self._rows.reserve(self._held.end)
        self._rows.scatter(slots, rows)
        return slots

    def _admitted(self, ids: Ids) -> NDArray[np.bool_]:
        """Count a push of ids without a row, (n,), and mark those to store now."""
        if self.spec.admit_after == 1:
            return np.ones(len(ids), np.bool_)
        slots = self._waiting.map.find(ids)
        new = slots < 0
        self._waiting.touch(slots[~new], self.clock)
        fits, _ = self._waiting.make_room(ids[new], self.clock)
        self._waiting.add(ids[new][fits], np.tile(np.array((self.clock, 1)), (int(fits.sum()), 1)))
        enough = ~new  # a new one had 1 push
        enough[~new] = self._waiting.use(slots[~new])[:, 1] >= self.spec.admit_after
        self._waiting.remove(ids[enough], slots[enough])
        return enough

    def dump(self, buckets: NDArray[np.int64]) -> TableDump:
        """Copy the content of `buckets`, (k,), which are sorted."""
        return self._copied(buckets, self._held.map.items(), self._waiting.map.items())

    def save(self, buckets: NDArray[np.int64], most_bytes: int) -> TableDump:
        """Copy what changed in `buckets` since the last call, or all where that is more than `most_bytes`."""
        copied = self.copy_changes(buckets, most_bytes)
        self.mark_saved()
        return copied

    def copy_changes(self, buckets: NDArray[np.int64], most_bytes: int) -> TableDump:
        """Copy what changed in `buckets` since `mark_saved`, or all where that is more than `most_bytes`."""
        changes = None if self._saved_at is None else self._changes(buckets, most_bytes)
        return self.dump(buckets) if changes is None else changes

    def mark_saved(self) -> None:
        """Begin to note changes again: a checkpoint has the content of every bucket."""
        self._held.mark_saved()
        self._waiting.mark_saved()
        self._saved_at = self.clock

    def _changes(self, buckets: NDArray[np.int64], most_bytes: int) -> TableDump | None:
        """Copy what changed in `buckets` since the last save; None where it is too much."""
        held, waiting = _inside(*self._held.changed(), buckets), _inside(*self._waiting.changed(), buckets)
        removed, forgotten = (_by_bucket(ids, ids, buckets)[0] for ids in (self._held.gone(), self._waiting.gone()))
        limited = self.spec.max_rows is not None
        row_bytes = 8 + self._rows.width * self._rows.dtype.itemsize + 16 * limited
        copied_bytes = row_bytes * len(held[0]) + 24 * len(waiting[0]) + 8 * (len(removed) + len(forgotten))
        if copied_bytes > most_bytes:
            return None
        changes = self._copied(buckets, held, waiting)
        return replace(changes, removed=removed, forgotten=forgotten, since=np.array([self._saved_at]))

    def _copied(self, buckets: NDArray[np.int64], held: tuple[Ids, Slots], waiting: tuple[Ids, Slots]) -> TableDump:
        """Copy ids that are held and ids that wait, and what is known of each of `buckets`."""
        ids, slots, starts = _by_bucket(*held, buckets)
        seen, seen_slots, _ = _by_bucket(*waiting, buckets)
        limited = self.spec.max_rows is not None
        return TableDump(
            buckets=buckets,
            starts=starts,
            ids=ids,
            rows=self._rows.gather(slots),
            use=self._held.use(slots) if limited else np.zeros((0, 2), np.int64),
            seen=np.column_stack([seen, self._waiting.use(seen_slots)[:, ::-1]]),
            counts=self.counts[buckets],
            clock=np.array([self.clock]),
        )

    def weights(self, buckets: NDArray[np.int64], at_once: int = 1 << 16) -> tuple[Ids, Iterator[Array]]:
        """Return the ids of `buckets` in hash order, and an iterator of their weights (n, dim) in blocks."""
        ids, slots, _ = _by_bucket(*self._held.map.items(), buckets)
        starts = range(0, len(ids), at_once)
        return ids, (self._rows.gather(slots[start : start + at_once])[:, : self.spec.dim] for start in starts)

    def load(self, dump: TableDump) -> None:
        """Add the content of buckets that this table holds nothing of."""
        if dump.rows.shape[1] != self._rows.width:
            raise ValueError(
                f"table {self.spec.name!r}: stored rows have {dump.rows.shape[1]} values, a row has "
                f"{self._rows.width}: it was trained with another dim, or another tables.optimizer"
            )
        use = dump.use if len(dump.use) else np.zeros((len(dump.ids), 2), np.int64)
        kept = self._held.newest(dump.ids, use)  # all, unless max_rows was larger
        self._store(dump.ids[kept], dump.rows[kept].astype(self.spec.dtype, copy=False), use[kept])
        self.counts[dump.buckets] = dump.counts
        self.counts[:, 1] += np.bincount(bucket_of(dump.ids[~kept]), minlength=BUCKETS)
        ids, use = np.ascontiguousarray(dump.seen[:, 0]), np.zeros((len(dump.seen), 2), np.int64)
        use[:, 1 - np.arange(dump.seen.shape[1] - 1)] = dump.seen[:, 1:]
        kept = self._waiting.newest(ids, use)
        self._waiting.add(ids[kept], use[kept])
        self.clock = int(dump.clock[0])


def _inside(ids: Ids, slots: NDArray[Any], buckets: NDArray[np.int64]) -> tuple[Ids, NDArray[Any]]:
    """Return the ids that are in `buckets`, and their slots."""
    if len(buckets) == BUCKETS:
        return ids, slots
    inside = np.isin(bucket_of(ids), buckets)
    return ids[inside], slots[inside]


def _by_bucket(
    ids: Ids, slots: NDArray[Any], buckets: NDArray[np.int64]
) -> tuple[Ids, NDArray[Any], NDArray[np.int64]]:
    """Return ids of `buckets` by hash, their slots, and the start of each bucket, (k + 1,)."""
    ids, slots = _inside(ids, slots, buckets)
    hashes = hash_of(ids)
    order = np.argsort(hashes)
    counts = np.bincount(bucket_of_hash(hashes), minlength=BUCKETS)[buckets]
    return ids[order], slots[order], np.concatenate([[0], np.cumsum(counts)])


def summed(ids: Ids, grads: Array) -> tuple[Ids, Array]:
    """Return distinct sorted ids (u,) and their summed gradients (u, dim), added in the order given."""
    # numpy would sum rows by an index ten times slower
    distinct, place = np.unique(ids, return_inverse=True)
    index = torch.from_numpy(place)[:, None].expand(-1, grads.shape[1])
    sums = torch.from_numpy(np.zeros((len(distinct), grads.shape[1]), grads.dtype))
    return distinct, sums.scatter_add_(0, index, torch.from_numpy(np.ascontiguousarray(grads))).numpy()
