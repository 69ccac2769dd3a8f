"""Count the classes or tags of a label of texts by split, before anything is written; decide their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkring.conf.features import State
from sparkring.conf.manifest import Column
from sparkring.conf.plain_text import count_of, in_order
from sparkring.etl.errors import EtlError
from sparkring.etl.shards.quarantine import PORTION
from sparkring.etl.split import SPLIT

MOST_CLASSES, SHOWN = 10_000, 10
MOST_GROUPS = 100 * MOST_CLASSES  # of rows by class, split and portion
ClassCounts = Mapping[str, Mapping[str, int]]
"""Split -> class -> rows; of several label columns split -> label -> rows of 1."""


def text_label(columns: Iterable[Column]) -> Column | None:
    """Return the string label column (classes or tags), or None."""
    return next((column for column in columns if column.role == "label" and column.dtype == "string"), None)


def is_tags(label: Column) -> bool:
    return label.layout == "ragged"


def count_classes(good: DataFrame, column: Column, portions: int) -> list[ClassCounts]:
    """Count the rows by class of every portion, in one job. EtlError for nulls, and for texts that are no classes.

    `good`: the rows that become shards, with PORTION and SPLIT. `column`: the label; a row counts for each of its tags.
    """
    label, value, known = column.name, F.col(f"`{column.name}`"), f"{column.name} IS NOT NULL"
    if is_tags(column):  # a row without tags is one of none of them; a null is not
        value = F.explode(F.when(value.isNull(), F.array(F.lit(None))).otherwise(F.array_distinct(value)))
        known += f" AND NOT exists({label}, tag -> tag IS NULL)"
    counted = good.select(PORTION, SPLIT, value.alias("class")).groupBy(PORTION, SPLIT, "class")
    found = counted.agg(F.count(F.lit(1)).alias("rows")).limit(MOST_GROUPS + 1).collect()
    classes = {row["class"] for row in found}
    if None in classes:
        rows = sum(row["rows"] for row in found if row["class"] is None)
        check = f"{{name: labelled, kind: expression, sql: {known}, level: row}}"
        raise EtlError(f"etl.label = {label!r}: null in {count_of(rows, 'row')}; leave such out by etl.checks: {check}")
    if len(classes) > MOST_CLASSES or len(found) > MOST_GROUPS:
        raise EtlError(
            f"etl.label = {label!r}: more than {MOST_CLASSES} distinct texts, such as {min(classes)!r}: those are no "
            "classes; make a number or a class of them in the recipe's SQL"
        )
    counts: list[dict[str, dict[str, int]]] = [{} for _ in range(portions)]
    for row in found:
        counts[row[PORTION]].setdefault(row[SPLIT], {})[row["class"]] = row["rows"]
    return list(counts)


def added(counts: Iterable[ClassCounts]) -> ClassCounts:
    """Add up the rows of several portions by split and class."""
    total: dict[str, dict[str, int]] = {}
    for one in counts:
        for split, classes in one.items():
            of_split = total.setdefault(split, {})
            for name, rows in classes.items():
                of_split[name] = of_split.get(name, 0) + rows
    return total


def fit_label(columns: Iterable[Column], counts: ClassCounts, declared: Sequence[str] | None) -> State:
    """Fit the state of a string label; {} without one. EtlError where no row has a tag."""
    label = text_label(columns)
    if label is None:
        return {}
    state = label_state(label, counts, declared)
    if not state["values"]:
        raise EtlError(f"etl.label = {label.name!r}: no row has a tag; there is nothing to learn")
    return {"labels": [state]}


def label_state(label: Column, counts: ClassCounts, declared: Sequence[str] | None) -> State:
    """Return the state of a string label: its classes in output order, and their rows by split."""
    values = list(declared) if declared is not None else classes_of(counts)
    kind = "tags" if is_tags(label) else "classes"
    return {"name": label.name, "kind": kind, "column": label.name, "values": values,
            "counts": counts_in_order(counts, values)}  # fmt: skip


def counts_in_order(counts: ClassCounts, values: Sequence[str]) -> dict[str, list[int]]:
    """Split -> rows of each of `values`."""
    return {split: [classes.get(name, 0) for name in values] for split, classes in sorted(counts.items())}


def classes_of(counts: ClassCounts) -> list[str]:
    """Return the classes that have rows: numbers by their value, others as texts."""
    return in_order({name for of_split in counts.values() for name in of_split})


def check_listed(label: str, counts: Iterable[ClassCounts], declared: Sequence[str] | None) -> None:
    """Raise EtlError for a class that is not among the declared ones, if any are."""
    seen = Counter[str]()
    for of_split in added(counts).values():
        seen.update(of_split)
    if declared is not None and (other := sorted(seen.keys() - set(declared))):
        shown = ", ".join(f"{name!r} ({seen[name]} rows)" for name in other[:SHOWN])
        raise EtlError(
            f"etl.classes: {label!r} has values that are not listed: {shown}{', ...' if len(other) > SHOWN else ''}; "
            "list them, or leave their rows out by a check of level row"
        )
