"""Ids that are held, each with a slot: any number, or so many of each bucket, where the longest untouched give way.

Every decision looks at one bucket only, and no slot decides anything: what is held is the same on any world. For
checkpoints of changes it is known which ids were touched since they were last saved, and which of those saved are gone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkring.training.tables.hashing import BUCKETS, Ids, bucket_of, hash_of
from sparkring.training.tables.id_map import IdMap, Slots
from sparkring.training.tables.slab import Slab
from sparkring.training.tables.slots import AnySlots, BucketSlots, places_in_runs

TRIMMED = 0.9  # a bucket without room is cut to this share, so that not every push evicts
FREE = -1  # in place of the last push
CHANGED, SAVED = 1, 2  # since the last checkpoint; in it


class HeldIds:
    """Distinct ids, and with a limit when they were touched."""

    def __init__(self, share: int | None) -> None:
        """Start without ids. `share`: most ids per bucket; None: no limit, and use is not recorded."""
        self.share, self.map = share, IdMap()
        self._slots: AnySlots | BucketSlots = AnySlots() if share is None else BucketSlots(share)
        self._use = Slab(3, np.int64)  # last push, pushes, id
        self._in_bucket = np.zeros(BUCKETS, np.int64)
        self._marks = np.zeros(0, np.uint8)  # of each slot
        self._gone: list[Ids] = []  # ids of the last checkpoint that were removed

    @property
    def bytes(self) -> int:
        return self.map.bytes + self._use.bytes + self._slots.bytes + self._marks.nbytes

    @property
    def end(self) -> int:
        """Above the largest slot ever taken."""
        return self._slots.end

    def use(self, slots: Slots) -> NDArray[np.int64]:
        """Return (n, 2): the step of each slot's last push, and the number of its pushes."""
        return self._use.gather(slots)[:, :2]

    def changed(self) -> tuple[Ids, Slots]:
        """Return the ids added or touched since `mark_saved`, and their slots."""
        return self.map.items_of(self._marks & CHANGED != 0)

    def gone(self) -> Ids:
        """Return the ids that `mark_saved` saw and that were removed since, even if added again; each once."""
        return np.concatenate([np.zeros(0, np.int64), *self._gone])

    def mark_saved(self) -> None:
        self._marks[:] = SAVED  # of free slots too: what takes one is marked again
        self._gone = []

    def touch(self, slots: Slots, clock: int) -> None:
        """Record a push of ids that are held."""
        self._marks[slots] |= CHANGED
        if self.share is not None and len(slots):
            use = self._use.gather(slots)
            use[:, 0], use[:, 1] = clock, use[:, 1] + 1
            self._use.scatter(slots, use)

    def add(self, ids: Ids, use: NDArray[np.int64]) -> Slots:
        """Hold new ids that there is room for; `use`: as of `use`. Returns their slots."""
        bucket = bucket_of(ids)
        slots = self._slots.take(bucket)
        self.map.insert(ids, slots)
        self._in_bucket += np.bincount(bucket, minlength=BUCKETS)
        if self.end > len(self._marks):
            places = max(1024, 1 << self.end.bit_length())
            self._marks = np.concatenate([self._marks, np.zeros(places - len(self._marks), np.uint8)])
        self._marks[slots] = CHANGED
        if self.share is not None:
            self._use.reserve(self.end)
            self._use.scatter(slots, np.column_stack([use, ids]))
        return slots

    def remove(self, ids: Ids, slots: Slots) -> None:
        bucket = bucket_of(ids)
        self.map.remove(ids)
        self._in_bucket -= np.bincount(bucket, minlength=BUCKETS)
        self._slots.give(slots, bucket)
        if (saved := self._marks[slots] & SAVED != 0).any():
            self._gone.append(ids[saved])
        if self.share is not None:
            self._use.scatter(slots, np.full((len(slots), 3), FREE))

    def make_room(self, ids: Ids, clock: int) -> tuple[NDArray[np.bool_], Ids]:
        """Evict for new ids, (n,): of each bucket that they would overfill those longest untouched, a tenth at once.

        Ids touched by push `clock` stay. Returns which new ids there is room for, the first by their hashes, and the
        ids that are evicted.
        """
        if self.share is None:
            return np.ones(len(ids), np.bool_), np.zeros(0, np.int64)
        wanted = self._in_bucket + np.bincount(bucket_of(ids), minlength=BUCKETS)
        surplus = np.where(wanted > self.share, wanted - max(1, int(TRIMMED * self.share)), 0)
        evicted = self._evict(surplus, clock)
        return self.first(ids), evicted

    def first(self, ids: Ids) -> NDArray[np.bool_]:
        """Mark the new ids, (n,), that fit: lowest hashes first."""
        return self._first(ids, np.argsort(hash_of(ids)))

    def newest(self, ids: Ids, use: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark the ids (n,) with uses (n, 2) that fit: last touched first."""
        order = np.lexsort((-ids, -use[:, 1], -use[:, 0], bucket_of(ids)))
        return self._first(ids, order)

    def _first(self, ids: Ids, order: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark the ids that fit, in an `order` of buckets."""
        fits = np.ones(len(ids), np.bool_)
        if self.share is not None:
            bucket = bucket_of(ids)[order]
            fits[order] = places_in_runs(bucket) < (self.share - self._in_bucket)[bucket]
        return fits

    def _evict(self, surplus: NDArray[np.int64], clock: int) -> Ids:
        """Evict `surplus` ids, (1024,), of each bucket: the last push oldest, then the rarest, then by id."""
        full = np.flatnonzero(surplus)
        if not len(full):
            return np.zeros(0, np.int64)
        assert isinstance(self._slots, BucketSlots)
        slots = self._slots.taken(full)
        use: NDArray[Any] = self._use.gather(slots)
        may_go = (use[:, 0] != FREE) & (use[:, 0] < clock)
        use, slots = use[may_go], slots[may_go]
        bucket = bucket_of(np.ascontiguousarray(use[:, 2]))
        order = np.lexsort((use[:, 2], use[:, 1], use[:, 0], bucket))
        gone = order[places_in_runs(bucket[order]) < surplus[bucket[order]]]
        evicted: Ids = np.ascontiguousarray(use[gone, 2])
        self.remove(evicted, slots[gone])
        return evicted
