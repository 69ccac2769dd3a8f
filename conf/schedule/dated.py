"""A recipe for one date: its templates filled in, and its `etl.interval` set by its schedule.

Works on the values of a recipe before they are checked, so that a template may stand where a date must.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import ValidationError

from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schedule.dates import (
    DataInterval,
    check_known,
    instant_of,
    interval_of,
    names_templates,
    parse_date,
    render,
)
from sparkring.conf.sources.base import as_text

TEMPLATED = ("etl", "predict")  # blocks, besides schedule.wait_for
ORIGIN = "schedule"  # of the values that a schedule sets


@dataclass(frozen=True)
class DateRequest:
    """The date that a command is given. `start` and `end`: of the data interval, ISO 8601; "": not given."""

    date: str = ""
    start: str = ""
    end: str = ""
    now: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.UTC))


@dataclass(frozen=True)
class DatedValues:
    """The values of a recipe for one date. `set_keys`: those that the schedule decided."""

    values: dict[str, Any]
    interval: DataInterval | None = None
    set_keys: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def apply_date(values: dict[str, Any], request: DateRequest | None) -> DatedValues:
    """Fill in the date of a recipe with a schedule; without a request the schedule's first date, to check the rest.

    A recipe whose schedule is missing or wrong comes back as it was: what is wrong there is found by its own check.
    """
    if values.get("schedule") is None:
        problem = "schedule: this recipe has none, so it has no dates; add the block, or run it without --date"
        return DatedValues(values, problems=(problem,) if request is not None else ())
    if (schedule := read_schedule(values["schedule"])) is None:
        return DatedValues(values)
    interval, problems = interval_of(schedule, schedule.begin), list[str]()
    if request is not None:
        try:
            interval = requested(schedule, request)
        except ValueError as error:
            return DatedValues(values, problems=(str(error),))
    problems += misplaced(values)
    block = values["schedule"]
    fill = partial(_filled, schedule=schedule, interval=interval, problems=problems)
    waits = {"wait_for": fill(block["wait_for"], "schedule.wait_for")} if "wait_for" in block else {}
    filled = {key: fill(value, key) for key, value in values.items() if key in TEMPLATED}
    values = values | filled | {"schedule": block | waits}
    values, set_keys = _with_window(values, schedule, interval, problems)
    return DatedValues(values, interval if request is not None else None, set_keys, tuple(problems))


def read_schedule(block: Any) -> ScheduleConfig | None:
    """Parse the schedule without `wait_for`, which may hold templates; None if it is invalid."""
    if not isinstance(block, dict):
        return None
    try:
        return ScheduleConfig.model_validate({key: value for key, value in block.items() if key != "wait_for"})
    except ValidationError:
        return None


def requested(schedule: ScheduleConfig, request: DateRequest) -> DataInterval:
    """Return the interval that a command asks for. ValueError names option, value and rule."""
    named = {"--date": request.date, "--data-interval-start": request.start}
    given = {option: text for option, text in named.items() if text}
    if not given:
        raise ValueError("--date: say which date; this recipe has a schedule")
    found = dict[str, str]()
    for option, text in given.items():
        try:
            found[option] = check_known(schedule, parse_date(schedule, text), request.now)
        except ValueError as error:
            raise ValueError(f"{option} {text}: {error}") from None
    if len(set(found.values())) > 1:
        raise ValueError(f"--date {request.date} and --data-interval-start {request.start} are two dates; give one")
    interval = interval_of(schedule, next(iter(found.values())))
    if request.end and (end := _instant(request.end, schedule)) != interval.end:
        raise ValueError(
            f"--data-interval-end {request.end}: the {schedule.interval} {interval.ds} of {schedule.timezone} ends "
            f"{interval.end.isoformat()}, not {end}; let the scheduler's interval be schedule.interval"
        )
    return interval


def _instant(text: str, schedule: ScheduleConfig) -> str | dt.datetime:
    """Parse an instant, by default in the schedule's zone; return a message if it is invalid."""
    try:
        found = dt.datetime.fromisoformat(text)
    except ValueError:
        return f"an instant such as {dt.datetime(2013, 3, 2, tzinfo=dt.UTC).isoformat()}: {text}"
    return found if found.tzinfo else instant_of(schedule, found)


def misplaced(values: dict[str, Any]) -> list[str]:
    """List templates in keys where templates are not filled in."""
    rest = {key: value for key, value in values.items() if key not in (*TEMPLATED, "description")}
    if isinstance(rest.get("schedule"), dict):
        rest["schedule"] = {key: value for key, value in rest["schedule"].items() if key != "wait_for"}
    return [
        f"{key} = {text!r}: {names_templates(text)[0]} is not filled in here; templates may stand in etl, predict and "
        "schedule.wait_for"
        for key, text in _texts(rest, "")
        if names_templates(text)
    ]


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for every text below a value."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, f"{key}.{name}" if key else str(name))


def _filled(value: Any, key: str, schedule: ScheduleConfig, interval: DataInterval, problems: list[str]) -> Any:
    """Return a copy of a value with its templates filled in.

    Args:
        value: part of the recipe's values.
        key: its path, for problems.
        schedule: schedule of the recipe.
        interval: data interval of the date.
        problems: list to which problems with templates are appended.
    """
    if isinstance(value, str):
        try:
            return render(value, schedule, interval)
        except ValueError as error:
            problems.append(f"{key} = {value[:200]!r}: {error}")
            return value
    if isinstance(value, dict):
        return {name: _filled(item, f"{key}.{name}", schedule, interval, problems) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, f"{key}.{n}", schedule, interval, problems) for n, item in enumerate(value)]
    return value


def _with_window(
    values: dict[str, Any], schedule: ScheduleConfig, interval: DataInterval, problems: list[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values with `etl.interval` set by the schedule, and the keys that it set."""
    etl = values.get("etl")
    etl = etl if isinstance(etl, dict) else {}
    own = etl.get("interval")
    if not isinstance(own, dict):
        if schedule.window is not None:
            problems.append(f"schedule.window = {schedule.window}: needs etl.interval, whose window it is")
        return values, ()
    if schedule.interval == "hour":
        problems.append(
            "schedule.interval = hour: etl.interval has parts of a day, week or month; set it to one of them"
        )
        return values, ()
    decided: dict[str, Any] = {
        "every": schedule.interval,
        "time_zone": schedule.timezone,
        "last": interval.ds,
        "missing": schedule.missing,
    }
    decided |= {"window": schedule.window} if schedule.window is not None else {}
    for key in decided.keys() & own.keys():
        if str(own[key]) != str(decided[key]):
            problems.append(
                f"etl.interval.{key} = {as_text(own[key])!r}: the schedule says {decided[key]!r}; "
                "leave it out of etl.interval"
            )
    interval_block = own | decided
    return values | {"etl": etl | {"interval": interval_block}}, tuple(f"etl.interval.{key}" for key in decided)
