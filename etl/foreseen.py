"""What the recipe alone says of the columns that its rows will have, and what it names that they will not.

sqlglot parses the views. Spark is not needed, and has the last word: what is not certain here is left to it.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from sparkring.conf.blocks.etl import EtlConfig


class _NotCertain(ValueError):
    """Only Spark can say which columns a query has."""


def row_problems(etl: EtlConfig) -> Iterator[str]:
    """Yield the keys that name a column which `etl.rows` will certainly not have."""
    known = row_columns(etl)
    if known is None:
        return
    wanted = [(f"etl.features.{name}", f.column or name) for name, f in etl.features.items()]
    wanted += [("etl.label", name) for name in etl.labels]
    single = {"etl.weight": etl.weight, "etl.split.column": etl.split.column}
    wanted += [(key, name) for key, name in single.items() if name]
    wanted += [("etl.keep", name) for name in etl.keep] + [("etl.key", name) for name in etl.key]
    wanted += [("etl.text.column", etl.text.column)] if etl.text else []
    wanted += [("etl.interval.column", etl.interval.column)] if etl.interval else []
    lower = {name.lower(): name for name in known}
    for key, name in wanted:
        by_spark = key == "etl.split.column"  # it ignores case there, and finds the fields of structs
        if name not in known and not (by_spark and name.partition(".")[0].lower() in lower):
            near = [lower[name.lower()]] if name.lower() in lower else difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"they have {sorted(known)}"
            yield f"{key}: the rows of {etl.rows!r} have no column {name!r}; {hint}"


def row_columns(etl: EtlConfig) -> list[str] | None:
    """Predict the columns of `etl.rows`; None if only Spark can tell."""
    parser_log = logging.getLogger("sqlglot")
    level = parser_log.level
    parser_log.setLevel(logging.CRITICAL)  # it warns of what it takes for a command: Spark decides that
    try:
        return _columns(etl.rows, etl)
    except (_NotCertain, RecursionError):  # a query may be nested more deeply than sqlglot can read
        return None
    finally:
        parser_log.setLevel(level)


def _columns(name: str, etl: EtlConfig) -> list[str]:
    """Predict the columns of a source or view."""
    if name in etl.sources:
        known = etl.sources[name].known_columns()
        if known is not None:
            return known
    if name not in etl.views:
        raise _NotCertain(name)
    earlier = etl.model_copy(update={"views": dict([*etl.views.items()][: [*etl.views].index(name)])})
    try:
        query = sqlglot.parse_one(etl.views[name], dialect="spark")
    except SqlglotError as error:
        raise _NotCertain(name) from error
    while isinstance(query, exp.SetOperation | exp.Subquery):
        query = query.this
    if not isinstance(query, exp.Select) or query.find(exp.Pivot, exp.CTE):
        raise _NotCertain(name)
    return [column for selected in query.selects for column in _selected(selected, query, earlier)]


def _selected(selected: exp.Expr, query: exp.Select, etl: EtlConfig) -> list[str]:
    """Predict the columns that one item of a SELECT produces."""
    if not selected.is_star:
        if isinstance(selected, exp.Aliases) or not (isinstance(selected, exp.Alias | exp.Column | exp.Dot)):
            raise _NotCertain(str(selected))
        return [selected.output_name]
    item = selected.this if isinstance(selected, exp.Column) else selected
    if any(item.args.get(word) for word in ("except_", "except", "replace", "rename")):
        raise _NotCertain(str(selected))
    source = query.args.get("from_") or query.args.get("from")
    tables = [source.this if source else None, *(join.this for join in query.args.get("joins") or [])]
    plain = all(isinstance(table, exp.Table) and not table.alias_column_names for table in tables)
    if query.args.get("laterals") or not plain:
        raise _NotCertain(str(selected))
    joined = any(  # with fewer columns than both tables have
        join.args.get("using") or join.kind in ("SEMI", "ANTI") or join.method == "NATURAL"
        for join in query.args.get("joins") or []
    )
    if isinstance(selected, exp.Column):
        tables = [table for table in tables if table.alias_or_name.lower() == selected.table.lower()]
    elif joined:
        raise _NotCertain(str(selected))
    by_lower = {name.lower(): name for name in [*etl.sources, *etl.views]}
    if not tables or any(table.name.lower() not in by_lower or table.db for table in tables):
        raise _NotCertain(str(selected))
    return [column for table in tables for column in _columns(by_lower[table.name.lower()], etl)]
