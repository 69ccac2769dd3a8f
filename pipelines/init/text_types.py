"""Decide the type of a column of texts, and which of its texts stand for null."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from sparkring.etl.sources.values import DECIMAL, convert

# What files write for a null, in lower case.
NULLS = {
    *("na", "n/a", "#n/a", "<na>", "n.a.", "null", "nan", "none", "nil", "missing", "unknown", "undefined"),
    *("\\n", "?", "-", "--", ".", "..", "*", "#value!", "#div/0!", "#ref!", "#null!", "#num!", "(null)", "nat"),
}
WHOLE = ("tinyint", "smallint", "int", "bigint")
TEXT_TYPES = ("bigint", "double", "boolean", "date", "timestamp")  # of equally good ones the first; else string
CODE = re.compile(r"[+-]?0[0-9]+")  # a zip code, not a number: as a number it would lose its zero
OFFSET = re.compile(r":[0-9.]+ ?([+-][0-9]{2}:?[0-9]{2})$")
MOST_ODD = 0.1  # of the rows, and of the distinct texts, of a column of numbers or dates may be something else
FEWEST_VALUES = 20  # distinct numbers or dates next to odd texts; fewer may be codes such as 1, 2, A
OFTEN = 0.01  # of the rows: a word for null that a column of texts has as often is a value of it
TRIED = 1000  # distinct texts by which a type is ruled out


@dataclass(frozen=True)
class TextType:
    """The Spark type of a column of texts. `nulls`: text that stands for null -> rows that have it."""

    kind: str
    nulls: dict[str, int] = field(default_factory=dict)
    zones: tuple[str, ...] = ()  # offsets that the texts of a timestamp end with

    @property
    def odd(self) -> dict[str, int]:
        """The texts that are no common word for a null."""
        return {text: rows for text, rows in self.nulls.items() if not is_null_word(text)}


def count_texts(texts: pa.ChunkedArray) -> dict[str, int]:
    """Count the rows of each text that is not empty."""
    counted = pc.value_counts(texts.filter(pc.fill_null(pc.not_equal(texts, ""), False)))
    return dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True))


def decide_type(counts: Mapping[str, int]) -> TextType:
    """Decide by a column's distinct texts, with the rows that have each: nearly all are values of the type.

    Words for null are nulls of a column of another type, and so are odd texts in few of its rows. A column of texts
    keeps a word for null that it has often, as `None` may stand for no alley, and `NA` for Namibia.
    """
    texts = pa.array(list(counts), pa.string())
    if (kind := text_type(texts)) == "boolean" and _are_words(counts):
        return TextType("string")
    if kind != "string":
        zones = {found[1] for text in counts if kind == "timestamp" and (found := OFFSET.search(text))}
        return TextType(kind, zones=tuple(sorted(zones)))
    if not any(map(CODE.fullmatch, counts)):
        types = {each: nulls for each in TEXT_TYPES if (nulls := _nulls(counts, each)) is not None}
        if types:
            best = min(types, key=lambda each: sum(types[each].values()))
            return TextType("string" if best == "boolean" and _are_words(counts, types[best]) else best, types[best])
    rows = sum(counts.values())
    rare = {text: count for text, count in counts.items() if is_null_word(text) and count < OFTEN * rows}
    return TextType("string", rare)


def _are_words(counts: Mapping[str, int], nulls: Collection[str] = ()) -> bool:
    """Return whether booleans are two other words than true and false, as Yes and No: classes of their own name."""
    words = {text for text in counts if text not in nulls}
    return len(words) <= 2 and not {word.lower() for word in words} <= {"true", "false"}


def _nulls(counts: Mapping[str, int], kind: str) -> dict[str, int] | None:
    """Find the texts, with their rows, that are no values of a type; None where the column has another type."""
    texts = list(counts)
    if len(convert(pa.array(texts[:TRIED], pa.string()), kind)[1]) > max(len(texts[:TRIED]) // 2, len(NULLS)):
        return None
    nulls = {texts[index]: counts[texts[index]] for index in convert(pa.array(texts, pa.string()), kind)[1]}
    odd = [text for text in nulls if not is_null_word(text)]
    values, rows = len(texts) - len(nulls), sum(counts.values())
    few = len(odd) <= MOST_ODD * len(texts) and sum(nulls[text] for text in odd) <= MOST_ODD * rows
    if not values or (odd and not (few and values >= FEWEST_VALUES and kind != "boolean")):
        return None
    return nulls


def is_null_word(text: str) -> bool:
    """Return whether files write the text for a null."""
    return (text.strip() or "null").lower() in NULLS


def text_type(values: pa.Array) -> str:
    """Find the narrowest of TEXT_TYPES that all of these texts are values of, by the reader of the ETL; else string."""
    if not len(values) or any(CODE.fullmatch(text) for text in values.to_pylist()):
        return "string"
    return next((kind for kind in TEXT_TYPES if _all_are(values, kind)), "string")


def _all_are(values: pa.Array, kind: str) -> bool:
    return not convert(values.slice(0, 100), kind)[1] and not convert(values, kind)[1]


def without_nulls(texts: pa.Array, nulls: Mapping[str, int]) -> pa.Array:
    """Return the texts with null in place of these."""
    return pc.if_else(pc.is_in(texts, pa.array(list(nulls), pa.string())), None, texts) if nulls else texts


def is_number(kind: str) -> bool:
    """Return whether a Spark type is numeric."""
    return kind in (*WHOLE, "float", "double") or DECIMAL.fullmatch(kind) is not None
