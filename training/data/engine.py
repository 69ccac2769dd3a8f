"""Serves one rank's lanes: decodes the windows that are needed next, and says where in the pool each row lies.

Loads run ahead in the order in which lanes will need them, up to a number of row groups; a row group two lanes share
is decoded once. What is before the starting point is never decoded, the windows it stands in excepted; nor is what
begins after the end. When an engine has asked for all it needs, the engine of the next epoch begins to decode ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import numpy as np

from training.data.order import Ints, Lane, Plan, dealt_before, lane_order, owned_slots, window_deal
from training.data.pool import Pool

Timing = dict[str, float]
Load = Callable[[int, int, int], Timing]
"""(epoch, index into plan.groups, slot) -> seconds by cause; decodes the row group into the slot of the pool."""


@dataclass
class _Group:
    slot: int
    future: Future[Timing]
    windows: int = 0  # of this rank's lanes, that hold rows of it and are live


@dataclass
class _Stream:
    """One lane as far as it is decoded: `positions` (n,) are the pool places of its rows from `first` on."""

    lane: int
    order: Lane
    first: int
    positions: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    loaded: int = 0  # windows before this one are, or need not be
    spent: int = 0  # windows before this one were released


class Engine:
    """One rank's samples [start, stop) of one epoch. Not thread-safe: belongs to the producing thread.

    `follower`: who decodes ahead once this one has nothing more to decode, into what the pool has to spare.
    """

    def __init__(
        self, plan: Plan, epoch: int, start: int, stop: int, lanes: range, pool: Pool, load: Load, executor: Executor,
        ahead: int,
    ) -> None:  # fmt: skip
        self._plan, self._epoch, self._pool, self._load, self._executor = plan, epoch, pool, load, executor
        self._slots = owned_slots(plan, lanes)
        self._limit = len(lanes) * plan.window + ahead
        self._live: dict[int, _Group] = {}
        self.timing: Timing = {}
        self.decoded = 0
        self.follower: Engine | None = None
        row = start // plan.lanes
        self._streams = {lane: self._open(lane, row) for lane in lanes}
        self._needs, self._need_rows = self._schedule(-(-stop // plan.lanes))
        self._submitted = self._ready = 0

    def _open(self, lane: int, row: int) -> _Stream:
        order = lane_order(self._plan, self._epoch, lane)
        window = min(int(np.searchsorted(order.first, row, side="right")) - 1, order.windows - 1)
        return _Stream(lane, order, int(order.first[window]), loaded=window, spent=window)

    def _schedule(self, end: int) -> tuple[list[tuple[int, int]], Ints]:
        """(lane, window) of every window to be decoded before lane row `end`, in the order of need, and the row needing
        it."""
        if not self._streams:
            return [], np.zeros(0, np.int64)
        rows = np.concatenate([s.order.first[s.loaded : -1] for s in self._streams.values()])
        lanes = np.concatenate([np.full(s.order.windows - s.loaded, s.lane) for s in self._streams.values()])
        windows = np.concatenate([np.arange(s.loaded, s.order.windows) for s in self._streams.values()])
        order = np.lexsort((lanes, rows))
        order = order[rows[order] < end]
        return list(zip(lanes[order].tolist(), windows[order].tolist(), strict=True)), rows[order]

    def positions(self, begin: int, end: int) -> Ints:
        """Pool places of this rank's samples in [begin, end), in the order they are dealt; waits for their windows.

        Samples past the last row (padding) repeat the last row of their lane. Call `done` when they were gathered.
        """
        first, last = begin // self._plan.lanes, -(-end // self._plan.lanes)
        self._need(last)
        if not len(self._slots):
            return np.zeros(0, np.int64)
        table = np.empty((last - first, len(self._slots)), np.int64)
        for at, slot in enumerate(self._slots.tolist()):
            stream = self._streams[int(self._plan.lane_of_slot[slot])]
            rows = stream.positions[first - stream.first : last - stream.first]
            table[: len(rows), at] = rows
            table[len(rows) :, at] = stream.positions[-1]
        skip = dealt_before(self._plan, self._slots, begin) - first * len(self._slots)
        count = self.count(begin, end)
        return table.reshape(-1)[skip : skip + count]

    def count(self, begin: int, end: int) -> int:
        """How many of the samples [begin, end) are this rank's."""
        return dealt_before(self._plan, self._slots, end) - dealt_before(self._plan, self._slots, begin)

    def samples(self, begin: int, end: int) -> Ints:
        """Their numbers in the epoch, in the order they are dealt."""
        lanes = self._plan.lanes
        table = np.arange(begin // lanes, -(-end // lanes), dtype=np.int64)[:, None] * lanes + self._slots
        skip = dealt_before(self._plan, self._slots, begin) - begin // lanes * len(self._slots)
        return table.reshape(-1)[skip : skip + self.count(begin, end)]

    def done(self, end: int) -> None:
        """Rows before sample `end` will not be asked for again: give their slots back and decode ahead."""
        row = end // self._plan.lanes
        for stream in self._streams.values():
            # The last window stays: padding repeats its last row.
            while stream.spent < stream.order.windows - 1 and stream.order.first[stream.spent + 1] <= row:
                self._release(stream)
        self._submit_ahead()

    def _release(self, stream: _Stream) -> None:
        rows = int(stream.order.first[stream.spent + 1] - stream.order.first[stream.spent])
        stream.positions, stream.first = stream.positions[rows:], stream.first + rows
        for group in self._groups(stream, stream.spent):
            held = self._live[group]
            held.windows -= 1
            if not held.windows:
                self._pool.release(held.slot)
                del self._live[group]
        stream.spent += 1

    def _groups(self, stream: _Stream, window: int) -> list[int]:
        pieces: list[int] = stream.order.group[self._pieces(window)].tolist()
        return pieces

    def _pieces(self, window: int) -> slice:
        return slice(window * self._plan.window, (window + 1) * self._plan.window)

    def _need(self, row: int) -> None:
        """Wait until every window that begins before lane row `row` is decoded and placed."""
        until = int(np.searchsorted(self._need_rows, row, side="left"))
        while self._submitted < until:
            self._submit()
        self._submit_ahead()
        for lane, window in self._needs[self._ready : until]:
            self._place(self._streams[lane], window)
        self._ready = max(self._ready, until)

    def _submit_ahead(self) -> None:
        while self._submitted < len(self._needs):
            lane, window = self._needs[self._submitted]
            new = sum(group not in self._live for group in self._groups(self._streams[lane], window))
            if len(self._live) + new > self._limit or new > self._pool.spare:
                return
            self._submit()
        if self.follower is not None:
            self.follower._submit_ahead()

    def _submit(self) -> None:
        lane, window = self._needs[self._submitted]
        for group in self._groups(self._streams[lane], window):
            if group not in self._live:
                if not self._pool.free:
                    self._grow()
                slot = self._pool.take_slot()
                self._live[group] = _Group(slot, self._executor.submit(self._load, self._epoch, group, slot))
                self.decoded += 1
            self._live[group].windows += 1
        self._submitted += 1

    def _grow(self) -> None:
        for held in self._live.values():  # decoders write into the arrays that are about to be replaced
            held.future.exception()
        self._pool.grow()

    def _place(self, stream: _Stream, window: int) -> None:
        """Append a window's rows to its lane, in the order they are served."""
        pieces, parts = self._pieces(window), []
        columns = (stream.order.group[pieces], stream.order.start[pieces], stream.order.stop[pieces])
        for group, start, stop in zip(*(c.tolist() for c in columns), strict=True):
            held = self._live[group]
            self._add(held.future)
            base = held.slot * self._pool.slot_rows
            parts.append(np.arange(base + start, base + stop, dtype=np.int64))
        deal = window_deal(self._plan, self._epoch, stream.lane, window, [len(p) for p in parts])
        stream.positions = np.concatenate([stream.positions, np.concatenate(parts)[deal]])
        stream.loaded = window + 1

    def _add(self, future: Future[Timing]) -> None:
        timing = future.result()
        for name, seconds in timing.items():
            self.timing[name] = self.timing.get(name, 0.0) + seconds
        timing.clear()  # a row group two windows share was decoded once

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, and give every slot back."""
        for held in self._live.values():
            held.future.cancel()
        for held in self._live.values():
            if not held.future.cancelled():
                held.future.exception()
            self._pool.release(held.slot)
        self._live.clear()


def chunk_ends(steps: int, first: int, most: int) -> Iterator[tuple[int, int]]:
    """Steps [a, b) gathered together: `first` of them, so that the first batch comes soon, then up to `most`."""
    start, size = 0, first
    while start < steps:
        yield start, min(steps, start + size)
        start, size = min(steps, start + size), min(2 * size, most)
