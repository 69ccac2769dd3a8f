"""Profiles of parts add up to that of all rows, in the splits that the window decides."""

from __future__ import annotations

import pyarrow as pa

from sparkring.etl.checks import Checked
from sparkring.etl.columns.statistics import Measured, measure
from sparkring.etl.profile import NO_ROWS, Profile, merged
from sparkring.etl.split import UNDIVIDED

WANTED = Measured((("x", "none"),), {"c": "string"})


def profile(split: str, values: list[float | None], odd: int = 0) -> Profile:
    """Rows of one split, of which one failed a check and was quarantined."""
    rows = len(values)
    table = pa.table({"x": pa.array(values, pa.float64()), "c": pa.array(["a"] * rows)})
    checked = Checked(rows + 1, {"rule": 1}, {split: rows}, {"rule": 1, "other": rows})
    classes = {split: {"a": rows}}
    return Profile(checked, measure(table, WANTED), classes, {"label": odd}, {split: rows - 1})


def test_the_profiles_of_parts_add_up_to_that_of_all_rows() -> None:
    parts = [profile("train", [1.0, None]), profile("test", [4.0], odd=1), profile("train", [0.5, 2.0, 8.0], odd=2)]
    whole = merged(parts)
    assert whole.checked == Checked(9, {"rule": 3}, {"train": 5, "test": 1}, {"rule": 3, "other": 6})
    assert whole.classes == {"train": {"a": 5}, "test": {"a": 1}}
    assert (whole.odd, whole.weighted) == ({"label": 3}, {"train": 3, "test": 0})
    all_rows = pa.table({"x": pa.array([1.0, None, 4.0, 0.5, 2.0, 8.0]), "c": ["a"] * 6})
    assert whole.statistics is not None
    assert whole.statistics.to_bytes() == measure(all_rows, WANTED).to_bytes()


def test_the_window_decides_the_split_of_a_part_that_has_none() -> None:
    part = profile(UNDIVIDED, [1.0, 2.0])
    found = part.in_split("test")
    assert found.checked == Checked(3, {"rule": 1}, {"test": 2}, {"rule": 1, "other": 2})
    assert (found.classes, found.weighted, found.odd) == ({"test": {"a": 2}}, {"test": 1}, {"label": 0})
    assert part.in_split(None) is part
    assert (NO_ROWS.in_split("test").checked.splits, NO_ROWS.in_split("test").weighted) == ({}, {})


def test_parts_without_fitted_rows_leave_the_statistics_of_the_others() -> None:
    trained = profile("train", [1.0])
    held_out = Profile(Checked(1, {}, {"test": 1}, {}))
    assert merged([held_out, trained]).statistics == trained.statistics
    assert merged([held_out]).statistics is None
