"""The numpy half of the features, by hand-made numbers; the parity with Spark is in tests/spark."""

import datetime as dt
import math
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from sparkring.conf.config import CategoricalFeature, CyclicFeature, NumericFeature, PassthroughFeature
from sparkring.etl.errors import EtlError
from sparkring.etl.features import (
    Moments,
    anchor_of,
    apply_numpy,
    cardinality,
    categorical_state,
    numeric_state,
    output_names,
    plain_state,
)


def state(*features):
    return {"version": 1, "features": list(features)}


def test_categories_have_codes_for_null_and_unseen():
    made = categorical_state("c", CategoricalFeature(kind="categorical", column="carrier"), ["UA", "AA"])
    codes = apply_numpy(state(made), {"carrier": ["AA", None, "UA", "ZZ", float("nan")]})["c"]
    assert codes.tolist() == [3, 0, 2, 1, 0] and codes.dtype == np.int32 and cardinality(made) == 4


def test_integers_and_booleans_are_categories_by_their_spark_text():
    made = categorical_state("c", CategoricalFeature(kind="categorical"), ["7", "true"])
    assert apply_numpy(state(made), {"c": [7, True, np.int64(7), 7.0, 8]})["c"].tolist() == [2, 3, 2, 2, 1]


def test_a_date_is_a_category_by_its_day_though_pandas_has_only_timestamps():
    made = state(categorical_state("day", CategoricalFeature(kind="categorical"), ["1970-01-03"]))
    codes = apply_numpy(made | {"inputs": {"day": "date"}}, {"day": [DAY, pd.Timestamp(DAY), pd.NaT, "1970-01-03"]})
    assert codes["day"].tolist() == [2, 2, 0, 2]


@pytest.mark.parametrize(
    ("mean", "std", "anchor"),
    [
        (1e12 + 499.5, 288.7, 1e12),
        (1_234_567_890_123.0, 0.0, 1_234_567_890_000.0),
        (1e12, 0.0, 0.0),
        (5.123456789012345, 1.0, 0.0),
        (None, None, 0.0),
        (float("inf"), float("nan"), 0.0),
    ],
)
def test_a_mean_far_above_the_deviation_is_taken_again(mean, std, anchor):
    assert anchor_of(mean, std) == anchor


def test_numbers_are_standardised_and_nulls_become_the_mean():
    made = numeric_state("x", NumericFeature(kind="numeric"), Moments(count=4, nulls=1, mean=2.0, std=4.0))
    out = apply_numpy(state(made), {"x": [10, None, 2.0, float("nan")]})
    assert out["x"].tolist() == [2.0, 0.0, 0.0, 0.0] and out["x__null"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert output_names(made) == ["x", "x__null"] and out["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("indicator", "nulls", "there"), [("auto", 0, False), ("always", 0, True), ("never", 5, False)]
)
def test_indicator(indicator, nulls, there):
    feature = NumericFeature(kind="numeric", indicator=indicator)
    assert ("x__null" in output_names(numeric_state("x", feature, Moments(1, nulls, 0.0, 1.0)))) == there


def test_fill_scale_and_log_are_applied():
    feature = NumericFeature(kind="numeric", fill=math.e - 1, transform="log1p", scale=False)
    out = apply_numpy(state(numeric_state("x", feature, Moments(1, 0, 3.0, 2.0))), {"x": [None, 0.0, -5.0]})
    assert out["x"].tolist() == [1.0, 0.0, 0.0]


def test_a_constant_column_is_zero_not_nan():
    made = numeric_state("x", NumericFeature(kind="numeric"), Moments(3, 0, 5.0, 0.0))
    assert apply_numpy(state(made), {"x": [5, 5]})["x"].tolist() == [0.0, 0.0]


def test_a_cycle_closes_and_null_is_its_centre():
    made = plain_state("h", CyclicFeature(kind="cyclic", period=24))
    out = apply_numpy(state(made), {"h": [0, 24, 6, None]})
    assert np.allclose(out["h_sin"], [0, 0, 1, 0], atol=1e-6) and np.allclose(out["h_cos"], [1, 1, 0, 0], atol=1e-6)


DAY, INSTANT = dt.date(1970, 1, 3), dt.datetime(1970, 1, 1, 0, 0, 1, 5, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("spark_type", "options", "values", "want", "dtype"),
    [
        ("int", {}, [3, -1], [3, -1], "int32"),
        ("boolean", {}, [True, False], [True, False], "bool"),
        ("date", {}, [DAY], [2], "int32"),
        ("timestamp", {}, [INSTANT, pd.Timestamp(INSTANT)], [1_000_005] * 2, "int64"),
        ("timestamp_ntz", {}, [INSTANT.replace(tzinfo=None)], [1_000_005], "int64"),
        ("date", {}, [DAY, pd.Timestamp(DAY)], [2, 2], "int32"),
        ("timestamp", {}, [DAY], [2 * 86_400_000_000], "int64"),
        ("array<date>", {"shape": [2]}, [[pd.Timestamp(DAY), DAY]], [[2, 2]], "int32"),
        ("decimal(6,2)", {}, [Decimal("1.25")], [1.25], "float64"),
        ("double", {"dtype": "float16"}, [1 / 3], [np.float16(1 / 3)], "float16"),
        ("bigint", {"nulls": "fill", "fill": -7}, [None, 5], [-7, 5], "int64"),
        ("array<float>", {"shape": [2]}, [[1, 2], [3, 4]], [[1, 2], [3, 4]], "float32"),
        ("array<array<int>>", {"shape": [1, 2]}, [[[1, 2]]], [[[1, 2]]], "int32"),
    ],
)
def test_columns_passed_through_are_as_the_reader_hands_them_out(spark_type, options, values, want, dtype):
    made = plain_state("x", PassthroughFeature(kind="passthrough", **options))
    out = apply_numpy(state(made) | {"inputs": {"x": spark_type}}, {"x": values})["x"]
    assert out.tolist() == np.array(want).tolist() and out.dtype == dtype


def test_nulls_of_columns_passed_through():
    masked = plain_state("x", PassthroughFeature(kind="passthrough", nulls="mask"))
    out = apply_numpy(state(masked) | {"inputs": {"x": "int"}}, {"x": [None, 4]})
    assert out["x"].tolist() == [0, 4] and out["x__valid"].tolist() == [False, True]
    refused = plain_state("x", PassthroughFeature(kind="passthrough"))
    with pytest.raises(ValueError, match="'x': 1 of 2 values are null"):
        apply_numpy(state(refused) | {"inputs": {"x": "int"}}, {"x": [None, 4]})
    ragged = apply_numpy(state(refused) | {"inputs": {"x": "array<int>"}}, {"x": [[1, 2], []]})["x"]
    assert [v.tolist() for v in ragged] == [[1, 2], []] and ragged[0].dtype == np.int32


@pytest.mark.parametrize(("count", "mean", "words"), [(0, None, "no value"), (3, math.inf, "infinite")])
def test_columns_without_statistics_are_refused(count, mean, words):
    with pytest.raises(EtlError, match=words):
        numeric_state("x", NumericFeature(kind="numeric"), Moments(count, 0, mean, 1.0))


def test_a_missing_raw_column_is_named():
    made = plain_state("h", CyclicFeature(kind="cyclic", period=24, column="hour"))
    with pytest.raises(KeyError, match="hour"):
        apply_numpy(state(made), {"minute": [1]})
