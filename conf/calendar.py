"""Hours, days, weeks and months of a calendar, counted, so that moving by some of them is a sum."""

from __future__ import annotations

import datetime as dt
from typing import Literal

Unit = Literal["hour", "day", "week", "month"]
EPOCH = dt.datetime(1970, 1, 1)
MONDAY = dt.datetime(1969, 12, 29)  # of the week that 1970 begins in
LENGTHS = {"hour": dt.timedelta(hours=1), "day": dt.timedelta(days=1), "week": dt.timedelta(weeks=1)}


def number_of(unit: Unit, wall: dt.datetime) -> int:
    """Return the number of whole units between 1970-01-01 and `wall`, a time without a zone."""
    if unit == "month":
        return (wall.year - 1970) * 12 + wall.month - 1
    return (wall - (MONDAY if unit == "week" else EPOCH)) // LENGTHS[unit]


def begin_of(unit: Unit, number: int) -> dt.datetime:
    """Return the start of the unit with this number. ValueError outside the years 1 to 9999."""
    try:
        if unit == "month":
            return dt.datetime(1970 + number // 12, number % 12 + 1, 1)
        return (MONDAY if unit == "week" else EPOCH) + number * LENGTHS[unit]
    except (ValueError, OverflowError):
        raise ValueError(f"a {unit} that begins {number} {unit}s after 1970 is in no year from 1 to 9999") from None
