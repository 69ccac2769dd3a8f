"""Find numbers and dates that a file writes as Spark does not read them, and the SQL that reads them."""

from __future__ import annotations

import calendar
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

DIGITS = r"[+-]?[0-9]+(?:[.,' \u00a0\u202f][0-9]+)*"
CURRENCY = r"(?:[$\u20ac\u00a3\u00a5\u20b9]|USD|EUR|GBP|CHF)"
NAMES, SHORT = "|".join(calendar.month_name[1:]), "|".join(calendar.month_abbr[1:])
FORMS = {"MMM": re.compile(f"(?i:{SHORT})"), "MMMM": re.compile(f"(?i:{NAMES})")}  # Spark's names of them
NAMED, SHORT_YEAR = "dates with the month's name", "dates with two digits of the year"
# What they are, and the pattern of one; the first that fits counts.
DATES = {
    "dates with the day or month first": r"[0-9]{1,2}([./-])[0-9]{1,2}\1[0-9]{4}(?: .*)?",
    "dates with points or strokes": r"[0-9]{4}([./])[0-9]{1,2}\1[0-9]{1,2}(?: .*)?",
    SHORT_YEAR: r"[0-9]{1,2}([./-])[0-9]{1,2}\1[0-9]{2}(?: .*)?",
    NAMED: rf"(?i:[0-9]{{1,2}}([ -])(?:{NAMES}|{SHORT})\1[0-9]{{4}}"
    rf"|(?:{NAMES}|{SHORT}) [0-9]{{1,2}},? [0-9]{{4}})",
}
DECIMAL_COMMAS = "numbers with a decimal comma"
UNITS = "numbers with a unit"
NUMBERS = {
    "percentages": rf"{DIGITS} ?%",
    "amounts with a currency": rf"[+-]?{CURRENCY} ?{DIGITS}|{DIGITS} ?{CURRENCY}",
    "numbers with thousands separators": r"[+-]?[0-9]{1,3}(?:(?:,[0-9]{2,3})*,[0-9]{3}(?:\.[0-9]+)?"
    r"|(?:[' \u00a0\u202f][0-9]{3})+(?:[.,][0-9]+)?)",
    DECIMAL_COMMAS: r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:[.' \u00a0\u202f][0-9]{3})+),[0-9]+"
    r"|[+-]?[0-9]{1,3}(?:\.[0-9]{3}){2,}",
    UNITS: rf"{DIGITS} ?(?P<unit>[^\W\d_]{{1,12}}(?:/[^\W\d_]{{1,6}})?[23\u00b2\u00b3]?|\u00b0[CF]?)",
}
POINT_SQL = "CAST(regexp_replace({}, '[^0-9.-]', '') AS double)"
COMMA_SQL = "CAST(replace(regexp_replace({}, '[^0-9,-]', ''), ',', '.') AS double)"
DECIMAL_COMMA = re.compile(r",[0-9]{1,2}(?![0-9,])|\.[0-9]{3},")
DECIMAL_POINT = re.compile(r"\.[0-9]{1,2}(?![0-9])")
SIGNED_OTHERWISE = re.compile(r"\(.*\)|.*[0-9] ?-")  # (5.00), 5.00-: the SQL would take it for more than nothing
WHOLE_NUMBER = re.compile("[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
MOST_ODD = 0.1  # of the distinct texts of a column of numbers or dates may be something else
MONTHS, DAYS = 12, 31


class WrittenForm(NamedTuple):
    """What the texts of a column are, one of them, and SQL that reads a column `{}`."""

    what: str
    example: str
    sql: str


def written_otherwise(texts: Iterable[str]) -> WrittenForm | None:
    """Find numbers or dates in texts; None where they are neither, or nobody can say how to read them."""
    values = [text.strip() for text in texts]
    fewest = len(values) * (1 - MOST_ODD)
    for what, pattern in DATES.items():
        found = [text for text in values if re.fullmatch(pattern, text)]
        if found and len(found) >= fewest and (sql := _date_sql(what, found)):
            return WrittenForm(what, found[0], sql)
    if any(map(SIGNED_OTHERWISE.fullmatch, values)):
        return None
    for what, pattern in NUMBERS.items():
        matches = [match for text in values if (match := re.fullmatch(pattern, text))]
        # A plain 12.5 among 1,5 leaves it open which sign is the decimal one, and a plain 500 among 5 kg its unit.
        number = {DECIMAL_COMMAS: WHOLE_NUMBER, UNITS: None}.get(what, NUMBER)
        plain = sum(number.fullmatch(text) is not None for text in values) if number else 0
        if not matches or len(matches) + plain < fewest:
            continue
        if what != UNITS:
            return WrittenForm(what, matches[0][0], _number_sql(what, values))
        unit, count = Counter(match["unit"] for match in matches).most_common(1)[0]
        if count == len(matches) and not any(map(NUMBER.fullmatch, values)):
            numbers = [match[0].removesuffix(unit) for match in matches]
            sql = _number_sql(what, numbers).format(f"regexp_replace({{}}, ' ?{unit}$', '')")
            return WrittenForm(what, matches[0][0], sql)
    return None


def _date_sql(what: str, texts: list[str]) -> str | None:
    """SQL that reads such dates; None where no order of day, month and year fits them all, as in 99.99.99."""
    mark = next(character for character in texts[0] if not character.isalnum())
    if what == NAMED:
        names = [re.sub("[^A-Za-z]", "", text) for text in texts]
        form = next((form for form, pattern in FORMS.items() if all(map(pattern.fullmatch, names))), None)
        shapes = {re.sub("[0-9]+", "0", re.sub("[A-Za-z]+", "m", text)) for text in texts}
        if form is None or len(shapes) > 1:
            return None
        month_first = f"{form} d{',' * (',' in texts[0])} yyyy"
        return f"to_date({{}}, '{mark.join(('d', form, 'yyyy')) if texts[0][0].isdecimal() else month_first}')"
    parts = [[int(part) for part in re.split("[^0-9]", text)[:3]] for text in texts]
    orders = {
        "dates with points or strokes": [("yyyy", "M", "d")],
        "dates with the day or month first": [("d", "M", "yyyy"), ("M", "d", "yyyy")],
        SHORT_YEAR: [("d", "M", "yy"), ("M", "d", "yy"), ("yy", "M", "d")],
    }[what]
    for order in orders:
        if all(_is_date(dict(zip(order, part, strict=True))) for part in parts):
            column = "substring_index({}, ' ', 1)" if any(" " in text for text in texts) else "{}"
            return f"to_date({column}, '{mark.join(order)}')"
    return None


def _is_date(parts: dict[str, int]) -> bool:
    return 1 <= parts["M"] <= MONTHS and 1 <= parts["d"] <= DAYS


def _number_sql(what: str, texts: list[str]) -> str:
    has_comma = what == DECIMAL_COMMAS or any(DECIMAL_COMMA.search(text) for text in texts)
    return COMMA_SQL if has_comma and not any(map(DECIMAL_POINT.search, texts)) else POINT_SQL
