"""Decide what the columns of a table are to a model: the task of the label, a feature, or neither, and why."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkring.conf.load import ConfigError
from sparkring.conf.plain_text import count_of, in_order
from sparkring.conf.tasks import BINARY, MULTICLASS, MULTILABEL, POISSON, REGRESSION, TASKS, LabelForm
from sparkring.etl.sources.files.read import quoted
from sparkring.etl.sources.values import convert
from sparkring.pipelines.init.remarks import SHOWN, alike_remark, listed, missing_class_remark, remark_on
from sparkring.pipelines.init.sample import TableSample
from sparkring.pipelines.init.text_types import CODE, MOST_ODD, WHOLE, is_number
from sparkring.pipelines.init.written import DECIMAL_COMMAS, written_otherwise

TAGS = "array<string>"
DATES = ("date", "timestamp", "timestamp_ntz")
FEWEST_ROWS = 50  # below, a split by hash may have none
MOST_CLASSES = 1000
CLASS_NUMBERS = 10  # a label of at most so many whole numbers is taken for classes
CATEGORY_NUMBERS, ROWS_PER_NUMBER = 12, 20  # a feature of few whole numbers, each in many rows, is one of categories
CODE_NUMBERS, ROWS_PER_CODE, CODE_ROWS = 300, 50, 5  # one of some more is a code too, where a value has CODE_ROWS rows
INFINITY = "double('infinity')"
SKEWED = 2.0  # numbers from 0 on whose skewness is larger are taken by their logarithm
IDS = re.compile(r"(?i:(?:^|_| |-)(?:id|ids|nr|no|num|number|code|key|zip|zipcode|plz|postcode|sku)$)|[a-z0-9]I[dD]$")
PLAIN = re.compile("[A-Za-z_][A-Za-z0-9_]*")  # what Spark takes for a name without backquotes, but for:
KEYWORDS = {
    "ALL", "CASE", "CAST", "CURRENT_PATH", "DISTINCT", "EXISTS", "FALSE", "FROM", "INTERVAL", "NOT", "NULL", "SELECT",
    "TRUE", "WHERE",
}  # fmt: skip


@dataclass(frozen=True)
class Label:
    """What is predicted. `columns`: SQL that makes each label; `mean` and `deviation` are those of a number."""

    columns: dict[str, str]
    task: str
    why: str
    mean: float = 0.0
    deviation: float = 1.0
    classes: list[str] = field(default_factory=list)  # as the recipe lists them; []: it does not
    remark: str = ""
    is_tags: bool = False

    @property
    def known(self) -> str:
        """SQL of the rows that have all that is predicted: of tags, no null among them either."""
        names = [in_sql(name) for name in self.columns]
        tags = [f"NOT exists({name}, tag -> tag IS NULL)" for name in names if self.is_tags]
        return " AND ".join([*(f"{name} IS NOT NULL" for name in names), *tags])


TRAIN_SHARE = 0.8  # of the rows
SHARES = {"train": TRAIN_SHARE, "valid": 0.1, "test": 0.1}
RANDOM = {"kind": "hash", "shares": SHARES}


@dataclass(frozen=True)
class SplitChoice:
    """The recipe's block `etl.split`, why it is so, and others that it has as comments."""

    block: Mapping[str, Any]
    why: str = "rows are split at random: 80 % train, 10 % valid, 10 % test"
    others: Sequence[str] = ()


@dataclass
class Columns:
    """What becomes of each column.

    `selected`: SQL expression by name; `left_out`: why, by column; `remarks`: what a person should look at, by column.
    """

    label: Label
    selected: dict[str, str] = field(default_factory=dict)
    features: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    key: list[str] = field(default_factory=list)
    dates: list[str] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)
    split: SplitChoice = SplitChoice(RANDOM)


def decide_columns(sample: TableSample, label: str, task: str | None = None) -> Columns:
    """Decide by types and counts of distinct values. `task`: None: by the label. ConfigError where it cannot be."""
    names = list(sample.types)
    labels = [label] if label in names else [each.strip() for each in label.split(",")]
    if len(labels) > 1 and ("" in labels or len({*labels}) < len(labels)):
        raise ConfigError(str(sample.path), [f"--label {label}: names columns with a comma between, each once"])
    for each in labels:
        if each not in names:
            near = difflib.get_close_matches(each, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {names}"
            raise ConfigError(str(sample.path), [f"--label {each}: no such column; {hint}"])
    if sample.rows.num_rows < FEWEST_ROWS:
        problem = (
            f"has {count_of(sample.rows.num_rows, 'row')}; at least {FEWEST_ROWS} are needed to train, validate and "
            "test"
        )
        raise ConfigError(str(sample.path), [problem])
    known = identifiers(names)
    if len(labels) > 1 or sample.types[labels[0]] == TAGS:
        found = Columns(decide_labels(sample, {each: known[each] for each in labels}, task))
    else:
        found = Columns(decide_label(sample, labels[0], known[labels[0]], task))
        found.remarks |= {labels[0]: found.label.remark} if found.label.remark else {}
    for name in names:
        if name not in labels:
            _decide_column(found, sample, name, known[name])
    if not found.features:
        why = "; ".join(f"{name}: {reason}" for name, reason in found.left_out.items())
        raise ConfigError(str(sample.path), [f"no column can be a feature ({why})"])
    return found


def identifiers(names: list[str], reserved: Iterable[str] = ()) -> dict[str, str]:
    """Return for each column a name that SQL and recipes accept; unique when case is ignored.

    `reserved`: names in lower case that no column gets.
    """
    made: dict[str, str] = {}
    for name in names:
        kept = "".join(
            c if c == "_" or c.isalpha() or c.isdecimal() else " " for c in name
        )  # not \u00b2: no digit to a recipe
        text = re.sub(" +", "_", kept).strip("_") or "column"
        text = text if re.match(r"[A-Za-z_]", text) and not text.lower().startswith("sparkring_") else f"c_{text}"
        taken, number, base = {*reserved, *(other.lower() for other in made.values())}, 2, text
        while text.lower() in taken:
            text, number = f"{base}_{number}", number + 1
        made[name] = text
    return made


def in_sql(name: str) -> str:
    """Return a recipe's name for SQL: in backquotes where Spark requires them."""
    return name if PLAIN.fullmatch(name) and name.upper() not in KEYWORDS else quoted(name)


def decide_labels(sample: TableSample, labels: Mapping[str, str], task: str | None) -> Label:
    """Decide several labels of 0 and 1, or one column of tags. ConfigError for others. `labels`: names by column."""
    if task not in (None, MULTILABEL.name):
        raise ConfigError(str(sample.path), [f"--task {task}: has one label, and {[*labels]} are several"])
    values = {column: pc.drop_null(sample.rows.column(column)).combine_chunks() for column in labels}
    if len(labels) == 1:
        ((column, name),) = labels.items()
        tags = sorted(pc.unique(values[column].flatten()).drop_null().to_pylist())
        if len(tags) < 2:
            raise ConfigError(str(sample.path), [f"--label {column}: has the tags {tags} only"])
        shown = ", ".join(tags[:SHOWN]) + ", ..." * (len(tags) > SHOWN)
        return Label({name: quoted(column)}, MULTILABEL.name, f"{count_of(len(tags), 'tag')}: {shown}", is_tags=True)
    made = {}
    for column, name in labels.items():
        kind = sample.types[column]
        found = {str(value) for value in pc.unique(values[column]).to_pylist()} if _is_counted(kind) else set()
        if found not in ({"0", "1"}, {"0.0", "1.0"}, {"True", "False"}):
            what = f"is {kind}" if not found else f"has the values {sorted(found)[:SHOWN]}"
            raise ConfigError(str(sample.path), [f"--label {column}: {what}; each of several labels is 0 and 1"])
        made[name] = quoted(column) if kind == "boolean" else f"CAST({quoted(column)} AS int)"
    return Label(made, MULTILABEL.name, f"{count_of(len(labels), 'column')} of 0 and 1")


def decide_label(sample: TableSample, column: str, name: str, task: str | None) -> Label:
    """Decide the task by the label's type and values, or take the given one. ConfigError for a label without a task."""
    kind, values = sample.types[column], pc.drop_null(sample.rows.column(column))
    where = f"--label {column}"
    looked_at = "all rows" if sample.is_whole else f"the first {count_of(sample.rows.num_rows, 'row')}"
    if not _is_counted(kind) or kind in DATES:
        raise ConfigError(str(sample.path), [f"{where}: is {kind}; a label is a number, a text or true and false"])
    if read_as(column, values) != quoted(column):
        values = values.filter(pc.is_finite(values))
    distinct = pc.count_distinct(values).as_py()
    if distinct < 2:
        has = "no value" if not distinct else f"one value, {values[0].as_py()!r},"
        raise ConfigError(str(sample.path), [f"{where}: has {has} in {looked_at}; there is nothing to learn"])
    number, sql = is_number(kind), read_as(column, sample.rows.column(column))
    is_whole = number and pc.all(pc.equal(pc.round(values), values)).as_py()
    decided, why = _task_of(kind, is_whole, distinct, len(values))
    may_be_numbers = task is None and kind == "string" and distinct > CLASS_NUMBERS
    if may_be_numbers and (remedy := number_remedy(pc.unique(values).to_pylist())):
        what = f"{where}: {count_of(distinct, 'text')} looking like numbers or dates; {remedy}"
        raise ConfigError(str(sample.path), [f"{what}; where they are classes: --task {MULTICLASS.name}"])
    task = task or decided
    if task is None:
        raise ConfigError(str(sample.path), [f"{where}: {why}; {label_remedy(pc.unique(values).to_pylist())}"])
    classes = class_texts(values, is_whole)
    shown, described = listed(classes), TASKS[task]
    wrong = {
        LabelForm.FLAGS: "is one label; name several columns with commas between, or a column of arrays of texts",
        LabelForm.FLAG: distinct != 2
        and f"has {count_of(distinct, 'value')} ({shown}), and binary has 2; use --task multiclass",
        LabelForm.CLASS: not 3 <= distinct <= MOST_CLASSES
        and f"has {count_of(distinct, 'value')}; multiclass has 3 to {MOST_CLASSES}, and binary has 2",
        LabelForm.NUMBER: not number and f"is {kind} ({shown}), and {task} needs a number",
    }[described.form]
    if wrong:
        raise ConfigError(str(sample.path), [f"--task {task}: {column!r} {wrong}"])
    if described.form is LabelForm.NUMBER:
        numbers = values.cast(pa.float64(), safe=False)  # a whole number beyond 2^53 is rounded
        mean, deviation = pc.mean(numbers).as_py(), pc.stddev(numbers).as_py()
        low, high = pc.min(numbers).as_py(), pc.max(numbers).as_py()
        if problem := described.range_problem(column, low, high):
            has = f"{column!r} has values from {low:.10g} to {high:.10g}"
            raise ConfigError(str(sample.path), [f"--task {task}: {has}, {problem}"])
        return Label({name: f"CAST({sql} AS double)"}, task, why, mean, deviation)
    is_flag = described.form is LabelForm.FLAG
    why = f"{why}: {shown}" + f"; prediction is the probability of {classes[-1]}" * is_flag
    if kind == "boolean":
        return Label({name: quoted(column)}, task, why)
    if is_flag and classes == ["0", "1"] and number:
        return Label({name: f"CAST({sql} AS int)"}, task, why)
    written = classes if sample.is_whole and (is_flag or number) else []
    if kind == "string":
        return Label(
            {name: quoted(column)},
            task,
            why,
            classes=written,
            remark="; ".join(filter(None, [missing_class_remark(values), alike_remark(values)])),
        )
    made = f"CAST({sql} AS bigint)" if is_whole and kind not in WHOLE else sql
    return Label({name: f"CAST({made} AS string)"}, task, why, classes=written)


def class_texts(values: Any, is_whole: bool) -> list[str]:
    """Return a label's distinct values as texts, in the order of a model's outputs, as Spark writes them.

    `is_whole`: they are numbers without a fraction.
    """
    found = pc.unique(values)
    if is_whole:
        return in_order(str(int(value)) for value in found.to_pylist())
    return in_order(
        map(str, found.to_numpy(zero_copy_only=False) if pa.types.is_floating(found.type) else found.to_pylist())
    )


def read_as(column: str, values: Any, is_label: bool = True) -> str:
    """Return SQL of a column with infinite numbers as null, and for a label also NaN."""
    if not pa.types.is_floating(values.type):
        return quoted(column)
    odd = pc.or_(pc.is_inf(values), pc.is_nan(values)) if is_label else pc.is_inf(values)
    if not pc.any(odd).as_py():
        return quoted(column)
    return f"IF(abs({quoted(column)}) < {INFINITY}, {quoted(column)}, NULL)"


def label_remedy(texts: list[str]) -> str:
    """Suggest what to do about a label with these texts."""
    return number_remedy(texts, most_odd=0.5) or "name another label"


def number_remedy(texts: list[str], most_odd: float = MOST_ODD) -> str:
    """Suggest a fix for a label whose texts are meant as numbers or dates; "" for others.

    `most_odd`: largest share of them that are no numbers. Codes such as 00123 are none.
    """
    wrong = [texts[i] for i in convert(pa.array(texts, pa.string()), "double")[1]]
    if 0 < len(wrong) < len(texts) * most_odd and not any(map(CODE.fullmatch, texts)):
        shown = ", ".join(map(repr, wrong[:SHOWN])) + ", ..." * (len(wrong) > SHOWN)
        but = f"all but {count_of(len(wrong), 'text')} are numbers"
        return f"{but}; leave {shown} empty in the file, or name another label"
    if written := written_otherwise(texts):
        what, example, _ = written
        if what == DECIMAL_COMMAS:
            return (
                f"write numbers with a decimal point, {example.replace(',', '.')} for {example}, or name another label"
            )
        return f"they are {what}, such as {example!r}: write plain numbers in the file, or name another label"
    return ""


def _task_of(kind: str, is_whole: bool, distinct: int, rows: int) -> tuple[str | None, str]:
    """Decide the task of a label: (task, reason), or (None, problem).

    Args:
        kind: type of the label.
        is_whole: whether its values are whole numbers, whatever the type.
        distinct: number of distinct values.
        rows: number of rows with a label.
    """
    if distinct == 2:
        return BINARY.name, "two values"
    if kind == "string":
        if distinct > min(MOST_CLASSES, rows // 2):
            return None, f"{count_of(distinct, 'distinct text')} in {count_of(rows, 'row is')} no classes"
        return MULTICLASS.name, f"{count_of(distinct, 'text')}, so classes"
    if is_whole and distinct <= CLASS_NUMBERS:
        amounts = f"where they are amounts: --task {REGRESSION.name}; where they count events: --task {POISSON.name}"
        why = f"{count_of(distinct, 'whole number')}, taken for classes; {amounts}"
        return MULTICLASS.name, why
    return REGRESSION.name, "numbers"


def _decide_column(found: Columns, sample: TableSample, column: str, name: str) -> None:
    """Make features of one column, or note why there are none."""
    kind, values = sample.types[column], sample.rows.column(column)
    reason = left_out_reason(kind, values)
    remark = remark_on(sample, column)
    if reason is None and kind == "string":
        remark = "; ".join(filter(None, [remark, alike_remark(values)]))
    if reason is None and remark:
        found.remarks[column] = remark
    if reason is not None:
        found.left_out[column] = f"{reason}; {remark}" if remark else reason
        if reason.startswith("an id") and sample.is_whole and not values.null_count and not found.key:
            found.key, found.selected[name] = [name], quoted(column)
            found.remarks |= {column: remark} if remark else {}
        return
    if kind in DATES:
        found.dates.append(name)
        found.selected[name] = quoted(column)
        parts = {"month": ("month", 12), "weekday": ("dayofweek", 7)}
        parts |= {} if kind == "date" else {"hour": ("hour", 24)}
        for part, (function, period) in parts.items():
            found.selected[f"{name}_{part}"] = f"{function}({quoted(column)})"
            found.features[f"{name}_{part}"] = {"kind": "cyclic", "period": period}
        return
    found.selected[name] = read_as(column, values, is_label=False)
    if found.selected[name] != quoted(column):
        found.remarks[column] = "its infinite values are taken for nulls, in the view"
    found.features[name] = feature = feature_of(kind, values)
    if "min_count" in feature and (rare := rare_remark(values)):
        found.remarks[column] = "; ".join(filter(None, [remark, rare]))
    if kind not in WHOLE or feature["kind"] != "numeric":
        return
    if repeats(values):  # hours, ages and zones are amounts and names at once, and a model finds out which counts
        code = {"kind": "categorical", "column": name, "min_count": CODE_ROWS}
        found.features[free_name(f"{name}_code", found, sample)] = code
    elif IDS.search(column):
        found.remarks[column] = (
            "its name is one of ids or codes, and its whole numbers are taken for amounts; if they are ids, "
            f"set etl.features.{name}.kind to categorical"
        )


def free_name(wanted: str, found: Columns, sample: TableSample) -> str:
    """Return the name, with a number appended if a column or a feature has it."""
    taken = {name.lower() for name in (*found.features, *found.selected, *identifiers([*sample.types]).values())}
    names = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(2)))
    return next(name for name in names if name.lower() not in taken)


def left_out_reason(kind: str, values: Any) -> str | None:
    """Return why a column is no feature; None if it is one."""
    if not _is_counted(kind):
        return f"{kind} is no single value; docs/how-to/etl.md says how such a column is a feature"
    present, distinct = len(values) - values.null_count, pc.count_distinct(values, mode="only_valid").as_py()
    if not present:
        return "no value at all"
    if distinct == 1 and not values.null_count:
        return "the same value in every row"
    if distinct == present and (kind == "string" or kind in WHOLE):
        return "an id, or free text: no two rows have the same value"
    if kind == "string" and distinct > present / 2:
        return f"free text, or nearly an id: {count_of(distinct, 'distinct value')} in {present} rows"
    if kind == "string" and distinct > MOST_CLASSES and not frequent(values)[0]:
        return (
            f"nearly an id: {count_of(distinct, 'distinct value')}, of which none has {CODE_ROWS} rows to be known by"
        )
    return None


def frequent(values: Any) -> tuple[int, float]:
    """Count values with CODE_ROWS rows, so that each gets a code; also the share of other rows."""
    counts = pc.value_counts(pc.drop_null(values)).field("counts").to_numpy()
    known = counts[counts >= CODE_ROWS]
    return len(known), 1 - known.sum() / max(counts.sum(), 1)


def rare_remark(values: Any) -> str:
    """Describe which of many categories share a code; "" where none do."""
    known, others = frequent(values)
    distinct = pc.count_distinct(values, mode="only_valid").as_py()
    if known == distinct:
        return ""
    return (
        f"values with {CODE_ROWS} rows or more to be known by: {known:,} of {distinct:,}; the others, in {others:.0%} "
        "of the rows, share one code"
    )


def feature_of(kind: str, values: Any) -> dict[str, Any]:
    """Choose the feature of a column by its type and its distinct values."""
    distinct = pc.count_distinct(values, mode="only_valid").as_py()
    is_few = distinct <= CATEGORY_NUMBERS and len(values) >= ROWS_PER_NUMBER * distinct
    if kind == "string" and distinct > MOST_CLASSES:
        return {"kind": "categorical", "min_count": CODE_ROWS}
    if kind in ("string", "boolean") or (kind in WHOLE and is_few):
        return {"kind": "categorical"}
    return {"kind": "numeric"} | ({"transform": "log1p"} if is_skewed(kind, values) else {})


def repeats(values: Any) -> bool:
    """Return whether few values each have many rows on average, so that each may have a code."""
    distinct = pc.count_distinct(values, mode="only_valid").as_py()
    return 2 < distinct <= CODE_NUMBERS and len(values) >= ROWS_PER_CODE * distinct


def is_skewed(kind: str, values: Any) -> bool:
    """Return whether a column has numbers from 0 on, with a long tail of large ones."""
    if not is_number(kind):
        return False
    numbers = values.cast(pa.float64(), safe=False).drop_null().to_numpy()  # beyond 2^53 rounded
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers) or numbers.min() < 0 or not (spread := numbers.std()):
        return False
    return bool(np.mean(((numbers - numbers.mean()) / spread) ** 3) > SKEWED)


def _is_counted(kind: str) -> bool:
    return is_number(kind) or kind in ("string", "boolean", *DATES)


def counts(features: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the features' kinds as `3 numeric, 2 categorical`."""
    kinds = [str(feature["kind"]) for feature in features.values()]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
