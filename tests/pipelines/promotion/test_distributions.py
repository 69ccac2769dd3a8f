from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from sparkring.etl.columns.statistics import Measured, Statistics, bucket_of, measure, merge
from sparkring.pipelines.promotion.distributions import column_counts, distance, prediction_counts, range_counts

WANTED = Measured((("x", "none"),), {"c": "string"})
COUNTS = st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any).map(np.array)


def counted(x: Any, c: Any = None) -> Statistics:
    values = pa.array(["a"] * len(x) if c is None else c, pa.string())
    return measure(pa.table({"x": pa.array(x, pa.float64(), from_pandas=True), "c": values}), WANTED)


@given(COUNTS, COUNTS)
@settings(max_examples=200)
def test_measures_by_their_definition(a: Any, b: Any) -> None:
    p, q = a / a.sum(), b / b.sum()
    assert distance("infinity_norm", a, b) == max(abs(p - q))
    assert distance("jensen_shannon_divergence", a, b) == pytest.approx(jensenshannon(p, q, base=2) ** 2, abs=1e-9)
    p, q = np.maximum(p, 1e-4), np.maximum(q, 1e-4)
    assert distance("psi", a, b) == pytest.approx(sum((q - p) * np.log(q / p)), abs=1e-12)
    for measure_name in ("infinity_norm", "jensen_shannon_divergence", "psi"):
        assert distance(measure_name, a, a) == pytest.approx(0, abs=1e-12)
        assert distance(measure_name, a, 3 * b) == pytest.approx(distance(measure_name, b, a), abs=1e-9)


def test_no_rows_have_no_distribution() -> None:
    with pytest.raises(ValueError, match="no rows to compare"):
        distance("psi", np.zeros(3), np.ones(3))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=60))
@settings(max_examples=200)
def test_buckets_rise_with_the_numbers(values: list[float]) -> None:
    x = np.array(sorted(values))
    buckets = bucket_of(x)
    assert (np.diff(buckets) >= 0).all()
    assert (np.sign(buckets) == np.sign(x)).all()


def test_a_bucket_is_narrow() -> None:
    x = np.array([270.0, 275.0, -270.0, 1e-300, 0.0, -0.0])
    buckets = bucket_of(x).tolist()
    assert len(set(buckets)) == 5 and buckets[4] == buckets[5] == 0
    first, last, beyond = bucket_of(np.array([512.0, 519.9, 520.1])).tolist()
    assert first == last == beyond - 1


def test_a_shift_of_a_number_is_seen_by_histograms_alone() -> None:
    draw = np.random.default_rng(0)
    before, same, moved = (counted(draw.normal(mean, 10, 4000)) for mean in (300, 300, 310))
    near, far = (distance("psi", *column_counts("x", before, now)) for now in (same, moved))
    assert near < 0.02 < 0.5 < far
    exact = distance("psi", *prediction_counts(draw.normal(300, 10, 40_000), draw.normal(310, 10, 40_000)))
    assert far == pytest.approx(exact, rel=0.15)


def test_nulls_and_infinities_have_cells_of_their_own() -> None:
    full, holes = counted([1.0, 2.0, 3.0, 4.0]), counted([1.0, None, math.inf, 4.0])
    assert distance("infinity_norm", *column_counts("x", full, holes)) == 0.25
    nothing = counted([None, None])
    assert distance("infinity_norm", *column_counts("x", full, nothing)) == 1.0
    assert distance("infinity_norm", *column_counts("x", nothing, full)) == 1.0


def test_categories_are_lined_up_by_value() -> None:
    one, two = counted([1.0] * 4, ["a", "a", "b", None]), counted([1.0] * 4, ["b", "a", "c", "a"])
    reference, current = column_counts("c", one, two)
    assert sorted(zip(reference.tolist(), current.tolist(), strict=True)) == [(0, 1), (1, 0), (1, 1), (2, 2)]
    assert distance("infinity_norm", reference, current) == 0.25


def test_ranges_are_equally_full_of_the_reference() -> None:
    reference = np.array([(bucket, 10) for bucket in range(20)])
    beyond = np.array([(-5, 1), (0, 2), (19, 3), (99, 4)])
    counts = range_counts(reference, beyond)
    assert [cells.tolist() for cells in counts] == [[20] * 10, [3, *[0] * 8, 7]]


def test_parts_add_up_to_the_whole() -> None:
    draw = np.random.default_rng(1)
    x, c = draw.normal(size=900), draw.choice(["a", "b", "c"], 900)
    parts = merge(counted(x[i : i + 300], c[i : i + 300]) for i in (600, 0, 300))
    for column in ("x", "c"):
        reference, current = column_counts(column, counted(x, c), parts)
        assert distance("infinity_norm", reference, current) == 0.0 and reference.sum() == current.sum() == 900


def test_what_was_not_counted_is_not_compared() -> None:
    one = counted([1.0, 2.0])
    assert column_counts("y", one, one) is None
    numbers = one.numbers[0].model_copy(update={"histogram": ()})  # of a part that was written before there were any
    assert column_counts("x", one, Statistics(2, (numbers,), one.values)) is None


def test_predictions_of_classes_are_counted_by_the_likeliest() -> None:
    a = np.array([[0.6, 0.4, 0.0], [0.1, 0.8, 0.1]])
    reference, current = prediction_counts(a, a[[0, 0]])
    assert (reference.tolist(), current.tolist()) == ([1, 1, 0], [2, 0, 0])
    with pytest.raises(ValueError, match="classes"):
        prediction_counts(a, np.array([0.5]))


def test_predictions_of_several_labels_are_counted_by_predicted_label_and_for_none() -> None:
    few, many = np.array([[0.9, 0.1], [0.2, 0.3]]), np.array([[0.9, 0.8], [0.2, 0.6]])
    reference, current = prediction_counts(few, many, several=True)
    assert reference.tolist() == [1, 0, 1] and current.tolist() == [1, 2, 0]
