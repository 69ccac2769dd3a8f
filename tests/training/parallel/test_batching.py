"""How a rank's batch is cut."""

from __future__ import annotations

import pytest

from sparkring.training.parallel.batching import longest_part, part_bounds


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [(7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (6, 3, [2, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_parts_cover_all_rows_in_order_the_longest_first(rows: int, parts: int, sizes: list[int]) -> None:
    bounds = part_bounds(rows, parts)
    assert [stop - start for start, stop in bounds] == sizes and longest_part(rows, parts) == sizes[0]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])] and bounds[-1][1] == rows
