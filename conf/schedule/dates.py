"""Arithmetic of dates: which interval a date stands for, its neighbors, and templates such as `{ds - 27d}`.

A date is named by the start of its data interval (Airflow's `ds`): `2013-03-01`, of hours `2013-03-01T05`; a week by
its Monday, a month by its first day. The interval is one of wall-clock time in `schedule.timezone`; its ends are
instants in UTC.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass
from zoneinfo import ZoneInfo

from sparkring.conf.calendar import begin_of, number_of
from sparkring.conf.schedule.block import DAY_FORM, HOUR_FORM, ScheduleConfig

NODASH = {DAY_FORM: "%Y%m%d", HOUR_FORM: "%Y%m%dT%H"}
TEMPLATE = re.compile(r"\{\{|\}\}|\{\s*([A-Za-z_]\w*)\s*([^{}]*)\}")
OFFSET = re.compile(r"([+-])\s*(\d{1,6})\s*([a-z]+)\s*")
DAY, HOUR = dt.timedelta(days=1), dt.timedelta(hours=1)


@dataclass(frozen=True)
class DataInterval:
    """The interval of a date: from `start` to `end`, without it, both in UTC."""

    ds: str
    start: dt.datetime
    end: dt.datetime
    number: int  # of hours, days, weeks or months since 1970: each date's is one more than the last one's


def number_of_date(schedule: ScheduleConfig, ds: str) -> int:
    """Return the number of intervals between 1970 and the date `ds`, in canonical form."""
    return number_of(schedule.interval, dt.datetime.strptime(ds, schedule.form))


def date_of_number(schedule: ScheduleConfig, number: int) -> str:
    """Return the date with this number, the inverse of `number_of_date`."""
    return begin_of(schedule.interval, number).strftime(schedule.form)


def interval_of(schedule: ScheduleConfig, ds: str) -> DataInterval:
    """Return the data interval of the date `ds`, in canonical form."""
    number = number_of_date(schedule, ds)
    first, following = (begin_of(schedule.interval, each) for each in (number, number + 1))
    return DataInterval(ds, instant_of(schedule, first), instant_of(schedule, following), number)


def moved(schedule: ScheduleConfig, ds: str, count: int) -> str:
    """Return the date `count` intervals after `ds`."""
    return date_of_number(schedule, number_of_date(schedule, ds) + count)


def between(schedule: ScheduleConfig, first: str, last: str) -> list[str]:
    """List all dates from `first` to `last`, both included; [] if `last` is earlier."""
    numbers = range(number_of_date(schedule, first), number_of_date(schedule, last) + 1)
    return [date_of_number(schedule, number) for number in numbers]


def dates_since_begin(schedule: ScheduleConfig, ds: str) -> int:
    """Return the number of dates from `schedule.begin` up to, but not including, `ds`."""
    return number_of_date(schedule, ds) - number_of_date(schedule, schedule.begin)


def last_ended(schedule: ScheduleConfig, now: dt.datetime) -> str:
    """Return the newest date whose interval has ended at `now`."""
    local = now.astimezone(ZoneInfo(schedule.timezone)).replace(tzinfo=None)
    return date_of_number(schedule, number_of(schedule.interval, local) - 1)


def parse_date(schedule: ScheduleConfig, text: str) -> str:
    """Parse an ISO 8601 date or instant that starts an interval; ValueError for any other."""
    every, example = schedule.interval, schedule.example
    try:
        found = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"no date; this schedule's are each a whole {every}, such as {example}") from None
    if every == "hour" and re.fullmatch(r"\d{4}-?\d\d-?\d\d", text):
        raise ValueError(f"a whole day; this schedule's dates are each a whole hour, such as {example}")
    local = found.astimezone(ZoneInfo(schedule.timezone)).replace(tzinfo=None) if found.tzinfo else found
    ds = date_of_number(schedule, number_of(every, local))
    given = found if found.tzinfo else instant_of(schedule, found)
    if given != interval_of(schedule, ds).start:
        raise ValueError(f"is not the start of its {every} in {schedule.timezone}; use {ds}")
    return ds


def check_known(schedule: ScheduleConfig, ds: str, now: dt.datetime) -> str:
    """Return the date; ValueError if it is before `begin` or starts after `now`."""
    if ds < schedule.begin:
        raise ValueError(f"is before schedule.begin, {schedule.begin}; give a later date, or set begin earlier")
    start = interval_of(schedule, ds).start
    if start > now:
        raise ValueError(
            f"is in the future: its interval begins {start.isoformat()}, and this host's clock shows "
            f"{now.isoformat(timespec='seconds')}"
        )
    return ds


def instant_of(schedule: ScheduleConfig, wall: dt.datetime) -> dt.datetime:
    """Convert wall-clock time in the schedule's zone to an instant in UTC."""
    # Where clocks skip midnight, the day begins with the instant at which they do.
    return wall.replace(tzinfo=ZoneInfo(schedule.timezone)).astimezone(dt.UTC)


# --- templates


def render(text: str, schedule: ScheduleConfig, interval: DataInterval) -> str:
    """Replace the templates in a text; `{{` and `}}` stand for braces. ValueError names an unknown one."""

    def replace(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        if found[1] not in VALUES:
            raise ValueError(
                f"{found[0]} is no template; there are {', '.join(VALUES)}, each with an offset such as {{ds - 27d}}; "
                "for a brace write it twice"
            )
        try:
            return VALUES[found[1]](schedule, _shifted(schedule, interval, found[1], found[2], found[0]))
        except OverflowError:
            raise ValueError(f"{found[0]}: of {interval.ds} that is in no year from 1 to 9999") from None

    return TEMPLATE.sub(replace, text)


def names_templates(text: str) -> list[str]:
    """List the templates in a text that `render` knows, as written."""
    return [found[0] for found in TEMPLATE.finditer(text) if found[1] in VALUES]


def _shifted(schedule: ScheduleConfig, interval: DataInterval, name: str, offset: str, shown: str) -> dt.datetime:
    """Return the template's time, moved by the offset: without a zone for `ds`, else an instant.

    Args:
        schedule: schedule that defines days and time zone.
        interval: data interval of the date.
        name: name of the template.
        offset: text after the name; "" for no offset.
        shown: the whole template, for errors.
    """
    found = OFFSET.fullmatch(offset)
    if offset and (found is None or found[3] not in ("h", "d")):
        raise ValueError(f"{shown}: an offset is + or -, a number and h or d, such as {{ds - 27d}}")
    count = int(found[1] + found[2]) if found else 0
    in_hours = found is not None and found[3] == "h"
    if name.startswith("ds"):
        if in_hours and schedule.interval != "hour":
            raise ValueError(f"{shown}: dates of this schedule are days, which move by d")
        return dt.datetime.strptime(interval.ds, schedule.form) + count * (HOUR if in_hours else DAY)
    instant = interval.start if name == "data_interval_start" else interval.end
    if in_hours:
        return instant + count * HOUR
    local = instant.astimezone(ZoneInfo(schedule.timezone)).replace(tzinfo=None)  # days of wall-clock time
    return instant_of(schedule, local + count * DAY) if count else instant


def _ds(schedule: ScheduleConfig, shifted: dt.datetime) -> str:
    return shifted.strftime(schedule.form)


def _nodash(schedule: ScheduleConfig, shifted: dt.datetime) -> str:
    return shifted.strftime(NODASH[schedule.form])


def _iso(_: ScheduleConfig, shifted: dt.datetime) -> str:
    return shifted.isoformat()


VALUES: dict[str, Callable[[ScheduleConfig, dt.datetime], str]] = {
    "ds": _ds,
    "ds_nodash": _nodash,
    "data_interval_start": _iso,
    "data_interval_end": _iso,
}
