"""Decide what a table of interactions holds: who, what and when, from when on rows are held out, and features."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkring.conf.load import ConfigError
from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import BINARY
from sparkring.etl.sources.files.read import quoted
from sparkring.etl.sources.values import DECIMAL
from sparkring.pipelines.init.columns import (
    DATES,
    FEWEST_ROWS,
    WHOLE,
    decide_label,
    feature_of,
    identifiers,
    left_out_reason,
)
from sparkring.pipelines.init.sample import TableSample, read_columns

TRAIN_SHARE, TEST_SHARE = 0.8, 0.1  # of the rows, by time
FEWEST_ITEMS = 20  # below, the first ten are no choice
LABEL, PERIOD = "taken", "period"
RESERVED = (LABEL, PERIOD, "place", "beside", "number", "prediction")  # columns of the recipe's views, and next to them


@dataclass(frozen=True)
class Roles:
    """Columns of the file, as the command line names them."""

    user: str
    item: str
    time: str
    label: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """Option -> column."""
        given = {"--user": self.user, "--item": self.item, "--time": self.time, "--label": self.label}
        return {option: column for option, column in given.items() if column is not None}


@dataclass(frozen=True)
class Outcome:
    """What of a row is predicted. `sql` makes it of the file's columns; None: every row of the file is positive."""

    name: str = LABEL
    sql: str | None = None
    why: str = "every row of the file is one, and others are drawn"


@dataclass
class Interactions:
    """What was found. Names are those of the recipe; `facts`: feature's name -> column of the file, by whose it is."""

    user: str
    item: str
    label: Outcome
    valid_from: str  # SQL literals of the file's time
    test_from: str
    users: int
    items: int
    test_users: int
    unknown: int  # rows without user, item or time
    features: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, dict[str, str]] = field(default_factory=lambda: {"item": {}, "user": {}, "row": {}})
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def is_drawn(self) -> bool:
        """Whether every row of the file is positive, so that others must be drawn."""
        return self.label.sql is None


def decide_interactions(sample: TableSample, roles: Roles) -> Interactions:
    """Decide by types and values. ConfigError for columns that are not there, or cannot be what they are named for."""
    check_roles(sample, roles)
    names = identifiers(list(sample.types), RESERVED)
    every = read_columns(sample, [roles.user, roles.item, roles.time]).rename_columns(["user", "item", "time"])
    known = every.filter(pc.field("user").is_valid() & pc.field("item").is_valid() & pc.field("time").is_valid())
    label = interaction_label(sample, roles, names)
    dated = known if label.sql is not None else first_interactions(known)
    valid_from, test_from = boundaries(sample, roles.time, dated["time"])
    kind = sample.types[roles.time]
    found = Interactions(
        user=names[roles.user],
        item=names[roles.item],
        label=label,
        valid_from=literal(valid_from.as_py(), kind),
        test_from=literal(test_from.as_py(), kind),
        users=pc.count_distinct(known["user"]).as_py(),
        items=pc.count_distinct(known["item"]).as_py(),
        test_users=pc.count_distinct(dated.filter(pc.field("time") >= test_from)["user"]).as_py(),
        unknown=every.num_rows - known.num_rows,
    )
    if found.items < FEWEST_ITEMS:
        raise ConfigError(
            str(sample.path), [f"--item: has {count_of(found.items, 'item')}; at least {FEWEST_ITEMS} are needed"]
        )
    for column, name in names.items():
        if column not in roles.named.values():
            _decide_column(found, sample, roles, column, name)
    return found


def check_roles(sample: TableSample, roles: Roles) -> None:
    """Raise ConfigError, with every problem, for columns that are not there or of a wrong type, and too few rows."""
    problems, columns = [], list(sample.types)
    for option, column in roles.named.items():
        if column not in columns:
            near = difflib.get_close_matches(column, columns, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {columns}"
            problems.append(f"{option} {column}: no such column; {hint}")
        elif list(roles.named.values()).count(column) > 1:
            problems.append(f"{option} {column}: named twice; each of {', '.join(roles.named)} is a column of its own")
        elif option in ("--user", "--item") and sample.types[column] not in (*WHOLE, "string"):
            problems.append(f"{option} {column}: is {sample.types[column]}; ids are whole numbers or texts")
        elif option == "--time" and sample.types[column] not in (*DATES, *WHOLE, "float", "double"):
            remedy = "rows are held out by time, so it is a date, a timestamp or a number; write dates as 2024-01-31"
            problems.append(f"{option} {column}: is {sample.types[column]}; {remedy}")
    if sample.rows.num_rows < FEWEST_ROWS:
        problems.append(f"has {count_of(sample.rows.num_rows, 'row')}; at least {FEWEST_ROWS} are needed")
    if problems:
        raise ConfigError(str(sample.path), problems)


def first_interactions(rows: pa.Table) -> pa.Table:
    """Return each pair of `user` and `item` with its first `time`, to hold out of all-positive rows."""
    return rows.group_by(["user", "item"]).aggregate([("time", "min")]).rename_columns(["user", "item", "time"])


def boundaries(sample: TableSample, column: str, times: pa.ChunkedArray) -> tuple[pa.Scalar, pa.Scalar]:
    """Return the first times of validation and test rows. ConfigError for fewer than three distinct times."""
    ordered = times.take(pc.sort_indices(times))
    distinct, counts = (part for part in pc.value_counts(ordered).flatten())  # in the order of their first row
    if len(distinct) < 3:
        problem = (
            f"--time {column}: has {count_of(len(distinct), 'distinct time')}; rows before, between and after two are "
            "needed"
        )
        raise ConfigError(str(sample.path), [problem])
    before = np.cumsum(counts.to_numpy()) - counts.to_numpy()
    rows = len(ordered)
    valid = int(np.clip(np.searchsorted(before, TRAIN_SHARE * rows), 1, len(distinct) - 2))
    test = int(np.clip(np.searchsorted(before, (1 - TEST_SHARE) * rows), valid + 1, len(distinct) - 1))
    return distinct[valid], distinct[test]


def literal(value: Any, kind: str) -> str:
    """Format the value for Spark SQL in a UTC session."""
    if kind == "date":
        assert isinstance(value, date), "as its type is"
        return f"DATE '{value.isoformat()}'"
    if isinstance(value, datetime):
        naive = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        return f"{kind.upper()} '{naive.isoformat(sep=' ')}'"
    return repr(value)


def interaction_label(sample: TableSample, roles: Roles, names: dict[str, str]) -> Outcome:
    """Choose the label: two values as they are; more numbers split at the best halving threshold."""
    if roles.label is None:
        return Outcome()
    column, name = roles.label, names[roles.label]
    values = pc.drop_null(sample.rows[column])
    distinct = pc.count_distinct(values).as_py()
    is_number = (
        sample.types[column] in (*WHOLE, "float", "double") or DECIMAL.fullmatch(sample.types[column]) is not None
    )
    if distinct <= 2 or not is_number:
        label = decide_label(sample, column, name, BINARY.name)
        return Outcome(name, label.columns[name], label.why)
    numbers = np.sort(values.cast(pa.float64(), safe=False).to_numpy())
    steps = np.unique(numbers)[1:]
    shares = 1 - np.searchsorted(numbers, steps) / len(numbers)
    least = float(steps[np.argmin(np.abs(shares - 0.5))])
    share = float(shares[np.argmin(np.abs(shares - 0.5))])
    cut = repr(int(least) if least.is_integer() else least)  # all its digits: it is one of the values
    why = f"{column} of at least {cut}, {100 * share:.0f} % of the rows, is taken; the others are not"
    return Outcome(LABEL, f"CAST({quoted(column)} >= {cut} AS int)", why)


def _decide_column(found: Interactions, sample: TableSample, roles: Roles, column: str, name: str) -> None:
    """Make a feature of one further column, or record why it cannot be one.

    Args:
        found: interactions, completed here.
        sample: sample of the table.
        roles: roles of the columns.
        column: column of the file.
        name: name in the recipe.
    """
    kind, values = sample.types[column], sample.rows[column]
    reason = left_out_reason(kind, values)
    if reason is None and kind in DATES:
        reason = f"{kind}; make a number or a category of it in the view"
    whose = "row"
    if reason is None:
        ids = {"item": roles.item, "user": roles.user}
        whose = next((owner for owner, id_ in ids.items() if is_fact_of(sample.rows, id_, column)), "row")
        distinct, owners = pc.count_distinct(values).as_py(), {"item": found.items, "user": found.users}.get(whose, 0)
        if kind == "string" and distinct > owners / 2 > 0:
            reason = f"a name: {count_of(distinct, 'text')} of {owners} {whose}s"
        elif whose == "row" and found.is_drawn:
            reason = "of the interaction, not of item or user, so a row that is drawn has none"
    if reason is not None:
        found.left_out[column] = reason
        return
    found.facts[whose if found.is_drawn else "row"][name] = column
    found.features[name] = feature_of(kind, values)


def is_fact_of(rows: pa.Table, id_: str, column: str) -> bool:
    """Return whether each id has at most one value of the column."""
    pairs = pa.table({"id": rows[id_], "value": rows[column]}).filter(pc.field("id").is_valid())
    counts = pairs.group_by("id").aggregate([("value", "count_distinct")])["value_count_distinct"]
    return bool((pc.max(counts).as_py() or 0) <= 1)
