"""Which row is in which global batch: pure functions of (row groups, settings, epoch), never of the world.

The N rows of a split, in stored order, are cut into K canonical shards (`lane`) of equal length (they differ by at
most B rows); a shard may begin or end inside a row group. Seed and epoch give every row its position in its shard: the
shard's segments (`piece`: whole row groups, or what the cut left of them) come in a seeded order, and rows are permuted
inside *windows* of W consecutive segments. The shards are interleaved round-robin: each has a slot (`turn`) per round,
in which it gives its next *block* of B rows. Sample t of an epoch is in block t // B, of the shard with slot (t // B)
mod K. So global batch s, samples [s * GB, (s + 1) * GB), is the next GB/K rows of every shard, for any GB, K and N, and
one integer, the consumed samples, is the position of a run. Rows of one block are moved together, which costs half of
moving them one by one: B is 16 where a global batch is whole rounds, else the largest smaller power of two for which it
is, or 1; or the recipe's value, for a run that continues with another global batch.

A rank owns whole canonical shards, next to each other. Two shards that share a cut row group both read it first, or
both read it last, so one rank decodes it once. No array here is larger than the list of row groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.random import PCG64, RandomState, SeedSequence
from numpy.typing import ArrayLike, NDArray

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.plain_text import count_of
from sparkring.training.data.epochs import EpochSteps

ORDER_VERSION = 3
MIXED_ROW_GROUPS = 64  # row groups a global batch draws from where the recipe sets no window
MOST_BLOCK = 16  # rows: a cache line of four-byte values
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class OrderPlan:
    """One split cut into K canonical shards (lanes), which give B rows per slot (turn), over G non-empty row groups.

    groups (G,): index of each non-empty row group; group_start (G + 1,): its first row; lane_start (K + 1,): first row
    of each shard; lane_of_turn, turn_of_lane (K,): the shards' slots in a round. config: seed, shuffle, tail.
    """

    config: DataConfig
    rows: int
    global_batch: int
    window: int  # W
    block: int  # B
    groups: Ints
    group_start: Ints
    lane_start: Ints
    lane_of_turn: Ints
    turn_of_lane: Ints

    @property
    def lanes(self) -> int:
        return len(self.lane_of_turn)

    @property
    def round_rows(self) -> int:
        """Rows of one round, a slot of every shard."""
        return self.lanes * self.block

    @property
    def epochs(self) -> EpochSteps:
        whole = self.rows - self.rows % self.global_batch
        return EpochSteps(self.rows if self.config.tail == "pad" else whole, self.global_batch)


def make_plan(group_rows: ArrayLike, global_batch: int, config: DataConfig) -> OrderPlan:
    """Cut row groups into canonical shards. ValueError if no step is possible.

    group_rows: (G,) rows of each, in stored order. K is `config.lanes`, lowered to the global batch and to the rows
    where it is larger.
    """
    counts = np.asarray(group_rows, dtype=np.int64)
    groups = np.flatnonzero(counts).astype(np.int64)
    start = np.concatenate(([0], np.cumsum(counts[groups]))).astype(np.int64)
    rows = int(start[-1])
    _check(rows, global_batch, config)
    lanes = min(config.lanes, global_batch, rows)
    window = config.window_row_groups or max(1, MIXED_ROW_GROUPS // lanes)
    lane_of_turn = (np.arange(lanes, dtype=np.int64) * _stride(lanes)) % lanes
    turn_of_lane = np.argsort(lane_of_turn, kind="stable").astype(np.int64)
    block = min(config.block_rows, rows // lanes) if config.block_rows else _block(rows, global_batch, lanes)
    rounds, rest = divmod(rows, lanes * block)
    lengths = rounds * block + np.clip(rest - turn_of_lane * block, 0, block)  # (K,)
    lane_start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return OrderPlan(config, rows, global_batch, window, block, groups, start, lane_start, lane_of_turn, turn_of_lane)


def _block(rows: int, global_batch: int, lanes: int) -> int:
    """Return B, the largest power of two for which a global batch is whole rounds of slots."""
    block = MOST_BLOCK
    while block > 1 and (global_batch % (lanes * block) or lanes * block > rows):
        block //= 2
    return block


def _check(rows: int, global_batch: int, config: DataConfig) -> None:
    if global_batch < 1:
        raise ValueError(f"global_batch is {global_batch}; it must be at least 1")
    if rows == 0:
        raise ValueError(
            "the split has no rows, so there is no batch to read; choose another split or rebuild the dataset"
        )
    if config.tail == "drop" and rows < global_batch:
        raise ValueError(
            f"global batch {global_batch} is larger than the split's {count_of(rows, 'row')}, and tail=drop would drop "
            "them all; lower the batch or set tail to pad"
        )
    if config.tail == "error" and rows % global_batch:
        raise ValueError(
            f"{count_of(rows, 'row is')} not a multiple of the global batch {global_batch} ({rows % global_batch} are "
            "left) and tail=error forbids it; set tail to drop or pad, or choose a batch that divides"
        )


def _stride(lanes: int) -> int:
    """Return the stride coprime to K = `lanes` that spreads any run of slots most evenly over the shards.

    It thus spreads over the ranks what they read of a global batch that is no multiple of K.

    With c(r) the shards of an interval of n that r consecutive slots visit, |c(r) - r n / K| < 2 (a1 + ... + am), where
    [0; a1, ..., am] is the continued fraction of stride / K. Proof (Ostrowski; Kuipers and Niederreiter 1974, ch. 2.3):
    r < K is a sum of at most a1 + ... + am denominators q of its convergents p / q. As stride / K is within 1 / (q q')
    of p / q, q' the next denominator, the q slots of such a term lie one in each cell of a grid of q equal cells, all
    moved the same way by less than a cell; each end of the interval gains or loses less than one slot. Whole rounds
    visit every shard once. Hence the smallest sum; near the golden section where several have it.
    """
    coprime = [step for step in range(1, lanes + 1) if gcd(step, lanes) == 1]
    return min(coprime, key=lambda step: (sum(partial_quotients(step, lanes)), abs(step - lanes * 0.6180339887498949)))


def partial_quotients(numerator: int, denominator: int) -> list[int]:
    """Expand a fraction in (0, 1] as 1 / (a1 + 1 / (a2 + ...)): [a1, ..., am]."""
    quotients = []
    while numerator:
        quotients.append(denominator // numerator)
        numerator, denominator = denominator % numerator, numerator
    return quotients


class RankOrder:
    """The samples of one rank, from its canonical shards.

    lanes: counts of ranks differ by at most one; none where there are fewer lanes than ranks. turns (own lanes,): when
    they take turns, ascending: the order in which the rank serves them.
    """

    def __init__(self, plan: OrderPlan, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"data_rank {rank} is not in 0..{size - 1}")
        self.plan = plan
        self.lanes = range(plan.lanes * rank // size, plan.lanes * (rank + 1) // size)
        self.turns: Ints = np.sort(plan.turn_of_lane[self.lanes.start : self.lanes.stop])

    def count(self, begin: int, end: int) -> int:
        """Count this rank's samples among an epoch's samples [begin, end)."""
        return self._before(end) - self._before(begin)

    def _before(self, sample: int) -> int:
        rounds, inside = divmod(sample, self.plan.round_rows)
        turn, row = divmod(inside, self.plan.block)
        before = int(np.searchsorted(self.turns, turn))
        own_turn = before < len(self.turns) and self.turns[before] == turn
        return (rounds * len(self.turns) + before) * self.plan.block + (row if own_turn else 0)

    def rounds(self, begin: int, end: int) -> range:
        """Return the rounds for samples [begin, end); round r serves rows [r * B, (r + 1) * B) of each shard."""
        return range(begin // self.plan.round_rows, -(-end // self.plan.round_rows))

    def cut(self, table: Ints, begin: int, end: int) -> Ints:
        """Pick the entries of samples [begin, end) from a table (rounds, own shards, B).

        A table of whole blocks, (rounds, own shards, 1), will do where both are multiples of B.
        """
        unit = self.plan.block // table.shape[2]
        first = begin // self.plan.round_rows * self.plan.round_rows
        skip = self.count(first, begin) // unit
        return table.reshape(-1)[skip : skip + self.count(begin, end) // unit]

    def samples(self, begin: int, end: int) -> Ints:
        """Return the numbers in the epoch of this rank's samples of [begin, end), as served."""
        rounds = np.array(self.rounds(begin, end), np.int64) * self.plan.round_rows
        blocks = rounds[:, None] + self.turns * self.plan.block
        return self.cut(blocks[:, :, None] + np.arange(self.plan.block), begin, end)

    def lanes_of(self, group: int) -> range:
        """Return this rank's canonical shards with rows of a row group, an index into `plan.groups`."""
        begin, end = self.plan.group_start[[group, group + 1]]
        first, last = _touched(self.plan.lane_start, begin, end)
        return range(max(first, self.lanes.start), min(last, self.lanes.stop))

    def row_groups(self) -> Ints:
        """Return the row groups of the split that overlap the rank's canonical shards."""
        if not self.lanes:
            return np.zeros(0, np.int64)
        begin, end = self.plan.lane_start[[self.lanes.start, self.lanes.stop]]
        first, last = _touched(self.plan.group_start, begin, end)
        return self.plan.groups[first:last]


def _touched(starts: Ints, begin: int, end: int) -> tuple[int, int]:
    """Return first and last + 1 of the intervals with these starts that overlap [begin, end)."""
    return int(np.searchsorted(starts, begin, side="right")) - 1, int(np.searchsorted(starts, end, side="left"))


@dataclass(frozen=True)
class LaneOrder:
    """One canonical shard in one epoch: its segments (P,), in the order they are read.

    A piece is rows [start, stop) of row group `group`, an index into `plan.groups`. Window w has pieces [w * W, (w + 1)
    * W), and the lane's rows [first[w], first[w + 1]).
    """

    plan: OrderPlan
    epoch: int
    lane: int
    group: Ints
    start: Ints
    stop: Ints
    first: Ints  # (windows + 1,)

    @property
    def windows(self) -> int:
        return len(self.first) - 1

    def pieces(self, window: int) -> list[tuple[int, int, int]]:
        """List (group, start, stop) of each segment of a window."""
        part = slice(window * self.plan.window, (window + 1) * self.plan.window)
        return list(zip(*(column[part].tolist() for column in (self.group, self.start, self.stop)), strict=True))

    def window_of(self, group: int) -> int:
        """Return the window that holds a row group of this canonical shard."""
        return int(np.flatnonzero(self.group == group)[0]) // self.plan.window

    def places(self, window: int) -> Ints:
        """Return where the window's segments, laid end to end, go in the canonical shard, (rows,).

        Rows of one segment keep that order (`piece_rows`): a seeded interleaving of segments, times a seeded order
        inside each, is a uniform permutation of the window, but only the second moves rows far.
        """
        sizes = [stop - start for _, start, stop in self.pieces(window)]
        rows, first = sum(sizes), int(self.first[window])
        if not self.plan.config.shuffle or len(sizes) == 1:
            return np.arange(first, first + rows, dtype=np.int64)
        piece = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        interleaved = piece[_random(self.plan.config.seed, self.epoch, self.lane, window, 1).permutation(rows)]
        return np.argsort(interleaved, kind="stable") + first

    def piece_rows(self, group: int, start: int, stop: int) -> Ints:
        """Return the rows (n,) of a segment of a row group, in the segment's shuffled order."""
        if not self.plan.config.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        random = _random(self.plan.config.seed, self.epoch, self.lane, group, 0)
        return random.permutation(stop - start).astype(np.int64, copy=False) + start

    def row_ids(self) -> Ints:
        """Return (length,) row indices of the split, in the order in which the canonical shard serves them."""
        ids = np.empty(int(self.first[-1]), np.int64)
        for window in range(self.windows):
            pieces = self.pieces(window)
            rows = [self.plan.group_start[group] + self.piece_rows(group, start, stop) for group, start, stop in pieces]
            ids[self.places(window)] = np.concatenate(rows)
        return ids


def lane_order(plan: OrderPlan, epoch: int, lane: int) -> LaneOrder:
    """Order the canonical shard's segments for this epoch."""
    begin, end = int(plan.lane_start[lane]), int(plan.lane_start[lane + 1])
    first, last = _touched(plan.group_start, begin, end)
    group = np.arange(first, last, dtype=np.int64)
    start = np.maximum(plan.group_start[first:last], begin) - plan.group_start[first:last]
    stop = np.minimum(plan.group_start[first + 1 : last + 1], end) - plan.group_start[first:last]
    if plan.config.shuffle:
        # Boundary j is between shards j - 1 and j. In even epochs shards meet first at odd boundaries and last at even
        # ones; odd epochs turn that round, so that no row stays at an end for good.
        left_first = (lane + epoch) % 2 == 1
        left = [0] if begin > plan.group_start[first] else []
        right = [len(group) - 1] if end < plan.group_start[last] else []
        order = _random(plan.config.seed, epoch, lane).permutation(len(group)).astype(np.int64)
        order = _with_ends(order, left, right) if left_first else _with_ends(order, right, left)
        group, start, stop = group[order], start[order], stop[order]
    ends = np.concatenate(([0], np.cumsum(stop - start)))
    edges = np.append(np.arange(0, len(group), plan.window), len(group))
    return LaneOrder(plan, epoch, lane, group, start, stop, ends[edges].astype(np.int64))


def _with_ends(order: Ints, head: Sequence[int], tail: Sequence[int]) -> Ints:
    """Move segments that a canonical shard shares with its neighbors to the ends of its order."""
    if len(order) == 1:
        return order
    inner = order[~np.isin(order, [*head, *tail])]
    return np.concatenate([np.array(head, np.int64), inner, np.array(tail, np.int64)])


def _random(*key: int) -> RandomState:
    # RandomState, not Generator: its streams are frozen for ever (NEP 19), so an order outlives an upgrade of numpy.
    return RandomState(PCG64(SeedSequence([*key, ORDER_VERSION])))


def epoch_ids(plan: OrderPlan, epoch: int) -> Ints:
    """Order the rows of a whole epoch, sample by sample: (rows,) row indices."""
    ids = np.empty(plan.rows, np.int64)
    for lane in range(plan.lanes):
        served = lane_order(plan, epoch, lane).row_ids()
        block, row = np.divmod(np.arange(len(served)), plan.block)
        ids[block * plan.round_rows + plan.turn_of_lane[lane] * plan.block + row] = served
    return ids
