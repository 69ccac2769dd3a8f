"""The engine's pool positions are the rows of the order, and it decodes no more than it must."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.conf.config import DataConfig
from sparkring.training.data.batch import Meter
from sparkring.training.data.engine import Engine
from sparkring.training.data.epochs import EpochSpan
from sparkring.training.data.order import OrderPlan, RankOrder, epoch_ids, group_order, make_plan
from sparkring.training.data.pool import RowGroupPool


class Decoder:
    """Decodes at once, into nothing: it remembers which rows are at which positions of the pool."""

    def __init__(self, order: RankOrder, slots: int) -> None:
        self.order, self.plan = order, order.plan
        self.pool = RowGroupPool((), slots, int(np.diff(order.plan.group_start).max()))
        self.decoded: list[tuple[int, int]] = []
        self.rows: dict[int, int] = {}

    def __call__(self, epoch: int, group: int, slot: int) -> Future[Meter]:
        self.decoded.append((epoch, group))
        rows = group_order(self.plan, epoch, group, self.order.lanes) + int(self.plan.group_start[group])
        self.rows |= {slot * self.pool.slot_rows + i: row for i, row in enumerate(rows.tolist())}
        future: Future[Meter] = Future()
        future.set_result(Meter({"decode": 1.0}))
        return future

    def engine(self, epoch: int, edges: list[int], ahead: int = 1) -> Engine:
        return Engine(self.order, EpochSpan(epoch, np.array(edges)), self.pool, self, ahead)


def plan_of(groups: list[int], lanes: int, window: int) -> OrderPlan:
    return make_plan(groups, 4, DataConfig(lanes=lanes, window_row_groups=window, tail="pad", seed=2))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3),
    st.data(),
)  # fmt: skip
def test_positions_are_the_ranks_rows_from_any_sample_on(
    groups: list[int], lanes: int, window: int, size: int, data: st.DataObject
) -> None:
    plan = plan_of(groups, lanes, window)
    ids = epoch_ids(plan, 1)
    start = data.draw(st.integers(0, plan.rows - 1))
    for rank in range(size):
        order = RankOrder(plan, rank, size)
        decoder = Decoder(order, slots=2)  # grows where that is too few
        engine = decoder.engine(1, [start, plan.rows])
        for begin in range(start, plan.rows, 5):
            end = min(begin + 5, plan.rows)
            found = [decoder.rows[p] for p in engine.positions(begin, end).tolist()]
            assert found == ids[order.samples(begin, end)].tolist()
            engine.release(end)
        assert len(decoder.decoded) == len(set(decoder.decoded))
        assert engine.meter.counts.get("row_groups", 0) == len(decoder.decoded)
        assert engine.meter.seconds.get("decode", 0.0) == len(decoder.decoded)  # each counted once, though shared
        engine.close()
        assert decoder.pool.free_slots == decoder.pool._slots


def test_padding_repeats_the_last_row_of_its_lane() -> None:
    plan = plan_of([10], lanes=4, window=1)
    decoder = Decoder(RankOrder(plan, 0, 1), slots=1)
    engine = decoder.engine(0, [0, 12])
    rows = [decoder.rows[p] for p in engine.positions(0, 12).tolist()]
    last = [rows[turn::4][-1] for turn in range(4)]
    assert sorted(rows[:10]) == list(range(10)) and set(rows[10:]) <= set(last) | set(rows[6:10])
    engine.close()


def test_only_what_is_needed_next_is_decoded_and_then_the_next_epoch() -> None:
    plan = plan_of([10] * 8, lanes=1, window=1)
    decoder = Decoder(RankOrder(plan, 0, 1), slots=8)
    engine = decoder.engine(0, [0, 80], ahead=2)
    engine.next_engine = decoder.engine(1, [0, 80], ahead=2)
    engine.positions(0, 1)
    assert [epoch for epoch, _ in decoder.decoded] == [0] * 3  # a window, and two ahead of it
    for begin in range(0, 80, 10):
        engine.positions(begin, begin + 10)
        engine.release(begin + 10)
    assert [epoch for epoch, _ in decoder.decoded] == [0] * 8 + [1] * 3
    for each in (engine, engine.next_engine):
        each.close()
