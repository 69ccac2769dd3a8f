"""Read raw values, as Python, numpy and pandas have them, as what Spark had stored of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sparkring.conf.features import EXACT_DTYPES, State
from sparkring.conf.plain_text import count_of
from sparkring.training.data.decoding.columns import nulls_of, plain_values

Array = NDArray[Any]
PASSTHROUGH_DTYPES = EXACT_DTYPES | {"decimal": "float64", "vector": "float64"}
INEXACT_IN_DOUBLE = 1 << 53  # from here on a double may stand for several whole numbers


def is_null(value: Any) -> bool:
    # NaN and NaT differ from themselves; of pandas' NA nobody can say
    return value is None or type(value).__name__ == "NAType" or value != value


def _as_spark(value: Any, spark_type: str) -> Any:
    """Restore the type of a date or timestamp: pandas makes dates timestamps; the column's type decides."""
    if spark_type == "date" and isinstance(value, dt.datetime):
        return value.date()
    if spark_type.startswith("timestamp") and isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        return dt.datetime.combine(value, dt.time())
    return value


def as_text(value: Any, spark_type: str) -> str:
    """Format the value as Spark's cast to string does."""
    if spark_type == "boolean":
        return _boolean_text(value)
    value = _as_spark(value, spark_type)
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        if abs(float(value)) >= INEXACT_IN_DOUBLE:
            raise ValueError(f"the category {value!r} is a float that may be another whole number; give an integer")
        return str(int(value))  # pandas keeps integers next to nulls as floats; no category is a float in Spark
    return str(value)


def _boolean_text(value: Any) -> str:
    text = str(value).lower()
    known = {"true": "true", "false": "false", "1": "true", "0": "false", "1.0": "true", "0.0": "false"}
    if text not in known:
        raise ValueError(f"{value!r} is no boolean; give True, False, 1, 0 or None")
    return known[text]


def doubles(values: Sequence[Any]) -> Array:
    """Convert numbers to doubles (n,), NaN for null. ValueError for text, which is not parsed."""
    array = np.asarray(values)
    if texts := [value for value in values if isinstance(value, str)] if array.dtype.kind in "OUT" else []:
        raise ValueError(f"{texts[0]!r} is text where a number must be; give an int, float, bool or None")
    if array.dtype == object:
        array = np.array([np.nan if is_null(v) else float(v) for v in values])
    return array.astype(np.float64)


def passthrough(state: State, values: Sequence[Any], spark_type: str) -> dict[str, Array]:
    """Convert a column as the dataset's reader does: dates as days, timestamps as microseconds, nulls as declared."""
    name, valid = state["name"], np.array([not _is_missing(v) for v in values], bool)
    if state["nulls"] == "refuse" and not valid.all():
        raise ValueError(
            f"feature {name!r}: {int((~valid).sum())} of {count_of(len(valid), 'value is')} null, and it may not be"
        )
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


def passthrough_arrow(state: State, array: pa.Array, spark_type: str) -> dict[str, Array]:
    """Convert an Arrow column like `passthrough`: at once if it has the stored type, else one by one."""
    dtype = np.dtype(state["dtype"] or EXACT_DTYPES.get(spark_type, "O"))
    values = None if state["shape"] else _whole_column(array, spark_type, dtype)
    null = nulls_of(array) if array.null_count else None
    if values is None or (state["nulls"] == "refuse" and null is not None):
        return passthrough(state, array.to_pylist(), spark_type)
    values = values.astype(dtype)
    if null is not None:
        fill = state["fill"] if state["nulls"] == "fill" and state["fill"] is not None else 0
        np.copyto(values, np.array([fill], dtype), where=null)
    masked = {f"{state['name']}__valid": np.ones(len(values), bool) if null is None else ~null}
    return {state["name"]: values} | (masked if state["nulls"] == "mask" else {})


def _whole_column(array: pa.Array, spark_type: str, dtype: np.dtype[Any]) -> Array | None:
    """Return an array's values (n,), any number for null; None if it is not of the column's own type."""
    kind = array.type
    if spark_type == "date" and pa.types.is_date32(kind):
        return plain_values(array.view(pa.int32()))
    if spark_type.startswith("timestamp") and pa.types.is_timestamp(kind) and kind.unit == "us":
        return plain_values(array.view(pa.int64()))
    if spark_type in ("date", "timestamp", "timestamp_ntz") or dtype.kind == "O":
        return None
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    values = plain_values(array)
    is_rounded_once = values.dtype.kind == dtype.kind == "f"
    return values if is_rounded_once or np.can_cast(values.dtype, dtype) else None


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, NaT or pandas' NA; NaN is a value, as in Spark."""
    return value is None or (
        not isinstance(value, (float, np.floating)) and type(value).__name__ in ("NaTType", "NAType")
    )


def _stored(value: Any, spark_type: str) -> Any:
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_stored(v, spark_type) for v in value]
    if isinstance(value, str) and spark_type in ("date", "timestamp", "timestamp_ntz"):  # as JSON has them
        value = dt.datetime.fromisoformat(value)
    value = _as_spark(value, spark_type)
    if isinstance(value, dt.datetime):
        utc = value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo else value
        return (utc - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)
    if isinstance(value, dt.date):
        return (value - dt.date(1970, 1, 1)).days
    return float(value) if spark_type.startswith("decimal") else value
