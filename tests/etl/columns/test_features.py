"""What is decided of a feature's state from counts, by hand-made numbers; the counts are Spark's: tests/spark."""

import math

import pytest

from sparkring.conf.blocks.etl import NumericFeature
from sparkring.conf.features import output_names
from sparkring.etl.columns.features import Moments, anchor_of, numeric_state
from sparkring.etl.errors import EtlError


@pytest.mark.parametrize(
    ("mean", "std", "anchor"),
    [
        (1e12 + 499.5, 288.7, 1e12),
        (1_234_567_890_123.0, 0.0, 1_234_567_890_000.0),
        (1e12, 0.0, 0.0),
        (5.123456789012345, 1.0, 0.0),
        (float("inf"), float("nan"), 0.0),
    ],
)
def test_a_mean_far_above_the_deviation_is_taken_again(mean, std, anchor):
    assert anchor_of(mean, std) == anchor


@pytest.mark.parametrize(
    ("indicator", "nulls", "there"), [("auto", 0, False), ("always", 0, True), ("never", 5, False)]
)
def test_indicator(indicator, nulls, there):
    feature = NumericFeature(kind="numeric", indicator=indicator)
    assert ("x__null" in output_names(numeric_state("x", feature, Moments(1, nulls, 0.0, 1.0)))) == there


@pytest.mark.parametrize(("count", "mean", "words"), [(0, math.inf, "no value"), (3, math.inf, "infinite")])
def test_columns_without_statistics_are_refused(count, mean, words):
    with pytest.raises(EtlError, match=words):
        numeric_state("x", NumericFeature(kind="numeric"), Moments(count, 0, mean, 1.0))
