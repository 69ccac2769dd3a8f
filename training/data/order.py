"""Which row is in which global batch: pure functions of (row groups, settings, epoch), never of the world.

The N rows of a split, in stored order, are cut into K *lanes* of equal length (they differ by at most one row); a lane
may begin or end inside a row group. Within its lane every row has one place, decided by the seed and the epoch: the
lane's pieces (whole row groups, or what the cut left of them) come in a seeded order, and rows are permuted inside
*windows* of W consecutive pieces. The lanes are then dealt like hands of cards: the t-th sample of an epoch is row
t // K of the lane in slot t mod K. So global batch s, samples [s * GB, (s + 1) * GB), is the next GB/K rows of every
lane, for any GB, K and N, and one integer says where an epoch stands.

A rank owns whole lanes, next to each other. Two lanes that share a cut row group both read it first, or both read it
last, so one rank decodes it once. Nothing here is larger than the list of row groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal

import numpy as np
from numpy.random import PCG64, RandomState, SeedSequence
from numpy.typing import ArrayLike, NDArray

ORDER_VERSION = 2
MIXED_ROW_GROUPS = 64  # row groups a global batch draws from when the window is left to us
Tail = Literal["drop", "pad", "error"]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class OrderSettings:
    """What decides the order besides the dataset and the global batch.

    lanes: K, lowered to the global batch and to the rows where it is larger. window_row_groups: W; None gives each
    global batch about 64 row groups to draw from. tail: what becomes of the last N mod GB rows of an epoch.
    """

    lanes: int = 64
    window_row_groups: int | None = None
    seed: int = 0
    tail: Tail = "drop"
    shuffle: bool = True


@dataclass(frozen=True)
class Plan:
    """One split cut into lanes. Arrays: groups (G,) index of each non-empty row group; group_start (G + 1,) its first
    row; lane_start (K + 1,) first row of each lane; lane_of_slot, slot_of_lane (K,) the order in which lanes are dealt.
    """

    rows: int
    global_batch: int
    lanes: int
    window: int
    seed: int
    tail: Tail
    shuffle: bool
    groups: Ints
    group_start: Ints
    lane_start: Ints
    lane_of_slot: Ints
    slot_of_lane: Ints

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.rows, self.global_batch)
        return whole + (1 if rest and self.tail == "pad" else 0)

    @property
    def epoch_samples(self) -> int:
        """Rows consumed per epoch; less than `rows` only where the tail is dropped."""
        return min(self.rows, self.steps_per_epoch * self.global_batch)

    def real_rows(self, step: int) -> int:
        """Rows of global batch `step` that are not padding."""
        return min(self.rows, (step + 1) * self.global_batch) - step * self.global_batch

    def cursor_after(self, epoch: int, step: int) -> int:
        """Samples consumed since the first epoch once global batch `step` of `epoch` has been."""
        return epoch * self.epoch_samples + min(self.rows, (step + 1) * self.global_batch)

    def locate(self, cursor: int) -> tuple[int, int]:
        """(epoch, next step) after `cursor` samples. ValueError where no step of this plan ends there."""
        epoch, rest = divmod(cursor, self.epoch_samples)
        if rest % self.global_batch:
            raise ValueError(
                f"cursor {cursor} is {rest} samples into epoch {epoch}, not a multiple of the global batch "
                f"{self.global_batch}: it was written with another global batch; resume with that one"
            )
        return epoch, rest // self.global_batch


def make_plan(group_rows: ArrayLike, global_batch: int, settings: OrderSettings) -> Plan:
    """Cut row groups of `group_rows` (G,) rows, in stored order, into lanes. ValueError where no step is possible."""
    counts = np.asarray(group_rows, dtype=np.int64)
    groups = np.flatnonzero(counts).astype(np.int64)
    start = np.concatenate(([0], np.cumsum(counts[groups]))).astype(np.int64)
    rows = int(start[-1])
    _check(rows, global_batch, settings)
    lanes = min(settings.lanes, global_batch, rows)
    window = settings.window_row_groups or max(1, MIXED_ROW_GROUPS // lanes)
    lane_of_slot = (np.arange(lanes, dtype=np.int64) * _stride(lanes)) % lanes
    slot_of_lane = np.argsort(lane_of_slot, kind="stable").astype(np.int64)
    lengths = rows // lanes + (slot_of_lane < rows % lanes)
    lane_start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return Plan(
        rows, global_batch, lanes, window, settings.seed, settings.tail, settings.shuffle,
        groups, start, lane_start, lane_of_slot, slot_of_lane,
    )  # fmt: skip


def _check(rows: int, global_batch: int, settings: OrderSettings) -> None:
    for name, value in (("global_batch", global_batch), ("lanes", settings.lanes)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if settings.window_row_groups is not None and settings.window_row_groups < 1:
        raise ValueError(f"window_row_groups is {settings.window_row_groups}; it must be at least 1")
    if rows == 0:
        raise ValueError(
            "the split has no rows, so there is no batch to read; choose another split or rebuild the dataset"
        )
    if settings.tail == "drop" and rows < global_batch:
        raise ValueError(
            f"global batch {global_batch} is larger than the split's {rows} rows, and tail=drop would drop them all; "
            "lower the batch or set tail to pad"
        )
    if settings.tail == "error" and rows % global_batch:
        raise ValueError(
            f"{rows} rows are not a multiple of the global batch {global_batch} ({rows % global_batch} are left) and "
            "tail=error forbids it; set tail to drop or pad, or choose a batch that divides"
        )


def _stride(lanes: int) -> int:
    """The step coprime to K = `lanes` that spreads any run of slots most evenly over the lanes, and so over the ranks:
    what a rank reads of a global batch that is no multiple of K.

    With c(r) the lanes of an interval of n that r consecutive slots visit, |c(r) - r n / K| < 2 (a1 + ... + am), where
    [0; a1, ..., am] is the continued fraction of stride / K. Proof (Ostrowski; Kuipers and Niederreiter 1974, ch. 2.3):
    r < K is a sum of at most a1 + ... + am denominators q of its convergents p / q. As stride / K is within 1 / (q q')
    of p / q, q' the next denominator, the q slots of such a part lie one in each cell of a grid of q equal cells, all
    moved the same way by less than a cell; each end of the interval gains or loses less than one slot. Whole turns
    visit every lane once. Hence the smallest sum; near the golden section where several have it.
    """
    coprime = [step for step in range(1, lanes + 1) if gcd(step, lanes) == 1]
    return min(coprime, key=lambda step: (sum(partial_quotients(step, lanes)), abs(step - lanes * 0.6180339887498949)))


def partial_quotients(numerator: int, denominator: int) -> list[int]:
    """[a1, ..., am] of numerator / denominator = 1 / (a1 + 1 / (a2 + ...)), a fraction in (0, 1]."""
    quotients = []
    while numerator:
        quotients.append(denominator // numerator)
        numerator, denominator = denominator % numerator, numerator
    return quotients


def lanes_of_rank(plan: Plan, rank: int, size: int) -> range:
    """The lanes a rank owns; counts differ by at most one, and some are 0 where there are fewer lanes than ranks."""
    if not 0 <= rank < size:
        raise ValueError(f"data_rank {rank} is not in 0..{size - 1}")
    return range(plan.lanes * rank // size, plan.lanes * (rank + 1) // size)


@dataclass(frozen=True)
class Lane:
    """One lane in one epoch. Pieces (P,) in the order they are read: `group` indexes `plan.groups`, rows
    [start, stop) of it. Window w holds pieces [w * W, (w + 1) * W) and the lane's rows [first[w], first[w + 1])."""

    group: Ints
    start: Ints
    stop: Ints
    first: Ints

    @property
    def windows(self) -> int:
        return len(self.first) - 1


def lane_order(plan: Plan, epoch: int, lane: int) -> Lane:
    """The lane's pieces in the order of this epoch."""
    begin, end = int(plan.lane_start[lane]), int(plan.lane_start[lane + 1])
    left = int(np.searchsorted(plan.group_start, begin, side="right")) - 1
    right = int(np.searchsorted(plan.group_start, end, side="left"))
    group = np.arange(left, right, dtype=np.int64)
    start = np.maximum(plan.group_start[left:right], begin) - plan.group_start[left:right]
    stop = np.minimum(plan.group_start[left + 1 : right + 1], end) - plan.group_start[left:right]
    if plan.shuffle:
        cut_left, cut_right = begin > plan.group_start[left], end < plan.group_start[right]
        order = _piece_order(plan, epoch, lane, len(group), bool(cut_left), bool(cut_right))
        group, start, stop = group[order], start[order], stop[order]
    ends = np.concatenate(([0], np.cumsum(stop - start)))
    edges = np.append(np.arange(0, len(group), plan.window), len(group))
    return Lane(group, start, stop, ends[edges].astype(np.int64))


def _piece_order(plan: Plan, epoch: int, lane: int, pieces: int, cut_left: bool, cut_right: bool) -> Ints:
    """Seeded order of a lane's pieces, with the pieces it shares with its neighbours first and last.

    Boundary j lies between lanes j - 1 and j. In even epochs lanes meet first at odd boundaries and last at even ones;
    odd epochs turn that round, so that no row stays at an end for good.
    """
    order = _random(plan.seed, epoch, lane).permutation(pieces).astype(np.int64)
    if pieces == 1:
        return order
    left_first = (lane + epoch) % 2 == 1
    head = [0] if cut_left and left_first else [pieces - 1] if cut_right and not left_first else []
    tail = [pieces - 1] if cut_right and left_first else [0] if cut_left and not left_first else []
    free = order[~np.isin(order, head + tail)]
    return np.concatenate([np.array(head, np.int64), free, np.array(tail, np.int64)])


def piece_rows(plan: Plan, epoch: int, lane: int, group: int, rows: int) -> Ints:
    """(rows,) the order in which the rows of a piece are served, counted from its first."""
    if not plan.shuffle:
        return np.arange(rows, dtype=np.int64)
    return _random(plan.seed, epoch, lane, group, 0).permutation(rows).astype(np.int64)


def group_order(plan: Plan, epoch: int, group: int, lanes: range) -> Ints:
    """(rows,) the order of a whole row group: each piece that `lanes` hold of it in its `piece_rows` order."""
    begin, end = int(plan.group_start[group]), int(plan.group_start[group + 1])
    order = np.arange(end - begin, dtype=np.int64)
    first = int(np.searchsorted(plan.lane_start, begin, side="right")) - 1
    last = int(np.searchsorted(plan.lane_start, end, side="left"))
    for lane in range(max(first, lanes.start), min(last, lanes.stop)):
        start = max(begin, int(plan.lane_start[lane])) - begin
        stop = min(end, int(plan.lane_start[lane + 1])) - begin
        order[start:stop] = start + piece_rows(plan, epoch, lane, group, stop - start)
    return order


def window_deal(plan: Plan, epoch: int, lane: int, window: int, sizes: ArrayLike) -> Ints:
    """Where each row of a window's pieces (of `sizes` rows, end to end, each in its `piece_rows` order) is served from:
    place i serves row deal[i]. Rows of one piece keep their order: a seeded deal of pieces, times a seeded order inside
    each, is a uniform permutation of the window, but only the second moves rows far, and is done while decoding.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    rows = int(sizes.sum())
    if not plan.shuffle or len(sizes) == 1:
        return np.arange(rows, dtype=np.int64)
    piece = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    dealt = piece[_random(plan.seed, epoch, lane, window, 1).permutation(rows)]
    deal = np.empty(rows, np.int64)
    deal[np.argsort(dealt, kind="stable")] = np.arange(rows)
    return deal


def epochs_of(epoch: int, start_step: int, steps: int | None, steps_per_epoch: int) -> Iterator[tuple[int, int, int]]:
    """(epoch, first step, step after the last) of each epoch that `steps` steps from `start_step` of `epoch` on lie in;
    None: those that are left of this epoch. ValueError where it has no such step."""
    if not 0 <= start_step <= steps_per_epoch:
        raise ValueError(f"start_step {start_step} is not in 0..{steps_per_epoch}, the steps of an epoch")
    each = max(1, steps_per_epoch)
    begin = epoch * each + start_step
    end = (epoch + 1) * steps_per_epoch if steps is None else begin + steps
    epochs = range(begin // each, -(-end // each)) if begin < end else ()
    return ((e, max(0, begin - e * each), min(each, end - e * each)) for e in epochs)


def _random(*key: int) -> RandomState:
    # RandomState, not Generator: its streams are frozen for ever (NEP 19), so an order outlives an upgrade of numpy.
    return RandomState(PCG64(SeedSequence([*key, ORDER_VERSION])))


def owned_slots(plan: Plan, lanes: range) -> Ints:
    """The slots of these lanes, ascending: the order in which a rank's rows are dealt."""
    return np.sort(plan.slot_of_lane[lanes.start : lanes.stop])


def dealt_before(plan: Plan, slots: Ints, sample: int) -> int:
    """How many of an epoch's samples before `sample` lie in `slots`."""
    row, slot = divmod(sample, plan.lanes)
    return row * len(slots) + int(np.searchsorted(slots, slot))


def lane_ids(plan: Plan, epoch: int, lane: int) -> Ints:
    """(length,) row indices of the split, in the order the lane serves them. O(rows of the lane): tests and audits."""
    order = lane_order(plan, epoch, lane)
    parts = []
    for window in range(order.windows):
        pieces = slice(window * plan.window, (window + 1) * plan.window)
        columns = (order.group[pieces].tolist(), order.start[pieces].tolist(), order.stop[pieces].tolist())
        rows = [
            plan.group_start[g] + a + piece_rows(plan, epoch, lane, g, b - a) for g, a, b in zip(*columns, strict=True)
        ]
        parts.append(np.concatenate(rows)[window_deal(plan, epoch, lane, window, [len(r) for r in rows])])
    return np.concatenate(parts).astype(np.int64)


def epoch_ids(plan: Plan, epoch: int) -> Ints:
    """(rows,) the whole epoch as row indices, sample by sample; global batch s is [s * GB, (s + 1) * GB)."""
    ids = np.empty(plan.rows, np.int64)
    for lane in range(plan.lanes):
        ids[int(plan.slot_of_lane[lane]) :: plan.lanes] = lane_ids(plan, epoch, lane)
    return ids
