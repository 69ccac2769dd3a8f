"""Statistics of parts merge, in any order and grouping, to the bits of those of all rows."""

from __future__ import annotations

import datetime as dt
import math
import random
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sparkring.conf.blocks.etl import Feature
from sparkring.conf.stored import StoredError
from sparkring.etl.columns import statistics
from sparkring.etl.columns.statistics import (
    Measured,
    Statistics,
    exact_sums,
    measure,
    measured_by,
    merge,
    moments,
    nothing,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
WANTED = Measured((("x", "none"), ("x", "log1p"), ("n", "none")), {"c": "string", "n": "bigint"})
ROWS = st.lists(
    st.tuples(
        st.none() | st.floats(),
        st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 3),
        st.none() | st.sampled_from(["", "a", "b", "ß", "\U0001f600"]),
    ),
    max_size=30,
)


def table(rows) -> pa.Table:
    x, n, c = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.table({"x": pa.array(x, pa.float64()), "n": pa.array(n, pa.int64()), "c": pa.array(c, pa.string())})


@given(ROWS, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_split_of_the_rows_in_any_order_merges_to_the_same_bits(rows, rng: random.Random) -> None:
    whole = measure(table(rows), WANTED)
    shuffled = rng.sample(rows, len(rows))
    cuts = sorted(rng.randint(0, len(rows)) for _ in range(rng.randint(0, 5)))
    parts = [measure(table(shuffled[a:b]), WANTED) for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    assert merge(parts).to_bytes() == whole.to_bytes()
    left = merge(parts[:2])
    assert merge([*parts[2:], nothing(WANTED), left]).to_bytes() == whole.to_bytes()


@given(st.lists(FINITE, max_size=40))
def test_sums_are_exact(values) -> None:
    total, squares = exact_sums(np.array(values, np.float64))
    assert total == sum(map(Fraction, values)) and squares == sum(Fraction(v) ** 2 for v in values)


@pytest.mark.parametrize("scale", [1.0, 1e6, 0.1], ids=["small", "large", "fractions"])
def test_sums_are_exact_over_more_rows_than_are_summed_at_once(scale, monkeypatch) -> None:
    monkeypatch.setattr(statistics, "CHUNK_ROWS", 1000)
    whole = np.arange(-statistics.CHUNK_ROWS, 2 * statistics.CHUNK_ROWS + 7) * 3
    x = whole * scale
    total, squares = exact_sums(x)
    exact = [Fraction(v) for v in x.tolist()]
    assert total == sum(exact) and squares == sum(v * v for v in exact)


def test_the_largest_limbs_do_not_overflow() -> None:
    x = np.full(statistics.CHUNK_ROWS, math.nextafter(2.0, 0.0))
    assert exact_sums(x) == (len(x) * Fraction(x[0]), len(x) * Fraction(x[0]) ** 2)


@pytest.mark.parametrize("scale", [-1074, -500, -499, 0, 446, 447, 900])
@pytest.mark.parametrize("apart", [0, 1, 2, 3, 4, 200])
def test_sums_are_exact_of_numbers_however_far_apart(apart: int, scale: int) -> None:
    """By either way of summing: one is for numbers of like size only."""
    large, small = math.ldexp(math.nextafter(2.0, 0.0), scale + 53), math.ldexp(math.nextafter(2.0, 0.0), scale - apart)
    x = np.array([large, -small, 0.0, small / 3] * 3)
    exact = [Fraction(v) for v in x.tolist()]
    assert exact_sums(x) == (sum(exact), sum(v * v for v in exact))


def test_nulls_nans_and_infinities_are_no_numbers() -> None:
    values = [1.5, None, math.nan, math.inf, -math.inf, -0.0, -2.0]
    found = measure(pa.table({"x": values}), Measured((("x", "none"), ("x", "log1p"))))
    plain, log = found.numbers
    assert found.rows == 7 and (plain.count, plain.infinite) == (3, 2) and plain.total == Fraction(-1, 2)
    assert (plain.low, plain.high) == (-2.0, 1.5)
    # What is below zero counts as zero, so its infinity is none.
    assert (log.count, log.infinite, log.low) == (4, 1, 0.0) and float(log.total) == math.log1p(1.5)


def test_zeros_of_both_signs_are_one_number() -> None:
    zeros = [measure(pa.table({"x": x}), Measured((("x", "none"),))) for x in ([-0.0, 0.0], [0.0, -0.0], [-0.0], [0.0])]
    assert len({merge([zero, zero]).to_bytes() for zero in zeros[:2]}) == 1
    assert zeros[2].to_bytes() == zeros[3].to_bytes()


def test_texts_of_categories_are_those_of_spark() -> None:
    rows = pa.table(
        {
            "flag": [True, False, None],
            "day": pa.array([dt.date(2024, 1, 2), None, dt.date(1969, 12, 31)]),
            "n": pa.array([-5, -5, None], pa.int8()),
        }
    )
    found = measure(rows, Measured((), {"flag": "boolean", "day": "date", "n": "tinyint"}))
    counts = {
        c: dict(zip(*[t[k].to_pylist() for k in ("value", "count")], strict=True)) for c, t in found.values.items()
    }
    assert counts == {"flag": {"true": 1, "false": 1}, "day": {"2024-01-02": 1, "1969-12-31": 1}, "n": {"-5": 2}}


def test_the_most_frequent_values_come_first_and_equal_counts_by_their_bytes() -> None:
    counts = pa.table({"value": ["b", "ä", "B", "z", "a"], "count": [2, 2, 2, 1, 9]})
    assert statistics.most_frequent(counts, 1, 10) == ["a", "B", "b", "ä", "z"]
    assert statistics.most_frequent(counts, 2, 3) == ["a", "B", "b"]


def test_mean_and_deviation_are_of_exact_sums() -> None:
    x = np.array([1e16, 1.0, -1e16, 1.0])
    (numbers,) = measure(pa.table({"x": x}), Measured((("x", "none"),))).numbers
    assert moments(numbers)[0] == 0.5 != x.mean()
    (numbers,) = measure(pa.table({"x": 1e12 + np.array([0.0, 1.0])}), Measured((("x", "none"),))).numbers
    assert moments(numbers, 1e12) == (0.5, 0.5)
    (numbers,) = measure(pa.table({"x": [1e308, -1e308]}), Measured((("x", "none"),))).numbers
    assert moments(numbers) == (math.inf, math.inf)


def test_parts_of_other_features_do_not_merge() -> None:
    rows = table([(1.0, 1, "a")])
    with pytest.raises(ValueError, match="of other features"):
        merge([measure(rows, WANTED), measure(rows, Measured((("x", "none"),)))])


def test_only_what_a_fit_needs_is_measured() -> None:
    specs = {
        "a": {"kind": "numeric", "column": "x"},
        "b": {"kind": "numeric", "column": "x", "scale": False},
        "c": {"kind": "categorical"},
        "d": {"kind": "cyclic", "column": "h", "period": 24},
        "e": {"kind": "passthrough"},
    }
    features = {name: TypeAdapter(Feature).validate_python(spec) for name, spec in specs.items()}
    inputs = {"x": "double", "c": "string", "h": "int", "e": "int"}
    assert measured_by(features, inputs) == Measured((("x", "none"),), {"c": "string"})


@pytest.mark.parametrize("data", [b"", b"ARROW1", b"\0" * 100])
def test_damaged_statistics_are_named(data) -> None:
    with pytest.raises(StoredError, match="parts/x"):
        Statistics.from_bytes(data, "parts/x")


def test_statistics_are_read_as_they_were_written() -> None:
    found = measure(table([(1.0, 2, "a"), (None, 2, "b")]), WANTED)
    read = Statistics.from_bytes(found.to_bytes(), "x")
    assert read.numbers == found.numbers and read.rows == 2 and read.numbers_of("n", "none").total == 4
    assert {name: t.to_pylist() for name, t in read.values.items()} == {
        "c": [{"value": "a", "count": 1}, {"value": "b", "count": 1}],
        "n": [{"value": "2", "count": 2}],
    }
    forged = found.to_bytes().replace(b'"total":"1"', b'"total":"x"')
    with pytest.raises(StoredError, match="fraction"):
        Statistics.from_bytes(forged, "x")
