"""The `schedule` block: which dates a recipe is run for, and how. Durations are texts: `90s`, `30m`, `2h`, `1d`."""

import re
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, field_validator, model_validator

from sparkring.conf.calendar import Unit, begin_of, number_of
from sparkring.conf.schema import Strict, TimeZone
from sparkring.conf.sources.base import as_text
from sparkring.conf.uris import check_uri

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SHORTEST_LEASE_S = 2
DAY_FORM, HOUR_FORM = "%Y-%m-%d", "%Y-%m-%dT%H"
EXAMPLES = {"hour": "2026-01-01T00", "day": "2026-01-01", "week": "2026-01-05, a Monday", "month": "2026-01-01"}


def seconds(duration: str) -> int:
    """Convert a duration such as `90s`, `30m`, `2h` or `1d` to seconds, or raise ValueError."""
    found = re.fullmatch(r"(\d{1,9})([smhd])", duration)
    if found is None:
        raise ValueError("a duration is a whole number and a unit, one of s, m, h, d: 90s, 30m, 2h, 1d")
    return int(found[1]) * UNITS_S[found[2]]


def _duration(text: str) -> str:
    seconds(text)
    return text


def _begins(text: str, unit: Unit, form: str) -> bool:
    """Return whether the text is the start of a unit, in exactly this form (`2026-1-1` is not)."""
    try:
        return begin_of(unit, number_of(unit, datetime.strptime(text, form))).strftime(form) == text
    except ValueError:
        return False


Duration = Annotated[str, AfterValidator(_duration)]


class ScheduleConfig(Strict):
    """The dates that a recipe is run for, each by `--date`. Who starts them is a scheduler's business, such as cron."""

    interval: Unit = Field(
        "day",
        description="what a date stands for; hours are of UTC only, a week begins on Monday, a month on its first",
    )
    timezone: TimeZone = Field(
        "UTC", description="whose days they are; where clocks are changed, a day has 23 or 25 hours"
    )
    begin: Annotated[str, BeforeValidator(as_text)] = Field(
        description="the first date there is: 2026-01-01, of hours 2026-01-01T00; earlier ones are refused"
    )
    window: PositiveInt | None = Field(
        None, description="sets etl.interval.window: intervals that a dataset spans, up to the date's own"
    )
    lookback: Annotated[int, Field(ge=0)] = Field(
        2, description="intervals before the date's own whose sources are looked at again for late or corrected files"
    )
    full_check: PositiveInt = Field(
        30, description="every so many dates, the sources of all intervals of the window are looked at again"
    )
    missing: Literal["fail", "skip"] = Field("fail", description="sets etl.interval.missing")
    concurrency: Literal["forbid", "replace", "allow"] = Field(
        "forbid",
        description="where another date of the recipe runs: forbid: exit 75; replace: that one loses its lease and "
        "ends; allow: both run. One date is never run by two",
    )
    wait_for: list[str] = Field([], description="files or folders, of any storage, without which a date does not begin")
    wait_timeout: Duration = Field("0s", description="how long to wait for them; then exit 75")
    deadline: Duration | None = Field(
        None, description="after the end of the interval; a date that ends later is marked late; the job goes on"
    )
    lease: Duration = Field("60s", description="a job that does not renew its lease for this long can lose its date")

    @field_validator("wait_for")
    @classmethod
    def _openable(cls, uris: list[str]) -> list[str]:
        for uri in uris:
            check_uri(uri)
        return uris

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.interval == "hour" and self.timezone != "UTC":
            raise ValueError(
                f"timezone = {self.timezone!r}: hours are of UTC; where clocks are changed, one hour is there twice"
            )
        if not _begins(self.begin, self.interval, self.form):
            raise ValueError(f"begin = {self.begin!r}: the first {self.interval}, such as {self.example}")
        if seconds(self.lease) < SHORTEST_LEASE_S:
            raise ValueError(f"lease = {self.lease!r}: at least {SHORTEST_LEASE_S}s")
        return self

    @property
    def form(self) -> str:
        """How dates are written."""
        return HOUR_FORM if self.interval == "hour" else DAY_FORM

    @property
    def example(self) -> str:
        return EXAMPLES[self.interval]
