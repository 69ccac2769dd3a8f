"""Where decoded row groups wait for their turn: slots of fixed size, and the one gather that makes batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from conf.manifest import Column
from training.data.columns import (
    DataError,
    Rows,
    fixed_values,
    is_fixed,
    numpy_dtype,
    variable_rows,
)
from training.data.spare import Spare

Array = NDArray[Any]


class Pool:
    """`slots` places for row groups of up to `slot_rows` rows, one array per fixed column.

    Row r of slot s stands at position s * slot_rows + r. The arrays are address space only until a slot is used: pages
    are touched as row groups arrive, and slots are reused last in, first out. `put` may run in any thread, for
    different slots; everything else belongs to one thread.
    """

    def __init__(self, columns: Sequence[Column], slots: int, slot_rows: int) -> None:
        # An odd number of cache lines: a gather reads all slots at once, and powers of two apart they share cache sets.
        self.slot_rows = slot_rows = (-(-slot_rows // 16) | 1) * 16
        self._columns = columns
        self._slots = self._most = slots
        self._free = list(range(slots))[::-1]
        rows = slots * slot_rows
        self._fixed = {c.name: np.empty((rows, *c.shape), numpy_dtype(c)) for c in columns if is_fixed(c)}
        self._valid = {c.name: np.empty(rows, np.bool_) for c in columns if c.nulls == "mask"}
        self._order: list[NDArray[np.int64] | None] = [None] * slots
        self._variable: dict[str, list[Rows | None]] = {c.name: [None] * slots for c in columns if not is_fixed(c)}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def spare(self) -> int:
        """Slots that may be taken without need: none that the pool was not made for."""
        return self._most - (self._slots - len(self._free))

    def take_slot(self) -> int:
        return self._free.pop()

    def release(self, slot: int) -> None:
        for rows in self._variable.values():
            rows[slot] = None
        self._free.append(slot)

    def grow(self) -> None:
        """Double the slots. Only while nothing is being put: the arrays are replaced."""
        for held in (self._fixed, self._valid):
            for name, array in held.items():
                held[name] = np.concatenate([array, np.empty_like(array)])
        for rows in self._variable.values():
            rows.extend([None] * self._slots)
        self._order.extend([None] * self._slots)
        self._free.extend(range(2 * self._slots - 1, self._slots - 1, -1))
        self._slots *= 2

    def put(self, slot: int, table: pa.Table, order: NDArray[np.int64]) -> None:
        """Write a decoded row group into its slot so that row i there is row order[i] (n,) of the table.

        The permutation happens here, while the row group is in the cache and in the decoding thread: rows served one
        after the other then lie one after the other, and a gather over many windows reads whole cache lines.
        """
        base, rows = slot * self.slot_rows, table.num_rows
        place = slice(base, base + rows)
        for column in self._columns:
            data = table.column(column.name)
            if is_fixed(column):
                values, present = fixed_values(column, data)
                _take(values, order, self._fixed[column.name][place])
            else:
                self._variable[column.name][slot], present = variable_rows(column, data)
            if column.nulls == "mask":
                self._valid[column.name][place] = True if present is None else present[order]
        self._order[slot] = order

    def gather(self, positions: NDArray[np.int64], spare: Spare) -> dict[str, Array | Rows]:
        """The rows at `positions` (n,), in that order, of every column: arrays (n, ...) or `Rows`, in spare memory."""
        out: dict[str, Array | Rows] = {}
        for column in self._columns:
            name = column.name
            if is_fixed(column):
                out[name] = _taken(self._fixed[name], positions, name, spare)
            else:
                out[name] = self._gather_rows(name, positions, spare)
            if column.mask is not None:
                out[column.mask] = _taken(self._valid[name], positions, column.mask, spare)
        return out

    def _gather_rows(self, name: str, positions: NDArray[np.int64], spare: Spare) -> Rows:
        slots, rows = np.divmod(positions, self.slot_rows)
        stored = self._variable[name]
        used = sorted(set(slots.tolist()))
        for slot in used:
            mine, order = slots == slot, self._order[slot]
            assert order is not None
            rows[mine] = order[rows[mine]]
        if not used:
            column = next(c for c in self._columns if c.name == name)
            depth = 2 if column.layout == "nested" else 1
            return Rows(np.zeros((0, *column.shape), numpy_dtype(column)), (np.zeros(1, np.int64),) * depth)
        starts, ends = rows, rows + 1
        levels = []
        depth = len(_held(stored[used[0]]).offsets)
        for level in range(depth):
            starts, ends, lengths = _descend(stored, slots, used, starts, ends, level)
            levels.append(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
        values = {slot: _held(stored[slot]).values for slot in used}
        parts = [values[s][a:b] for s, a, b in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)]
        out = spare.take(name, (int((ends - starts).sum()), *parts[0].shape[1:]), parts[0].dtype)
        return Rows(np.concatenate(parts, out=out), tuple(levels))


def _descend(
    stored: list[Rows | None], slots: Array, used: list[int], starts: Array, ends: Array, level: int
) -> tuple[Array, Array, Array]:
    """From row ranges at one level of offsets to ranges of the next, and the lengths of the rows in between."""
    next_starts, next_ends = np.empty_like(starts), np.empty_like(ends)
    for slot in used:
        mine = slots == slot
        offsets = _held(stored[slot]).offsets[level]
        next_starts[mine], next_ends[mine] = offsets[starts[mine]], offsets[ends[mine]]
    if level == 0:
        return next_starts, next_ends, next_ends - next_starts
    lengths = [
        np.diff(_held(stored[s]).offsets[level][a : b + 1])
        for s, a, b in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)
    ]
    return next_starts, next_ends, np.concatenate(lengths) if lengths else np.zeros(0, np.int64)


def _held(rows: Rows | None) -> Rows:
    if rows is None:
        raise DataError("a row group was used before it was decoded; this is a defect of the reader")
    return rows


def _taken(source: Array, positions: NDArray[np.int64], name: str, spare: Spare) -> Array:
    return _take(source, positions, spare.take(name, (len(positions), *source.shape[1:]), source.dtype))


def _take(source: Array, positions: NDArray[np.int64], out: Array) -> Array:
    if len(positions):
        np.take(source, positions, axis=0, out=out, mode="clip")  # clip: the only mode that writes to `out` directly
    return out
