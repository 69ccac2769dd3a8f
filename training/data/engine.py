"""Decode the windows that one rank's lanes need next.

The engine knows the pool position of each of their rows. Row groups are decoded ahead in the order in which lanes will
need them; a row group two lanes share is decoded once, and each lane's piece of it is written to that lane's pages.
What comes before the starting point is never decoded, except the windows it is in; nor is what begins after the end.
When an engine has submitted all it needs, the engine of the next epoch decodes ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from sparkring.training.data.batch import Meter
from sparkring.training.data.decoding.pool import PagePool, Places
from sparkring.training.data.epochs import EpochSpan
from sparkring.training.data.order import Ints, LaneOrder, RankOrder, lane_order


@dataclass(frozen=True)
class PlacedPiece:
    """Where a lane's piece of a row group goes: rows [start, stop) of it, in the piece's order, to `places` (n,)."""

    lane: LaneOrder
    start: int
    stop: int
    places: Ints


Decode = Callable[[int, int, Sequence[PlacedPiece]], "Future[Meter]"]
"""(index into plan.groups, key, landings): decodes the row group into the pool, in another thread."""


@dataclass
class _Group:
    """A row group that is decoded, or being decoded."""

    key: int  # of its ragged columns in the pool
    future: Future[Meter]
    lanes: set[int]  # whose pieces of it are not yet released


@dataclass
class _LaneState:
    """One lane as far as it is decoded."""

    order: LaneOrder
    window: int  # windows before this one were released
    page: int  # pages before this one were released; page k has the lane's rows from k * page_rows on
    pages: dict[int, int] = field(default_factory=dict)  # page of the lane -> page of the pool
    kept_until: int = 0  # a row of the lane; before it is served there is nothing to release
    placed: tuple[int, Ints] = (-1, np.zeros(0, np.int64))  # the last window whose places were asked for, and they


class Engine:
    """Decodes one rank's samples of one epoch. Not thread-safe: belongs to the thread that makes batches."""

    def __init__(self, order: RankOrder, span: EpochSpan, pool: PagePool, decode: Decode, ahead: int) -> None:
        """Create the engine of one epoch span.

        Args:
            order: canonical shards of this rank.
            span: epoch and range of its samples to read.
            pool: pool that row groups are decoded into.
            decode: starts decoding one row group.
            ahead: windows decoded before they are needed; more only into memory that was in use before.
        """
        self._order, self._plan, self._epoch, self._pool, self._decode = order, order.plan, span.epoch, pool, decode
        self._ahead = ahead
        self._held: dict[int, _Group] = {}
        self.meter = Meter()
        self.next_engine: Engine | None = None  # decodes ahead when this one has no more to decode
        self._serving = [int(self._plan.lane_of_turn[turn]) for turn in order.turns.tolist()]  # own lanes, in turn
        self._last_row = np.diff(self._plan.lane_start)[self._serving] - 1  # (own lanes,) of each lane
        rounds = order.rounds(int(span.edges[0]), int(span.edges[-1]))
        self._lanes = {lane: self._lane_from(lane, rounds.start * self._plan.block) for lane in order.lanes}
        self._needs, self._need_rows = self._schedule(rounds.stop * self._plan.block)
        self._submitted = self._needed = 0  # windows of _needs

    def _lane_from(self, lane: int, row: int) -> _LaneState:
        order = lane_order(self._plan, self._epoch, lane)
        window = min(int(np.searchsorted(order.first, row, side="right")) - 1, order.windows - 1)
        return _LaneState(order, window, int(order.first[window]) // self._pool.page_rows)

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

    def positions(self, begin: int, end: int) -> Places:
        """Find this rank's samples in [begin, end) in the pool, as served.

        Waits for decoding. Samples past the last row (padding) repeat the last row of their lane. Call `release` when
        they were gathered.
        """
        plan, rounds = self._plan, self._order.rounds(begin, end)
        whole = begin % plan.block == end % plan.block == 0 and end <= plan.rows
        width = plan.block if whole else 1
        self._wait_for(rounds.stop * plan.block)
        if not self._lanes:
            return Places(np.zeros(0, np.int64), width)
        blocks = np.arange(rounds.start * plan.block, rounds.stop * plan.block, width, dtype=np.int64) // width
        own = np.minimum(blocks, self._last_row[:, None] // width)  # (own lanes, blocks)
        table = self._in_pool([self._lanes[lane] for lane in self._serving], own, width)
        rows = table.reshape(len(table), len(rounds), -1).transpose(1, 0, 2)
        return Places(self._order.cut(rows, begin, end), width)

    def _in_pool(self, states: Sequence[_LaneState], blocks: Ints, width: int) -> Ints:
        """Locate blocks (shards, n) of `width` rows of canonical shards in the pool."""
        of_page = self._pool.page_rows // width
        page, block = np.divmod(blocks, of_page)
        first, last = int(page.min()), int(page.max())
        # A lane that ends before others has no page there; none of its rows is looked up in it.
        pages = [[state.pages.get(k, 0) for k in range(first, last + 1)] for state in states]
        found: Ints = np.take_along_axis(np.array(pages, np.int64), page - first, axis=1) * of_page + block
        return found

    def release(self, end: int) -> None:
        """Free the pages of rows before sample `end`, and decode ahead into them."""
        row = end // self._plan.round_rows * self._plan.block
        for state in self._lanes.values():
            if row < state.kept_until:
                continue
            # The last page and window stay: padding repeats the last row.
            while state.window < state.order.windows - 1 and state.order.first[state.window + 1] <= row:
                self._release_window(state)
            until = min(row, int(state.order.first[-1]) - 1) // self._pool.page_rows
            for page in range(state.page, until):
                self._pool.release_page(state.pages.pop(page))
            state.page = max(state.page, until)
            window_end = int(state.order.first[min(state.window + 1, state.order.windows)])
            state.kept_until = min(window_end, (state.page + 1) * self._pool.page_rows)
        self._submit_ahead()

    def _release_window(self, state: _LaneState) -> None:
        for group, _, _ in state.order.pieces(state.window):
            held = self._held[group]
            held.lanes.discard(state.order.lane)
            if not held.lanes:
                self._pool.release_ragged(held.key)
                del self._held[group]
        state.window += 1

    def _wait_for(self, row: int) -> None:
        """Wait until every window that begins before lane row `row` is decoded."""
        since, self._needed = self._needed, max(self._needed, int(np.searchsorted(self._need_rows, row, side="left")))
        while self._submitted < self._needed:
            self._submit()
        self._submit_ahead()
        for lane, window in self._needs[since : self._needed]:
            for group, _, _ in self._lanes[lane].order.pieces(window):
                self.meter.absorb(self._held[group].future.result())  # empties it: a shared group counts once

    def _submit_ahead(self) -> None:
        while self._submitted < len(self._needs):
            wanted = self._submitted < self._needed + self._ahead
            if self._new_pages() > (self._pool.spare_pages if wanted else self._pool.warm_pages):
                return
            self._submit()
        if self.next_engine is not None:
            self.next_engine._submit_ahead()

    def _new_groups(self) -> list[int]:
        """List row groups of the next window to submit that are not held."""
        lane, window = self._needs[self._submitted]
        return [group for group, _, _ in self._lanes[lane].order.pieces(window) if group not in self._held]

    def _new_pages(self) -> int:
        """Count the pages that submitting the next window takes."""
        windows = {target for group in self._new_groups() for target in self._targets(group)}
        return sum(page not in self._lanes[lane].pages for lane, w in windows for page in self._pages(lane, w))

    def _targets(self, group: int) -> list[tuple[int, int]]:
        """List (lane, window) of each segment of a row group that is still to be served."""
        windows = ((lane, self._lanes[lane].order.window_of(group)) for lane in self._order.lanes_of(group))
        return [(lane, window) for lane, window in windows if window >= self._lanes[lane].window]

    def _pages(self, lane: int, window: int) -> range:
        """Return the pages of a canonical shard that hold rows of a window."""
        first, end = self._lanes[lane].order.first[window : window + 2].tolist()
        return range(first // self._pool.page_rows, (end - 1) // self._pool.page_rows + 1)

    def _submit(self) -> None:
        """Start decoding the next window, as far as it is not held."""
        while self._pool.free_pages < self._new_pages():
            self._grow_pool()
        for group in self._new_groups():
            targets, key = self._targets(group), self._pool.new_key()
            landings = [self._landing(self._lanes[lane], window, group) for lane, window in targets]
            self._held[group] = _Group(key, self._decode(group, key, landings), {lane for lane, _ in targets})
            self.meter.count("row_groups")
        self._submitted += 1

    def _landing(self, state: _LaneState, window: int, group: int) -> PlacedPiece:
        """Take the pages of a piece, and find the places of its rows."""
        for page in self._pages(state.order.lane, window):
            if page not in state.pages:
                state.pages[page] = self._pool.take_page()
        if state.placed[0] != window:
            state.placed = window, self._window_in_pool(state, window)
        first = 0
        for each, start, stop in state.order.pieces(window):
            if each == group:
                return PlacedPiece(state.order, start, stop, state.placed[1][first : first + stop - start])
            first += stop - start
        raise AssertionError(f"shard {state.order.lane} has no segment of row group {group} in window {window}")

    def _window_in_pool(self, state: _LaneState, window: int) -> Ints:
        """Return the pool positions (rows,) of a window's segments, laid end to end."""
        first, end = state.order.first[window : window + 2].tolist()
        pages, size = self._pages(state.order.lane, window), self._pool.page_rows
        edges: Ints = np.clip(np.arange(pages.start, pages.stop + 1, dtype=np.int64) * size, first, end)
        rows = edges[1:] - edges[:-1]  # in each page
        shift = np.repeat([(state.pages[page] - page) * size for page in pages], rows)  # from lane to pool
        places = state.order.places(window)
        return places + shift[places - first]

    def _grow_pool(self) -> None:
        for held in self._held.values():  # decoders write into the arrays that are about to be replaced
            held.future.exception()
        self._pool.grow()

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, and free every page."""
        for held in self._held.values():
            held.future.cancel()
        for held in self._held.values():
            if not held.future.cancelled():
                held.future.exception()
            self._pool.release_ragged(held.key)
        self._held.clear()
        for state in self._lanes.values():
            for page in state.pages.values():
                self._pool.release_page(page)
            state.pages.clear()
