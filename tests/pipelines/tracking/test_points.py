"""Which points of metrics MLflow gets."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sparkring.pipelines.tracking.points import new_points, split_finite


def test_only_finite_values_are_points() -> None:
    assert split_finite({"a": 1, "b": math.nan, "c": math.inf, "d": -math.inf}) == ({"a": 1.0}, ["b", "c", "d"])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9))))
def test_replayed_steps_leave_no_duplicates(steps: list[tuple[str, int]]) -> None:
    last: dict[str, int] = {}
    kept = [(name, step) for point in steps for name, _, step, _ in new_points([(point[0], 0.5, point[1], 7)], last)]
    assert len(kept) == len(set(kept))
    for name in "ab":
        mine = [step for n, step in kept if n == name]
        assert mine == sorted(mine)
        assert last.get(name) == max((s for n, s in steps if n == name), default=None)
