"""Features applied to stored and to raw values, by hand-made numbers; the parity with Spark is in tests/spark."""

import datetime as dt
import io
import math
import os
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from sparkring.conf.blocks.etl import (
    CategoricalFeature,
    CyclicFeature,
    ImageFeature,
    NumericFeature,
    PassthroughFeature,
)
from sparkring.conf.features import FIRST_CODE, cardinality, output_names
from sparkring.etl.columns.features import Moments, categorical_state, numeric_state, plain_state
from sparkring.training.data.features.raw import as_text, is_null
from sparkring.training.data.features.transform import TABLE_SPAN, WholeCodes, apply_numpy, make_transforms


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


def test_numbers_are_standardised_and_nulls_become_the_mean():
    made = numeric_state("x", NumericFeature(kind="numeric"), Moments(count=4, nulls=1, mean=2.0, std=4.0))
    out = apply_numpy(state(made), {"x": [10, None, 2.0, float("nan")]})
    assert out["x"].tolist() == [2.0, 0.0, 0.0, 0.0] and out["x__null"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert output_names(made) == ["x", "x__null"] and out["x"].dtype == np.float32


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
        ("date", {}, ["1970-01-03"], [2], "int32"),  # as JSON has it
        ("timestamp", {}, [str(pd.Timestamp(INSTANT)), "1970-01-01T01:00:01.000005+01:00"], [1_000_005] * 2, "int64"),
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


def test_a_missing_raw_column_is_named():
    made = plain_state("h", CyclicFeature(kind="cyclic", period=24, column="hour"))
    with pytest.raises(KeyError, match="hour"):
        apply_numpy(state(made), {"minute": [1]})


# --- the same from stored columns, over every type that is stored and every kind of null

EXAMPLES = int(os.environ.get("SPARKRING_EXAMPLES", "200"))
WHOLE = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
ARROW = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "float": pa.float32(),
    "double": pa.float64(),
}
ARROW |= {name: getattr(pa, f"int{bits}")() for name, bits in WHOLE.items()}
ODD_TEXTS = ["UA", "AA", "", " UA", "null", "None", "nan", "Ünï", "\x00"]
VALUES = {
    "string": st.one_of(st.sampled_from(ODD_TEXTS), st.text(max_size=3)),
    "boolean": st.booleans(),
    "date": st.one_of(st.sampled_from([DAY, dt.date(1582, 10, 4)]), st.dates(dt.date(1, 1, 1), dt.date(9999, 12, 31))),
    "float": st.floats(width=32),
    "double": st.one_of(st.floats(), st.sampled_from([-0.0, 0.0, 1e308, -1e-320, math.nan, math.inf])),
}
VALUES |= {
    name: st.one_of(st.integers(-3, 40), st.integers(-(1 << bits - 1), (1 << bits - 1) - 1))
    for name, bits in WHOLE.items()
}


@st.composite
def columns(draw, types):
    """A column's Spark type and its values in chunks, as row groups have them; a None is a null."""
    spark_type = draw(st.sampled_from(sorted(types)))
    values = st.one_of(st.none(), VALUES[spark_type])
    return spark_type, draw(st.lists(st.lists(values, max_size=12), min_size=1, max_size=3))


def stored(spark_type, chunks, as_dictionary=False):
    arrays = [pa.array(chunk, ARROW[spark_type]) for chunk in chunks]
    return pa.chunked_array([a.dictionary_encode() for a in arrays] if as_dictionary else arrays)


def equal_bits(one, other):
    """NaN is one value: signs and payloads of NaN are nobody's."""
    assert one.dtype == other.dtype and one.shape == other.shape
    is_float = one.dtype.kind == "f"
    assert (np.isnan(one) == np.isnan(other)).all() if is_float else True
    keep = ~np.isnan(one) if is_float else slice(None)
    assert one[keep].tobytes() == other[keep].tobytes()


@settings(max_examples=EXAMPLES)
@given(columns({"string", "boolean", "date", *WHOLE}), st.integers(0, 6), st.booleans())
@example(("bigint", [[(1 << 63) - 1, -(1 << 63), None], [], [0]]), 3, False)
@example(("string", [["b", "a", None], ["a", "c"]]), 1, True)
def test_stored_categories_have_the_codes_that_serving_gives_them(column, known, as_dictionary):
    """Dictionaries differ between row groups; what is seen in training is a part of what is there."""
    spark_type, chunks = column
    rows = [value for chunk in chunks for value in chunk]
    texts = [None if v is None else as_text(v, spark_type) for v in rows]
    seen = list(dict.fromkeys(t for t in texts if t is not None))[::2][:known]
    features = state(categorical_state("c", CategoricalFeature(kind="categorical"), seen))
    features |= {"inputs": {"c": spark_type}}
    (transform,) = make_transforms(features)
    got = transform.of_stored(stored(spark_type, chunks, as_dictionary and spark_type == "string"))["c"]
    equal_bits(got, apply_numpy(features, {"c": rows})["c"])
    assert got.tolist() == [0 if t is None else seen.index(t) + 2 if t in seen else 1 for t in texts]


@settings(max_examples=EXAMPLES)
@given(
    columns({"boolean", "float", "double", *WHOLE}),
    st.sampled_from(["none", "log1p"]),
    st.booleans(),
    st.sampled_from([None, -1.5]),
    st.sampled_from(["always", "never"]),
)
@example(("double", [[-0.0, math.nan, None, 0.0], [math.inf]]), "log1p", False, None, "always")
@example(("int", [list(range(12)), [5] * 20]), "log1p", True, None, "never")
def test_stored_numbers_become_what_serving_makes_of_them(column, transform, scale, fill, indicator):
    spark_type, chunks = column
    feature = NumericFeature(kind="numeric", transform=transform, scale=scale, fill=fill, indicator=indicator)
    cycle = plain_state("h", CyclicFeature(kind="cyclic", period=24, column="x"))
    features = state(numeric_state("x", feature, Moments(3, 1, 0.625, 1.75)), cycle) | {"inputs": {"x": spark_type}}
    wanted = apply_numpy(features, {"x": [value for chunk in chunks for value in chunk]})
    for each in make_transforms(features):
        for name, values in each.of_stored(stored(spark_type, chunks)).items():
            equal_bits(values, wanted[name])


# --- raw rows in Arrow, of the stored column's type or of another


GIVEN = ARROW | {
    "uint64": pa.uint64(),
    "large_string": pa.large_string(),
    "decimal(4,2)": pa.decimal128(4, 2),
    "timestamp": pa.timestamp("us", "UTC"),
    "null": pa.null(),
}
GIVEN_VALUES = VALUES | {
    "uint64": st.one_of(st.integers(0, 9), st.integers(0, (1 << 64) - 1)),
    "large_string": st.sampled_from(["7", "true", "1970-01-02", "UA"]),
    "decimal(4,2)": st.decimals("-99", "99", places=2),
    "timestamp": st.datetimes(dt.datetime(1970, 1, 1), dt.datetime(1970, 1, 4), timezones=st.just(dt.UTC)),
    "null": st.none(),
}


@st.composite
def raw_rows(draw, types):
    """An Arrow array of some type, cut out of a longer one, as the rows of a batch are."""
    kind = draw(st.sampled_from(sorted(types)))
    values = draw(st.lists(st.one_of(st.none(), GIVEN_VALUES[kind]), max_size=24))
    start, end = sorted((draw(st.integers(0, len(values))), draw(st.integers(0, len(values)))))
    return pa.array(values, GIVEN[kind]).slice(start, end - start)


def made_or_error(function, *words):
    try:
        return function(*words)
    except (ValueError, TypeError, OverflowError) as error:
        return type(error)


def same_outcome(features, column, array):
    """Equal bits from Arrow and from Python values, or an error of the same kind from both."""
    with np.errstate(invalid="ignore", over="ignore"):
        at_once, one_by_one = (made_or_error(apply_numpy, features, {column: v}) for v in (array, array.to_pylist()))
    if isinstance(one_by_one, dict):
        assert isinstance(at_once, dict) and at_once.keys() == one_by_one.keys()
        for name, values in one_by_one.items():
            equal_bits(at_once[name], values)
    else:
        assert at_once is one_by_one


CATEGORIES = {
    "string": ["UA", "1", "true", "1970-01-02", "0.50"],
    "boolean": ["true", "false"],
    "date": ["1970-01-02", "1970-01-01"],
} | {name: ["-1", "1", "7", "0"] for name in WHOLE}


@settings(max_examples=2 * EXAMPLES)
@given(st.sampled_from(sorted(CATEGORIES)), raw_rows(GIVEN))
@example("bigint", pa.array([(1 << 64) - 1, None, 7], pa.uint64()))
@example("boolean", pa.array([1, 0, None], pa.int8()))
@example("tinyint", pa.array([True, None]))
@example("int", pa.array([dt.date(1970, 1, 2)]))
@example("int", pa.array([1.0, None, -0.0, 1.5, math.nan]))
@example("bigint", pa.array([2.0**53]))
def test_raw_categories_in_arrow_have_the_codes_of_their_values_one_by_one(spark_type, array):
    made = categorical_state("c", CategoricalFeature(kind="categorical"), CATEGORIES[spark_type])
    same_outcome(state(made) | {"inputs": {"c": spark_type}}, "c", array)


@settings(max_examples=EXAMPLES)
@given(raw_rows({"boolean", "float", "double", "uint64", "decimal(4,2)", "null", "date", *WHOLE}), st.booleans())
@example(pa.array([(1 << 64) - 1, (1 << 64) - 2, None] * 4, pa.uint64()), True)
@example(pa.array([(1 << 64) - 1, (1 << 64) - 2] * 4, pa.uint64()), True)
def test_raw_numbers_in_arrow_become_what_their_values_do_one_by_one(array, is_log):
    feature = NumericFeature(kind="numeric", transform="log1p" if is_log else "none", indicator="always")
    cycle = plain_state("h", CyclicFeature(kind="cyclic", period=24, column="x"))
    features = state(numeric_state("x", feature, Moments(3, 1, 0.625, 1.75)), cycle)
    same_outcome(features | {"inputs": {"x": "double"}}, "x", array)


@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from(["boolean", "date", "timestamp", "float", "double", "decimal(4,2)", *WHOLE]),
    raw_rows({"boolean", "float", "double", "date", "timestamp", "decimal(4,2)", *WHOLE}),
    st.sampled_from(["refuse", "mask", "fill"]),
    st.sampled_from([None, "float16"]),
)
@example("tinyint", pa.array([1000, None], pa.int64()), "mask", None)
@example("double", pa.array([1.0, math.nan, None]), "refuse", None)
def test_raw_columns_passed_through_in_arrow_are_what_they_are_one_by_one(spark_type, array, nulls, dtype):
    fill = 1.0 if nulls == "fill" else None
    passed = plain_state("x", PassthroughFeature(kind="passthrough", nulls=nulls, fill=fill, dtype=dtype))
    same_outcome(state(passed) | {"inputs": {"x": spark_type}}, "x", array)


def test_numbers_are_scaled_in_doubles_and_rounded_last():
    """Plain Python is the oracle; 2^24 + 1 has no float32."""
    rows = [2.0**24 + 1, 2.0**24, 0.1, -1e300]
    scaled = numeric_state("x", NumericFeature(kind="numeric"), Moments(4, 0, 2.0**24, 3.0))
    (transform,) = make_transforms(state(scaled) | {"inputs": {"x": "double"}})
    made = transform.of_stored(pa.chunked_array([rows]))["x"]
    with np.errstate(over="ignore"):
        wanted = np.array([np.float32((x - scaled["mean"]) / scaled["std"]) for x in rows])
    assert made.tobytes() == wanted.tobytes() and made[0] > made[1]


def test_a_value_does_not_depend_on_its_neighbors():
    """numpy computes several at once: the place in an array, its length and what is beside it must not show."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.normal(0, 1e3, 4001), [0.0, -0.0, 1e300, np.inf, 6.0, 1440.0]])
    features = state(
        plain_state("h", CyclicFeature(kind="cyclic", period=1440, column="x")),
        numeric_state("x", NumericFeature(kind="numeric", transform="log1p"), Moments(3, 0, 3.1, 0.7)),
    ) | {"inputs": {"x": "double"}}
    whole = [t.of_stored(pa.chunked_array([x])) for t in make_transforms(features)]
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(x))[: 7 + 801 * seed]
        for transform, made in zip(make_transforms(features), whole, strict=True):
            for name, values in transform.of_stored(pa.chunked_array([x[order]])).items():
                equal_bits(values, made[name][order])


def test_codes_of_whole_numbers_far_apart_and_close_to_each_other():
    far = WholeCodes([5, -(1 << 63), (1 << 63) - 1, 7])
    near = WholeCodes([5, 4, TABLE_SPAN])
    values = np.array([5, 4, -(1 << 63), (1 << 63) - 1, 6, 7, TABLE_SPAN], np.int64)
    assert far.of(values).tolist() == [2, 1, 3, 4, 1, 5, 1]
    assert near.of(values).tolist() == [2, 3, 1, 1, 1, 1, 4]
    assert WholeCodes([]).of(values).tolist() == [1] * 7
    assert near.of(np.array([5, -128, 127], np.int8)).tolist() == [2, 1, 1]


def test_text_that_is_not_utf8_was_not_seen_in_training():
    (transform,) = make_transforms(
        state(categorical_state("c", CategoricalFeature(kind="categorical"), ["a", "\ufffd"]))
    )
    text = pa.array([b"a", b"\xff", None], pa.binary()).view(pa.string())
    assert transform.of_stored(pa.chunked_array([text]))["c"].tolist() == [2, 1, 0]


def test_a_float_that_may_be_another_whole_number_is_no_category():
    made = state(categorical_state("c", CategoricalFeature(kind="categorical"), [str(2**53 + 1)]))
    with pytest.raises(ValueError, match="may be another whole number"):
        apply_numpy(made | {"inputs": {"c": "bigint"}}, {"c": [float(2**53 + 1)]})
    assert apply_numpy(made | {"inputs": {"c": "bigint"}}, {"c": [2**53 + 1]})["c"].tolist() == [FIRST_CODE]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (np.False_, "false"),
        ("True", "true"),
        ("FALSE", "false"),
        (1, "true"),
        (0.0, "false"),
        ("1", "true"),
    ],
)
def test_booleans_as_databases_and_python_write_them(value: Any, text: str) -> None:
    assert as_text(value, "boolean") == text


@pytest.mark.parametrize("value", ["yes", 3, 0.5, ""])
def test_a_value_that_is_no_boolean_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="is no boolean; give True, False, 1, 0 or None"):
        as_text(value, "boolean")


def test_pandas_na_is_a_null() -> None:
    assert [is_null(value) for value in (pd.NA, pd.NaT, float("nan"), None, 0, "")] == [True] * 4 + [False] * 2


def encoded(color: int) -> bytes:
    out = io.BytesIO()
    Image.new("L", (6, 4), color).save(out, "PNG")
    return out.getvalue()


def test_raw_images_are_decoded_to_the_shape_of_their_feature():
    made = plain_state("photo", ImageFeature(kind="image", column="content", shape=[2, 3, 1]))
    cells = [encoded(7), encoded(9)]
    for given_cells in (cells, [bytearray(cell) for cell in cells], pa.array(cells, pa.binary())):
        photos = apply_numpy(state(made), {"content": given_cells})["photo"]
        assert photos.dtype == np.uint8 and photos.shape == (2, 2, 3, 1)
        assert photos[:, 0, 0, 0].tolist() == [7, 9]
    for odd, name in ((None, "NoneType"), ("text", "str"), (float("nan"), "float")):
        with pytest.raises(ValueError, match=f"column 'content': {name} where an image's bytes must be"):
            apply_numpy(state(made), {"content": [cells[0], odd]})
    with pytest.raises(ValueError, match="column 'photo': 3 bytes of sha256"):
        apply_numpy(state(made), {"content": [b"123"]})
