"""Describe a column to a person: how it is written, its time zone, and which of its texts are similar."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sparkring.conf.plain_text import count_of
from sparkring.etl.sources.files.read import quoted
from sparkring.etl.sources.values import convert
from sparkring.pipelines.init.sample import TableSample
from sparkring.pipelines.init.text_types import FEWEST_VALUES, count_texts, decide_type, is_null_word, is_number
from sparkring.pipelines.init.written import odd_numbers_sql, written_otherwise

SHOWN = 5
PLURALS = {"double": "numbers", "bigint": "whole numbers"}
UTC = ("UTC", "Etc/UTC", "Z", "+00:00", "+0000", "GMT")
TIMES = re.compile(
    r"(?i:date|time|stamp|epoch|moment|created|updated|modified|since|until|born|birth|day|serial)|(?i:_(?:at|ts|on)$|^ts$)"
)
ARE_TIMES = 100_000_000_000  # numbers from here on are times whatever the name of the column is
# Numbers of a column whose name says that it has times: what, from, to (1990 to 2050), SQL.
EPOCHS = (
    ("seconds since 1970", 631_152_000, 2_524_608_000, "timestamp_seconds({})"),
    ("milliseconds since 1970", 631_152_000_000, 2_524_608_000_000, "timestamp_millis({})"),
    ("microseconds since 1970", 631_152_000_000_000, 2_524_608_000_000_000, "timestamp_micros({})"),
    ("dates of a spreadsheet", 32_874, 54_789, "date_add(DATE '1899-12-30', CAST({} AS int))"),
)


def remark_on(sample: TableSample, column: str) -> str:
    """Explain how to read a column that is not written as its type says; "" for others."""
    kind, values = sample.types[column], sample.rows.column(column)
    if kind == "string":
        return written_remark(values, column)
    if kind == "timestamp":
        return zone_remark(sample, column)
    return epoch_remark(values, column) if is_number(kind) else ""


def written_remark(values: Any, column: str) -> str:
    """Explain what to do about texts that are numbers or dates written in another way; "" for others."""
    counts = count_texts(values)
    if (typed := decide_type(counts)).kind != "string" and len(counts) > FEWEST_VALUES:  # of a file with types
        but = f"all but {sum(typed.nulls.values()):,} of {sum(counts.values()):,} are" if typed.nulls else "all are"
        shown = f": {listed(map(repr, typed.nulls))}" * bool(typed.nulls)
        sql = f"try_cast({quoted(column)} AS {typed.kind})"
        return f"its type is text, and {but} {PLURALS.get(typed.kind, typed.kind + 's')}{shown}; {sql} in the view"
    if not (written := written_otherwise(counts)):
        return ""
    what, example, sql = written
    return f"its texts are {what}, such as {example!r}; to use them, write {sql.format(quoted(column))} in the view"


def zone_remark(sample: TableSample, column: str) -> str:
    """Name the time zone of a timestamp's hours and days, where its file has another than UTC; "" for others."""
    of_type = getattr(sample.rows.schema.field(column).type, "tz", None) or UTC[0]
    zones = sample.texts[column].zones if column in sample.texts else (of_type,)
    if not (other := [zone for zone in zones if zone not in UTC]):
        return ""
    what = f"the file's times are of {listed(other)}, and its hours and days here are UTC's"
    if len(zones) > 1:  # summer and winter: no offset is right for all rows
        return (
            f"{what}; from_utc_timestamp({quoted(column)}, 'Europe/Berlin'), with their zone's name, makes them local"
        )
    return f"{what}; from_utc_timestamp({quoted(column)}, '{other[0]}') in the view makes them local"


def epoch_remark(values: Any, column: str) -> str:
    """Describe numbers that look like times since 1970 or like dates of a spreadsheet, with the SQL; "" for others."""
    low, high = pc.min(values).as_py(), pc.max(values).as_py()
    if low is None:
        return ""
    if is_compact(values):
        sql = f"to_date(CAST({quoted(column)} AS string), 'yyyyMMdd')"
        return f"its numbers look like dates as 20240131; {sql} in the view makes dates of them"
    for what, least, most, sql in EPOCHS:
        if least <= low and high <= most and (least >= ARE_TIMES or TIMES.search(column)):
            return f"its numbers look like {what}; {sql.format(quoted(column))} in the view makes times of them"
    return ""


def is_compact(values: Any) -> bool:
    """Return whether whole numbers are all dates as 20240131, and of several days."""
    numbers = pc.unique(values).drop_null()
    if not pa.types.is_integer(numbers.type) or len(numbers) < FEWEST_VALUES:
        return False
    if pc.min(numbers).as_py() < 19_000_101 or pc.max(numbers).as_py() > 21_001_231:
        return False
    texts = numbers.cast(pa.string())
    parts = [pc.utf8_slice_codeunits(texts, start, stop) for start, stop in ((0, 4), (4, 6), (6, 8))]
    return not convert(pc.binary_join_element_wise(*parts, "-"), "date")[1]


def missing_class_remark(values: Any) -> str:
    """Describe which classes of a label may be missing values; "" where none are."""
    words = [text for text in pc.unique(values).to_pylist() if is_null_word(text)]
    rows = pc.sum(pc.is_in(values, pa.array(words, pa.string()))).as_py()
    if not words:
        return ""
    what = f"{listed(map(repr, words))} is a class of its own, of {count_of(rows, 'row')}"
    return f"{what}; where it means that the label is not known, list it in options.nulls of the source"


def null_lines(sample: TableSample, columns: Iterable[str]) -> list[str]:
    """Name the texts of a CSV file's columns that are nulls: a line for common words, one per column of others."""
    read = {name: sample.texts[name] for name in columns if name in sample.texts and sample.texts[name].nulls}
    words: dict[str, list[str]] = {}
    for name, found in read.items():
        for text in found.nulls.keys() - found.odd.keys():
            words.setdefault(text, []).append(name)
    lines = [f"{text!r} is a null in {listed(names)}" for text, names in sorted(words.items())]
    for name, found in read.items():
        if found.odd:
            what = PLURALS.get(found.kind, f"{found.kind}s")
            rows, known = sum(found.odd.values()), len(sample.rows) - sample.rows.column(name).null_count
            shown = listed([f"{text!r} ({count_of(count, 'row')})" for text, count in found.odd.items()])
            sql = odd_numbers_sql(found.odd) if is_number(found.kind) else ""
            remedy = f"; as string in columns, {sql.format(quoted(name))} in the view reads them" * bool(sql)
            lines.append(f"{name}: all but {rows:,} of {known + rows:,} are {what}; a null is each {shown}{remedy}")
    return lines


def listed(texts: Iterable[str]) -> str:
    """List the first few of several texts."""
    shown = list(texts)
    return ", ".join(shown[:SHOWN]) + f" and {len(shown) - SHOWN} more" * (len(shown) > SHOWN)


def alike_remark(values: Any) -> str:
    """Describe which texts of a column differ in case or blanks alone, and what to do; "" where none do."""
    groups: dict[str, list[str]] = {}
    for text in pc.unique(values).drop_null().to_pylist():
        groups.setdefault(" ".join(unicodedata.normalize("NFKC", text).split()).casefold(), []).append(text)
    alike = [sorted(texts) for texts in groups.values() if len(texts) > 1]
    if not alike:
        return ""
    shown = listed(" and ".join(map(repr, texts)) for texts in alike)
    return f"{shown} differ in case or blanks alone, and are different values; lower(trim(..)) in the view makes one"
