"""The recipe's schema refuses, by key and rule, what no run can mean. Combinations of blocks: test_rules.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.config import RunConfig

RECIPES = Path(__file__).resolve().parents[2] / "conf/recipes"
BLOCK = {
    "sources": {"t": {"path": "t.csv", "columns": {"a": "int", "y": "boolean"}}},
    "rows": "t",
    "label": "y",
    "features": {"a": {"kind": "numeric"}},
}


def refused(**changes) -> str:
    with pytest.raises(ValidationError) as caught:
        EtlConfig.model_validate(BLOCK | changes)
    return str(caught.value)


def test_the_smallest_block_is_complete():
    config = EtlConfig.model_validate(BLOCK)
    assert config.split.shares == {"train": 0.8, "valid": 0.1, "test": 0.1} and config.shard.row_group is None


def test_flights_block_is_valid():
    block = yaml.safe_load((RECIPES / "flights.yaml").read_text())["etl"]
    assert EtlConfig.model_validate(block).label == "late"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rowz": "t"}, "rowz"),
        ({"features": {"SparkRing_Row": {"kind": "numeric", "column": "a"}}}, "['SparkRing_Row']: names that begin"),
        ({"features": {"sparkring_sample": {"kind": "numeric", "column": "a"}}}, "['sparkring_sample']: names that"),
        ({"keep": ["SPARKRING_ROW"]}, "['SPARKRING_ROW']: names that begin"),
        ({"label": "sparkring_row"}, "['sparkring_row']: names that begin"),
        ({"rows": "u"}, "no view or source"),
        ({"views": {"t": "select 1"}}, "sources already"),
        ({"one_per": "u"}, "is no source"),
        ({"features": {}}, "needs `features`"),
        ({"features": {"y": {"kind": "numeric"}}}, "one role"),
        ({"features": {"z": {"kind": "numeric", "column": "y"}}}, "reads the label"),
        ({"features": {"a": {"kind": "numerical"}}}, "numerical"),
        ({"features": {"a": {"kind": "passthrough", "nulls": "fill"}}}, "come together"),
        ({"kind": "text"}, "come together"),
        ({"checks": [{"name": "c", "kind": "range", "column": "a"}]}, "min, max or both"),
        ({"checks": [{"name": "c", "kind": "unique"}]}, "needs ['columns']"),
        ({"checks": [{"name": "c", "kind": "null_share", "column": "a", "sql": "a"}]}, "has no ['sql']"),
        ({"checks": [{"name": "c", "kind": "referential", "column": "a", "to": "u.a"}]}, "no such source"),
        ({"checks": [{"name": "c", "kind": "null_share", "column": "a"}] * 2}, "given twice"),
        ({"split": {"shares": {"train": 0.5, "test": 0.4}}}, "sum to 0.9"),
        ({"split": {"kind": "time", "column": "d"}}, "boundaries"),
        ({"split": {"kind": "time", "column": "d", "boundaries": {"train": "2020-01-01"}}}, "no boundary"),
        ({"split": {"kind": "time", "column": "d", "boundaries": {"a": "soon"}}}, "a = 'soon': not an ISO"),
        ({"split": {"kind": "time", "column": "d", "boundaries": {"a": "2020-01-01", "b": "2020-01-01"}}}, "same"),
        ({"sources": {"t": {"path": "t.csv"}}}, "must be declared"),
        ({"shard": {"row_group": 0}}, "greater than 0"),
        ({"shard": {"shards": 1}}, "must say how many files each split has, such as {train: 1, valid: 1}"),
        (
            {"sources": {"t": {"path": "t.csv", "columns": {"v": "int", "V": "int"}}}},
            "'v' and 'V' are one name",
        ),
        ({"views": {"T": "select 1"}}, "'t' and 'T' are one name"),
        ({"features": {"a": {"kind": "numeric"}, "A": {"kind": "numeric", "column": "a"}}}, "'a' and 'A' are one name"),
        ({"keep": ["Y"]}, "'Y' and 'y' are one name"),
        ({"sources": {"t": {"path": "t.csv", "columns": {"a": "int"}, "options": {"escape": "x"}}}}, "escape"),
        ({"sources": {"t": {"path": "t", "format": "parquet", "columns": {"a": "int"}, "options": {}}}}, "for csv"),
        (
            {"sources": {"t": {"path": "t", "format": "avro"}}},
            "spark-submit --packages org.apache.spark:spark-avro_2.13",
        ),
        (
            {"sources": {"t": {"path": "t", "format": "xml"}}},
            "format must be one of ['binaryFile', 'csv', 'delta', 'iceberg', 'jdbc', 'json', 'orc', ",
        ),
        ({"sources": {"t": {"path": "t", "columns": {"a": "int"}, "where": "a = 1"}}}, "declare them in partitions"),
        (
            {"sources": {"t": {"path": "t", "columns": {"a": "int"}, "partitions": {"a": "date"}}}},
            "'a' is date in partitions and int in columns",
        ),
        (
            {"sources": {"t": {"path": "t", "columns": {"a": "int"}, "partitions": {"A": "int"}}}},
            "columns and partitions: 'a' and 'A' are one name",
        ),
        (
            {"sources": {"t": {"path": "t", "format": "text", "partitions": {"Path": "string"}}}},
            "columns and partitions: 'path' and 'Path' are one name",
        ),
    ],
)
def test_impossible_blocks_are_refused_by_rule(changes, words):
    assert words in refused(**changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reader": "petastorm", "filters": [["a", ">", 1]]}, "filters: only reader native has this"),
        ({"reader": "petastorm", "audit": True, "decoders": {"i": "image"}}, "audit, decoders: only reader native"),
        ({"petastorm": {"url": "file:///x"}}, "petastorm.url is given but reader is native"),
        ({"verify": "off", "on_corrupt": "quarantine"}, "verify may not be off"),
        ({"filters": [["a", "~", 1]]}, "filters.0.1"),
        ({"filters": [["a", "in", 5]]}, "'in' wants a list of values"),
        ({"filters": [["a", "not in", []]]}, "'not in' wants a list of values"),
        ({"filters": [["a", "==", [1]]]}, "'==' wants one value"),
        ({"filters": [["a", "==", None]]}, "a null row is never kept"),
        ({"seed": -1}, "seed"),
        ({"lanes": 0}, "lanes"),
        ({"decoders": {"i": "video"}}, "decoders.i"),
        ({"mix": {"parts": [{"dataset": "a"}]}}, "mix.parts"),
        ({"mix": {"parts": [{"dataset": "a"}, {"dataset": "b", "weight": 0}]}}, "mix.parts.1.weight"),
        ({"windows": 3}, "windows"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate(given)
    lines = [".".join(str(p) for p in e["loc"]) + ": " + e["msg"] for e in caught.value.errors()]
    assert message in " ".join(lines)


def test_defaults_are_possible_and_frozen() -> None:
    config = DataConfig()
    assert DataConfig.model_validate(config.model_dump()) == config
    with pytest.raises(ValidationError):
        config.lanes = 3  # type: ignore[misc]


def test_defaults_are_a_ring_of_two_that_never_shrinks() -> None:
    launch = LaunchConfig()
    assert (launch.world, launch.min_world, launch.max_attempts) == (2, None, 3)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"world": 2, "min_world": 3}, r"min_world = 3: must not be above world = 2"),
        ({"world": 0}, "greater than 0"),
        ({"backoff_s": -1.0}, "greater than or equal to 0"),
        ({"max_attempts": 0}, "greater than 0"),
        ({"silence_timeout_s": 0}, "greater than 0"),
        ({"gpus_per_rank": -1}, "greater than or equal to 0"),
        ({"wrld": 2}, "Extra inputs"),
    ],
)
def test_values_that_cannot_be(values: dict[str, object], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        LaunchConfig(**values)  # type: ignore[arg-type]


def test_no_hang_limit_is_allowed() -> None:
    assert LaunchConfig(hang_timeout_s=None).hang_timeout_s is None


IN_PARTS = {
    "sources": {
        "t": {"path": "t", "format": "parquet", "columns": {"a": "int"}, "partitions": {"day": "date", "n": "int"}},
        "u": {"format": "jdbc", "url_env": "U", "dbtable": "u"},
    },
    "one_per": "t",
    "label": None,
    "interval": {"column": "day", "sources": {"t": "day"}, "last": "2013-03-28", "window": 28},
}


def test_a_recipe_in_parts():
    config = EtlConfig.model_validate(BLOCK | IN_PARTS)
    assert config.interval is not None and config.interval.every == "day" and config.interval.missing == "fail"
    yaml_day = IN_PARTS | {"interval": IN_PARTS["interval"] | {"last": yaml.safe_load("2013-03-28")}}
    assert EtlConfig.model_validate(BLOCK | yaml_day) == config


def with_interval(**changes):
    return {"interval": IN_PARTS["interval"] | changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (with_interval(sources={"x": "day"}), "'x' is no source"),
        (with_interval(sources={"t": "day", "u": "day"}), "interval.sources.u: a jdbc source is read whole"),
        (with_interval(sources={"t": "month"}), "must be a partition column of type date, and it is none"),
        (with_interval(sources={"t": "n"}), "must be a partition column of type date, and it is int"),
        (with_interval(sources={}), "one_per = 't': must be one of interval.sources"),
        ({"one_per": None} | with_interval(look_back=1), "interval.look_back: needs `one_per`"),
        (with_interval(time_zone="Mars"), "'Mars' is no time zone"),
        (with_interval(time_zone="America"), "'America' is no time zone"),
        (with_interval(last="2013-02-30"), "interval.last"),
        (with_interval(window=0), "interval.window"),
        (with_interval(every="hour"), "interval.every"),
        (
            {"split": {"kind": "time", "column": "at", "boundaries": {"valid": "2013-03-27"}}},
            "split.column = 'at': must be interval.column, 'day'",
        ),
        ({"shard": {"shards": {"train": 2}}}, "shard.shards: every part has files of its own"),
        (
            {"checks": [{"name": "once", "kind": "unique", "columns": ["a"], "level": "row"}]},
            "'once': which of equal rows is kept must not depend on other parts; add 'day'",
        ),
        ({"kind": "text", "text": {}, "features": {}}, "text is packed across documents"),
    ],
)
def test_what_cannot_be_in_parts_is_refused(changes, words):
    assert words in refused(**IN_PARTS | changes)


def test_numbers_and_bools_of_yaml_are_texts_for_spark() -> None:
    conf = {"spark.sql.shuffle.partitions": 8, "spark.speculation": True, "spark.memory.fraction": 0.5, "my.token": 12}
    found = SparkConfig.model_validate({"conf": conf})
    assert found.settings() == {
        "spark.sql.shuffle.partitions": "8", "spark.speculation": "true", "spark.memory.fraction": "0.5",
        "my.token": "12",
    }  # fmt: skip
    assert "12" not in str(found)


@pytest.mark.parametrize(
    ("uri", "unknown"),
    [
        (None, None), ("http://host:5000", None), ("sqlite:////tmp/a.db", None), ("mysql+pymysql://h/d", None),
        ("/a/folder", None), ("htp://host:5000", "htp"), ("s3://bucket/a", "s3"),
    ],
)  # fmt: skip
def test_stores_that_mlflow_has(uri: str | None, unknown: str | None) -> None:
    assert TrackingConfig(uri=uri).unknown_store == unknown


def test_the_code_that_a_model_needs_is_named_by_key() -> None:
    assert RunConfig(name="t").model_code == {"model.factory": "sparkring.training.models.tabular:Tabular"}
    own = {"model": {"factory": "a:B", "task": "c:D"}, "data": {"decoders": {"photo": "e:f", "map": "image"}}}
    expected = {"model.factory": "a:B", "model.task": "c:D", "data.decoders.photo": "e:f"}
    assert RunConfig.model_validate({"name": "t"} | own).model_code == expected


@pytest.mark.parametrize(
    ("words", "split_rows", "expected"),
    [
        ({}, 10_000, 1024),  # a batch of training
        ({"parallel": {"accumulate": 8}}, 10_000, 128),  # as much of it as is computed at a time
        ({"train": {"global_batch": 3}, "parallel": {"accumulate": 4}}, 10_000, 1),
        ({"parallel": {"pp": 2, "micro_batches": 4, "accumulate": 2}}, 10_000, 128),
        ({"train": {"eval_batch": 8192}}, 10_000, 8192),
        ({"train": {"eval_batch": 8192}}, 250, 250),  # the rest would be padding, and computed
        ({}, 0, 1),
    ],
)
def test_evaluation_takes_as_many_rows_at_a_time_as_training_does(
    words: dict[str, Any], split_rows: int, expected: int
) -> None:
    assert RunConfig.model_validate({"name": "t"} | words).evaluation_batch(split_rows) == expected
