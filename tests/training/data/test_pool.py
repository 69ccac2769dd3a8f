"""Rows gathered from the pool are the rows that were put, for every layout."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.conf.manifest import Column
from sparkring.training.data.buffers import BufferPool
from sparkring.training.data.columns import DataError, RaggedArray
from sparkring.training.data.features.tensors import TensorSource
from sparkring.training.data.pool import RowGroupPool
from tests.training.conftest import described

COLUMNS = (
    Column(name="id", dtype="int64"),
    Column(name="v", dtype="float32", layout="vector", shape=(2,), nulls="mask"),
    Column(name="r", dtype="int64", layout="ragged"),
    Column(name="n", dtype="int32", layout="nested"),
    Column(name="b", dtype="binary", layout="binary"),
)


TENSORS = TensorSource(described(COLUMNS), None)


def value(name: str, i: int) -> Any:
    """The naive twin: row i of a column, as plain Python."""
    return {
        "id": i,
        "v": None if i % 3 == 0 else [i, i + 0.5],
        "r": list(range(i % 4)),
        "n": [[i] * j for j in range(i % 3)],
        "b": str(i).encode() * (i % 3),
    }[name]


def table(first: int, rows: int) -> pa.Table:
    types = {
        "id": pa.int64(), "v": pa.list_(pa.float32()), "r": pa.list_(pa.int64()),
        "n": pa.list_(pa.list_(pa.int32())), "b": pa.binary(),
    }  # fmt: skip
    return pa.table({n: pa.array([value(n, i) for i in range(first, first + rows)], t) for n, t in types.items()})


def rows_of(ragged: RaggedArray) -> list[Any]:
    rows: list[Any] = ragged.values.tolist()
    for level in reversed(ragged.offsets):
        rows = [rows[a:b] for a, b in pairwise(level.tolist())]
    return rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.booleans(), st.data())
def test_a_gather_is_the_rows_in_the_order_of_their_positions(
    groups: list[int], grow: bool, data: st.DataObject
) -> None:
    pool, places, first = RowGroupPool(COLUMNS, len(groups), max(groups)), [], 0
    for rows in groups:
        slot, order = pool.take_slot(), np.random.default_rng(rows).permutation(rows)
        pool.put(slot, TENSORS.made(table(first, rows)), order)
        places += [(slot * pool.slot_rows + i, first + int(order[i])) for i in range(rows)]
        first += rows
    if grow:
        pool.grow()
    chosen = data.draw(st.lists(st.sampled_from(places), max_size=40))
    gathered = pool.gather(np.array([p for p, _ in chosen], np.int64), BufferPool())
    ids = [i for _, i in chosen]
    assert gathered["id"].tolist() == ids  # type: ignore[union-attr]
    assert gathered["v__valid"].tolist() == [i % 3 != 0 for i in ids]  # type: ignore[union-attr]
    assert gathered["v"].tolist() == [value("v", i) or [0, 0] for i in ids]  # type: ignore[union-attr]
    for name in ("r", "n", "b"):
        found = rows_of(gathered[name])  # type: ignore[arg-type]
        assert [bytes(row) if name == "b" else row for row in found] == [value(name, i) for i in ids]


def test_slots_are_used_again_and_growth_is_no_room_to_decode_ahead() -> None:
    pool = RowGroupPool(COLUMNS[:1], 2, 10)
    first, second = pool.take_slot(), pool.take_slot()
    assert (pool.free_slots, pool.spare_slots) == (0, 0)
    pool.grow()
    assert (pool.free_slots, pool.spare_slots) == (2, 0)
    pool.release(second)
    assert pool.take_slot() == second and first != second


def test_rows_that_were_never_put_are_a_defect_and_not_garbage() -> None:
    with pytest.raises(DataError, match="used before they were decoded"):
        RowGroupPool(COLUMNS, 1, 4).gather(np.zeros(1, np.int64), BufferPool())
