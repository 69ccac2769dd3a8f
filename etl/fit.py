"""Fit features in Spark on the training split, in two or three jobs. Applying them: training/data/features/."""

from __future__ import annotations

from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    IntegralType,
    NumericType,
    StringType,
)

from sparkring.conf.config import CategoricalFeature, CyclicFeature, Feature, NumericFeature
from sparkring.conf.features import STATE_VERSION, State
from sparkring.etl.errors import EtlError
from sparkring.etl.features import (
    Moments,
    anchor_of,
    categorical_state,
    input_column,
    numeric_state,
    plain_state,
)


def check_inputs(rows: DataFrame, features: dict[str, Feature]) -> dict[str, str]:
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
    if isinstance(feature, (NumericFeature, CyclicFeature)) and not isinstance(found, (NumericType, BooleanType)):
        return f"{feature.kind} wants a number; derive one in the recipe's SQL"
    return ""


def fit(train: DataFrame, features: dict[str, Feature]) -> State:
    """Fit the state of every feature on the training rows alone."""
    inputs = check_inputs(train, features)
    numeric = {n: f for n, f in features.items() if isinstance(f, NumericFeature)}
    categorical = {n: f for n, f in features.items() if isinstance(f, CategoricalFeature)}
    states = _fit_numeric(train, numeric) | _fit_categorical(train, categorical)
    for name, feature in features.items():
        if not isinstance(feature, (NumericFeature, CategoricalFeature)):
            states[name] = plain_state(name, feature)
    return {"version": STATE_VERSION, "inputs": inputs, "features": [states[name] for name in features]}


def _double(column: str) -> Column:
    value = F.col(column).cast("double")
    return F.when(~F.isnan(value), value)


def _transformed(value: Column, transform: str) -> Column:
    return F.log1p(F.greatest(value, F.lit(0.0))) if transform == "log1p" else value


def _fit_numeric(train: DataFrame, features: dict[str, NumericFeature]) -> dict[str, State]:
    if not features:
        return {}
    values = {}
    for name, feature in features.items():
        raw = _double(input_column(name, feature))
        # greatest() skips nulls, so the null must be put back before it would become log1p(0).
        values[name] = F.when(raw.isNotNull(), _transformed(raw, feature.transform))
    rows, moments = _moments(train, values)
    anchors = {name: anchor for name, (_, mean, std) in moments.items() if (anchor := anchor_of(mean, std))}
    if anchors:
        moments |= _moments(train, {name: values[name] - F.lit(anchor) for name, anchor in anchors.items()})[1]
    return {
        name: numeric_state(name, f, Moments(count, rows - count, mean, std, anchors.get(name, 0.0)))
        for (name, f), (count, mean, std) in zip(features.items(), moments.values(), strict=True)
    }


def _moments(train: DataFrame, values: dict[str, Column]) -> tuple[int, dict[str, tuple[int, Any, Any]]]:
    """Count rows, and by name find (values that are not null, mean, deviation), in one job."""
    aggregates = [F.count(F.lit(1))]
    for value in values.values():
        aggregates += [F.count(value), F.avg(value), F.stddev_pop(value)]
    rows, *found = train.agg(*[a.alias(f"a{i}") for i, a in enumerate(aggregates)]).collect()[0]
    return rows, {name: tuple(found[3 * i : 3 * i + 3]) for i, name in enumerate(values)}


def _fit_categorical(train: DataFrame, features: dict[str, CategoricalFeature]) -> dict[str, State]:
    """One job counts every value of every feature; only those kept come to the driver."""
    if not features:
        return {}
    names = list(features)
    pairs = [
        F.struct(F.lit(i).alias("feature"), F.col(input_column(n, features[n])).cast("string").alias("value"))
        for i, n in enumerate(names)
    ]
    pair = train.select(F.explode(F.array(*pairs)).alias("pair")).select("pair.*").where("value is not null")
    limits = [(i, f.min_count, f.max_size) for i, f in enumerate(features.values())]
    limit = F.create_map(*[F.lit(x) for i, least, _ in limits for x in (i, least)])
    size = F.create_map(*[F.lit(x) for i, _, most in limits for x in (i, most)])
    counts = pair.groupBy("feature", "value").count().where(F.col("count") >= limit[F.col("feature")])
    rank = F.row_number().over(Window.partitionBy("feature").orderBy(F.desc("count"), "value"))
    kept = counts.withColumn("rank", rank).where(F.col("rank") <= size[F.col("feature")]).collect()
    values: dict[str, list[str]] = {name: [] for name in names}
    for row in sorted(kept, key=lambda r: (r["feature"], r["rank"])):
        values[names[row["feature"]]].append(row["value"])
    return {name: categorical_state(name, features[name], values[name]) for name in names}
