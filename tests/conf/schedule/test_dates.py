from __future__ import annotations

import datetime as dt
from itertools import pairwise

import pytest

from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schedule.dates import (
    between,
    check_known,
    dates_since_begin,
    interval_of,
    last_ended,
    moved,
    parse_date,
    render,
)

NOW = dt.datetime(2024, 12, 1, tzinfo=dt.UTC)
HOURS = ScheduleConfig(interval="hour", begin="2024-03-01T00")
NEW_YORK = ScheduleConfig(timezone="America/New_York", begin="2024-01-01")
DAYS = ScheduleConfig(begin="2024-03-01")
WEEKS = ScheduleConfig(interval="week", begin="2024-01-01")
MONTHS = ScheduleConfig(interval="month", begin="2024-01-01", timezone="America/New_York")


@pytest.mark.parametrize(("ds", "hours"), [("2024-03-09", 24), ("2024-03-10", 23), ("2024-11-03", 25)])
def test_a_day_has_the_hours_that_its_zone_gives_it(ds: str, hours: int) -> None:
    interval = interval_of(NEW_YORK, ds)
    assert interval.end - interval.start == dt.timedelta(hours=hours)
    assert interval.end == interval_of(NEW_YORK, moved(NEW_YORK, ds, 1)).start


@pytest.mark.parametrize(
    ("schedule", "text", "ds"),
    [
        (DAYS, "2024-03-05", "2024-03-05"),
        (DAYS, "2024-03-05T00:00:00+00:00", "2024-03-05"),
        (NEW_YORK, "2024-03-05T05:00:00+00:00", "2024-03-05"),
        (NEW_YORK, "2024-03-05T00:00", "2024-03-05"),
        (HOURS, "2024-03-05T07", "2024-03-05T07"),
        (HOURS, "2024-03-05T07:00:00+00:00", "2024-03-05T07"),
        (HOURS, "2024-03-05T09:00:00+02:00", "2024-03-05T07"),
        (WEEKS, "2024-03-04", "2024-03-04"),
        (MONTHS, "2024-03-01T05:00:00+00:00", "2024-03-01"),
    ],
)
def test_a_date_may_be_written_as_an_instant(schedule: ScheduleConfig, text: str, ds: str) -> None:
    assert parse_date(schedule, text) == ds


@pytest.mark.parametrize(
    ("zone", "ds", "number"), [("America/New_York", "1970-01-03", 2), ("Asia/Tokyo", "1970-01-03", 2)]
)
def test_the_number_of_a_day_is_that_of_its_calendar(zone: str, ds: str, number: int) -> None:
    schedule = ScheduleConfig(begin="1970-01-01", timezone=zone)
    assert interval_of(schedule, ds).number == number


@pytest.mark.parametrize(("schedule", "ds"), [(WEEKS, "1969-12-22"), (MONTHS, "1969-11-01")])
def test_the_numbers_of_weeks_and_months_go_up_by_one(schedule: ScheduleConfig, ds: str) -> None:
    intervals = [interval_of(schedule, moved(schedule, ds, count)) for count in range(30)]
    first = intervals[0].number
    assert [interval.number for interval in intervals] == [*range(first, first + 30)]
    assert all(one.end == after.start for one, after in pairwise(intervals))


def test_the_number_of_an_hour_counts_hours() -> None:
    schedule = ScheduleConfig(begin="1970-01-01T00", interval="hour")
    assert [interval_of(schedule, ds).number for ds in ("1970-01-02T03", "1970-01-02T04")] == [27, 28]


@pytest.mark.parametrize(
    ("schedule", "text", "message"),
    [
        (DAYS, "2024-03-05T07", "is not the start of its day in UTC; use 2024-03-05"),
        (NEW_YORK, "2024-03-05T00:00:00+00:00", "is not the start of its day in America/New_York; use 2024-03-04"),
        (HOURS, "2024-03-05", "a whole day; this schedule's dates are each a whole hour, such as 2026-01-01T00"),
        (HOURS, "2024-03-05T07:30", "is not the start of its hour in UTC; use 2024-03-05T07"),
        (DAYS, "yesterday", "no date; this schedule's are each a whole day, such as 2026-01-01"),
        (DAYS, "2024-13-01", "no date"),
        (DAYS, "9999-12-31", "is in no year from 1 to 9999"),
        (WEEKS, "2024-03-05", "is not the start of its week in UTC; use 2024-03-04"),
        (MONTHS, "2024-03-05", "is not the start of its month in America/New_York; use 2024-03-01"),
        (MONTHS, "2024-03-01T00:00:00+00:00", "is not the start of its month in .*; use 2024-02-01"),
    ],
)
def test_a_date_of_another_granularity_is_refused(schedule: ScheduleConfig, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_date(schedule, text)


def test_a_date_before_begin_or_in_the_future_is_refused() -> None:
    assert check_known(DAYS, "2024-03-01", NOW) == "2024-03-01"
    assert check_known(DAYS, "2024-12-01", NOW) == "2024-12-01"
    with pytest.raises(ValueError, match=r"is before schedule\.begin, 2024-03-01"):
        check_known(DAYS, "2024-02-29", NOW)
    with pytest.raises(ValueError, match=r"in the future: its interval begins 2024-12-02T00:00:00.* shows 2024-12-01"):
        check_known(DAYS, "2024-12-02", NOW)


def test_dates_are_counted_moved_and_listed() -> None:
    assert between(DAYS, "2024-02-28", "2024-03-01") == ["2024-02-28", "2024-02-29", "2024-03-01"]
    assert between(HOURS, "2024-03-01T23", "2024-03-02T00") == ["2024-03-01T23", "2024-03-02T00"]
    assert between(DAYS, "2024-03-02", "2024-03-01") == []
    assert between(WEEKS, "2024-12-23", "2025-01-06") == ["2024-12-23", "2024-12-30", "2025-01-06"]
    assert between(MONTHS, "2024-11-01", "2025-01-01") == ["2024-11-01", "2024-12-01", "2025-01-01"]
    assert (moved(WEEKS, "2024-01-08", -2), moved(MONTHS, "2024-03-01", -14)) == ("2023-12-25", "2023-01-01")
    assert dates_since_begin(WEEKS, "2024-03-04") == 9
    assert dates_since_begin(MONTHS, "2025-03-01") == 14
    assert dates_since_begin(DAYS, "2024-03-31") == 30
    assert dates_since_begin(HOURS, "2024-03-02T01") == 25


@pytest.mark.parametrize(
    ("schedule", "now", "ds"),
    [
        (DAYS, "2024-03-05T00:00:00+00:00", "2024-03-04"),
        (DAYS, "2024-03-04T23:59:59+00:00", "2024-03-03"),
        (NEW_YORK, "2024-03-05T04:59:00+00:00", "2024-03-03"),
        (HOURS, "2024-03-05T00:10:00+00:00", "2024-03-04T23"),
        (WEEKS, "2024-03-04T00:00:00+00:00", "2024-02-26"),
        (WEEKS, "2024-03-10T23:00:00+00:00", "2024-02-26"),
        (MONTHS, "2024-03-01T04:59:00+00:00", "2024-01-01"),
        (MONTHS, "2024-03-01T05:00:00+00:00", "2024-02-01"),
    ],
)
def test_the_last_date_is_the_one_whose_interval_has_ended(schedule: ScheduleConfig, now: str, ds: str) -> None:
    assert last_ended(schedule, dt.datetime.fromisoformat(now)) == ds


@pytest.mark.parametrize(
    ("schedule", "ds", "text", "filled"),
    [
        (DAYS, "2024-03-05", "a/{ds}/b", "a/2024-03-05/b"),
        (DAYS, "2024-03-05", "{ds_nodash}", "20240305"),
        (DAYS, "2024-03-05", "{ds - 27d}", "2024-02-07"),
        (DAYS, "2024-03-05", "{ ds_nodash+1d }", "20240306"),
        (DAYS, "2024-03-05", "{data_interval_start}", "2024-03-05T00:00:00+00:00"),
        (DAYS, "2024-03-05", "{data_interval_end}", "2024-03-06T00:00:00+00:00"),
        (NEW_YORK, "2024-03-10", "{data_interval_start}", "2024-03-10T05:00:00+00:00"),
        (NEW_YORK, "2024-03-10", "{data_interval_end}", "2024-03-11T04:00:00+00:00"),
        (NEW_YORK, "2024-03-11", "{data_interval_start - 1d}", "2024-03-10T05:00:00+00:00"),
        (NEW_YORK, "2024-03-11", "{data_interval_start - 24h}", "2024-03-10T04:00:00+00:00"),
        (HOURS, "2024-03-05T07", "{ds} {ds_nodash}", "2024-03-05T07 20240305T07"),
        (HOURS, "2024-03-05T07", "{ds - 8h} {ds - 1d}", "2024-03-04T23 2024-03-04T07"),
        (WEEKS, "2024-03-04", "{ds - 1d} {data_interval_end}", "2024-03-03 2024-03-11T00:00:00+00:00"),
        (MONTHS, "2024-03-01", "{ds} {data_interval_end}", "2024-03-01 2024-04-01T04:00:00+00:00"),
        (DAYS, "2024-03-05", "x rlike '[0-9]{4}' {{ds}} {}", "x rlike '[0-9]{4}' {ds} {}"),
    ],
)  # fmt: skip
def test_templates_are_filled_in(schedule: ScheduleConfig, ds: str, text: str, filled: str) -> None:
    assert render(text, schedule, interval_of(schedule, ds)) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{dss}",
            r"\{dss\} is no template; there are ds, ds_nodash, .*for a brace write it twice",
        ),
        ("{ds - 3w}", "an offset is"),
        ("{ds 27d}", "an offset is"),
        ("{ds - 3h}", "dates of this schedule are days, which move by d"),
        ("{ds - 800000d}", r"\{ds - 800000d\}: of 2024-03-05 that is in no year from 1 to 9999"),
    ],
)
def test_an_unknown_template_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(text, DAYS, interval_of(DAYS, "2024-03-05"))
