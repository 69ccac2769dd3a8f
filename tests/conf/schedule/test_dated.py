from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkring.conf.load import ConfigError, Resolved, load_config
from sparkring.conf.schedule.dated import DateRequest

NOW = dt.datetime(2024, 12, 1, tzinfo=dt.UTC)
RECIPE: dict[str, Any] = {
    "name": "sales",
    "schedule": {
        "begin": "2024-03-01",
        "timezone": "America/New_York",
        "window": 28,
        "wait_for": ["x/{ds_nodash}/_SUCCESS"],
    },
    "etl": {
        "sources": {
            "sales": {
                "path": "lake/{ds - 27d}",
                "format": "parquet",
                "columns": {"amount": "int"},
                "partitions": {"day": "date"},
            }
        },
        "rows": "sales",
        "features": {"amount": {"kind": "numeric"}},
        "split": {"kind": "time", "column": "day", "boundaries": {"valid": "{ds - 6d}", "test": "{ds - 2d}"}},
        "interval": {"column": "day", "sources": {"sales": "day"}},
    },
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (path := tmp_path / "sales.yaml").write_text(yaml.safe_dump(RECIPE))
    return str(path)


def load(recipe: str, *overrides: str, **request: str) -> Resolved:
    return load_config(recipe, overrides, DateRequest(**request, now=NOW) if request else None)


def test_a_date_fills_in_templates_and_sets_the_window(recipe: str) -> None:
    resolved = load(recipe, date="2024-04-10")
    etl = resolved.config.etl
    assert etl is not None and etl.interval is not None and resolved.config.schedule is not None
    interval = etl.interval
    assert (interval.last, interval.window, interval.time_zone) == ("2024-04-10", 28, "America/New_York")
    assert etl.sources["sales"].model_dump()["path"] == "lake/2024-03-14"
    assert [*etl.split.boundaries.items()] == [("valid", "2024-04-04"), ("test", "2024-04-08")]
    assert resolved.config.schedule.wait_for == ["x/20240410/_SUCCESS"]
    assert resolved.origins["etl.interval.last"] == resolved.origins["etl.interval.window"] == "schedule"
    assert resolved.interval is not None
    assert resolved.interval.start == dt.datetime(2024, 4, 10, 4, tzinfo=dt.UTC)
    assert load(recipe, date="2024-04-11").digest != resolved.digest


@pytest.mark.parametrize(
    ("unit", "begin", "ds"), [("week", "2024-03-04", "2024-04-08"), ("month", "2024-03-01", "2024-04-01")]
)
def test_dates_of_weeks_and_months_set_parts_of_weeks_and_months(recipe: str, unit: str, begin: str, ds: str) -> None:
    words = [f"schedule.interval={unit}", f"schedule.begin={begin}", "etl.split.boundaries.valid='{ds - 3d}'"]
    etl = load(recipe, *words, date=ds).config.etl
    assert etl is not None and etl.interval is not None
    assert (etl.interval.every, etl.interval.last, etl.interval.window) == (unit, ds, 28)


def test_without_a_date_the_recipe_is_checked_as_of_its_first_one(recipe: str) -> None:
    resolved = load(recipe)
    assert resolved.interval is None
    assert resolved.config.etl is not None and resolved.config.etl.interval is not None
    assert resolved.config.etl.interval.last == "2024-03-01"


def test_a_recipe_without_a_schedule_keeps_its_braces(tmp_path: Path) -> None:
    plain = {key: value for key, value in RECIPE.items() if key != "schedule"} | {"description": "{ds}"}
    plain["etl"] = RECIPE["etl"] | {"views": {"v": "SELECT '{x}'"}, "split": {"kind": "hash"}, "interval": None}
    (path := tmp_path / "plain.yaml").write_text(yaml.safe_dump(plain))
    etl = load_config(str(path)).config.etl
    assert etl is not None and etl.views == {"v": "SELECT '{x}'"}
    with pytest.raises(ConfigError, match="schedule: this recipe has none"):
        load(str(path), date="2024-04-10")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"date": "2024-02-29"}, "--date 2024-02-29: is before schedule.begin, 2024-03-01"),
        ({"date": "2024-12-02"}, "--date 2024-12-02: is in the future"),
        ({"date": "2024-04-10T07"}, "is not the start of its day in America/New_York"),
        ({"date": "2024-04-10", "start": "2024-04-11"}, "are two dates; give one"),
        ({"start": "2024-04-10", "end": "2024-04-11T00:00:00+00:00"}, "ends 2024-04-11T04:00:00"),
        ({"start": "2024-04-10", "end": "soon"}, "not an instant such as"),
        ({"end": "2024-04-11"}, "--date: say which date"),
    ],
)
def test_a_date_that_there_is_not_is_refused(recipe: str, request_: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(recipe, **request_)


def test_the_schedulers_interval_may_name_the_date(recipe: str) -> None:
    found = load(recipe, start="2024-04-10T04:00:00+00:00", end="2024-04-11T04:00:00+00:00").interval
    assert found is not None and found.ds == "2024-04-10"
    naive = load(recipe, start="2024-04-10T00:00", end="2024-04-11T00:00").interval
    assert naive == found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("etl.sources.sales.path=lake/{dss}", r"etl.sources.sales.path = 'lake/{dss}': {dss} is no template"),
        ("etl.split.boundaries.valid='{ds_ - 6d}'", "etl.split.boundaries.valid = .*is no template"),
        ("schedule.wait_for=['x/{day}']", "schedule.wait_for.0 = 'x/{day}': {day} is no template"),
        (
            "storage.runs=runs/{ds}",
            r"storage.runs = 'runs/{ds}': {ds} is not filled in here; templates may",
        ),
        ("tracking.tags={a: 'x {ds - 1d}'}", "tracking.tags.a = .*{ds - 1d} is not filled in here"),
        ("schedule.timezone='{ds}'", "schedule.timezone"),
        ("etl.interval.window=27", "etl.interval.window = 27: the schedule says 28; leave it out"),
        ("etl.interval.last=2024-01-01", "etl.interval.last = '2024-01-01': the schedule says '2024-04-10'"),
        ("etl.interval.every=week", "etl.interval.every = 'week': the schedule says 'day'"),
        ("etl.interval=null", "schedule.window = 28: needs etl.interval"),
        ("schedule.interval=week", "begin = '2024-03-01': the first week, such as 2026-01-05, a Monday"),
        ("schedule.begn=1", "schedule.begn: unknown key .*did you mean 'begin'"),
    ],
)
def test_a_recipe_that_its_schedule_does_not_fit_is_refused(recipe: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(recipe, override, date="2024-04-10")


def test_a_wrong_schedule_is_the_only_problem_that_is_shown(recipe: str) -> None:
    with pytest.raises(ConfigError) as found:
        load(recipe, "schedule.lookback=-1", date="2024-04-10")
    assert len(found.value.problems) == 1 and "schedule.lookback" in found.value.problems[0]


def test_hours_have_no_parts(recipe: str) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.interval = hour: etl.interval has parts of a day"):
        load(recipe, "schedule.interval=hour", "schedule.begin=2024-03-01T00", "schedule.timezone=UTC")
