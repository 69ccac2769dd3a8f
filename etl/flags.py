"""Count the rows of 0 and 1 of several label columns before anything is written, and name what is neither."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column as Expression
from pyspark.sql import functions as F

from sparkring.conf.features import State
from sparkring.conf.manifest import Column
from sparkring.conf.plain_text import count_of
from sparkring.etl.checks import RULE
from sparkring.etl.classes import ClassCounts, counts_in_order
from sparkring.etl.errors import EtlError
from sparkring.etl.split import SPLIT

ONE, ODD, NULL = "__one", "__odd", "__null_label"


def several_labels(columns: Iterable[Column]) -> list[str]:
    """Return the label columns if there are several; else []. EtlError for a label that is no number or boolean.

    A date is no number here, although it is stored as a number of days.
    """
    labels = [column for column in columns if column.role == "label"]
    if len(labels) < 2:
        return []
    if other := [c for c in labels if c.layout != "scalar" or c.dtype in ("string", "binary") or c.logical == "date"]:
        raise EtlError(
            f"etl.label = {[c.name for c in labels]}: {other[0].name!r} is {other[0].logical}; of several labels each "
            "is a number or a boolean: make one of it in the recipe's SQL, or of all an array of texts, the row's tags"
        )
    return [column.name for column in labels]


def flag_counts(labels: Sequence[str]) -> list[Expression]:
    """Return the aggregates that `check_flags`, `ones` and `odd_rows` read."""
    found: list[Expression] = []
    for number, label in enumerate(labels):
        value = F.col(f"`{label}`").cast("double")
        known = {ONE: value == 1.0, ODD: (value != 0.0) & (value != 1.0), NULL: value.isNull()}
        found += [F.count_if(condition).alias(f"{name}_{number}") for name, condition in known.items()]
    return found


def check_flags(labels: Sequence[str], counted: pa.Table) -> None:
    """Raise EtlError for good rows without a label. `counted`: by RULE, with the columns of `flag_counts`."""
    for label, rows in _summed(labels, counted, NULL).items():
        if rows:
            check = f"{{name: labelled, kind: expression, sql: {label} IS NOT NULL, level: row}}"
            raise EtlError(
                f"etl.label: {label!r} is null in {count_of(rows, 'row')}; leave such out by etl.checks: {check}"
            )


def ones(labels: Sequence[str], counted: pa.Table) -> ClassCounts:
    """Count the good rows with value 1, by split and label."""
    good = counted.filter(pc.is_null(counted[RULE]))
    splits = pc.unique(good[SPLIT]).to_pylist()
    return {split: _summed(labels, good.filter(pc.equal(good[SPLIT], split)), ONE) for split in splits}


def odd_rows(labels: Sequence[str], counted: pa.Table) -> dict[str, int]:
    """Count the good rows whose value is neither 0 nor 1, by label."""
    return _summed(labels, counted, ODD)


def _summed(labels: Sequence[str], counted: pa.Table, name: str) -> dict[str, int]:
    good = counted.filter(pc.is_null(counted[RULE]))
    return {label: pc.sum(good[f"{name}_{n}"]).as_py() or 0 for n, label in enumerate(labels)}


def flags_state(labels: Sequence[str], counts: ClassCounts, odd: Mapping[str, int]) -> State:
    """Make the state of several label columns; `counts` and `odd` are empty before counting."""
    return {"values": list(labels), "counts": counts_in_order(counts, labels),
            "odd": {label: odd.get(label, 0) for label in labels}}  # fmt: skip


def fit_flags(columns: Iterable[Column], counts: ClassCounts, odd: Mapping[str, int]) -> State:
    """Fit the state of several label columns; {} for one label."""
    labels = several_labels(columns)
    return {"flags": flags_state(labels, counts, odd)} if labels else {}
