"""Decode the windows that one rank's lanes need next.

The engine knows the pool position of each of their rows. Row groups are decoded ahead in the order in which lanes will
need them, up to a number of row groups; a row group two lanes share is decoded once. What comes before the starting
point is never decoded, except the windows it is in; nor is what begins after the end. When an engine has submitted all
it needs, the engine of the next epoch decodes ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from sparkring.training.data.batch import Meter
from sparkring.training.data.epochs import EpochSpan
from sparkring.training.data.order import Ints, LaneOrder, RankOrder, lane_order
from sparkring.training.data.pool import RowGroupPool

Decode = Callable[[int, int, int], "Future[Meter]"]
"""(epoch, index into plan.groups, slot): decodes the row group into the slot of the pool, in another thread."""


@dataclass
class _Group:
    """A row group that is decoded, or being decoded."""

    slot: int
    future: Future[Meter]
    windows: int = 0  # not yet released, of this rank's lanes, that hold rows of it


@dataclass
class _LaneState:
    """One lane as far as it is decoded."""

    order: LaneOrder
    first: int  # row of the lane
    window: int  # windows before this one were released
    positions: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # (n,) in the pool, of the rows from `first`


class Engine:
    """Decodes one rank's samples of one epoch.

    Not thread-safe: belongs to the thread that makes batches.
    """

    def __init__(self, order: RankOrder, span: EpochSpan, pool: RowGroupPool, decode: Decode, ahead: int) -> None:
        """Args:
        order: this rank's lanes.
        span: the epoch and the samples of it that are read.
        pool: where row groups are decoded to.
        decode: starts decoding one row group.
        ahead: row groups decoded before they are needed.
        """
        self._order, self._plan, self._epoch, self._pool, self._decode = order, order.plan, span.epoch, pool, decode
        self._limit = len(order.lanes) * self._plan.window + ahead
        self._held: dict[int, _Group] = {}
        self.meter = Meter()
        self.next_engine: Engine | None = None  # decodes ahead, into spare slots, when this one has no more to decode
        rounds = order.rounds(int(span.edges[0]), int(span.edges[-1]))
        self._lanes = {lane: self._lane_from(lane, rounds.start) for lane in order.lanes}
        self._needs, self._need_rows = self._schedule(rounds.stop)
        self._submitted = self._placed = 0  # windows of _needs

    def _lane_from(self, lane: int, row: int) -> _LaneState:
        order = lane_order(self._plan, self._epoch, lane)
        window = min(int(np.searchsorted(order.first, row, side="right")) - 1, order.windows - 1)
        return _LaneState(order, int(order.first[window]), window)

    def _schedule(self, end: int) -> tuple[list[tuple[int, int]], Ints]:
        """List the windows needed before lane row `end`, in the order of need.

        Returns (lane, window) of each, and the row that needs it.
        """
        states = self._lanes.values()
        if not states:
            return [], np.zeros(0, np.int64)
        rows = np.concatenate([s.order.first[s.window : -1] for s in states])
        lanes = np.concatenate([np.full(s.order.windows - s.window, s.order.lane) for s in states])
        windows = np.concatenate([np.arange(s.window, s.order.windows) for s in states])
        order = np.lexsort((lanes, rows))  # by row, then by lane
        order = order[rows[order] < end]
        return list(zip(lanes[order].tolist(), windows[order].tolist(), strict=True)), rows[order]

    def positions(self, begin: int, end: int) -> Ints:
        """Return pool positions of this rank's samples in [begin, end), as served.

        Waits for decoding. Samples past the last row (padding) repeat the last row of their lane. Call `release` when
        they were gathered.
        """
        rounds = self._order.rounds(begin, end)
        self._wait_for(rounds.stop)
        if not self._lanes:
            return np.zeros(0, np.int64)
        table = np.empty((len(rounds), len(self._order.turns)), np.int64)
        for column, turn in enumerate(self._order.turns.tolist()):
            state = self._lanes[int(self._plan.lane_of_turn[turn])]
            rows = state.positions[rounds.start - state.first : rounds.stop - state.first]
            table[: len(rows), column] = rows
            table[len(rows) :, column] = state.positions[-1]
        return self._order.cut(table, begin, end)

    def release(self, end: int) -> None:
        """Free the slots of rows before sample `end`, and decode ahead into them."""
        row = end // self._plan.lanes
        for state in self._lanes.values():
            # The last window stays: padding repeats its last row.
            while state.window < state.order.windows - 1 and state.order.first[state.window + 1] <= row:
                self._release_window(state)
        self._submit_ahead()

    def _release_window(self, state: _LaneState) -> None:
        end = int(state.order.first[state.window + 1])
        state.positions, state.first = state.positions[end - state.first :], end
        for group, _, _ in state.order.pieces(state.window):
            held = self._held[group]
            held.windows -= 1
            if not held.windows:
                self._pool.release(held.slot)
                del self._held[group]
        state.window += 1

    def _wait_for(self, row: int) -> None:
        """Wait until every window that begins before lane row `row` is decoded and placed."""
        until = int(np.searchsorted(self._need_rows, row, side="left"))
        while self._submitted < until:
            self._submit()
        self._submit_ahead()
        for lane, window in self._needs[self._placed : until]:
            self._place(self._lanes[lane], window)
        self._placed = max(self._placed, until)

    def _submit_ahead(self) -> None:
        while self._submitted < len(self._needs):
            lane, window = self._needs[self._submitted]
            new = sum(group not in self._held for group, _, _ in self._lanes[lane].order.pieces(window))
            if len(self._held) + new > self._limit or new > self._pool.spare_slots:
                return
            self._submit()
        if self.next_engine is not None:
            self.next_engine._submit_ahead()

    def _submit(self) -> None:
        """Start decoding the next window, as far as it is not held."""
        lane, window = self._needs[self._submitted]
        for group, _, _ in self._lanes[lane].order.pieces(window):
            if group not in self._held:
                if not self._pool.free_slots:
                    self._grow_pool()
                slot = self._pool.take_slot()
                self._held[group] = _Group(slot, self._decode(self._epoch, group, slot))
                self.meter.count("row_groups")
            self._held[group].windows += 1
        self._submitted += 1

    def _grow_pool(self) -> None:
        for held in self._held.values():  # decoders write into the arrays that are about to be replaced
            held.future.exception()
        self._pool.grow()

    def _place(self, state: _LaneState, window: int) -> None:
        """Append a window's rows to its lane, in the order they are served."""
        parts = []
        for group, start, stop in state.order.pieces(window):
            held = self._held[group]
            self.meter.absorb(held.future.result())  # empties it: a row group that two windows share was decoded once
            base = held.slot * self._pool.slot_rows
            parts.append(np.arange(base + start, base + stop, dtype=np.int64))
        served = np.concatenate(parts)[state.order.permutation(window)]
        state.positions = np.concatenate([state.positions, served])

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, and free every slot."""
        for held in self._held.values():
            held.future.cancel()
        for held in self._held.values():
            if not held.future.cancelled():
                held.future.exception()
            self._pool.release(held.slot)
        self._held.clear()
