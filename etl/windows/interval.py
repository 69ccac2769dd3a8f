"""Intervals of wall-clock time: days, weeks or months of a time zone, and the window of them that a dataset spans."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from zoneinfo import ZoneInfo

from sparkring.conf.blocks.etl import IntervalConfig
from sparkring.conf.calendar import Unit, begin_of, number_of
from sparkring.etl.errors import EtlError


@dataclass(frozen=True, order=True)
class Interval:
    """The days `first` to `next`, without it, as clocks in `zone` show them."""

    first: dt.date
    next: dt.date
    zone: str

    @property
    def label(self) -> str:
        """Names the interval everywhere: `2013-03-28`."""
        return self.first.isoformat()

    @property
    def start(self) -> dt.datetime:
        """Its first instant, in UTC. A day has 23 or 25 hours where clocks are changed in it."""
        return _midnight(self.first, self.zone)

    @property
    def end(self) -> dt.datetime:
        """The first instant after it, in UTC."""
        return _midnight(self.next, self.zone)

    def condition(self, column: str) -> str:
        """Return SQL that keeps the interval's rows by a date column."""
        return f"`{column}` >= '{self.first}' AND `{column}` < '{self.next}'"


def _midnight(day: dt.date, zone: str) -> dt.datetime:
    # Where clocks skip midnight, the day begins with the instant at which they do.
    return dt.datetime.combine(day, dt.time(), ZoneInfo(zone)).astimezone(dt.UTC)


def interval_from(config: IntervalConfig, first: dt.date) -> Interval:
    """Return the interval that starts on this day."""
    return Interval(first, _moved(first, config.every, 1), config.time_zone)


def before(config: IntervalConfig, interval: Interval, count: int) -> list[Interval]:
    """List the `count` intervals before one, oldest first."""
    return [interval_from(config, _moved(interval.first, config.every, -n)) for n in range(count, 0, -1)]


def window_of(config: IntervalConfig) -> list[Interval]:
    """List the intervals of a dataset, oldest first. EtlError if none starts on the day `last`."""
    last = interval_from(config, beginning("etl.interval.last", config.last, config))
    return [*before(config, last, config.window - 1), last]


def beginning(key: str, text: str, config: IntervalConfig) -> dt.date:
    """Parse the first day of an interval. EtlError names `key` for another day, or for what is no day."""
    try:
        day = dt.date.fromisoformat(text)
    except ValueError as error:
        raise EtlError(f"{key} = {text!r}: not a day, such as 2013-03-28 ({error})") from error
    first = _first_day(day, config.every)
    if first != day:
        raise EtlError(f"{key} = {text!r}: is not the first day of its {config.every}; use {first}")
    return day


def _first_day(day: dt.date, every: Unit) -> dt.date:
    return begin_of(every, number_of(every, dt.datetime.combine(day, dt.time()))).date()


def _moved(first: dt.date, every: Unit, count: int) -> dt.date:
    """Return the first day of the interval `count` intervals after the one starting on `first`."""
    return begin_of(every, number_of(every, dt.datetime.combine(first, dt.time())) + count).date()
