"""Weights that are none are found by kind, of good rows alone; a split of weights 0 by name."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.etl.checks import RULE
from sparkring.etl.columns.statistics import Measured, measure
from sparkring.etl.errors import EtlError
from sparkring.etl.split import SPLIT
from sparkring.etl.weights import WEIGHTED, check_weighted, check_weights, fit_weight, weighted_rows


def counted(*groups: dict[str, Any]) -> pa.Table:
    nothing = {RULE: None, SPLIT: "train", "__null": 0, "__negative": 0, "__nan": 0, WEIGHTED: 0}
    return pa.Table.from_pylist([nothing | group for group in groups])


def test_rows_without_a_weight_are_counted_by_kind() -> None:
    found = counted({"__null": 2, "__nan": 1}, {SPLIT: "test", "__negative": 4})
    with pytest.raises(EtlError, match=r"etl\.weight = 'w': 7 rows have no weight \(null: 2, negative: 4, NaN or inf"):
        check_weights("w", found)
    with pytest.raises(EtlError, match=r"sql: w BETWEEN 0 AND 1e300, level: row"):
        check_weights("w", counted({"__negative": 1}))


def test_quarantined_rows_need_no_weight() -> None:
    found = counted({RULE: "weighted", "__null": 2, WEIGHTED: 9}, {WEIGHTED: 3}, {WEIGHTED: 4}, {SPLIT: "test"})
    check_weights("w", found)
    assert weighted_rows(found) == {"train": 7, "test": 0}


def test_a_split_of_which_no_row_counts_is_named() -> None:
    check_weighted("w", {"train": 1, "test": 1}, ["train", "test"])
    check_weighted(None, {}, ["train"])
    with pytest.raises(EtlError, match="every row of the split 'test' has the weight 0"):
        check_weighted("w", {"train": 1, "test": 0}, ["train", "test"])


def test_the_mean_weight_is_exact() -> None:
    statistics = measure(pa.table({"w": [0.1] * 10}), Measured((("w", "none"),)))
    assert fit_weight("w", statistics) == {"weight": {"column": "w", "mean": 0.1}}
    assert fit_weight(None, statistics) == {}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"features": {"w": {"kind": "numeric"}}}, r"features\.w: is the weight too"),
        ({"features": {"a": {"kind": "numeric", "column": "w"}}}, r"features\.a: reads the weight 'w', which no model"),
        ({"weight": "sparkring_w"}, "names that begin with 'sparkring_' are ours"),
    ],
)
def test_a_weight_is_no_feature(keys: dict[str, Any], message: str) -> None:
    source = {"path": "t", "format": "parquet", "columns": {"a": "double", "w": "double"}}
    block = {"sources": {"t": source}, "rows": "t", "features": {"a": {"kind": "numeric"}}, "weight": "w"}
    with pytest.raises(ValueError, match=message):
        EtlConfig.model_validate(block | keys)
