"""The engine's pool positions are the rows of the order, and it decodes no more than it must."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.conf.blocks.data import DataConfig
from sparkring.training.data.batch import Meter
from sparkring.training.data.decoding.pool import PagePool, Places
from sparkring.training.data.engine import Engine, PlacedPiece
from sparkring.training.data.epochs import EpochSpan
from sparkring.training.data.order import OrderPlan, RankOrder, epoch_ids, make_plan


class Decoder:
    """Decodes at once, into nothing: it remembers which rows are at which positions of the pool."""

    def __init__(self, order: RankOrder, pages: int, page_blocks: int = 2) -> None:
        self.order, self.plan = order, order.plan
        self.pool = PagePool((), pages, page_blocks * order.plan.block)
        self.decoded: list[tuple[int, int]] = []
        self.rows: dict[int, int] = {}

    def __call__(self, group: int, key: int, landings: Sequence[PlacedPiece]) -> Future[Meter]:
        self.decoded.append((landings[0].lane.epoch, group))
        for landing in landings:
            rows = landing.lane.piece_rows(group, landing.start, landing.stop) + int(self.plan.group_start[group])
            self.rows |= dict(zip(landing.places.tolist(), rows.tolist(), strict=True))
        future: Future[Meter] = Future()
        future.set_result(Meter({"decode": 1.0}))
        return future

    def found(self, places: Places) -> list[int]:
        positions = places.blocks[:, None] * places.width + np.arange(places.width)
        return [self.rows[p] for p in positions.reshape(-1).tolist()]

    def engine(self, epoch: int, edges: list[int], ahead: int = 1) -> Engine:
        return Engine(self.order, EpochSpan(epoch, np.array(edges)), self.pool, self, ahead)


def plan_of(groups: list[int], lanes: int, window: int, gb: int = 4) -> OrderPlan:
    return make_plan(groups, gb, DataConfig(lanes=lanes, window_row_groups=window, tail="pad", seed=2))


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3),
    st.sampled_from([4, 24, 32]), st.data(),
)  # fmt: skip
def test_positions_are_the_ranks_rows_from_any_sample_on(
    groups: list[int], lanes: int, window: int, size: int, gb: int, data: st.DataObject
) -> None:
    plan = plan_of(groups, lanes, window, gb)
    step = data.draw(st.sampled_from([5, gb]))
    ids = epoch_ids(plan, 1)
    start = data.draw(st.integers(0, plan.rows - 1))
    for rank in range(size):
        order = RankOrder(plan, rank, size)
        decoder = Decoder(order, pages=2)  # grows where that is too few
        engine = decoder.engine(1, [start, plan.rows])
        for begin in range(start, plan.rows, step):
            end = min(begin + step, plan.rows)
            places = engine.positions(begin, end)
            assert places.width == (plan.block if begin % plan.block == end % plan.block == 0 else 1)
            assert decoder.found(places) == ids[order.samples(begin, end)].tolist()
            engine.release(end)
        assert len(decoder.decoded) == len(set(decoder.decoded))
        assert engine.meter.counts.get("row_groups", 0) == len(decoder.decoded)
        assert engine.meter.seconds.get("decode", 0.0) == len(decoder.decoded)  # each counted once, though shared
        engine.close()
        assert decoder.pool.free_pages == decoder.pool._pages == len(set(decoder.pool._free))


def test_padding_repeats_the_last_row_of_its_lane() -> None:
    plan = plan_of([10], lanes=4, window=1)
    decoder = Decoder(RankOrder(plan, 0, 1), pages=1)
    engine = decoder.engine(0, [0, 12])
    rows = decoder.found(engine.positions(0, 12))
    last = [rows[turn::4][-1] for turn in range(4)]
    assert sorted(rows[:10]) == list(range(10)) and set(rows[10:]) <= set(last) | set(rows[6:10])
    engine.close()


def test_only_what_is_needed_next_is_decoded_and_then_the_next_epoch() -> None:
    plan = plan_of([10] * 8, lanes=1, window=1)
    decoder = Decoder(RankOrder(plan, 0, 1), pages=40)
    engine = decoder.engine(0, [0, 80], ahead=2)
    engine.next_engine = decoder.engine(1, [0, 80], ahead=2)
    engine.positions(0, 1)
    assert [epoch for epoch, _ in decoder.decoded] == [0] * 3  # a window, and two ahead of it
    most = 0
    for begin in range(0, 80, 10):
        engine.positions(begin, begin + 10)
        engine.release(begin + 10)
        if (0, begin // 10) != (0, 7):
            most = max(most, decoder.pool._pages - decoder.pool.free_pages)
    assert [epoch for epoch, _ in decoder.decoded] == [0] * 8 + [1] * 5  # into memory that is there, no more
    assert decoder.pool._pages - decoder.pool.free_pages <= most and decoder.pool.warm_pages < 2
    for each in (engine, engine.next_engine):
        each.close()


def test_pages_are_freed_as_their_rows_are_served() -> None:
    """Lanes that began inside row groups hold half of one each: that is what a batch from many row groups costs."""
    plan = plan_of([64] * 37, lanes=16, window=1, gb=64)
    decoder = Decoder(RankOrder(plan, 0, 1), pages=8 * 16 * 2, page_blocks=2)
    engine, held = decoder.engine(0, [0, plan.rows]), []
    for begin in range(0, plan.rows // 64 * 64, 64):
        engine.positions(begin, begin + 64)
        held.append(decoder.pool._pages - decoder.pool.free_pages)
        engine.release(begin + 64)
    assert plan.block == 4 and max(held) <= 16 * (8 // 2 + 2) + 2 * 8 and decoder.pool._pages == 8 * 16 * 2
    engine.close()
