"""An open-addressing hash map from 64-bit ids to slots, in numpy: 12 bytes a place, at most 0.6 of them taken."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparkring.training.tables.hashing import Ids, hash_of

Slots = NDArray[np.int32]
FULLEST = 0.6
PLACES = 1024  # of an empty map
PLACE_BYTES = 12
EMPTY, REMOVED = -1, -2  # in place of a slot
_AT_ONCE = 1 << 20  # ids that a rehash moves at once


class IdMap:
    """Linear probing, all ids of a call at once. Any id is allowed: slots tell free places, not ids."""

    def __init__(self, places: int = PLACES) -> None:
        """Start empty. `places`: initial capacity, a power of two."""
        self._keys = np.zeros(places, np.int64)
        self._slots = np.full(places, EMPTY, np.int32)
        self._taken = 0  # places that are not EMPTY
        self.live = 0  # ids in the map

    @property
    def bytes(self) -> int:
        return self._keys.nbytes + self._slots.nbytes

    def find(self, ids: Ids) -> Slots:
        """Return the slot of each id, (n,); -1 for an unknown id."""
        found = np.full(len(ids), -1, np.int32)
        todo, at = np.arange(len(ids)), self._first_places(ids)
        while len(todo):
            slot = self._slots[at]
            hit = (self._keys[at] == ids[todo]) & (slot >= 0)
            found[todo[hit]] = slot[hit]
            on = ~hit & (slot != EMPTY)
            todo, at = todo[on], self._next(at[on])
        return found

    def insert(self, ids: Ids, slots: Slots) -> None:
        """Add distinct ids that are not in the map, at distinct slots."""
        self._reserve(len(ids))
        self._place(ids, slots)
        self.live += len(ids)

    def remove(self, ids: Ids) -> None:
        """Take distinct ids out that are in the map."""
        todo, at = np.arange(len(ids)), self._first_places(ids)
        while len(todo):
            hit = (self._keys[at] == ids[todo]) & (self._slots[at] >= 0)
            self._slots[at[hit]] = REMOVED
            todo, at = todo[~hit], self._next(at[~hit])
        self.live -= len(ids)

    def items(self) -> tuple[Ids, Slots]:
        """Return all ids and their slots, unordered."""
        held = np.flatnonzero(self._slots >= 0)
        return self._keys[held], self._slots[held]

    def items_of(self, wanted: NDArray[np.bool_]) -> tuple[Ids, Slots]:
        """Return the ids whose slots are `wanted` (by slot), and their slots, scanning in blocks."""
        picked = [np.zeros(0, np.int64)]
        for start in range(0, len(self._slots), _AT_ONCE):
            slots = self._slots[start : start + _AT_ONCE]
            held = np.flatnonzero(slots >= 0)
            picked.append(start + held[wanted[slots[held]]])
        places = np.concatenate(picked)
        return self._keys[places], self._slots[places]

    def _first_places(self, ids: Ids) -> NDArray[np.int64]:
        return (hash_of(ids) & np.uint64(len(self._keys) - 1)).astype(np.int64)

    def _next(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        return (at + 1) & (len(self._keys) - 1)

    def _place(self, ids: Ids, slots: Slots) -> None:
        todo, at = np.arange(len(ids)), self._first_places(ids)
        while len(todo):
            before = self._slots[at]
            free = before < 0
            # TRICK: of several ids that want one place the last write wins, which is seen by reading it again.
            self._slots[at[free]] = slots[todo[free]]
            won = free & (self._slots[at] == slots[todo])
            self._keys[at[won]] = ids[todo[won]]
            self._taken += int((before[won] == EMPTY).sum())
            todo, at = todo[~won], self._next(at[~won])

    def _reserve(self, more: int) -> None:
        """Rehash where `more` ids would fill the map too far: into a larger one, unless removed ids fill it."""
        if self._taken + more <= FULLEST * len(self._keys):
            return
        keys, slots = self.items()
        places = len(self._keys)
        while self.live + more > FULLEST * places / 1.5:  # room to grow before the next rehash
            places *= 2
        self._keys, self._slots = np.zeros(places, np.int64), np.full(places, EMPTY, np.int32)
        self._taken = 0
        for start in range(0, len(keys), _AT_ONCE):
            self._place(keys[start : start + _AT_ONCE], slots[start : start + _AT_ONCE])
