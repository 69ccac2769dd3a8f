"""The kinds of source: which options go together, and by which names they are shown and stored."""

from __future__ import annotations

import pytest

from sparkring.conf.load import ConfigError, json_schema, load_config, parse_override
from sparkring.conf.sources import DeltaSource, FilesSource, IcebergSource


def iceberg(**values):
    return IcebergSource.model_validate({"format": "iceberg", "table": "prod.db.t"} | values)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"table": None}, "exactly one of table and path"),
        ({"path": "/lake/t"}, "exactly one of table and path"),
        ({"table": "db.t"}, "catalog.namespace.table"),
        ({"table": "prod..t"}, "catalog.namespace.table"),
        ({"snapshot-id": 5, "tag": "eod"}, "snapshot-id and tag are given"),
        ({"branch": "b", "as-of-timestamp": 5}, "branch and as-of-timestamp are given"),
        ({"as-of-timestamp": "yesterday"}, "'yesterday'"),
        ({"snapshot_id": 5}, "Extra inputs"),
        ({"columns": {"a": "int", "A": "int"}}, "'a' and 'A' are one name to Spark"),
    ],
)
def test_an_iceberg_table_is_named_once_and_read_at_one_snapshot(options, words):
    with pytest.raises(ValueError, match=words):
        iceberg(**options)


@pytest.mark.parametrize(
    ("value", "milliseconds"),
    [
        (1700000000123, 1700000000123),
        ("1700000000123", 1700000000123),
        ("2023-11-14T22:13:20.123999Z", 1700000000123),
        ("2023-11-14 23:13:20.123+01:00", 1700000000123),
        ("2023-11-14", 1699920000000),
    ],
)
def test_as_of_timestamp_is_milliseconds_or_an_instant(value, milliseconds):
    assert iceberg(**{"as-of-timestamp": value}).as_of_ms == milliseconds


RECIPE = """
etl:
  sources:
    weather: {{format: iceberg, table: prod.db.weather{options}}}
  rows: weather
"""


def recipe(tmp_path, options=""):
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE.format(options=options))
    return str(path)


def problem(tmp_path, options="", *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(tmp_path, options), overrides)
    return "\n".join(p for p in caught.value.problems if "weather" in p)


def test_hyphened_options_are_shown_as_they_are_written(tmp_path):
    assert "weather.snapshot-id = " in problem(tmp_path, ", snapshot-id: no number")
    assert "did you mean 'snapshot-id'?" in problem(tmp_path, ", snapshot_id: 5")
    assert "etl.sources.weather.snapshot-id = " in problem(tmp_path, "", "etl.sources.weather.snapshot-id=x")
    assert parse_override("etl.sources.weather.snapshot-id=5") == ("etl.sources.weather.snapshot-id", 5)
    schema = json_schema()["$defs"]["IcebergSource"]["properties"]
    assert {"snapshot-id", "as-of-timestamp"} <= schema.keys() and "snapshot_id" not in schema


def test_they_are_stored_so_with_their_defaults():
    stored = iceberg(**{"snapshot-id": 5}).model_dump(mode="json")
    assert stored["snapshot-id"] == 5 and stored["as-of-timestamp"] is None and "snapshot_id" not in stored
    assert iceberg(**{"snapshot-id": 5}) == IcebergSource.model_validate(stored)


def test_where_and_columns_are_content_and_which_snapshot_is_not():
    source = iceberg(**{"snapshot-id": 5, "where": "a = 1"})
    content = source.model_dump(mode="json", exclude=set(source.POINTERS))
    assert content == {"format": "iceberg", "where": "a = 1", "columns": {}}


def test_a_date_without_quotes_which_yaml_makes_one_is_an_instant(tmp_path):
    problems = problem(tmp_path, ", as-of-timestamp: 2024-01-31 12:00:00, tag: 5")
    assert "as-of-timestamp" not in problems and "weather.tag = 5" in problems


def test_the_version_that_was_read_replaces_whatever_was_asked_for() -> None:
    for asked in ({"branch": "audit"}, {"tag": "v1"}, {"as-of-timestamp": 5}, {"snapshot-id": 6}, {}):
        assert iceberg(**asked).at_version({"snapshot-id": 7, "files": 1}) == iceberg(**{"snapshot-id": 7})
    for asked in ({"versionAsOf": 3}, {"timestampAsOf": "2026-11-21"}, {}):
        delta = DeltaSource.model_validate({"format": "delta", "path": "t"} | asked)
        assert delta.at_version({"version": 4}) == DeltaSource(format="delta", path="t", versionAsOf=4)
    files = FilesSource(path="t.csv", columns={"a": "int"})
    assert files.at_version({"files": 1}) is files
