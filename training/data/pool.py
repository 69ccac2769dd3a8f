"""Hold decoded row groups in slots of equal size until their rows are served.

One gather per column makes batches of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkring.conf.manifest import Column
from sparkring.training.data.buffers import BufferPool
from sparkring.training.data.columns import DataError, RaggedArray, is_fixed, numpy_dtype
from sparkring.training.data.features.tensors import Made

Array = NDArray[Any]


class RowGroupPool:
    """Slots for row groups of up to `slot_rows` rows, one array per fixed column.

    Row r of slot s is at position s * slot_rows + r. The arrays are address space only until a slot is used: pages are
    touched as row groups arrive, and slots are reused last in, first out. `put` may run in any thread, for different
    slots; everything else belongs to one thread.
    """

    def __init__(self, columns: Sequence[Column], slots: int, slot_rows: int) -> None:
        # An odd number of cache lines: a gather reads all slots at once, and powers of two apart they share cache sets.
        self.slot_rows = slot_rows = (-(-slot_rows // 16) | 1) * 16
        self._columns = columns
        self._slots = self._planned = slots
        self._free = list(range(slots))[::-1]
        rows = slots * slot_rows
        self._fixed = {c.name: np.empty((rows, *c.shape), numpy_dtype(c)) for c in columns if is_fixed(c)}
        self._valid = {c.name: np.empty(rows, np.bool_) for c in columns if c.nulls == "mask"}
        self._order: dict[int, NDArray[np.int64]] = {}  # slot -> (n,) row of the ragged columns that row i is
        self._ragged: dict[str, dict[int, RaggedArray]] = {c.name: {} for c in columns if not is_fixed(c)}

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def spare_slots(self) -> int:
        """Slots to decode ahead into: free ones, without those the pool had to grow by."""
        return self._planned - (self._slots - len(self._free))

    def take_slot(self) -> int:
        return self._free.pop()

    def release(self, slot: int) -> None:
        for rows in self._ragged.values():
            rows.pop(slot, None)
        self._free.append(slot)

    def grow(self) -> None:
        """Double the slots. Only while nothing is being put: the arrays are replaced."""
        for held in (self._fixed, self._valid):
            for name, array in held.items():
                held[name] = np.concatenate([array, np.empty_like(array)])
        self._free.extend(range(2 * self._slots - 1, self._slots - 1, -1))
        self._slots *= 2

    def put(self, slot: int, made: Iterable[Made], order: NDArray[np.int64]) -> None:
        """Write the tensors of a decoded row group into its slot: row i is row order[i] of what was made.

        The permutation (n,) happens here, while the row group is in the cache and in the decoding thread: rows served
        one after the other are then next to each other, and a gather over many windows reads whole cache lines.
        """
        base = slot * self.slot_rows
        place = slice(base, base + len(order))
        for column, values, present in made:
            if isinstance(values, RaggedArray):
                self._ragged[column.name][slot] = values
            else:
                _take(values, order, self._fixed[column.name][place])
            if column.nulls == "mask":
                self._valid[column.name][place] = True if present is None else present[order]
        self._order[slot] = order

    def gather(self, positions: NDArray[np.int64], buffers: BufferPool) -> dict[str, Array | RaggedArray]:
        """Gather the rows at `positions` (n,), in that order, into pooled memory."""
        out: dict[str, Array | RaggedArray] = {}

        def take(name: str, source: Array) -> Array:
            return _take(source, positions, buffers.take(name, (len(positions), *source.shape[1:]), source.dtype))

        for column in self._columns:
            if is_fixed(column):
                out[column.name] = take(column.name, self._fixed[column.name])
            else:
                out[column.name] = self._gather_ragged(column, positions, buffers)
            if column.mask is not None:
                out[column.mask] = take(column.mask, self._valid[column.name])
        return out

    def _gather_ragged(self, column: Column, positions: NDArray[np.int64], buffers: BufferPool) -> RaggedArray:
        if not len(positions):
            depth = 2 if column.layout == "nested" else 1
            return RaggedArray(np.zeros((0, *column.shape), numpy_dtype(column)), (np.zeros(1, np.int64),) * depth)
        slots, rows = np.divmod(positions, self.slot_rows)  # (n,) each
        stored, used = self._ragged[column.name], sorted(set(slots.tolist()))
        if missing := [slot for slot in used if slot not in stored]:
            raise DataError(f"slots {missing} were used before they were decoded; this is a defect of the reader")
        for slot in used:
            mine = slots == slot
            rows[mine] = self._order[slot][rows[mine]]
        # Level by level: row i covers [starts[i], ends[i]) of the level's entries, at last of the values.
        starts, ends, levels = rows, rows + 1, []
        for level in range(len(stored[used[0]].offsets)):
            inner_starts, inner_ends = np.empty_like(starts), np.empty_like(ends)
            for slot in used:
                mine, offsets = slots == slot, stored[slot].offsets[level]
                inner_starts[mine], inner_ends[mine] = offsets[starts[mine]], offsets[ends[mine]]
            if level == 0:  # one entry per row
                lengths = inner_ends - inner_starts
            else:
                ranges = zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)
                lengths = np.concatenate([np.diff(stored[s].offsets[level][a : b + 1]) for s, a, b in ranges])
            levels.append(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
            starts, ends = inner_starts, inner_ends
        ranges = zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)
        parts = [stored[s].values[a:b] for s, a, b in ranges]
        out = buffers.take(column.name, (int((ends - starts).sum()), *parts[0].shape[1:]), parts[0].dtype)
        return RaggedArray(np.concatenate(parts, out=out), tuple(levels))


def _take(source: Array, positions: NDArray[np.int64], out: Array) -> Array:
    if len(positions):
        np.take(source, positions, axis=0, out=out, mode="clip")  # clip: the only mode that writes to `out` directly
    return out
