"""Decide which files are sound and which rows a filter keeps.

This comes before the order is planned, and is equal on all ranks: every rank looks at its share of the files, and an
all-gather of what they found makes the same selection everywhere.
"""

from __future__ import annotations

import datetime as dt
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparkring.conf.manifest import Column, DataFile, DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.training.data.decoding.columns import DataError, StorageFailure
from sparkring.training.data.files import FileOpener
from sparkring.training.data.request import DataRank

log = logging.getLogger(__name__)
Condition = tuple[str, str, Any]
COMPARE: dict[str, Callable[[Any, Any], pc.Expression]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda field, values: field.isin(list(values)),
    "not in": lambda field, values: ~field.isin(list(values)) & field.is_valid(),
}


@dataclass(frozen=True)
class RowFilter:
    """Keeps the rows for which an expression over `columns` is true."""

    expression: pc.Expression
    columns: frozenset[str]


@dataclass(frozen=True)
class Selection:
    """Selected files, their row groups' rows in stored order, and what is left out."""

    files: tuple[DataFile, ...]
    group_rows: tuple[int, ...]
    row_filter: RowFilter | None = None
    conditions: tuple[Condition, ...] = ()
    quarantined: tuple[tuple[str, int, str], ...] = ()  # (path, rows, reason)


def select_all(files: Sequence[DataFile]) -> Selection:
    return Selection(tuple(files), tuple(rows for file in files for rows in file.row_groups))


def quarantine(files: Sequence[DataFile], opener: FileOpener, rank: DataRank) -> Selection:
    """Omit, whole, the files whose content differs from the manifest.

    Where one page is wrong, no other is trusted. The same on every rank; logged with the reason. DataError where no
    file is left.
    """
    found: dict[str, str] = {}
    for file in files[rank.rank :: rank.size]:
        rank.on_progress(f"check {file.path}")
        try:
            opener.check(file, content=True)
        except StorageFailure:
            raise
        except DataError as error:
            found[file.path] = str(error)
    reasons = {path: reason for report in rank.gather(found) for path, reason in report.items()}
    sound = [file for file in files if file.path not in reasons]
    damaged = tuple((file.path, file.rows, reasons[file.path]) for file in files if file.path in reasons)
    for path, rows, reason in damaged:
        log.warning("quarantined %s with %d rows: %s", path, rows, reason)
    if files and not sound:
        raise DataError(f"all {count_of(len(damaged), 'file is')} damaged, such as: {damaged[0][2]}")
    return replace(select_all(sound), quarantined=damaged)


def apply_filters(
    selection: Selection,
    manifest: DatasetManifest,
    conditions: Sequence[Condition],
    opener: FileOpener,
    rank: DataRank,
) -> Selection:
    """Keep the rows for which all conditions are true (a null is not).

    One pass over the filter's columns, shared by the ranks, counts the rows that are left of each row group, from which
    the order is planned.

    Args:
        selection: the sound files.
        manifest: the columns that conditions may name.
        conditions: (column, operator, value); none leave the selection as it is.
        opener: how files are read.
        rank: which share of the files this rank counts.
    """
    if not conditions:
        return selection
    row_filter = make_row_filter(manifest, conditions)
    counts: dict[str, list[int]] = {}
    for file in selection.files[rank.rank :: rank.size]:
        rank.on_progress(f"filter {file.path}")
        with opener.open(file) as handle:
            parquet = pq.ParquetFile(handle)
            names = sorted(row_filter.columns)
            groups = [parquet.read_row_group(g, columns=names) for g in range(len(file.row_groups))]
            try:
                counts[file.path] = [group.filter(row_filter.expression).num_rows for group in groups]
            except pa.ArrowException as error:
                types = {field.name: str(field.type) for field in groups[0].schema}
                raise ValueError(f"data.filters = {_shown(conditions)}: stored are {types}; {error}") from error
    counted = {path: rows for report in rank.gather(counts) for path, rows in report.items()}
    rows = tuple(n for file in selection.files for n in counted[file.path])
    log.info("filters keep %d of %d rows", sum(rows), sum(selection.group_rows))
    return replace(selection, group_rows=rows, row_filter=row_filter, conditions=tuple(conditions))


def _shown(conditions: Sequence[Condition]) -> str:
    return str([list(condition) for condition in conditions])


def literal(column: Column, value: Any) -> Any:
    """Parse the value of a condition: dates and timestamps are ISO 8601, in UTC without a zone."""
    if not isinstance(value, str) or column.logical not in ("date", "timestamp", "timestamp_ntz"):
        return value
    if column.logical == "date":
        return dt.date.fromisoformat(value)
    moment = dt.datetime.fromisoformat(value)
    return moment if column.logical == "timestamp_ntz" else moment.replace(tzinfo=moment.tzinfo or dt.UTC)


def make_row_filter(manifest: DatasetManifest, conditions: Sequence[Condition]) -> RowFilter:
    """Make the filter that keeps rows which meet all conditions."""
    expression, columns = None, set()
    for name, compare, value in conditions:
        try:
            column = manifest.column(name)
        except KeyError as error:
            raise ValueError(f"data.filters: {error.args[0]}") from None
        if column.layout not in ("scalar", "binary"):
            raise ValueError(f"data.filters: column {name!r} is {column.layout}; only scalar columns can be compared")
        try:
            given = [literal(column, v) for v in value] if isinstance(value, list) else literal(column, value)
            one = COMPARE[compare](pc.field(name), given)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ValueError(f"data.filters = {_shown([(name, compare, value)])}: {error}") from error
        expression = one if expression is None else expression & one
        columns.add(name)
    return RowFilter(expression, frozenset(columns))
