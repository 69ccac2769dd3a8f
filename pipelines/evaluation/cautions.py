"""Warn of what makes scores better than the model will be, or worse than they need be, by the rows of the splits.

Groups of rows on both sides of the split, columns that give the label away, and features whose later values training
never saw. On samples, in the driver: some seconds. `sparkring init` looks for the same by the same code.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from sparkring.conf.errors import error_line
from sparkring.conf.manifest import Column
from sparkring.conf.tasks import LabelForm, TaskKind
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.pipelines.init.soundness.columns import microseconds, values_of
from sparkring.pipelines.init.soundness.groups import Array, CellRows, Grouping, Values, codes_of, find_grouping
from sparkring.pipelines.init.soundness.leaks import find_leaks
from sparkring.training.worker.result import Importance

log = logging.getLogger(__name__)
MOST_ROWS = 50_000  # of a split that are looked at for groups and leaks
STRADDLING = 0.05  # of the test rows whose group has training rows too
MOST_COMPARED = 5_000_000  # rows of a split whose ranges are compared
OUTSIDE = 0.05  # of a later split's rows, whose value of a feature lies outside of training's
NEW = 0.1  # of the test rows have new values of a category
FEWEST_ROWS = 20  # of a later split
MOST_VALUES = 1000  # distinct whole numbers and dates, of which each is looked for; of more their range


@dataclass(frozen=True)
class ScoredSplits:
    """What a model was trained and tested on, for cautions.

    splits: rows by name, train first and the scored one last. inputs: stored columns that the model reads. key: columns
    whose rows of one value are in one split; None: of a split by time, in which groups are on both sides.
    """

    kind: TaskKind
    splits: Mapping[str, SplitRows]
    inputs: Sequence[str]
    label: str
    key: Sequence[str] | None = ()


def find_cautions(judged: ScoredSplits, importance: Sequence[Importance]) -> list[str]:
    """Return a sentence per finding, logged as a warning; a failing search finds nothing."""
    searches: dict[str, Callable[[], Iterator[str]]] = {
        "ranges": lambda: outside_training(judged),
        "groups": lambda: straddling_groups(judged),
        "leaks": lambda: given_away(judged, importance),
    }
    found = list[str]()
    for name, search in searches.items():
        try:
            found += search()
        except Exception as error:
            log.warning("%s of features were not looked at: %s", name, error_line(error))
    for line in found:
        log.warning("%s", line)
    return found


def straddling_groups(judged: ScoredSplits) -> Iterator[str]:
    """Warn of groups with rows in train and test, where trees do worse on rows of new ones."""
    if judged.key is None or judged.kind.has_several_labels:
        return
    names = [*judged.splits]
    train, test = judged.splits[names[0]], judged.splits[names[-1]]
    wanted = [c.name for c in train.manifest.columns if c.layout == "scalar" and c.role not in ("label", "weight")]
    both = [_first_rows(rows, wanted, judged.label) for rows in (train, test)]
    columns, labels = _columns(both, wanted), np.concatenate([labels for _, labels in both])
    rows = _cells(columns, [name for name in judged.inputs if name in columns], labels, judged.kind)
    grouping = find_grouping(rows, columns, in_order=False)
    if grouping is None or not grouping.gap.is_clear or {*grouping.columns} & {*judged.key}:
        return
    groups, first = codes_of(*(columns[name].codes for name in grouping.columns)), len(both[0][1])
    share = float(np.mean(np.isin(groups[first:], groups[:first])))
    if share > STRADDLING:
        yield _of_groups(grouping, share, names[-1], rows.is_number)


def _of_groups(grouping: Grouping, share: float, split: str, is_number: bool) -> str:
    key = " and ".join(grouping.columns)
    random, grouped = (math.sqrt(loss) if is_number else loss for loss in (grouping.gap.random, grouping.gap.grouped))
    loss = "RMSE" if is_number else "log loss"
    return (
        f"rows of one {key} are in train and {split} ({share:.0%} of the {split} rows): trees have a {loss} of "
        f"{random:.4g} so, and of {grouped:.4g} for rows of a new {key}; if the model is for new ones, its scores are "
        f"too good: set etl.split.key to [{', '.join(grouping.columns)}]"
    )


def given_away(judged: ScoredSplits, importance: Sequence[Importance]) -> Iterator[str]:
    """Warn of columns that alone give the label in the test rows, or nearly."""
    if judged.kind.has_several_labels:
        return
    test = judged.splits[[*judged.splits][-1]]
    wanted = [name for name in judged.inputs if test.manifest.column(name).layout == "scalar"]
    both = [_first_rows(test, wanted, judged.label)]
    shares = _shares(importance)
    for leak in find_leaks(_columns(both, wanted), both[0][1], judged.kind.form is LabelForm.NUMBER, in_order=False):
        share = sum(shares.get(name, 0.0) for name in leak.columns)
        much = f", and {share:.0%} of what the model depends on" if share else ""
        how = leak.how.format(label=judged.label)
        yield (
            f"too good to be true: {' and '.join(leak.columns)} {how}{much}; leave it out (etl.features) if it is not "
            "known when a prediction is made"
        )


def _shares(importance: Sequence[Importance]) -> dict[str, float]:
    """Return each column's share in the growth of the loss when any column is permuted."""
    total = sum(max(each.mean, 0.0) for each in importance)
    return {each.feature: max(each.mean, 0.0) / total for each in importance} if total else {}


def outside_training(judged: ScoredSplits) -> Iterator[str]:
    """Warn of features of which later splits have values outside of those of training."""
    train, *later = judged.splits
    seen = _some_files(judged.splits[train])
    wanted = [name for name in judged.inputs if _is_compared(seen.manifest.column(name))]
    if not wanted:
        return
    known = {name: TrainingValues() for name in wanted}
    for table in seen.tables(wanted):
        known = {name: each.beside(table[name]) for name, each in known.items()}
    for split in later:
        outside, rows = dict.fromkeys(wanted, 0), 0
        for table in _some_files(judged.splits[split]).tables(wanted):
            rows += len(table)
            outside = {name: n + known[name].unseen(table[name]) for name, n in outside.items()}
        for name, n in outside.items():
            if rows >= FEWEST_ROWS and n > OUTSIDE * rows:
                share = f"{name}: {n / rows:.0%} of the {split} rows"
                yield (
                    f"{share} have values that training never saw ({known[name].text}); a model cannot "
                    "know them: leave it out (etl.features), or hold out other rows (etl.split)"
                )


def new_categories(unseen: Mapping[str, int], rows: int) -> list[str]:
    """Warn of categories with new values in many test rows. `unseen`: such rows by feature; `rows`: all of them."""
    found = [
        f"{name}: {n / rows:.0%} of the test rows have values that training has not, or too seldom to know them; what "
        "names the rows is no feature"
        for name, n in unseen.items()
        if rows >= FEWEST_ROWS and n > NEW * rows
    ]
    for line in found:
        log.warning("%s", line)
    return found


def _some_files(rows: SplitRows) -> SplitRows:
    """Return the rows, or if very many, those of evenly spaced files."""
    step = math.ceil(rows.most_rows / MOST_COMPARED)
    return replace(rows, files=rows.files[::step], first_rows=rows.first_rows[::step]) if step > 1 else rows


def _is_compared(column: Column) -> bool:
    """Return whether a column's values have an order; new categories are counted elsewhere."""
    return column.layout == "scalar" and column.dtype not in ("string", "binary", "bool")


@dataclass(frozen=True)
class TrainingValues:
    """What training has seen of a column: its ends, and each value where these are few."""

    low: float = math.inf
    high: float = -math.inf
    values: Array | None = None  # None: too many
    is_empty: bool = True

    def beside(self, column: pa.ChunkedArray) -> TrainingValues:
        """Merge the values of more rows."""
        found = _doubles(column)
        if not len(found):
            return self
        values = None
        if self.is_empty or self.values is not None:
            values = np.unique(found if self.values is None else np.concatenate([self.values, found]))
        few = values if values is not None and len(values) <= MOST_VALUES and not np.fmod(values, 1).any() else None
        return TrainingValues(min(self.low, found.min()), max(self.high, found.max()), few, False)

    def unseen(self, column: pa.ChunkedArray) -> int:
        """Count rows whose value is outside of what was seen; nulls do not count."""
        found = _doubles(column)
        if self.is_empty:
            return 0
        if self.values is not None and len(self.values) < 64:  # parts of dates and codes: holes count too
            return int(np.count_nonzero(~np.isin(found, self.values)))
        return int(np.count_nonzero((found < self.low) | (found > self.high)))

    @property
    def text(self) -> str:
        return f"it is {self.low:.6g} to {self.high:.6g} there"


def _doubles(column: pa.ChunkedArray) -> Array:
    """Return the finite values as float64."""
    if pa.types.is_temporal(column.type):
        column = microseconds(column)
    found: Array = column.drop_null().cast(pa.float64(), safe=False).to_numpy()
    return found[np.isfinite(found)]


def _first_rows(rows: SplitRows, names: Sequence[str], label: str) -> tuple[pa.Table, Array]:
    """Return the first stored rows, which are in hash order, and their labels, (N,)."""
    texts = [name for name in names if rows.manifest.column(name).dtype == "string"]
    tables, labels, count = list[pa.Table](), list[Array](), 0
    for table, batch in zip(rows.tables(names, texts), rows.doubles([label]), strict=True):
        tables.append(table.select([*names]).slice(0, MOST_ROWS - count))
        labels.append(batch.column(0).to_numpy()[: MOST_ROWS - count])
        count += len(tables[-1])
        if count >= MOST_ROWS:
            break
    return pa.concat_tables(tables), np.concatenate(labels)


def _columns(both: Sequence[tuple[pa.Table, Array]], names: Sequence[str]) -> dict[str, Values]:
    """Return the values of each column in all rows."""
    found = {}
    for name in names:
        parts = [table.column(name) for table, _ in both]
        plain = [p.cast(p.type.value_type) if pa.types.is_dictionary(p.type) else p for p in parts]
        found[name] = values_of(pa.chunked_array([chunk for part in plain for chunk in part.chunks], plain[0].type))
    return found


def _cells(columns: Mapping[str, Values], inputs: Sequence[str], labels: Array, kind: TaskKind) -> CellRows:
    """Convert rows to what trees see: numbers, and codes for other values."""
    cells = [columns[n].numbers if columns[n].numbers is not None else columns[n].codes.astype(float) for n in inputs]
    is_number = kind.form is LabelForm.NUMBER
    of = labels if is_number else np.unique(labels, return_inverse=True)[1].astype(float)
    return CellRows(np.column_stack([np.asarray(each) for each in cells]), inputs, of, is_number)
