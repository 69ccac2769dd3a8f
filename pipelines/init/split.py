"""Decide how rows are split: at random, by groups, or by time; and remark columns that give the label away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from sparkring.conf.blocks.etl import SPLIT_BUCKETS, SPLIT_SALT, share_edges
from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import TASKS, LabelForm
from sparkring.etl.sources.files.read import quoted
from sparkring.pipelines.init.columns import DATES, RANDOM, SHARES, WHOLE, Columns, SplitChoice, identifiers
from sparkring.pipelines.init.sample import TableSample, read_columns
from sparkring.pipelines.init.soundness.columns import codes, microseconds, numbers, values_of
from sparkring.pipelines.init.soundness.groups import (
    TIMES,
    Array,
    CellRows,
    Gap,
    Grouping,
    Values,
    codes_of,
    find_grouping,
)
from sparkring.pipelines.init.soundness.leaks import Leak, find_leaks
from sparkring.pipelines.init.soundness.times import time_gap
from sparkring.training.data.features.xxhash64 import SEED, hash_bytes, hash_whole

FEW_GROUPS = 100
FEW_SHARES = {"train": 0.6, "valid": 0.2, "test": 0.2}  # of few groups: each split needs several
MOST_SEEDS, NEAR = 100, 0.2  # seeds that are tried until each split has its share of the rows, but for so much of it
MOST_ROWS = 200_000  # that are looked at
FEWEST_TIMES = 20
LONG_LIVED = 0.5  # of the time of the table, in the median group
UNSEEN = 0.05  # of the later rows
SELDOM = 0.1  # rows of a value in training for each later one: those of a season's first days teach nothing of it
FEWEST_ROWS = 5  # for each value of a part of dates that others follow from
GROWS = 0.995  # rank correlation with time
DAY_US = 86_400_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PERIODS = {"hour": 1, "weekday": 7, "month": 366}  # days in which a part of a date has each of its values
PARTS = {
    "year": pc.year, "month": pc.month, "quarter": pc.quarter, "week": pc.iso_week, "day": pc.day,
    "weekday": pc.day_of_week, "day of the year": pc.day_of_year, "hour": pc.hour,
    "year and month": lambda dates: pc.add(pc.multiply(pc.year(dates), 12), pc.month(dates)),
}  # fmt: skip
YEARLY = ("year", "month", "quarter", "week", "day of the year")  # parts that a table of less than two years has once


@dataclass(frozen=True)
class Times:
    """A column of dates or timestamps: microseconds since 1970 in (N,) rows, and when later splits begin."""

    column: str
    at: Array
    valid: int
    test: int
    is_date: bool

    @property
    def later(self) -> Array:
        """Rows of the later splits, (N,) bool."""
        found: Array = self.at >= self.valid
        return found

    def block(self, name: str) -> dict[str, Any]:
        """Return the recipe's split block. `name`: name of the column there."""
        return {
            "kind": "time",
            "column": name,
            "boundaries": {"valid": self.text(self.valid), "test": self.text(self.test)},
        }

    def text(self, at: int) -> str:
        """Format an instant as ISO 8601."""
        found = EPOCH + timedelta(microseconds=at)
        return found.date().isoformat() if at % DAY_US == 0 else found.replace(tzinfo=None).isoformat(sep=" ")


def with_split(sample: TableSample, found: Columns, label: str) -> Columns:
    """Decide the split of a table with one label, and leave out the features that make no sense with it.

    Args:
        sample: sample of the table.
        found: columns of the table.
        label: name of the label in the file.
    """
    some = replace(sample, rows=sample.rows.slice(0, MOST_ROWS))
    some = replace(some, rows=some.rows.filter(pc.is_valid(some.rows.column(label))))
    rows = rows_of(some, found, label)
    columns = {
        name: values_of(some.rows.column(name)) for name in some.types if name != label and is_single(some, name)
    }
    read = " ".join(sql for name, sql in found.selected.items() if name not in found.key)
    features = {name: of for name, of in columns.items() if quoted(name) in read}
    found = replace(
        found,
        remarks=found.remarks | leak_remarks(found, label, find_leaks(features, rows.labels, rows.is_number, True)),
    )
    grouping = find_grouping(rows, columns, in_order=True)
    times = next((made for name in some.types if name != label and (made := times_of(sample, some, name))), None)
    gap = None
    if times is not None:
        timeless = rows_of(some, without_features(found, unseen_parts(some, found, times)), label)
        gap = time_gap(rows, timeless, times.at)
    if grouping is not None:
        lives_long = times is not None and is_long_lived(grouping, columns, times)
        if gap is None or not gap.is_clear or not lives_long:
            return by_groups(some, found, grouping, rows.is_number, times)
    if times is None or gap is None:
        return found
    if not gap.is_clear:
        return replace(found, split=replace(found.split, others=[time_instead(some, found, times)]))
    return by_time(some, found, times, gap, rows.is_number, grouping)


def leak_remarks(found: Columns, label: str, leaks: Iterable[Leak]) -> dict[str, str]:
    """Return remarks on columns that give the label away, appended to earlier remarks."""
    made = dict[str, str]()
    for leak in leaks:
        first, *others = leak.columns
        who = f"it and {' and '.join(others)}" if others else "it"
        what = f"too good to be true: {who} {leak.how.format(label=label)}; leave it out if it is not known earlier"
        made[first] = "; ".join(filter(None, [found.remarks.get(first), what]))
    return made


# --- by groups


def by_groups(sample: TableSample, found: Columns, grouping: Grouping, is_number: bool, times: Times | None) -> Columns:
    """Keep the rows of a group in one split; the columns that tell groups apart are no features then.

    Args:
        sample: sample of the table.
        found: columns of the table.
        grouping: grouping that was found.
        is_number: whether the label is a number.
        times: times of the table, if any.
    """
    names = recipe_names(sample)
    key = [names[column] for column in grouping.columns]
    shares = FEW_SHARES if grouping.groups < FEW_GROUPS else SHARES
    block: dict[str, Any] = {"kind": "hash", "shares": shares, "key": key}
    if seed := even_seed(sample, grouping.columns, list(shares.values())):
        block["seed"] = seed
    first, *more = grouping.columns
    dropped = [first, *(c for c in more if pc.count_distinct(sample.rows.column(c)).as_py() > grouping.groups / 2)]
    why = f"rows are split by {' and '.join(key)} (etl.split.key), {count_of(grouping.groups, 'group', ',')}: "
    why += grouping.why + worth(grouping.gap, is_number, f"rows of one {' and '.join(key)} are on both sides")
    others = [_as_comment(f"To predict further rows of a known {' and '.join(key)}", RANDOM)]
    others += [] if times is None else [time_instead(sample, found, times)]
    made = replace(found, split=SplitChoice(block, why, others))
    reason = "rows are split by it, so that test rows have values that training never saw"
    made = without_columns(sample, made, dict.fromkeys(dropped, reason))
    return replace(made, selected={names[c]: quoted(c) for c in grouping.columns} | made.selected)


def worth(gap: Gap, is_number: bool, how: str) -> str:
    """Describe what trees lose either way, as the end of a sentence; "" if unclear."""
    if not gap.is_clear:
        return ""
    random, grouped = (math.sqrt(loss) if is_number else loss for loss in (gap.random, gap.grouped))
    loss = "an RMSE" if is_number else "a log loss"
    return f"; trees have {loss} of {grouped:.4g}, and of {random:.4g} where {how}"


def even_seed(sample: TableSample, columns: tuple[str, ...], shares: list[float]) -> int:
    """Find a seed by which each split has about its share of the rows; 0 if unknown."""
    groups = codes_of(*(codes(sample.rows.column(column)) for column in columns))
    _, first = np.unique(groups, return_index=True)
    rows, edges = np.bincount(groups) / len(groups), np.array(share_edges(shares))
    kinds = [sample.types[column] for column in columns]
    if not all(kind in ("string", *WHOLE) for kind in kinds):
        return 0
    values = [sample.rows.column(column).take(pa.array(first)) for column in columns]
    found: list[tuple[float, int]] = []
    for seed in range(MOST_SEEDS):
        places = np.searchsorted(edges, spark_buckets(values, kinds, seed), side="right")
        got = np.bincount(places, rows, minlength=len(shares))[: len(shares)]
        found.append((float(np.max(np.abs(got / shares - 1))), seed))
        if found[-1][0] <= NEAR:
            break
    return min(found)[1] if found[0][0] > NEAR else 0


def spark_buckets(values: list[pa.ChunkedArray], kinds: list[str], seed: int) -> Array:
    """Compute the bucket that etl/split.py gives each row by Spark's hash, (N,)."""
    hashes = np.full(len(values[0]), SEED, np.uint64)
    salt = pa.array([SPLIT_SALT] * len(hashes))
    for column, kind in [
        (salt, "string"),
        (pa.array([seed] * len(hashes), pa.int32()), "int"),
        *zip(values, kinds, strict=True),
    ]:
        hashes = np.where(np.asarray(column.is_null()), hashes, _hashed(column, kind, hashes))
    found: Array = hashes.view(np.int64) % SPLIT_BUCKETS
    return found


def _hashed(column: Any, kind: str, seeds: Array) -> Array:
    """Compute Spark's hash of a column, (N,) uint64, each row starting from its seed."""
    if kind == "bigint":
        return hash_whole(column.cast(pa.int64()).fill_null(0).to_numpy(), seeds).view(np.uint64)
    if kind == "string":
        texts = column.cast(pa.large_string()).fill_null("")
        texts = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
        _, offsets, data = texts.buffers()
        ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        return hash_bytes(ends, np.frombuffer(data or b"", np.uint8), seeds).view(np.uint64)
    numbers = np.asarray(column.fill_null(0)).astype("<i4")
    return hash_bytes(np.arange(len(numbers) + 1) * 4, numbers.view(np.uint8), seeds).view(np.uint64)


# --- by time


def times_of(sample: TableSample, some: TableSample, name: str) -> Times | None:
    """Return the times of a column without nulls, and where a tenth and a fifth of all rows remain."""
    kind = some.types[name]
    if kind not in DATES or some.rows.column(name).null_count:
        return None
    at = microseconds(some.rows.column(name)).to_numpy()
    every = at if sample.is_whole else microseconds(read_columns(sample, [name]).column(name).drop_null()).to_numpy()
    is_date = kind == "date" or not (every % DAY_US).any()
    first, valid, test = (int(each) for each in np.quantile(every, [0, 0.8, 0.9], method="higher"))
    if test - first > 200 * DAY_US:  # whole days are what a person reads
        valid, test = (each // DAY_US * DAY_US for each in (valid, test))
    if len(np.unique(every)) < FEWEST_TIMES or not first < valid < test:
        return None
    return Times(name, at, valid, test, is_date)


def by_time(
    sample: TableSample, found: Columns, times: Times, gap: Gap, is_number: bool, grouping: Grouping | None
) -> Columns:
    """Train on earlier rows, without date parts whose later values training never saw.

    Args:
        sample: sample of the table.
        found: columns of the table.
        times: times by which rows are split.
        gap: loss gap of trees.
        is_number: whether the label is a number.
        grouping: grouping of the table, if any.
    """
    names = recipe_names(sample)
    name = names[times.column]
    why = f"rows are split by {name}: 80 % before {times.text(times.valid)} train, 10 % before {times.text(times.test)}"
    why += " validate, later ones test, as the order of time matters" + worth(
        gap, is_number, "rows of all times are known"
    )
    key = [] if grouping is None else [names[column] for column in grouping.columns]
    others = [_as_comment(f"To predict rows of a new {' and '.join(key)}", {"kind": "hash", "key": key})] if key else []
    made = replace(found, split=SplitChoice(times.block(name), why, others))
    return without_features(made, unseen_parts(sample, found, times))


def time_instead(sample: TableSample, found: Columns, times: Times) -> str:
    """Return a comment for the recipe with its split by time."""
    without = unseen_parts(sample, found, times)
    but = f", without {', '.join(without)}, of which later rows have other values" if without else ""
    return _as_comment(f"To predict later rows from earlier ones{but}", times.block(recipe_names(sample)[times.column]))


def _as_comment(what: str, block: Mapping[str, Any]) -> str:
    return (
        f"{what}:\n  split: {yaml.safe_dump(dict(block), default_flow_style=True, width=1000, sort_keys=False).strip()}"
    )


def unseen_parts(sample: TableSample, found: Columns, times: Times) -> list[str]:
    """List features that tell when a row is: date parts with new later values, and what grows with time."""
    days, made = (int(times.at.max()) - int(times.at.min())) / DAY_US, list[str]()
    dates = sample.rows.column(times.column).cast(pa.timestamp("us"), safe=False)
    parts = {part: codes(function(dates)) for part, function in PARTS.items()}
    for name, feature in found.features.items():
        source = str(feature.get("column", name))
        part = next((each for each in PERIODS if source.endswith(f"_{each}") and feature["kind"] == "cyclic"), None)
        if part is not None:
            if days < 2 * PERIODS[part]:
                made.append(name)
            continue
        column = column_of(sample, found, source)
        if feature["kind"] == "numeric" and grows(numbers(sample.rows.column(column)), times.at):
            made.append(name)
            continue
        if (
            sample.types[column] not in (*WHOLE, "string")
            or pc.count_distinct(sample.rows.column(column)).as_py() > 1000
        ):
            continue
        values = codes(sample.rows.column(column))
        same = {each for each, of in parts.items() if of.max() == values.max() == codes_of(of, values).max()}
        later, earlier = (np.bincount(values[of], minlength=values.max() + 1) for of in (times.later, ~times.later))
        unseen = float(later[earlier < SELDOM * later].sum() / later.sum())
        follows = any(
            codes_of(of, values).max() == of.max() < len(of) / FEWEST_ROWS for of in parts.values()
        )  # a season
        is_part = same or follows or (TIMES.fullmatch(column) and sample.types[column] in WHOLE)
        if is_part and (unseen > UNSEEN or (same & {*YEARLY} and days < 2 * PERIODS["month"])):
            made.append(name)
    return made


def grows(values: Array, at: Array) -> bool:
    """Return whether numbers rise, or fall, with time alone, such as a growing id."""
    known = np.isfinite(values)
    ours, theirs = (np.unique(each[known], return_inverse=True)[1] for each in (values, at))
    if known.sum() < FEWEST_TIMES or not ours.max() or not theirs.max():
        return False
    return bool(abs(np.corrcoef(ours, theirs)[0, 1]) > GROWS)


def is_long_lived(grouping: Grouping, columns: Mapping[str, Values], times: Times) -> bool:
    """Return whether most groups have rows over most of the time, as stores have, unlike storms."""
    groups = codes_of(*(columns[name].codes for name in grouping.columns))
    low, high = np.full(groups.max() + 1, np.inf), np.full(groups.max() + 1, -np.inf)
    np.minimum.at(low, groups, times.at)
    np.maximum.at(high, groups, times.at)
    return bool(np.median(high - low) > LONG_LIVED * (times.at.max() - times.at.min()))


# --- what trees and tests see of a table


def recipe_names(sample: TableSample) -> dict[str, str]:
    """Map each column of the file to its name in the recipe."""
    return identifiers([*sample.types])


def column_of(sample: TableSample, found: Columns, name: str) -> str:
    """Return the file's column that a selected name is made of."""
    return next(column for column in sample.types if quoted(column) in found.selected[name])


def is_single(sample: TableSample, name: str) -> bool:
    """Return whether a column's values can be compared."""
    return not pa.types.is_nested(sample.rows.column(name).type)


def rows_of(sample: TableSample, found: Columns, label: str) -> CellRows:
    """Return the recipe's features, and the label, as trees see them."""
    cells, owners = [], []
    for name, feature in found.features.items():
        if feature.get("column", name) != name:
            continue  # a code next to its amount
        column = column_of(sample, found, name)
        values = sample.rows.column(column)
        if sample.types[column] in DATES:
            part = {"dayofweek": "weekday"}.get(word := found.selected[name].partition("(")[0], word)
            values = PARTS[part](values.cast(pa.timestamp("us"), safe=False))
        is_number = feature["kind"] != "categorical"
        cells.append(numbers(values) if is_number else codes(values).astype(np.float64))
        owners.append(column)
    is_value = TASKS[found.label.task].form is LabelForm.NUMBER
    labels = sample.rows.column(label)
    of = numbers(labels) if is_value else codes(labels).astype(np.float64)
    made = np.column_stack(cells) if cells else np.zeros((len(of), 0))
    return CellRows(made, owners, np.nan_to_num(of, posinf=np.finfo(float).max, neginf=np.finfo(float).min), is_value)


def without_columns(sample: TableSample, found: Columns, reasons: Mapping[str, str]) -> Columns:
    """Drop all features of some columns, unless none would be left. `reasons`: by column of the file."""
    owners = {name: column_of(sample, found, str(of.get("column", name))) for name, of in found.features.items()}
    kept = {name: of for name, of in found.features.items() if owners[name] not in reasons}
    if not kept:
        return found
    remarks = {name: text for name, text in found.remarks.items() if name not in reasons}
    return replace(found, features=kept, remarks=remarks, left_out=found.left_out | dict(reasons))


def without_features(found: Columns, names: list[str]) -> Columns:
    """Drop some features, unless none would be left."""
    kept = {name: of for name, of in found.features.items() if name not in names}
    if not kept:
        return found
    sources = {str(of.get("column", name)) for name, of in kept.items()}
    reason = "says when a row is, and later rows have values of it that training never saw"
    selected = {n: sql for n, sql in found.selected.items() if n not in names or n in sources}
    return replace(found, features=kept, selected=selected, left_out=found.left_out | dict.fromkeys(names, reason))
