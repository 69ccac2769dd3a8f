from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.training.checkpoint.policy import Retention, expendable, most_increment_bytes, ranked_steps


@pytest.mark.parametrize(
    ("keep", "committed", "gone"),
    [
        (Retention(last=2, best=0), [(1, None), (2, None), (3, None)], [1]),
        (Retention(last=0, best=0), [(1, None), (2, None), (3, None)], [1, 2]),
        (Retention(last=1, best=1), [(1, 0.1), (2, 0.3), (3, 0.2)], [2]),
        (Retention(last=1, best=1, mode="max"), [(1, 0.1), (2, 0.3), (3, 0.2)], [1]),
        (Retention(last=1, best=2), [(1, 0.1), (2, 0.3), (3, 0.2), (4, 0.9)], [2]),
        (Retention(last=1, best=0, every=10), [(10, None), (15, None), (20, None), (25, None)], [15]),
        (Retention(last=1, best=1), [(1, math.nan), (2, math.inf), (3, 0.5), (4, None)], [1, 2]),
        (Retention(last=1, best=1), [(1, 0.5), (2, 0.5), (3, None)], [2]),
        (Retention(), [], []),
    ],
)
def test_expendable(keep: Retention, committed: list[tuple[int, float | None]], gone: list[int]) -> None:
    assert expendable(committed, keep) == gone


@given(
    st.dictionaries(st.integers(0, 50), st.none() | st.floats(), max_size=12),
    st.integers(1, 4),
    st.integers(0, 3),
    st.none() | st.integers(1, 7),
)
def test_the_newest_and_the_best_always_stay(
    steps: dict[int, float | None], last: int, best: int, every: int | None
) -> None:
    gone = expendable(steps.items(), Retention(last, best, every))
    left = sorted(steps.keys() - set(gone))
    assert left[-last:] == sorted(steps)[-last:]
    if best and (ranked := ranked_steps(steps.items(), "min")):
        assert ranked[0] in left
    assert len(left) <= last + best + (len([s for s in steps if every and s % every == 0]))


@pytest.mark.parametrize(
    ("written", "most"),
    [([], -1), ([100], 50), ([100, 20, 20], 10), ([100, 60], -10), ([100, *[1] * 7], 43), ([100, *[1] * 8], -1)],
)  # fmt: skip
def test_a_table_is_written_whole_after_increments_of_half_its_bytes_or_eight(written: list[int], most: int) -> None:
    assert most_increment_bytes(written) == most
