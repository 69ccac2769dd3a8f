"""Lengths of list rows and back."""

import numpy as np
import pyarrow as pa
import pytest

from sparkring.etl.columns.ragged import list_lengths, lists_of


@pytest.mark.parametrize("rows", [[], [[]], [[1], [], [2, 3]]])
def test_lists_come_back_from_their_values_and_lengths(rows):
    lists = pa.array(rows, pa.list_(pa.int64()))
    assert list_lengths(lists).tolist() == [len(row) for row in rows]
    assert lists_of(lists.flatten(), list_lengths(lists)).equals(lists)


def test_a_slice_counts_its_own_rows_only():
    assert list_lengths(pa.array([[1], [2, 3], [4, 5, 6]])[1:]).tolist() == [2, 3]


def test_null_rows_have_no_values():
    mask = pa.array([False, True, False])
    assert lists_of(np.array([1, 2]), np.array([1, 0, 1], np.int32), mask).to_pylist() == [[1], None, [2]]
