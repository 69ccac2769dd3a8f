"""What a fitted feature's state says that a model sees. Shared by the fit, the manifest, the reader and serving."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

STATE_VERSION = 1
NULL_CODE, UNSEEN_CODE, FIRST_CODE = 0, 1, 2

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
WHOLE = ("bool", "int8", "int16", "int32", "int64")
STORED_FOR = {
    "categorical": ("string", *WHOLE),
    "hashed": ("string", *WHOLE),
    "numeric": (*WHOLE, "float32", "float64"),
    "cyclic": (*WHOLE, "float32", "float64"),
    "classes": ("string",),
    "tags": ("string",),
}
"""Kind of feature, or of label -> the dtypes of a stored column that it can be made of."""

State = dict[str, Any]


@dataclass(frozen=True)
class Output:
    """A tensor that a feature becomes. `cardinality`: number of codes, where it is one. `shape`: of a row."""

    name: str
    dtype: str
    cardinality: int | None = None
    shape: tuple[int, ...] = ()


def outputs(state: State) -> list[Output]:
    """List what a numeric, categorical, hashed or cyclic feature, or a label of classes or tags becomes."""
    name, kind = state["name"], state["kind"]
    if kind == "classes":
        return [Output(name, "int64", len(state["values"]))]
    if kind == "tags":
        return [Output(name, "float32", shape=(len(state["values"]),))]
    if kind == "categorical":
        return [Output(name, "int32", cardinality(state))]
    if kind == "hashed":
        return [Output(name, "int64")]
    if kind == "cyclic":
        return [Output(f"{name}_sin", "float32"), Output(f"{name}_cos", "float32")]
    return [Output(name, "float32"), *([Output(f"{name}__null", "float32")] if state["indicator"] else [])]


def output_names(state: State) -> list[str]:
    """List the names of the tensors that a feature becomes, of any kind."""
    return [state["name"]] if state["kind"] == "passthrough" else [output.name for output in outputs(state)]


def cardinality(state: State) -> int:
    return FIRST_CODE + len(state["values"])


def whole_number(text: str, spark_type: str) -> int:
    """Read a category of a column that is no string, as Spark's cast to string writes it: its stored whole number.

    A boolean is 0 or 1, a date its days since 1970 (Python's own dates end with the year 9999, Spark's do not).
    ValueError for another text.
    """
    if spark_type == "boolean":
        return ("false", "true").index(text)
    if spark_type == "date":
        return _days(text)
    number = int(text)
    if str(number) != text or not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{text!r} is no whole number of 64 bits")
    return number


def category_text(number: int, spark_type: str) -> str:
    """Write a stored whole number as Spark's cast to string does: the reverse of `whole_number`."""
    if spark_type == "boolean":
        return ("false", "true")[number]
    return _date_text(number) if spark_type == "date" else str(number)


def _date_text(days: int) -> str:
    cycles, rest = divmod(days + 719_162, 146_097)  # from 0001-01-01 on, in 400 years each
    found = dt.date.fromordinal(rest + 1)
    year = found.year + 400 * cycles
    sign = "-" if year < 0 else "+" if year > 9999 else ""
    return f"{sign}{abs(year):04d}-{found:%m-%d}"


def _days(text: str) -> int:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    year, month, day = digits.split("-")
    # The calendar repeats every 400 years, which are 146,097 days.
    cycles, rest = divmod(sign * int(year), 400)
    return (dt.date(rest + 400, int(month), int(day)) - dt.date(1970, 1, 1)).days + (cycles - 1) * 146_097
