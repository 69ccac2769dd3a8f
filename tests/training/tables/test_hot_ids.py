"""The most used ids in bounded memory, against a count of all of them."""

from functools import reduce

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sparkring.training.tables.hot_ids import COUNTERS, HotIds, hot_ids_of
from tests.training.tables.test_increments import Rows


def uses_of(batches: list[NDArray[np.int64]]) -> HotIds:
    found = HotIds()
    for batch in batches:
        found = found.with_uses(*np.unique(batch, return_counts=True))
    return found


def test_few_ids_are_counted_exactly_and_the_most_used_come_first() -> None:
    found = uses_of([np.array([5, -3, 5]), np.array([7, 5, -3]), np.zeros(0, np.int64)])
    assert found.top(9) == [(5, 3), (-3, 2), (7, 1)] and found.top(1) == [(5, 3)]
    assert (found.total, found.missed) == (6, 0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_counts_of_many_ids_are_never_too_high_and_too_low_by_a_known_and_small_number(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    batches = [[rng.zipf(1.2, 3000) % (1 << 40) - 9 for _ in range(40)] for _ in range(ranks)]
    found = reduce(HotIds.merged, [uses_of(own) for own in batches])
    ids, counts = np.unique(np.concatenate([batch for own in batches for batch in own]), return_counts=True)
    assert len(ids) > 5 * COUNTERS and found.total == counts.sum() == ranks * 120_000
    assert 0 < found.missed <= found.total / (COUNTERS + 1) and len(found.ids) <= COUNTERS
    true = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    for id_, count in zip(found.ids.tolist(), found.counts.tolist(), strict=True):
        assert count <= true[id_] <= count + found.missed
    assert set(ids[counts > found.missed].tolist()) <= set(found.ids.tolist())
    assert found.top(1)[0][0] == ids[counts.argmax()]


def as_file(found: HotIds, first_bucket: int) -> dict[str, Rows]:
    tensors = found.to_tensors() | {"buckets": torch.tensor([first_bucket])}
    return {name: Rows(tensor) for name, tensor in tensors.items()}


def test_counters_go_on_in_any_world_from_the_last_file_of_each_rank() -> None:
    old, ours, theirs = uses_of([np.array([1])]), uses_of([np.array([1, 1, 2])]), uses_of([np.array([2, 9])])
    files = [as_file(old, 0), as_file(ours, 0), as_file(theirs, 3)]
    assert hot_ids_of(files, 0, 1).top(9) == [(1, 2), (2, 2), (9, 1)]
    two = [hot_ids_of(files, rank, 2) for rank in range(2)]
    assert [each.total for each in two] == [3, 2] and hot_ids_of(files, 2, 3).total == 0
    older = [{"buckets": Rows(torch.tensor([0]))}]  # of a checkpoint before there were counters
    assert hot_ids_of(older, 0, 1).total == 0


def test_where_no_id_is_used_more_than_others_the_error_keeps_its_bound() -> None:
    rng = np.random.default_rng(0)
    found = uses_of([rng.integers(0, 3000, 3000) for _ in range(40)])
    assert 0 < found.missed <= found.total / (COUNTERS + 1)
