"""The same state gives the same columns in Spark and in numpy; nothing but training rows decides it."""

import datetime as dt
import json
import random

import numpy as np
import pyarrow as pa
import pytest
from pydantic import TypeAdapter
from pyspark.sql import functions as F

from sparkring.conf.blocks.etl import Feature
from sparkring.etl.columns.fit import check_inputs, fit
from sparkring.etl.columns.statistics import measure, measured_by, merge
from sparkring.etl.errors import EtlError
from sparkring.training.data.features.transform import apply_numpy
from tests.spark.feature_oracle import feature_frame

pytestmark = pytest.mark.spark
SCHEMA = (
    "carrier string, flag boolean, day date, code int, delay double, weight float, count bigint, "
    "price decimal(8,2), hour int"
)
# One float32 unit in the last place: JVM and C round sin, cos and log1p differently in the last bit of a double.
TRANSCENDENTAL = {"clock_sin", "clock_cos", "count_log"}


def features(**specs):
    return {name: TypeAdapter(Feature).validate_python(spec) for name, spec in specs.items()}


FEATURES = features(
    carrier={"kind": "categorical", "min_count": 3},
    top={"kind": "categorical", "column": "carrier", "max_size": 2},
    flag={"kind": "categorical"},
    day={"kind": "categorical"},
    code={"kind": "categorical"},
    delay={"kind": "numeric"},
    raw_delay={"kind": "numeric", "column": "delay", "scale": False, "fill": -1.5, "indicator": "never"},
    weight={"kind": "numeric"},
    count_log={"kind": "numeric", "column": "count", "transform": "log1p"},
    price={"kind": "numeric"},
    clock={"kind": "cyclic", "column": "hour", "period": 24},
    flag_number={"kind": "numeric", "column": "flag"},
)


def make_rows(count, seed):
    rng = random.Random(seed)

    def maybe(value):
        return None if rng.random() < 0.1 else value

    return [
        (
            maybe(rng.choice(["AA", "UA", "B6", "DL", "Ünï", "ZZ" if seed else "AA"])),
            maybe(rng.random() < 0.5),
            maybe(dt.date(2024, 1, rng.randint(1, 5))),
            maybe(rng.randint(-2, 4)),
            maybe(rng.choice([rng.gauss(5, 100), float("nan"), 1e-12, 1e12, -0.0])),
            maybe(rng.uniform(0, 1)),
            maybe(rng.choice([0, 1, 10**12, -3])),
            None,
            maybe(rng.randint(0, 23)),
        )
        for _ in range(count)
    ]


def frame(spark, rows):
    return spark.createDataFrame(rows, SCHEMA).withColumn("price", (F.col("code") * F.lit(1.25)).cast("decimal(8,2)"))


def fitted(rows, wanted):
    """Fit on a DataFrame, as its stored rows would be measured: each partition by itself."""
    inputs = check_inputs(rows, wanted)
    stored = [
        F.col(c).cast("double").alias(c) if kind.startswith("decimal") else F.col(c) for c, kind in inputs.items()
    ]
    batches = rows.select(*stored).toArrow().to_batches(max_chunksize=97)
    measured = measured_by(wanted, inputs)
    return fit(merge(measure(pa.Table.from_batches([batch]), measured) for batch in batches), wanted, inputs)


def in_spark(spark, rows, state):
    table = feature_frame(rows, state).coalesce(1).toArrow()
    return {n: table[n].to_numpy() for n in table.column_names}


def test_spark_and_numpy_agree_and_the_state_survives_json(spark):
    train = frame(spark, make_rows(400, 0)).coalesce(1)
    other = frame(spark, make_rows(300, 1)).coalesce(1)
    state = json.loads(json.dumps(fitted(train, FEATURES)))
    raw = {name: [row[name] for row in other.collect()] for name in other.columns}
    want, got = in_spark(spark, other, state), apply_numpy(state, raw)
    assert want.keys() == got.keys()
    for name in want:
        assert want[name].dtype == got[name].dtype, name
        if name in TRANSCENDENTAL:
            np.testing.assert_array_max_ulp(want[name], got[name], maxulp=1)
        else:
            assert want[name].tobytes() == got[name].tobytes() or (want[name] == got[name]).all(), name
    assert set(np.unique(got["carrier"])) >= {0, 1, 2} and "ZZ" not in state["features"][0]["values"]
    assert len(state["features"][1]["values"]) == 2


def test_training_columns_have_mean_zero_and_deviation_one(spark):
    rows = spark.range(1000).selectExpr("cast(id * id as double) x")
    state = fitted(rows, features(x={"kind": "numeric"}))
    out = in_spark(spark, rows, state)["x"].astype(np.float64)
    assert abs(out.mean()) < 1e-6 and abs(out.std() - 1) < 1e-6


def test_missing_values_are_not_counted_as_zeros_of_a_logarithm(spark):
    rows = frame(spark, make_rows(400, seed=0))
    (state,) = (each for each in fitted(rows, FEATURES)["features"] if each["name"] == "count_log")
    known = [max(row["count"], 0) for row in rows.collect() if row["count"] is not None]
    assert state["train_nulls"] == 400 - len(known) > 0
    carrier = fitted(rows, FEATURES)["features"][0]
    assert carrier["train_nulls"] == sum(row["carrier"] is None for row in rows.collect()) > 0
    assert state["mean"] == pytest.approx(np.log1p(known).mean()) and state["std"] == pytest.approx(
        np.log1p(known).std()
    )


def test_large_values_that_differ_little_are_centred_too(spark):
    """Ten digits of a mean of 1e12 are off by up to fifty: more than these values differ by."""
    rows = spark.range(1000).selectExpr("1e12D + 123 + id % 7 x", "1234567890123D flat", "id % 2 plain")
    spec = features(x={"kind": "numeric"}, flat={"kind": "numeric"}, plain={"kind": "numeric"})
    states = [json.dumps(fitted(rows.repartition(n), spec)) for n in (1, 3)]
    out = in_spark(spark, rows, json.loads(states[0]))
    assert states[0] == states[1]
    assert abs(out["x"].mean()) < 1e-4 and abs(out["x"].std() - 1) < 1e-4
    assert (out["flat"] == 0).all() and sorted(set(out["plain"])) == [-1, 1]


def test_the_state_does_not_depend_on_partitions(spark):
    rows = frame(spark, make_rows(500, 2))
    states = [json.dumps(fitted(rows.repartition(n, "hour"), FEATURES)) for n in (1, 3, 8)]
    assert states[0] == states[1] == states[2]


def test_all_wrong_columns_are_listed(spark):
    rows = spark.createDataFrame([(1.0, "a")], "x double, s string")
    bad = features(
        gone={"kind": "numeric"},
        s={"kind": "numeric"},
        x={"kind": "categorical"},
        c={"kind": "cyclic", "column": "s", "period": 1},
    )
    with pytest.raises(EtlError) as caught:
        fitted(rows, bad)
    message = str(caught.value)
    assert (
        "etl.features.gone: rows have no column 'gone'" in message and "etl.features.x: column 'x' is double" in message
    )
    assert message.count("\n") == 3


def test_a_feature_without_training_values_is_refused(spark):
    rows = spark.createDataFrame([(None,)], "x double")
    with pytest.raises(EtlError, match=r"etl\.features\.x: the training split has no value"):
        fitted(rows, features(x={"kind": "numeric"}))
