"""Check the weights of rows before anything is written, and fit their mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import NumericType

from sparkring.conf.features import State
from sparkring.conf.plain_text import count_of
from sparkring.etl.checks import RULE
from sparkring.etl.columns.statistics import Statistics
from sparkring.etl.errors import EtlError
from sparkring.etl.split import SPLIT

WEIGHTED = "__weighted"  # rows of a weight above 0
UNUSABLE = {"__null": "null", "__negative": "negative", "__nan": "NaN or infinite"}


def check_weight_type(rows: DataFrame, weight: str) -> None:
    """Raise EtlError where the column is missing, or no number."""
    types = {field.name: field.dataType for field in rows.schema.fields}
    if weight not in types:
        raise EtlError(f"etl.weight = {weight!r}: rows have no such column; they have {sorted(types)}")
    if not isinstance(types[weight], NumericType):
        raise EtlError(
            f"etl.weight = {weight!r}: the column is {types[weight].simpleString()}; a weight is a number: cast it in "
            "the recipe's SQL"
        )


def weight_counts(weight: str) -> list[Expression]:
    """Return the aggregates that `check_weights` and `weighted_rows` read."""
    value = F.col(f"`{weight}`").cast("double")
    odd = F.isnan(value) | (F.abs(value) == math.inf)
    is_of = {"__null": value.isNull(), "__negative": (value < 0) & ~odd, "__nan": odd, WEIGHTED: (value > 0) & ~odd}
    return [F.count_if(condition).alias(name) for name, condition in is_of.items()]


def check_weights(weight: str, counted: pa.Table) -> None:
    """Raise EtlError for good rows whose weight is none. `counted`: by RULE, with the columns of `weight_counts`."""
    good = counted.filter(pc.is_null(counted[RULE]))
    found = {words: pc.sum(good[name]).as_py() or 0 for name, words in UNUSABLE.items()}
    if any(found.values()):
        shown = ", ".join(f"{words}: {rows}" for words, rows in found.items() if rows)
        check = f"{{name: weighted, kind: expression, sql: {weight} BETWEEN 0 AND 1e300, level: row}}"
        raise EtlError(
            f"etl.weight = {weight!r}: {count_of(sum(found.values()), 'row has')} no weight ({shown}); a weight is "
            f"finite and at least 0: give them one in the recipe's SQL, or leave them out by etl.checks: {check}"
        )


def weighted_rows(counted: pa.Table) -> dict[str, int]:
    """Count the good rows with a weight above 0, by split."""
    good = counted.filter(pc.is_null(counted[RULE])).group_by(SPLIT).aggregate([(WEIGHTED, "sum")])
    return dict(zip(good[SPLIT].to_pylist(), good[f"{WEIGHTED}_sum"].to_pylist(), strict=True))


def check_weighted(weight: str | None, weighted: Mapping[str, int], splits: Iterable[str]) -> None:
    """Raise EtlError for a split whose weights are all 0: nothing could be learnt of it, or scored on it."""
    if weight is not None and (empty := [split for split in splits if not weighted.get(split)]):
        raise EtlError(
            f"etl.weight = {weight!r}: every row of the split {empty[0]!r} has the weight 0; some must have more"
        )


def fit_weight(weight: str | None, train: Statistics) -> State:
    """Fit the state of the weight column; {} without weights. `train`: statistics of training rows."""
    if weight is None:
        return {}
    numbers = train.numbers_of(weight, "none")
    return {"weight": {"column": weight, "mean": float(Fraction(numbers.total) / numbers.count)}}
