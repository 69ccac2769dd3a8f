"""Units of a calendar are counted without a gap, and each begins where the one before ends."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.conf.calendar import Unit, begin_of, number_of

UNITS = st.sampled_from(["hour", "day", "week", "month"])
TIMES = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1))


@given(UNITS, TIMES)
def test_a_time_is_in_the_unit_of_its_number(unit: Unit, wall: dt.datetime) -> None:
    number = number_of(unit, wall)
    assert begin_of(unit, number) <= wall < begin_of(unit, number + 1)
    assert number_of(unit, begin_of(unit, number)) == number


@pytest.mark.parametrize(
    ("unit", "begin"),
    [("hour", "1970-01-01T00"), ("day", "1970-01-01"), ("week", "1969-12-29"), ("month", "1970-01-01")],
)
def test_the_first_of_each_is_the_one_that_1970_begins_in(unit: Unit, begin: str) -> None:
    assert begin_of(unit, 0) == dt.datetime.fromisoformat(begin)
    assert number_of(unit, dt.datetime(1970, 1, 1)) == 0


@pytest.mark.parametrize("unit", ["hour", "day", "week", "month"])
@pytest.mark.parametrize("number", [-(10**9), 10**9])
def test_a_unit_beyond_the_calendar_is_a_wrong_value(unit: Unit, number: int) -> None:
    with pytest.raises(ValueError, match=f"{unit} .* is in no year from 1 to 9999"):
        begin_of(unit, number)


@given(st.integers(-2000, 3000))
def test_weeks_begin_on_mondays_and_months_on_their_first_day(number: int) -> None:
    assert begin_of("week", number).weekday() == 0
    assert begin_of("month", number).day == 1
