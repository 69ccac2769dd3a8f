"""Evaluate rules about the rows in one pass; failing rows are quarantined, failing datasets stop the job."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from sparkring.conf.blocks.etl import CheckConfig
from sparkring.conf.errors import first_line
from sparkring.conf.plain_text import count_of
from sparkring.etl.errors import ChecksFailed, EtlError
from sparkring.etl.spark_platform.versions import to_arrow
from sparkring.etl.split import SPLIT

RULE = "__rule"  # name of the first row-level rule the row fails; null on good rows
FAIL = "__fail_"
UNSPLIT = "split_column_is_null"


@dataclass(frozen=True)
class Checked:
    """What one pass over the marked rows counted."""

    rows_in: int
    quarantined: dict[str, int]  # by rule
    splits: dict[str, int]  # good rows by split
    failing: dict[str, int]  # rows by check


def mark(
    rows: DataFrame,
    checks: list[CheckConfig],
    tables: dict[str, DataFrame],
    key: list[str],
    levels: Container[str] = ("row", "dataset"),
) -> DataFrame:
    """Add one boolean column per rule (true: the row fails it) and RULE to the rows. No job runs here.

    Raises EtlError naming the rule whose column or SQL Spark cannot resolve.

    Args:
        rows: the rows, with SPLIT.
        checks: checks of the recipe.
        tables: sources and views, for referential checks.
        key: columns that identify a row.
        levels: check levels that get a column; RULE needs the level `row`.
    """
    marked = rows
    for index, check in enumerate(checks):
        if check.level not in levels:
            continue
        try:
            marked = _with_failure(marked, check, f"{FAIL}{index}", tables, key or rows.columns)
        except PySparkException as error:
            raise EtlError(f"etl.checks.{index} ({check.name}): {first_line(error)}") from error
    row_rules = [F.when(F.col(f"{FAIL}{i}"), F.lit(c.name)) for i, c in enumerate(checks) if c.level == "row"]
    return marked.withColumn(RULE, F.coalesce(*row_rules, F.when(F.col(SPLIT).isNull(), F.lit(UNSPLIT))))


def _with_failure(
    rows: DataFrame, check: CheckConfig, name: str, tables: dict[str, DataFrame], key: list[str]
) -> DataFrame:
    """Add the boolean column `name`: true where the row fails the check.

    Args:
        rows: the rows, with SPLIT.
        check: the check to evaluate.
        name: name of the new column.
        tables: sources and views, for referential checks.
        key: columns that identify a row; they decide which of equal rows a unique check keeps.
    """
    if check.kind == "unique":
        missing = [c for c in check.columns if c not in rows.columns]
        if missing:
            raise EtlError(f"check {check.name!r}: rows have no column {missing[0]!r}; they have {rows.columns}")
        # At row level the row of the smallest key is kept, so the choice does not depend on partitioning.
        window = Window.partitionBy(*check.columns).orderBy(*key)
        return rows.withColumn(name, F.row_number().over(window) > 1)
    if check.kind == "referential":
        assert check.to is not None and check.column is not None
        table, column = check.to.split(".")
        known = tables[table].select(F.col(column).alias(f"{name}_key")).distinct()
        known = known.withColumn(f"{name}_hit", F.lit(True))
        joined = rows.join(known, rows[check.column] == known[f"{name}_key"], "left")
        fails = F.col(check.column).isNotNull() & F.col(f"{name}_hit").isNull()
        return joined.withColumn(name, fails).drop(f"{name}_key", f"{name}_hit")
    return rows.withColumn(name, _simple_failure(check))


def _simple_failure(check: CheckConfig) -> Column:
    if check.kind == "expression":
        assert check.sql is not None
        return ~F.coalesce(F.expr(check.sql), F.lit(False))
    column = F.col(check.column or "")
    if check.kind == "null_share":
        return column.isNull()
    bounds = [column < check.min] if check.min is not None else []
    bounds += [column > check.max] if check.max is not None else []
    return F.coalesce(reduce(operator.or_, bounds), F.lit(False))


def count(marked: DataFrame, checks: list[CheckConfig]) -> Checked:
    """Count rows by split and rule, and every check's failing rows, in one job."""
    return checked_of(counted(marked, checks), checks)


def counted(
    marked: DataFrame, checks: list[CheckConfig], by: Sequence[Column] = (), further: Sequence[Column] = ()
) -> pa.Table:
    """Count rows by RULE, SPLIT and more, and every check's failing rows, in one job.

    Args:
        marked: the marked rows.
        checks: checks with which the rows were marked.
        by: named columns to group rows by, too.
        further: named aggregates per group, besides its number of `rows`.
    """
    counts = [F.count_if(F.col(f"{FAIL}{i}")).alias(f"n{i}") for i in range(len(checks))]
    return to_arrow(marked.groupBy(RULE, SPLIT, *by).agg(F.count(F.lit(1)).alias("rows"), *further, *counts))


def checked_of(table: pa.Table, checks: list[CheckConfig]) -> Checked:
    """Sum what `counted` found over its groups."""
    sums = [("rows", "sum"), *((f"n{i}", "sum") for i in range(len(checks)))]
    groups = table.group_by([RULE, SPLIT]).aggregate(sums).to_pylist()
    quarantined: dict[str, int] = {}
    splits: dict[str, int] = {}
    for group in sorted(groups, key=lambda g: (g[RULE] or "", g[SPLIT] or "")):
        kind, name = (quarantined, group[RULE]) if group[RULE] else (splits, group[SPLIT])
        kind[name] = kind.get(name, 0) + group["rows_sum"]
    failing = {check.name: sum(group[f"n{i}_sum"] for group in groups) for i, check in enumerate(checks)}
    return Checked(sum(group["rows_sum"] for group in groups), quarantined, splits, failing)


def add(parts: Iterable[Checked]) -> Checked:
    """Add the counts of day partitions that have no row in common."""
    quarantined, splits, failing = Counter[str](), Counter[str](), Counter[str]()
    rows_in = 0
    for part in parts:
        rows_in += part.rows_in
        for total, counts in ((quarantined, part.quarantined), (splits, part.splits), (failing, part.failing)):
            total.update(counts)
    return Checked(rows_in, dict(quarantined), dict(splits), dict(failing))


def judge(checked: Checked, checks: list[CheckConfig]) -> list[dict[str, Any]]:
    """Make the report, one JSON-able entry per rule.

    Raises ChecksFailed with all failed rules, EtlError for no good row.
    """
    rows_in, quarantined = checked.rows_in, checked.quarantined
    report = [_entry(check, rows_in, checked.failing[check.name]) for check in checks]
    if rows_in == 0:
        raise EtlError("etl.rows: gave no row at all; look at the joins and the sources' files")
    if broken := [entry for entry in report if not entry["passed"]]:
        lines = "\n".join(f"  - {e['name']}: {e['detail']}" for e in broken)
        raise ChecksFailed(
            f"etl.checks: {len(broken)} of {count_of(len(checks), 'rule')} failed on "
            f"{count_of(rows_in, 'row')}:\n{lines}",
            report,
        )
    if sum(quarantined.values()) == rows_in:
        raise EtlError(
            f"etl.checks: all {count_of(rows_in, 'row was')} quarantined: {quarantined}; nothing is left to train on"
        )
    return report


def _entry(check: CheckConfig, rows: int, failing: int) -> dict[str, Any]:
    limit = check.max_share if check.max_share is not None else (0.0 if check.level == "dataset" else 1.0)
    share = failing / rows if rows else 0.0
    return {
        "name": check.name,
        "kind": check.kind,
        "level": check.level,
        "rows": rows,
        "failing": failing,
        "share": share,
        "max_share": limit,
        "passed": share <= limit,
        "rule": _rule_text(check),
        "detail": f"{_rule_text(check)}: {failing} of {count_of(rows, 'row')} failed ({share:.4%}), "
        f"allowed {limit:.4%}",
    }


def _rule_text(check: CheckConfig) -> str:
    if check.kind == "range":
        low = "" if check.min is None else f"{check.min:g} <= "
        return f"{low}{check.column}" + ("" if check.max is None else f" <= {check.max:g}")
    if check.kind == "null_share":
        return f"{check.column} is not null"
    if check.kind == "unique":
        return f"({', '.join(check.columns)}) is unique"
    if check.kind == "referential":
        return f"{check.column} occurs in {check.to}"
    return check.sql or ""


def good(marked: DataFrame) -> DataFrame:
    """Return the rows that pass every row-level rule, without the check columns."""
    return _without_flags(marked.where(F.col(RULE).isNull())).drop(RULE)


def bad(marked: DataFrame) -> DataFrame:
    """Return quarantined rows with their rule's name in a last column `rule` (`__rule` if taken)."""
    rows = _without_flags(marked.where(F.col(RULE).isNotNull()))
    name = RULE if any(c.casefold() == "rule" for c in rows.columns) else "rule"
    return rows.select(*[c for c in rows.columns if c != RULE], F.col(RULE).alias(name))


def _without_flags(marked: DataFrame) -> DataFrame:
    return marked.drop(*[c for c in marked.columns if c.startswith(FAIL)])
