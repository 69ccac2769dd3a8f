"""The order, by property: every row once, the same global batches on any world, other epochs other orders."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.conf.blocks.data import DataConfig
from sparkring.training.data.order import (
    OrderPlan,
    RankOrder,
    _stride,
    epoch_ids,
    lane_order,
    make_plan,
    partial_quotients,
)

row_groups = st.lists(st.integers(0, 60), min_size=1, max_size=25).filter(lambda groups: sum(groups) > 0)
order_settings = st.builds(
    DataConfig,
    lanes=st.integers(1, 70),
    window_row_groups=st.none() | st.integers(1, 6),
    block_rows=st.none() | st.integers(1, 40),
    seed=st.integers(0, 2**40),
    tail=st.just("pad"),
    shuffle=st.booleans(),
)
batch = st.integers(1, 90) | st.sampled_from([64, 128, 256])
world = st.integers(1, 9)


def rank_ids(plan: OrderPlan, epoch: int, rank: int, size: int, begin: int, end: int) -> list[int]:
    """What a rank reads of samples [begin, end), straight from its own lanes."""
    turns = RankOrder(plan, rank, size).turns.tolist()
    lanes = {turn: lane_order(plan, epoch, int(plan.lane_of_turn[turn])).row_ids() for turn in turns}
    served = []
    for sample in range(begin, end):
        block, row = divmod(sample, plan.block)
        rounds, turn = divmod(block, plan.lanes)
        if turn in lanes:
            served.append(int(lanes[turn][rounds * plan.block + row]))
    return served


@settings(max_examples=300)
@given(row_groups, batch, order_settings, st.integers(0, 5))
def test_an_epoch_is_every_row_exactly_once(groups: list[int], gb: int, how: DataConfig, epoch: int) -> None:
    plan = make_plan(groups, gb, how)
    assert sorted(epoch_ids(plan, epoch).tolist()) == list(range(sum(groups)))
    assert np.ptp(np.diff(plan.lane_start)) <= plan.block and np.diff(plan.lane_start).min() > 0


@settings(max_examples=150)
@given(row_groups, batch, order_settings, world, st.integers(0, 3))
def test_ranks_share_every_global_batch_without_overlap(
    groups: list[int], gb: int, how: DataConfig, size: int, epoch: int
) -> None:
    plan = make_plan(groups, gb, how)
    ids = epoch_ids(plan, epoch)
    for step in range(plan.epochs.steps):
        begin, end = step * gb, min((step + 1) * gb, plan.rows)
        parts = [rank_ids(plan, epoch, rank, size, begin, end) for rank in range(size)]
        assert sorted(i for part in parts for i in part) == sorted(ids[begin:end].tolist())
        for rank, part in enumerate(parts):
            order = RankOrder(plan, rank, size)
            assert len(part) == order.count(begin, end)
            assert ids[order.samples(begin, end)].tolist() == part


def worst_deviation(lanes: int) -> float:
    """The most by which what any run of turns visits of any interval of lanes differs from its share, in rows: all of
    them tried. A run that begins later is the first one of its length turned round, as an interval then is too."""
    lane_of_turn = np.arange(lanes) * _stride(lanes) % lanes
    visited = np.cumsum(lane_of_turn[:, None] < np.arange(lanes + 1), axis=0)  # [r - 1, n]: by r turns, of lanes < n
    surplus = visited - np.outer(np.arange(1, lanes + 1), np.arange(lanes + 1)) / lanes
    return float((surplus.max(axis=1) - surplus.min(axis=1)).max())


def test_the_stride_spreads_any_run_of_turns_within_the_proven_bound() -> None:
    for lanes in range(1, 257):
        proven = 2 * sum(partial_quotients(_stride(lanes), lanes))
        assert worst_deviation(lanes) < min(proven, 3.0 if lanes <= 128 else 3.5), lanes


@settings(max_examples=150)
@given(st.integers(1, 5000), batch, st.integers(1, 70), world)
def test_ranks_get_nearly_equal_parts_of_every_batch(rows: int, gb: int, lanes: int, size: int) -> None:
    plan = make_plan([rows], gb, DataConfig(lanes=lanes, tail="pad"))
    orders = [RankOrder(plan, rank, size) for rank in range(size)]
    assert sum(len(order.turns) for order in orders) == plan.lanes
    most = 1e-9 if plan.block > 1 else worst_deviation(plan.lanes) + 1e-9
    for step in range(min(plan.epochs.steps, 20)):
        counts = [order.count(step * gb, (step + 1) * gb) for order in orders]
        assert sum(counts) == gb
        for order, count in zip(orders, counts, strict=True):
            assert abs(count - gb * len(order.turns) / plan.lanes) <= most


@settings(max_examples=150)
@given(row_groups, batch, order_settings, st.integers(0, 4), st.integers(1, 4))
def test_row_groups_two_lanes_share_are_read_first_or_last_by_both(
    groups: list[int], gb: int, how: DataConfig, epoch: int, size: int
) -> None:
    plan = make_plan(groups, gb, how.model_copy(update={"shuffle": True}))
    lanes = [lane_order(plan, epoch, lane) for lane in range(plan.lanes)]
    for left, right in pairwise(lanes):
        for group in set(left.group.tolist()) & set(right.group.tolist()):
            ends = [{0} if g[0] == group else set() for g in (left.group, right.group)]
            for end, lane in zip(ends, (left, right), strict=True):
                if lane.group[-1] == group:
                    end.add(1)
            assert ends[0] & ends[1], "decoded twice: one lane needs it early, its neighbor late"
    for lane in range(plan.lanes):  # the decoder permutes the rows of the lane's piece only
        order = lanes[lane]
        for group, start, stop in zip(order.group.tolist(), order.start.tolist(), order.stop.tolist(), strict=True):
            rows = order.piece_rows(group, start, stop)
            assert sorted(rows.tolist()) == list(range(start, stop))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    plan = make_plan([50] * 20, 32, DataConfig(lanes=8, window_row_groups=2, seed=5))
    other = make_plan([50] * 20, 32, DataConfig(lanes=8, window_row_groups=2, seed=6))
    first, second = epoch_ids(plan, 0), epoch_ids(plan, 1)
    assert (first != second).mean() > 0.9 and (first != epoch_ids(other, 0)).mean() > 0.9
    assert (first == epoch_ids(plan, 0)).all()


def test_each_stage_of_the_shuffle_depends_on_epoch_and_seed() -> None:
    """Pieces of a lane, the interleaving of a window's pieces, and the rows inside a piece: each alone must change."""
    inside = [500], DataConfig(lanes=1)
    pieces = [1] * 500, DataConfig(lanes=1, window_row_groups=1)
    interleaved = [1] * 500, DataConfig(lanes=1, window_row_groups=500)
    for groups, how in (inside, pieces, interleaved):
        other = how.model_copy(update={"seed": 9})
        base = epoch_ids(make_plan(groups, 10, how), 0)
        assert (base != np.arange(500)).mean() > 0.9
        assert (base != epoch_ids(make_plan(groups, 10, how), 1)).mean() > 0.9
        assert (base != epoch_ids(make_plan(groups, 10, other), 0)).mean() > 0.9


def test_every_window_has_a_permutation_of_its_own() -> None:
    plan = make_plan([5] * 40, 10, DataConfig(lanes=2, window_row_groups=10))
    orders = [
        (lane_order(plan, epoch, lane).places(window) - lane_order(plan, epoch, lane).first[window]).tolist()
        for epoch in range(2)
        for lane in range(2)
        for window in range(2)
    ]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_a_piece_at_an_end_in_one_epoch_is_at_the_other_in_the_next() -> None:
    plan = make_plan([10] * 5, 10, DataConfig(lanes=3, tail="pad"))
    middle = [lane_order(plan, epoch, 1).group.tolist() for epoch in range(4)]
    left, right = min(middle[0]), max(middle[0])
    ends = [(groups[0], groups[-1]) for groups in middle]
    assert ends == [(left, right), (right, left)] * 2


def test_the_order_is_frozen() -> None:
    """These numbers may only change together with ORDER_VERSION: a resumed run depends on them."""
    plan = make_plan([7, 5, 0, 9], 4, DataConfig(lanes=3, window_row_groups=2, seed=1))
    assert epoch_ids(plan, 0).tolist() == FROZEN
    blocks = make_plan([7, 5, 0, 9], 8, DataConfig(lanes=2, seed=1))
    assert blocks.block == 4 and epoch_ids(blocks, 0).tolist() == FROZEN_BLOCKS


FROZEN = [4, 14, 8, 6, 17, 9, 0, 20, 7, 2, 19, 10, 1, 15, 12, 3, 16, 13, 5, 18, 11]
FROZEN_BLOCKS = [10, 4, 6, 9, 20, 13, 19, 16, 0, 7, 2, 8, 15, 18, 17, 12, 1, 3, 5, 11, 14]


@pytest.mark.parametrize(
    ("rows", "gb", "lanes", "block"),
    [(10_000, 4096, 64, 16), (10_000, 512, 64, 8), (10_000, 1000, 64, 1), (10_000, 1000, 50, 4), (600, 4096, 64, 8)],
)
def test_lanes_give_blocks_where_a_global_batch_is_whole_rounds_of_them(
    rows: int, gb: int, lanes: int, block: int
) -> None:
    plan = make_plan([rows], gb, DataConfig(lanes=lanes, shuffle=False, tail="pad"))
    assert plan.block == block
    ids = epoch_ids(plan, 0)[: plan.round_rows].reshape(plan.lanes, block)
    assert (np.diff(ids, axis=1) == 1).all() and len(set(ids[:, 0].tolist())) == plan.lanes


def test_unshuffled_one_lane_is_the_stored_order() -> None:
    plan = make_plan([7, 5, 9], 4, DataConfig(lanes=1, shuffle=False, tail="pad"))
    assert epoch_ids(plan, 3).tolist() == list(range(21))


@pytest.mark.parametrize(
    ("groups", "gb", "how", "message"),
    [
        ([0, 0], 4, DataConfig(), "no rows"),
        ([3], 4, DataConfig(), "larger than the split's 3 rows"),
        ([9], 4, DataConfig(tail="error"), "1 are left"),
        ([9], 0, DataConfig(), "global_batch is 0"),
    ],
)
def test_impossible_plans_say_why(groups: list[int], gb: int, how: DataConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(groups, gb, how)


def test_the_tail_is_dropped_padded_or_refused() -> None:
    for tail, steps, samples in (("drop", 2, 20), ("pad", 3, 25)):
        epochs = make_plan([25], 10, DataConfig.model_validate({"tail": tail})).epochs
        assert (epochs.steps, epochs.samples) == (steps, samples)
    assert make_plan([30], 10, DataConfig(tail="error")).epochs.steps == 3


def test_planning_a_million_files_and_ten_billion_rows() -> None:
    rows = np.full(1_000_000, 10_000)
    tracemalloc.start()
    plan = make_plan(rows, 65_536, DataConfig())
    orders = [lane_order(plan, 1, lane) for lane in range(plan.lanes)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.rows == 10_000_000_000 and sum(o.windows for o in orders) >= 1_000_000
    assert peak < 200e6


@settings(max_examples=100)
@given(row_groups, batch, batch, order_settings)
def test_another_global_batch_keeps_the_order_with_the_same_block_rows(
    groups: list[int], gb: int, later: int, how: DataConfig
) -> None:
    first = make_plan(groups, gb, how)
    kept = how.model_copy(update={"lanes": first.lanes, "block_rows": first.block})
    second = make_plan(groups, max(later, first.lanes), kept)
    assert second.block == first.block
    assert epoch_ids(first, 1).tolist() == epoch_ids(second, 1).tolist()


def rank_correlation(ids: np.ndarray) -> float:
    """Spearman's, between the stored and the served order."""
    return float(np.corrcoef(np.arange(len(ids)), ids)[0, 1])


def row_groups_per_batch(ids: np.ndarray, group_rows: int, gb: int) -> float:
    whole = len(ids) // gb * gb
    return float(np.mean([len(np.unique(b)) for b in (ids[:whole] // group_rows).reshape(-1, gb)]))


def test_shuffle_quality_beside_a_full_permutation() -> None:
    groups, size, gb = 512, 256, 1024
    plan = make_plan([size] * groups, gb, DataConfig(seed=3))
    served, full = epoch_ids(plan, 0), np.random.default_rng(0).permutation(groups * size)
    assert abs(rank_correlation(served)) < 0.02 and abs(rank_correlation(full)) < 0.02
    assert row_groups_per_batch(served, size, gb) > 60  # 64 lanes, a window of one row group each
    wide = make_plan([size] * groups, gb, DataConfig(seed=3, window_row_groups=8))
    assert row_groups_per_batch(epoch_ids(wide, 0), size, gb) > 0.8 * row_groups_per_batch(full, size, gb)
