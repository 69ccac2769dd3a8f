"""Hold decoded rows in pages, in the order in which they are served.

A page holds some rows of one lane, all columns: its memory is used again as soon as they were served, not when a whole
row group was. Copies of blocks of rows make batches of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkring.conf.manifest import Column
from sparkring.training.data.decoding.buffers import BufferPool
from sparkring.training.data.decoding.columns import DataError, RaggedArray, is_fixed, numpy_dtype
from sparkring.training.data.features.tensors import Made

Array = NDArray[Any]
Ints = NDArray[np.int64]
GROUP_PAGES = 16  # pages of a row group: fewer hold served rows longer, more cost more calls
LONG_RUN = 64  # rows: runs this long are copied one by one, shorter ones by index
RAGGED_ROW = ""  # the hidden column that says where a row of the ragged columns is: key << 32 | row


class Places(NamedTuple):
    """Positions of rows in the pool: block u is rows [u * width, (u + 1) * width)."""

    blocks: Ints  # (n / width,)
    width: int

    @property
    def rows(self) -> int:
        return len(self.blocks) * self.width


@dataclass(frozen=True)
class Gathered:
    """Rows in the order in which they are served, n of them.

    stacks: names (C,) of fixed columns and masks of one dtype and shape, and their values (C, n, *shape).
    """

    stacks: list[tuple[Sequence[str], Array]]
    ragged: dict[str, RaggedArray]


class PagePool:
    """Pages of `page_rows` rows; row r of page p is at position p * page_rows + r.

    Columns of one dtype and shape share memory, page by page. It is address space only until a page is used: pages are
    used again last in, first out, so that no more is touched than was ever held at once. `put` may run in any thread,
    for different positions; everything else belongs to one thread.
    """

    def __init__(self, columns: Sequence[Column], pages: int, page_rows: int) -> None:
        self.page_rows = page_rows
        self._columns = columns
        self._pages = self._planned = pages
        self._free = list(range(pages))[::-1]
        self._most_used = self._keys = 0
        fixed = [(c.name, numpy_dtype(c), c.shape) for c in columns if is_fixed(c)]
        fixed += [(c.mask, np.dtype(np.bool_), ()) for c in columns if c.mask is not None]
        self._ragged: dict[str, dict[int, RaggedArray]] = {c.name: {} for c in columns if not is_fixed(c)}
        fixed += [(RAGGED_ROW, np.dtype(np.int64), ())] if self._ragged else []
        self._memory: list[Array] = []  # (pages, columns of one kind, page_rows, *shape) each
        self._names: list[list[str]] = []  # of each memory's columns
        self._at: dict[str, tuple[int, int]] = {}  # column -> which memory, and which column there
        kinds = dict.fromkeys((dtype, shape) for _, dtype, shape in fixed)
        for number, kind in enumerate(kinds):
            names = [name for name, *own in fixed if tuple(own) == kind]
            # An odd number of columns, one of them unused: pages a power of two apart would share cache sets.
            self._memory.append(np.zeros((pages, len(names) | 1, page_rows, *kind[1]), kind[0]))
            self._names.append(names)
            self._at |= {name: (number, column) for column, name in enumerate(names)}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def spare_pages(self) -> int:
        """Pages to decode ahead into: free ones, without those the pool had to grow by."""
        return self._planned - (self._pages - len(self._free))

    @property
    def warm_pages(self) -> int:
        """Spare pages that were in use before: filling them takes no new memory."""
        return min(self.spare_pages, self._most_used - (self._pages - len(self._free)))

    @property
    def used_rows(self) -> int:
        """Rows of the pages that were in use: the others are address space."""
        return self._most_used * self.page_rows

    def take_page(self) -> int:
        page = self._free.pop()
        self._most_used = max(self._most_used, self._pages - len(self._free))
        return page

    def release_page(self, page: int) -> None:
        self._free.append(page)

    def new_key(self) -> int:
        """Return a new unique key for a row group."""
        self._keys += 1
        return self._keys

    def release_ragged(self, key: int) -> None:
        """Drop the ragged columns of a row group."""
        for rows in self._ragged.values():
            rows.pop(key, None)

    def grow(self) -> None:
        """Double the pages. Only while nothing is being put: the arrays are replaced."""
        self._memory = [np.concatenate([memory, np.zeros_like(memory)]) for memory in self._memory]
        self._free.extend(range(2 * self._pages - 1, self._pages - 1, -1))
        self._pages *= 2

    def put(self, key: int, made: Iterable[Made], landings: Sequence[tuple[Ints, Ints]]) -> None:
        """Write the tensors of a decoded row group: row order[i] of what was made to position places[i].

        The rows are permuted here, while a column is in the cache and in the decoding thread: those served one after
        the other are then next to each other. Pages are written last, all columns of one kind at once.

        Args:
            key: key of the row group, 1 or more, valid until its ragged columns are released.
            made: decoded tensors of the row group.
            landings: (order, places), each (n,), per canonical shard that holds rows of it.
        """
        order, places = (np.concatenate(each) for each in zip(*landings, strict=True))
        staged = [np.empty((m.shape[1], len(order), *m.shape[3:]), m.dtype) for m in self._memory]

        def stage(name: str, values: Array) -> None:
            number, column = self._at[name]
            _take(values, order, staged[number][column])

        for column, values, present in made:
            if isinstance(values, RaggedArray):
                self._ragged[column.name][key] = values
            else:
                stage(column.name, values)
            if column.mask is not None:
                stage(column.mask, np.ones(int(order.max()) + 1, np.bool_) if present is None else present)
        if self._ragged:
            stage(RAGGED_ROW, np.arange(int(order.max()) + 1, dtype=np.int64) + (key << 32))
        runs = self._runs(places)
        for memory, rows in zip(self._memory, staged, strict=True):
            if len(runs) * LONG_RUN > len(places) + self.page_rows:  # pieces of a window are interleaved
                memory[places // self.page_rows, :, places % self.page_rows] = np.moveaxis(rows, 0, 1)
                continue
            for page, row, begin, end in runs:
                memory[page, :, row : row + end - begin] = rows[:, begin:end]

    def _runs(self, places: Ints) -> list[tuple[int, int, int, int]]:
        """Cut places (n,) where the next is not the next of the same page: (page, row, begin, end) of each run."""
        runs = []
        cuts = (np.flatnonzero(np.diff(places) != 1) + 1).tolist()
        for begin, end in pairwise([0, *cuts, len(places)]):
            page, row = divmod(int(places[begin]), self.page_rows)
            while begin < end:
                rows = min(end - begin, self.page_rows - row)
                runs.append((page, row, begin, begin + rows))
                begin, page, row = begin + rows, page + 1, 0
        return runs

    def gather(self, places: Places, buffers: BufferPool) -> Gathered:
        """Gather the rows at `places`, in that order, into pooled memory."""
        blocks = self.page_rows // places.width  # of a page
        page = places.blocks // blocks
        stacks: list[tuple[Sequence[str], Array]] = []
        for number, (memory, names) in enumerate(zip(self._memory, self._names, strict=True)):
            rows = buffers.take(f"stack {number}", (len(names), places.rows, *memory.shape[3:]), memory.dtype)
            index = places.blocks + page * (memory.shape[1] - 1) * blocks
            source = memory.reshape(-1, places.width, *memory.shape[3:])
            for column, out in enumerate(rows.reshape(len(names), len(index), *source.shape[1:])):
                _take(source[column * blocks :], index, out)
            stacks.append((names, rows))
        if not self._ragged:
            return Gathered(stacks, {})
        number, column = self._at[RAGGED_ROW]
        where = stacks[number][1][column]
        every = [column for column in self._columns if not is_fixed(column)]
        return Gathered(stacks, {column.name: self._gather_ragged(column, where, buffers) for column in every})

    def _gather_ragged(self, column: Column, where: Ints, buffers: BufferPool) -> RaggedArray:
        """Gather ragged values. where: (n,) RAGGED_ROW of each row."""
        if not len(where):
            depth = 2 if column.layout == "nested" else 1
            return RaggedArray(np.zeros((0, *column.shape), numpy_dtype(column)), (np.zeros(1, np.int64),) * depth)
        keys, rows = where >> 32, where & 0xFFFFFFFF  # (n,) each
        stored, used = self._ragged[column.name], sorted(set(keys.tolist()))
        if missing := [key for key in used if key not in stored]:
            raise DataError(f"row groups {missing} were used before they were decoded; this is a defect of the reader")
        # Level by level: row i covers [starts[i], ends[i]) of the level's entries, at last of the values.
        starts, ends, levels = rows, rows + 1, []
        for level in range(len(stored[used[0]].offsets)):
            inner_starts, inner_ends = np.empty_like(starts), np.empty_like(ends)
            for key in used:
                mine, offsets = keys == key, stored[key].offsets[level]
                inner_starts[mine], inner_ends[mine] = offsets[starts[mine]], offsets[ends[mine]]
            if level == 0:  # one entry per row
                lengths = inner_ends - inner_starts
            else:
                ranges = zip(keys.tolist(), starts.tolist(), ends.tolist(), strict=True)
                lengths = np.concatenate([np.diff(stored[s].offsets[level][a : b + 1]) for s, a, b in ranges])
            levels.append(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
            starts, ends = inner_starts, inner_ends
        ranges = zip(keys.tolist(), starts.tolist(), ends.tolist(), strict=True)
        parts = [stored[s].values[a:b] for s, a, b in ranges]
        out = buffers.take(column.name, (int((ends - starts).sum()), *parts[0].shape[1:]), parts[0].dtype)
        return RaggedArray(np.concatenate(parts, out=out), tuple(levels))


def _take(source: Array, positions: Ints, out: Array) -> None:
    if len(positions):
        source.take(positions, axis=0, out=out, mode="clip")  # clip: the only mode that writes to `out` directly
