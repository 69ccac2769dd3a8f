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
from sparkring.training.data.decoding.buffers import BufferPool
from sparkring.training.data.decoding.columns import DataError, RaggedArray
from sparkring.training.data.decoding.pool import PagePool, Places
from sparkring.training.data.features.tensors import TensorSource
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


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4), st.sampled_from([1, 4]), st.booleans(), st.booleans(),
    st.data(),
)  # fmt: skip
def test_a_gather_is_the_rows_in_the_order_of_their_positions(
    groups: list[int], width: int, grow: bool, interleaved: bool, data: st.DataObject
) -> None:
    """Rows of row groups, put to runs of positions or scattered, on pages taken in any order."""
    page_rows, random = 8 * width, np.random.default_rng(sum(groups))
    pages = -(-sum(groups) // page_rows)
    pool, first, row_at = PagePool(COLUMNS, pages, page_rows), 0, {}
    taken = random.permutation([pool.take_page() for _ in range(pages)])
    positions = (taken[:, None] * page_rows + np.arange(page_rows)).reshape(-1)[: sum(groups)]
    positions = random.permutation(positions) if interleaved else positions
    for rows in groups:
        order, places = random.permutation(rows), positions[first : first + rows]
        cut = rows // 3  # a row group of two lanes
        landings = [(order[a:b], places[a:b]) for a, b in ((0, cut), (cut, rows)) if a < b]
        pool.put(pool.new_key(), TENSORS.made(table(first, rows)), landings)
        row_at |= dict(zip(places.tolist(), (first + order).tolist(), strict=True))
        first += rows
    if grow:
        pool.grow()
    whole = [p for p in range(0, pages * page_rows, width) if all(p + i in row_at for i in range(width))]
    chosen = data.draw(st.lists(st.sampled_from(whole), max_size=40)) if whole else []
    gathered = pool.gather(Places(np.array(chosen, np.int64) // width, width), BufferPool())
    ids = [row_at[p + i] for p in chosen for i in range(width)]
    fixed = {name: rows for names, stack in gathered.stacks for name, rows in zip(names, stack, strict=True)}
    assert fixed["id"].tolist() == ids
    assert fixed["v__valid"].tolist() == [i % 3 != 0 for i in ids]
    assert fixed["v"].tolist() == [value("v", i) or [0, 0] for i in ids]
    for name in ("r", "n", "b"):
        found = rows_of(gathered.ragged[name])
        assert [bytes(row) if name == "b" else row for row in found] == [value(name, i) for i in ids]


def test_pages_are_used_again_and_growth_is_no_room_to_decode_ahead() -> None:
    pool = PagePool(COLUMNS[:1], 2, 10)
    assert (pool.free_pages, pool.spare_pages, pool.warm_pages) == (2, 2, 0)
    first, second = pool.take_page(), pool.take_page()
    assert (pool.free_pages, pool.spare_pages) == (0, 0)
    pool.grow()
    assert (pool.free_pages, pool.spare_pages) == (2, 0)
    pool.release_page(second)
    assert (pool.spare_pages, pool.warm_pages) == (1, 1)
    assert pool.take_page() == second and first != second


def test_ragged_rows_of_a_released_row_group_are_gone() -> None:
    pool, key = PagePool(COLUMNS, 1, 8), 1
    pool.put(key, TENSORS.made(table(0, 8)), [(np.arange(8), pool.take_page() * 8 + np.arange(8))])
    pool.release_ragged(key)
    with pytest.raises(DataError, match=r"row groups \[1\] were used before they were decoded"):
        pool.gather(Places(np.zeros(1, np.int64), 1), BufferPool())


def test_rows_that_were_never_put_are_a_defect_and_not_garbage() -> None:
    with pytest.raises(DataError, match="used before they were decoded"):
        PagePool(COLUMNS, 1, 4).gather(Places(np.zeros(1, np.int64), 1), BufferPool())
