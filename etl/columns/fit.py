"""Check what features are made of, and fit them on statistics of the training rows. Applying them: training/data/."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    IntegralType,
    NumericType,
    StringType,
)

from sparkring.conf.blocks.etl import (
    CategoricalFeature,
    CyclicFeature,
    Feature,
    HashedFeature,
    ImageFeature,
    NumericFeature,
)
from sparkring.conf.features import STATE_VERSION, State
from sparkring.etl.columns.features import (
    Moments,
    anchor_of,
    categorical_state,
    input_column,
    numeric_state,
    plain_state,
)
from sparkring.etl.columns.statistics import Statistics, moments, most_frequent
from sparkring.etl.errors import EtlError


def check_inputs(rows: DataFrame, features: Mapping[str, Feature]) -> dict[str, str]:
    """Find the Spark type of every input column. EtlError lists features whose column is missing or of a wrong type."""
    types = {f.name: f.dataType for f in rows.schema.fields}
    problems, inputs = [], {}
    for name, feature in features.items():
        column = input_column(name, feature)
        if column not in types:
            problems.append(f"etl.features.{name}: rows have no column {column!r}; they have {sorted(types)}")
        elif wanted := _wrong_type(feature, types[column]):
            problems.append(f"etl.features.{name}: column {column!r} is {types[column].simpleString()}; {wanted}")
        else:
            inputs[column] = types[column].simpleString()
    if problems:
        raise EtlError("\n".join(problems))
    return inputs


def _wrong_type(feature: Feature, found: DataType) -> str:
    if isinstance(feature, CategoricalFeature) and not isinstance(
        found, (StringType, IntegralType, BooleanType, DateType)
    ):
        return "categorical wants a string, integer, boolean or date; cast it in the recipe's SQL"
    if isinstance(feature, HashedFeature) and not isinstance(found, (StringType, IntegralType)):
        return "hashed wants a string or an integer; cast it in the recipe's SQL"
    if isinstance(feature, (NumericFeature, CyclicFeature)) and not isinstance(found, (NumericType, BooleanType)):
        return f"{feature.kind} wants a number; derive one in the recipe's SQL"
    if isinstance(feature, ImageFeature) and not isinstance(found, BinaryType):
        return "image wants the bytes of an encoded image (binary), as a source of format binaryFile has them"
    return ""


def unfitted(features: Mapping[str, Feature], inputs: dict[str, str]) -> State:
    """Return the state before anything is measured: the stored columns and the possible tensors."""
    states = []
    for name, feature in features.items():
        if isinstance(feature, NumericFeature):
            states.append(numeric_state(name, feature, Moments(count=1, nulls=1, mean=0.0, std=1.0)))
        elif isinstance(feature, CategoricalFeature):
            states.append(categorical_state(name, feature, [], nulls=1))
        else:
            states.append(plain_state(name, feature))
    return {"version": STATE_VERSION, "inputs": inputs, "features": states}


def fit(train: Statistics, features: Mapping[str, Feature], inputs: dict[str, str]) -> State:
    """Fit the state of every feature on the statistics of the training rows."""
    states = []
    for name, feature in features.items():
        if isinstance(feature, NumericFeature):
            states.append(numeric_state(name, feature, _moments(train, name, feature)))
        elif isinstance(feature, CategoricalFeature):
            counts = train.values[input_column(name, feature)]
            values = most_frequent(counts, feature.min_count, feature.max_size)
            nulls = train.rows - pc.sum(counts["count"]).as_py() if len(counts) else train.rows
            states.append(categorical_state(name, feature, values, nulls))
        else:
            states.append(plain_state(name, feature))
    return {"version": STATE_VERSION, "inputs": inputs, "features": states}


def _moments(train: Statistics, name: str, feature: NumericFeature) -> Moments:
    numbers = train.numbers_of(input_column(name, feature), feature.transform)
    count, nulls = numbers.count + numbers.infinite, train.rows - numbers.count - numbers.infinite
    if numbers.infinite or not count:
        return Moments(count, nulls, math.inf, math.inf)
    anchor = anchor_of(*moments(numbers))
    return Moments(count, nulls, *moments(numbers, anchor), anchor)
