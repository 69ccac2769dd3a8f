"""Days, weeks and months of a time zone follow each other without a gap, whatever clocks do."""

import datetime as dt
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.conf.blocks.etl import IntervalConfig
from sparkring.etl.errors import EtlError
from sparkring.etl.windows.interval import before, interval_from, window_of


def config(last: str = "2013-03-11", window: int = 4, **keys) -> IntervalConfig:
    return IntervalConfig(column="t", last=last, window=window, **keys)


def test_a_window_is_its_last_intervals() -> None:
    assert [i.label for i in window_of(config(window=3))] == ["2013-03-09", "2013-03-10", "2013-03-11"]
    assert [i.label for i in window_of(config("2013-03-01", every="month"))] == [
        "2012-12-01", "2013-01-01", "2013-02-01", "2013-03-01"
    ]  # fmt: skip
    assert [i.label for i in window_of(config(every="week", window=2))] == ["2013-03-04", "2013-03-11"]


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("America/New_York", "2013-03-10", 23),
        ("America/New_York", "2013-11-03", 25),
        ("America/New_York", "2013-07-01", 24),
        ("UTC", "2013-03-10", 24),
        ("America/Sao_Paulo", "2013-10-20", 23),  # clocks skip midnight: the day begins at one
    ],
)
def test_a_day_has_the_hours_that_clocks_give_it(zone: str, day: str, hours: int) -> None:
    (found,) = window_of(config(day, 1, time_zone=zone))
    assert found.end - found.start == dt.timedelta(hours=hours)
    assert found.start.tzinfo == dt.UTC


@given(
    st.dates(dt.date(1990, 1, 1), dt.date(2035, 1, 1)),
    st.sampled_from(["day", "week", "month"]),
    st.sampled_from(["UTC", "America/New_York", "America/Sao_Paulo", "Australia/Lord_Howe", "Asia/Kathmandu"]),
)
def test_intervals_meet(day: dt.date, every: str, zone: str) -> None:
    day = day - dt.timedelta(days=day.weekday()) if every == "week" else day.replace(day=1) if every == "month" else day
    settings = config(day.isoformat(), 5, every=every, time_zone=zone)
    window = window_of(settings)
    assert all(a.next == b.first and a.end == b.start for a, b in pairwise(window))
    assert window[-1].first == day and before(settings, window[-1], 4) == window[:-1]


@pytest.mark.parametrize(("every", "first"), [("week", "2013-03-04"), ("month", "2013-03-01")])
def test_a_day_that_begins_no_interval_is_refused_with_the_one_that_it_is_in(every: str, first: str) -> None:
    with pytest.raises(EtlError, match=rf"'2013-03-10': is not the first day of its {every}; use {first}"):
        window_of(config("2013-03-10", every=every))


def test_rows_are_kept_by_dates() -> None:
    found = interval_from(config(every="week"), dt.date(2013, 3, 4))
    assert found.condition("day") == "`day` >= '2013-03-04' AND `day` < '2013-03-11'"
