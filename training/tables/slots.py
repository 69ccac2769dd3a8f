"""Numbers of rows in slabs, given back and taken again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkring.training.tables.hashing import BUCKETS
from sparkring.training.tables.slab import Slab

Slots = NDArray[np.int32]
Buckets = NDArray[np.int16]
BLOCK = 256  # slots that a bucket takes at once


def places_in_runs(ordered: NDArray[Any]) -> NDArray[np.int64]:
    """Return each value's position among its equals, (n,), of sorted values."""
    return np.arange(len(ordered)) - np.searchsorted(ordered, ordered)


class AnySlots:
    """Those given back, then new ones. `end`: above the largest slot ever taken."""

    bytes = 0

    def __init__(self) -> None:
        self.end = 0
        self._given: list[Slots] = []

    def take(self, buckets: Buckets) -> Slots:
        """Return a free slot for each of `buckets`, (n,)."""
        parts, missing = [], len(buckets)
        while missing and self._given:
            part = self._given.pop()
            if len(part) > missing:
                self._given.append(part[missing:])
            parts.append(part[:missing])
            missing -= len(parts[-1])
        parts.append(np.arange(self.end, self.end + missing, dtype=np.int32))
        self.end += missing
        return np.concatenate(parts)

    def give(self, slots: Slots, buckets: Buckets) -> None:
        if len(slots):
            self._given.append(slots)


class BucketSlots:
    """Slots in blocks that belong to one bucket each, so that those of a bucket are found without the others."""

    def __init__(self, share: int) -> None:
        """Start empty. `share`: most slots per bucket."""
        self._size = min(BLOCK, share)
        self._blocks = np.zeros((BUCKETS, -(-share // self._size)), np.int32)  # the block of each so many places
        self._held = np.zeros(BUCKETS, np.int64)  # blocks of each bucket
        self._top = np.zeros(BUCKETS, np.int64)  # places of each bucket that were ever taken
        self._free = np.zeros(BUCKETS, np.int64)  # of them, given back: a stack in the bucket's own places
        self._stack = Slab(1, np.int32)
        self.end = 0

    @property
    def bytes(self) -> int:
        return self._stack.bytes + self._blocks.nbytes

    def take(self, buckets: Buckets) -> Slots:
        """Return a free slot for each of `buckets`, (n,)."""
        order = np.argsort(buckets, kind="stable")
        bucket = buckets[order]
        place, count = places_in_runs(bucket), np.bincount(bucket, minlength=BUCKETS)
        left = self._free[bucket] - place  # above 0: one that was given back
        again = np.minimum(count, self._free)
        self._grow(self._top + count - again)
        out = np.empty(len(order), np.int32)
        old, new = left > 0, left <= 0
        out[order[old]] = self._stack.gather(self._at(bucket[old], left[old] - 1))[:, 0]
        out[order[new]] = self._at(bucket[new], self._top[bucket[new]] - left[new])
        self._free -= again
        self._top += count - again
        return out

    def give(self, slots: Slots, buckets: Buckets) -> None:
        order = np.argsort(buckets, kind="stable")
        bucket = buckets[order]
        self._stack.reserve(self.end)
        self._stack.scatter(self._at(bucket, self._free[bucket] + places_in_runs(bucket)), slots[order][:, None])
        self._free += np.bincount(bucket, minlength=BUCKETS)

    def taken(self, buckets: NDArray[np.int64]) -> Slots:
        """Return all slots that `buckets` ever took, including those given back."""
        bucket = np.repeat(buckets, self._top[buckets])
        return self._at(bucket, places_in_runs(bucket))

    def _at(self, buckets: NDArray[Any], places: NDArray[np.int64]) -> Slots:
        """Return the slots at positions `places` of buckets."""
        slots: Slots = self._blocks[buckets, places // self._size] * self._size + (places % self._size).astype(np.int32)
        return slots

    def _grow(self, tops: NDArray[np.int64]) -> None:
        """Allocate blocks for so many places of each bucket."""
        missing = np.maximum(-(-tops // self._size) - self._held, 0)
        bucket = np.repeat(np.arange(BUCKETS), missing)
        first = self.end // self._size
        self._blocks[bucket, self._held[bucket] + places_in_runs(bucket)] = first + np.arange(len(bucket))
        self._held += missing
        self.end += len(bucket) * self._size
