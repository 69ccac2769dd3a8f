"""Apply fitted features in numpy, bit-equal to Spark; the state is fitted once and is JSON in the manifest.

This half needs no Spark: decisions, and the numpy side for serving. Arithmetic is IEEE double in both, rounded to
float32 last, so categorical, numeric and passthrough columns are bit-equal; `log1p` and `cyclic` may differ by one
float32 unit in the last place (the JVM's and C's functions round differently).
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkring.conf.config import CategoricalFeature, CyclicFeature, Feature, NumericFeature, PassthroughFeature
from sparkring.etl.errors import EtlError

STATE_VERSION = 1
NULL_CODE, UNSEEN_CODE, FIRST_CODE = 0, 1, 2
# Sums over partitions differ in their last bits with the order of the partitions; ten digits are far more than
# float32 outputs can show, and make the state, so the dataset, independent of it.
SIGNIFICANT_DIGITS = 10
FLAT = 1e-5  # a deviation below this share of the mean has less than five digits left of it

# Spark type, by its simple name -> the dtype that holds each of its values.
EXACT_DTYPES = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "date": "int32",  # days since 1970
    "timestamp": "int64",  # microseconds since 1970 UTC
    "timestamp_ntz": "int64",
}
PASSTHROUGH_DTYPES = EXACT_DTYPES | {"decimal": "float64", "vector": "float64"}

State = dict[str, Any]


def rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def input_column(name: str, feature: Feature) -> str:
    return feature.column or name


def anchor_of(mean: float | None, std: float | None) -> float:
    """Value to subtract before averaging again, where ten digits of the mean are too few beside the deviation.

    Readings around 1e12 that differ by ones need it; 0 where ten digits are enough.
    """
    if mean is None or std is None or not (math.isfinite(mean) and math.isfinite(std)):
        return 0.0
    return rounded(mean) if rounded(mean) != mean and std < abs(mean) * FLAT else 0.0


@dataclass(frozen=True)
class Moments:
    """Of a numeric feature's transformed training values: how many, how many nulls, and their mean and deviation.

    `mean` and `std` are of the values less `anchor`.
    """

    count: int
    nulls: int
    mean: Any
    std: Any
    anchor: float = 0.0


def numeric_state(name: str, feature: NumericFeature, moments: Moments) -> State:
    """Make the state of a numeric feature. EtlError if it has no values, or infinite ones."""
    column = input_column(name, feature)
    if moments.count == 0:
        raise EtlError(f"etl.features.{name}: the training split has no value in {column!r}; remove it")
    if not (math.isfinite(moments.mean) and math.isfinite(moments.std)):
        raise EtlError(f"etl.features.{name}: {column!r} holds infinite values; null or clip them in SQL")
    center, spread = moments.anchor + rounded(moments.mean), rounded(moments.std)
    fill = center if feature.fill is None else transformed(feature.fill, feature.transform)
    return {
        "name": name,
        "kind": "numeric",
        "column": column,
        "transform": feature.transform,
        "mean": center if feature.scale else 0.0,
        "std": (spread or 1.0) if feature.scale else 1.0,
        "fill": fill,
        "indicator": feature.indicator == "always" or (feature.indicator == "auto" and moments.nulls > 0),
        "train_nulls": moments.nulls,
    }


def transformed(value: float, transform: str) -> float:
    return math.log1p(max(value, 0.0)) if transform == "log1p" else float(value)


def categorical_state(name: str, feature: CategoricalFeature, values: Sequence[str]) -> State:
    """`values` by falling count, already cut to min_count and max_size."""
    column = input_column(name, feature)
    return {"name": name, "kind": "categorical", "column": column, "values": list(values)}


def plain_state(name: str, feature: CyclicFeature | PassthroughFeature) -> State:
    return {"name": name, **feature.model_dump(mode="json"), "column": input_column(name, feature)}


def cardinality(state: State) -> int:
    return FIRST_CODE + len(state["values"])


def output_names(state: State) -> list[str]:
    """Names of the columns one feature becomes."""
    name = state["name"]
    if state["kind"] == "cyclic":
        return [f"{name}_sin", f"{name}_cos"]
    if state["kind"] == "numeric" and state["indicator"]:
        return [name, f"{name}__null"]
    return [name]


def apply_numpy(features: State, rows: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Convert raw columns to feature columns, each (rows,), as the dataset has them. `features` is `manifest.features`.

    A null is None, NaN or NaT. Raises KeyError naming a raw column that is not given.
    """
    out: dict[str, np.ndarray] = {}
    inputs = features.get("inputs", {})
    for state in features["features"]:
        if state["column"] not in rows:
            raise KeyError(f"feature {state['name']!r} needs the column {state['column']!r}; given: {sorted(rows)}")
        values = rows[state["column"]]
        if state["kind"] == "categorical":
            out[state["name"]] = _codes(state, values, inputs.get(state["column"], "string"))
        elif state["kind"] == "numeric":
            out |= _numeric(state, values)
        elif state["kind"] == "cyclic":
            out |= _cyclic(state, values)
        else:
            out |= _passthrough(state, values, inputs[state["column"]])
    return out


def _is_null(value: Any) -> bool:
    return value is None or value != value  # NaN and NaT differ from themselves


def _as_spark(value: Any, spark_type: str) -> Any:
    """Restore the type of a date or timestamp: pandas makes dates timestamps; the column's type decides."""
    if spark_type == "date" and isinstance(value, dt.datetime):
        return value.date()
    if spark_type.startswith("timestamp") and isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        return dt.datetime.combine(value, dt.time())
    return value


def as_text(value: Any, spark_type: str) -> str:
    """The value as Spark's cast to string writes it."""
    value = _as_spark(value, spark_type)
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, (float, np.floating)) and value == int(value):
        return str(int(value))  # pandas keeps integers beside nulls as floats; no category is a float in Spark
    return str(value)


def _codes(state: State, values: Sequence[Any], spark_type: str) -> np.ndarray:
    code_of = {value: FIRST_CODE + i for i, value in enumerate(state["values"])}
    codes = (NULL_CODE if _is_null(v) else code_of.get(as_text(v, spark_type), UNSEEN_CODE) for v in values)
    return np.fromiter(codes, np.int32, len(values))


def _doubles(values: Sequence[Any]) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype == object:
        array = np.array([np.nan if _is_null(v) else float(v) for v in values])
    return array.astype(np.float64)


def _passthrough(state: State, values: Sequence[Any], spark_type: str) -> dict[str, np.ndarray]:
    """As the dataset's reader hands the column out: dates as days, timestamps as microseconds, nulls as declared."""
    name, valid = state["name"], np.array([not _is_missing(v) for v in values], bool)
    if state["nulls"] == "refuse" and not valid.all():
        raise ValueError(f"feature {name!r}: {int((~valid).sum())} of {len(valid)} values are null, and it may not be")
    fill = state["fill"] if state["nulls"] == "fill" else None
    element_type = spark_type.replace("array<", "").rstrip(">")
    stored = [_stored(v, element_type) if ok else fill for v, ok in zip(values, valid, strict=True)]
    element = element_type.split("(")[0]
    dtype = np.dtype(state["dtype"] or PASSTHROUGH_DTYPES.get(element, "O"))
    shape = tuple(state["shape"] or ())
    if "array<" in spark_type and not shape:
        array = np.empty(len(stored), object)
        for row, value in enumerate(stored):
            array[row] = np.asarray([] if value is None else value, dtype)
    else:
        zero = np.zeros(shape, dtype)
        array = np.array([zero if v is None else v for v in stored], dtype).reshape(len(stored), *shape)
    return {name: array} | ({f"{name}__valid": valid} if state["nulls"] == "mask" else {})


def _is_missing(value: Any) -> bool:
    """None, NaT or pandas' NA; a NaN is a value here, as it is in Spark."""
    return value is None or (
        not isinstance(value, (float, np.floating)) and type(value).__name__ in ("NaTType", "NAType")
    )


def _stored(value: Any, spark_type: str) -> Any:
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_stored(v, spark_type) for v in value]
    value = _as_spark(value, spark_type)
    if isinstance(value, dt.datetime):
        utc = value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo else value
        return (utc - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)
    if isinstance(value, dt.date):
        return (value - dt.date(1970, 1, 1)).days
    return float(value) if spark_type.startswith("decimal") else value


def _numeric(state: State, values: Sequence[Any]) -> dict[str, np.ndarray]:
    x = _doubles(values)
    null = np.isnan(x)
    if state["transform"] == "log1p":
        x = np.log1p(np.maximum(x, 0.0))
    x = np.where(null, state["fill"], x)
    out = {state["name"]: ((x - state["mean"]) / state["std"]).astype(np.float32)}
    if state["indicator"]:
        out[f"{state['name']}__null"] = null.astype(np.float32)
    return out


def _cyclic(state: State, values: Sequence[Any]) -> dict[str, np.ndarray]:
    x = _doubles(values)
    angle = x * (2.0 * math.pi / state["period"])
    null = np.isnan(x)
    return {
        f"{state['name']}_sin": np.where(null, 0.0, np.sin(angle)).astype(np.float32),
        f"{state['name']}_cos": np.where(null, 0.0, np.cos(angle)).astype(np.float32),
    }
