"""Names, errors and other texts from outside on their way to a reader: one function for each door.

A file's column, a library's error or a program's output may hold escape codes that a terminal obeys, or marks that
Markdown reads as links, headlines and tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# Control characters but for tab and line feed, and those that turn the direction of writing.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_MARKS = re.compile(r"[\\`*\[\]<>|~]|(?<![^\W_])_|_(?![^\W_])|^[#+=-](?=[\s#+=-]|$)|^\d+(?=[.)](?:\s|$))")

_VERBS = {"is": "are", "was": "were", "has": "have", "needs": "need"}  # of one thing, of several


def count_of(number: int, noun: str, form: str = "") -> str:
    """Show a number of things, or what they are: `1 rank`, `2 ranks`, `2 rows are`.

    Args:
        number: count to show.
        noun: singular noun, optionally followed by the verb `is`, `was`, `has` or `needs`.
        form: how the number is formatted, such as `,`.
    """
    return f"{number:{form}} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    things, _, verb = noun.rpartition(" ")
    if verb in _VERBS:
        return f"{_plural(things)} {_VERBS[verb]}"
    if re.search("(s|x|(?<!o)ch|sh)$", noun):  # batches, epochs
        return f"{noun}es"
    return re.sub("(?<=[^aeiou])y$", "ie", noun) + "s"


def in_order(texts: Iterable[str]) -> list[str]:
    """Sort texts: by value where each is a number, so that 5 is before 10, else as texts."""
    found = sorted(texts)
    try:
        values = [float(text) for text in found]
    except ValueError:
        return found
    return found if any(map(math.isnan, values)) else [text for _, text in sorted(zip(values, found, strict=True))]


def size_text(size: float) -> str:
    """Show bytes in the largest unit of which there is a tenth."""
    for unit, bytes_of in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_of / 10:
            return f"{size / bytes_of:,.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{size:.0f} B"


def score_text(value: float) -> str:
    """Show a score: four decimals, where these say something of it; else five significant digits, or a whole number.

    A loss is in the square of the label's unit, and may be 1e-12 or 1e18.
    """
    size = abs(value)
    if 0 < size < 1e-3 or size >= 1e12:
        return f"{value:.5g}"
    return f"{value:.4f}" if size < 1e5 else f"{value:,.0f}"


def for_terminal(text: str) -> str:
    r"""Show what a terminal would obey as its code (`\x1b`); colors alone are left out."""
    plain = _COLOR.sub("", text) if "\x1b" in text else text
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], plain)


def in_markdown(text: str) -> str:
    """Show a text as it is in a line, or a table's cell, of Markdown."""
    line = " ".join(for_terminal(text).split())
    return _MARKS.sub(_escaped, line)


def _escaped(found: re.Match[str]) -> str:
    mark = found[0]
    if mark in "<>|":  # a backslash does not help everywhere: not in tables, not before HTML
        return f"&#{ord(mark)};"
    return f"{mark}\\" if mark.isdigit() else f"\\{mark}"


def code_in_markdown(text: str) -> str:
    """Show a text as code in a line of Markdown: between more backticks than it has in a row."""
    line = " ".join(for_terminal(text).split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else ""
