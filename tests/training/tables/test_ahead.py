"""Rows that were pulled ahead: what eviction makes of them, and how checkpoints of any world hold them."""

import numpy as np
import torch

from sparkring.training.tables.ahead import (
    EVICTED,
    INITIAL,
    STORED,
    RowsAhead,
    ahead_tensors,
    pulled_ahead,
    rows_ahead_of,
)
from sparkring.training.tables.exchange import Alone
from sparkring.training.tables.hashing import BUCKETS, bucket_of
from sparkring.training.tables.sharded import ShardedTable
from sparkring.training.tables.table import Table, TableSpec
from sparkring.training.tables.update_rules import UpdateRule

SPEC = TableSpec("t", 2, 0.5, rule=UpdateRule("sgd"), max_rows=BUCKETS)  # a row for each bucket
ALL = np.arange(BUCKETS)


class File(dict[str, torch.Tensor]):
    """Tensors in place of a file's."""

    def __getitem__(self, name: str) -> "Rows":  # type: ignore[override]
        return Rows(super().__getitem__(name))


class Rows:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]


def of_one_bucket(count: int) -> np.ndarray:
    ids = np.arange(40_000)
    return ids[bucket_of(ids) == bucket_of(ids[:1])[0]][:count]


def trained(table: ShardedTable, ids: np.ndarray, grad: float = 1.0) -> None:
    table.reduce(np.full((len(ids), 2), grad, np.float32))
    table.apply(0.1, 1.0)


def test_a_gradient_of_a_row_that_was_evicted_since_its_pull_is_dropped() -> None:
    one, two, _ = of_one_bucket(3)
    table = ShardedTable(SPEC, Alone(), lag=1)
    table.pull(np.array([one]), training=True)
    table.pull(np.array([one]), training=True)
    trained(table, np.array([one]))  # stores it
    table.pull(np.array([two]), training=True)
    trained(table, np.array([one]))
    assert table.table.stores(np.array([one, two])).tolist() == [True, False]
    pulled = table.pull(np.array([one]), training=True)
    assert (pulled == table.table.pull(np.array([one]))).all()
    trained(table, np.array([two]))  # evicts `one`, whose gradient is on its way
    assert table.table.stores(np.array([one, two])).tolist() == [False, True]
    before = table.table.dump(ALL)
    trained(table, np.array([one]))
    assert table.table.stores(np.array([one, two])).tolist() == [False, True], "it must not be created again"
    assert (table.table.dump(ALL).rows == before.rows).all() and table.table.counts.sum(axis=0).tolist() == [2, 1]


def test_what_was_not_stored_when_it_was_pulled_is_stored_by_its_gradient() -> None:
    one, two, _ = of_one_bucket(3)
    table = ShardedTable(SPEC, Alone(), lag=1)
    table.pull(np.array([one]), training=True)
    table.pull(np.array([two]), training=True)
    trained(table, np.array([one]))
    trained(table, np.array([two]))
    assert table.table.stores(np.array([one, two])).tolist() == [False, True]


def test_a_checkpoint_has_each_id_once_and_any_world_answers_with_it() -> None:
    table = Table(SPEC)
    ids = np.array([5, -7, 5, 123456789, 8])
    table.push(np.array([-7, 5]), np.ones((2, 2), np.float32), 0.1)
    ahead = pulled_ahead(table, ids)
    ahead.mark_evicted(np.array([5, 8]))
    assert ahead.state.tolist() == [EVICTED, STORED, EVICTED, INITIAL, INITIAL]
    halves = [ALL[::2], ALL[1::2]]
    files = [File(ahead_tensors([ahead.of_buckets(half)], 9, ahead.rows[:0])) for half in halves]
    old = File(ahead_tensors([], 8, ahead.rows[:0]))
    table.push(np.array([-7, 5]), np.ones((2, 2), np.float32), 0.1)
    (kept,) = rows_ahead_of([files[1], old, files[0]], ALL)
    assert kept.ids.tolist() == sorted(set(ids.tolist()))
    asked = np.array([8, -7, 99, 5])
    again = pulled_ahead(table, asked, kept)
    assert (again.rows[[0, 1, 3]] == ahead.rows[[4, 1, 0]]).all() and (again.rows[2] == table.pull(asked[2:3])).all()
    assert again.state.tolist() == [INITIAL, STORED, INITIAL, EVICTED]
    assert (again.rows[1] != table.pull(asked)[1]).any()
    thirds = [rows_ahead_of(files, ALL[start::3])[0] for start in range(3)]
    assert sorted(np.concatenate([part.ids for part in thirds]).tolist()) == kept.ids.tolist()


def test_a_checkpoint_without_a_lag_has_no_rows_ahead() -> None:
    assert rows_ahead_of([File()], ALL) == []
    nothing = RowsAhead(np.zeros(0, np.int64), np.zeros((0, 2), np.float32), np.zeros(0, np.uint8))
    table = Table(SPEC)
    assert pulled_ahead(table, np.array([3]), nothing).state.tolist() == [INITIAL]
