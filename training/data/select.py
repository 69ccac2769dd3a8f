"""What is decided before the plan, by all ranks together: which files are sound, which rows a filter keeps.

Every rank looks at its share of the files; an all-gather of what they found makes the same selection everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.manifest import DataFile, DatasetManifest
from training.data.columns import DataError, Unreachable
from training.data.source import Keep, Opener

log = logging.getLogger(__name__)
AllGather = Callable[[Any], list[Any]]
"""One JSON-able value per rank in, the list of all ranks' values, in the order of ranks, out. Collective."""

Tick = Callable[[str], None]
"""Called with other words after every piece of a long work, by the thread that waits for it: it makes progress."""

Condition = tuple[str, str, Any]
COMPARE: dict[str, Callable[[pc.Expression, Any], pc.Expression]] = {
    "==": lambda field, value: field == value,
    "!=": lambda field, value: field != value,
    "<": lambda field, value: field < value,
    "<=": lambda field, value: field <= value,
    ">": lambda field, value: field > value,
    ">=": lambda field, value: field >= value,
    "in": lambda field, value: field.isin(list(value)),
    "not in": lambda field, value: ~field.isin(list(value)),
}


def alone(value: Any) -> list[Any]:
    """The all-gather of one rank."""
    return [value]


def unheard(words: str) -> None:
    """The tick of whoever is not watched."""


@dataclass(frozen=True)
class Selection:
    """The files that are read, the rows of each of their row groups, in stored order, and why others are not."""

    files: tuple[DataFile, ...]
    group_rows: tuple[int, ...]
    keep: Keep | None = None
    conditions: tuple[Condition, ...] = ()
    quarantined: tuple[tuple[str, int, str], ...] = ()  # (path, rows, reason)

    @property
    def lost_rows(self) -> int:
        return sum(rows for _, rows, _ in self.quarantined)


def everything(files: Sequence[DataFile]) -> Selection:
    return Selection(tuple(files), tuple(rows for file in files for rows in file.row_groups))


def quarantine(
    files: Sequence[DataFile], opener: Opener, rank: int, size: int, gather: AllGather, tick: Tick = unheard
) -> Selection:
    """Leave out the files whose content is not what the manifest says, whole: where one page is wrong, no other is
    trusted. The same on every rank; counted and logged with the reason. DataError where nothing is left."""
    found: dict[str, str] = {}
    for file in list(files)[rank::size]:
        tick(f"check {file.path}")
        try:
            opener.check(file, content=True)
        except Unreachable:
            raise
        except DataError as error:
            found[file.path] = str(error)
    return without(files, gather(found))


def without(files: Sequence[DataFile], reports: Sequence[dict[str, str]]) -> Selection:
    """The selection that every rank makes of all ranks' reports (path -> reason)."""
    reasons = {path: reason for report in reports for path, reason in report.items()}
    sound = [file for file in files if file.path not in reasons]
    gone = tuple((file.path, file.rows, reasons[file.path]) for file in files if file.path in reasons)
    for path, rows, reason in gone:
        log.warning("quarantined %s with %d rows: %s", path, rows, reason)
    if files and not sound:
        raise DataError(f"all {len(gone)} files are damaged, such as: {gone[0][2]}")
    chosen = everything(sound)
    return Selection(chosen.files, chosen.group_rows, quarantined=gone)


def filtered(
    chosen: Selection, manifest: DatasetManifest, conditions: Sequence[Condition], opener: Opener,
    rank: int, size: int, gather: AllGather, tick: Tick = unheard,
) -> Selection:  # fmt: skip
    """Keep the rows for which all conditions are true (a null is not). One pass over the filter's columns, shared by
    the ranks, counts what is left of each row group: the plan is made of that."""
    if not conditions:
        return chosen
    keep = make_keep(manifest, conditions)
    counts: dict[str, list[int]] = {}
    for file in chosen.files[rank::size]:
        tick(f"filter {file.path}")
        with opener.open(file) as handle:
            parquet = pq.ParquetFile(handle)
            groups = [parquet.read_row_group(g, columns=sorted(keep.columns)) for g in range(len(file.row_groups))]
            try:
                counts[file.path] = [group.filter(keep.expression).num_rows for group in groups]
            except pa.ArrowException as error:
                types = {field.name: str(field.type) for field in groups[0].schema}
                raise ValueError(f"data.filters = {_shown(conditions)}: stored are {types}; {error}") from error
    every = {path: rows for report in gather(counts) for path, rows in report.items()}
    rows = tuple(n for file in chosen.files for n in every[file.path])
    log.info("filters keep %d of %d rows", sum(rows), sum(chosen.group_rows))
    return Selection(chosen.files, rows, keep, tuple(conditions), chosen.quarantined)


def _shown(conditions: Sequence[Condition]) -> str:
    return str([list(condition) for condition in conditions])


def make_keep(manifest: DatasetManifest, conditions: Sequence[Condition]) -> Keep:
    """ValueError for a column there is not, or one that cannot be compared."""
    expression, columns = None, set()
    for name, operator, value in conditions:
        try:
            layout = manifest.column(name).layout
        except KeyError as error:
            raise ValueError(f"data.filters: {error.args[0]}") from None
        if layout not in ("scalar", "binary"):
            raise ValueError(f"data.filters: column {name!r} is {layout}; only scalar columns can be compared")
        try:
            one = COMPARE[operator](pc.field(name), value)
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(f"data.filters = {_shown([(name, operator, value)])}: {error}") from error
        expression = one if expression is None else expression & one
        columns.add(name)
    return Keep(expression, frozenset(columns))
