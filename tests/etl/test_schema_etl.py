"""What a recipe's etl block may say, and how it is refused."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from conf.schema_etl import EtlConfig

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
        ({"sources": {"t": {"path": "t.csv"}}}, "must be declared"),
        ({"shard": {"row_group": 0}}, "greater than 0"),
        (
            {"sources": {"t": {"path": "t.csv", "columns": {"v": "int", "V": "int"}}}},
            "'v' and 'V' are one name",
        ),
        ({"views": {"T": "select 1"}}, "'t' and 'T' are one name"),
        ({"features": {"a": {"kind": "numeric"}, "A": {"kind": "numeric", "column": "a"}}}, "'a' and 'A' are one name"),
        ({"keep": ["Y"]}, "'Y' and 'y' are one name"),
        ({"sources": {"t": {"path": "t.csv", "columns": {"a": "int"}, "options": {"escape": "x"}}}}, "escape"),
        ({"sources": {"t": {"path": "t", "format": "parquet", "columns": {"a": "int"}, "options": {}}}}, "for csv"),
    ],
)
def test_impossible_blocks_are_refused_by_rule(changes, words):
    assert words in refused(**changes)
