"""Find numbers and dates that a file writes as Spark does not read them, and the SQL that reads them."""

from __future__ import annotations

import calendar
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from sparkring.pipelines.init.text_types import CODE, MOST_ODD

DIGITS = r"[+-]?[0-9]+(?:[.,' \u00a0\u202f][0-9]+)*"
CURRENCY = r"(?:[$\u20ac\u00a3\u00a5\u20b9]|USD|EUR|GBP|CHF)"
NAMES, SHORT = "|".join(calendar.month_name[1:]), "|".join(calendar.month_abbr[1:])
FORMS = {"MMM": re.compile(f"(?i:{SHORT})"), "MMMM": re.compile(f"(?i:{NAMES})")}  # Spark's names of them
NAMED, SHORT_YEAR = "dates with the month's name", "dates with two digits of the year"
ISO, MIXED = "dates as 2024-01-31", "dates of several forms"
TWELVE_HOURS, NINE_DIGITS = "times with AM or PM", "times with more than six digits of a second"
TWELVE = re.compile(r"(.*[0-9]),?( [0-9]{1,2}:[0-9]{2})(:[0-9]{2})?( ?)(?i:[AP]M)")
# What they are, and the pattern of one; the first that fits counts.
DATES = {
    "dates with the day or month first": r"[0-9]{1,2}([./-])[0-9]{1,2}\1[0-9]{4}(?: .*)?",
    "dates with points or strokes": r"[0-9]{4}([./])[0-9]{1,2}\1[0-9]{1,2}(?: .*)?",
    SHORT_YEAR: r"[0-9]{1,2}([./-])[0-9]{1,2}\1[0-9]{2}(?: .*)?",
    NAMED: rf"(?i:[0-9]{{1,2}}([ -])(?:{NAMES}|{SHORT})\1[0-9]{{4}}"
    rf"|(?:{NAMES}|{SHORT}) [0-9]{{1,2}},? [0-9]{{4}})",
}
NINE = r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}[ T][0-9]{1,2}:[0-9]{2}:[0-9]{2}[.][0-9]{7,}(?:Z|UTC|[+-][0-9]{2}:?[0-9]{2})?"
NINE_SQL = "CAST(regexp_replace({}, '([.][0-9]{{6}})[0-9]+', '$1') AS timestamp)"
ISO_DATE = {ISO: "[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}"}
DECIMAL_COMMAS = "numbers with a decimal comma"
OTHER_SIGNS, MANY_DIGITS = "numbers with another sign for minus", "numbers of more digits than a double keeps"
SIGNED = re.compile(rf"\({DIGITS}\)|[\u2212\u2013]{DIGITS}|{DIGITS} ?-")
SIGNED_OTHERWISE = re.compile(r"\(.*\)|.*[0-9] ?-")  # ($5.00): other SQL would take it for more than nothing
SIGNED_SQL = (
    "CAST(concat(IF({0} RLIKE '^ *-|[(\u2212\u2013]|-$', '-', ''), regexp_replace({0}, '[^0-9.]', '')) AS double)"
)
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
BESIDE_PLAIN = (OTHER_SIGNS, "amounts with a currency", "numbers with thousands separators")  # read by the same SQL
POINT_SQL = "CAST(regexp_replace({}, '[^0-9.-]', '') AS double)"
COMMA_SQL = "CAST(replace(regexp_replace({}, '[^0-9,-]', ''), ',', '.') AS double)"
DECIMAL_COMMA = re.compile(r",[0-9]{1,2}(?![0-9,])|\.[0-9]{3},")
DECIMAL_POINT = re.compile(r"\.[0-9]{1,2}(?![0-9])")
WHOLE_NUMBER = re.compile("[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
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
    if nine := [text for text in values if re.fullmatch(NINE, text)]:
        others = sum(re.fullmatch(r"[0-9]{4}-.*", text) is not None for text in values)
        return WrittenForm(NINE_DIGITS, nine[0], NINE_SQL) if others >= fewest else None
    if twelve := _twelve_hours(values, fewest):
        return twelve
    for what, pattern in DATES.items():
        found = [text for text in values if re.fullmatch(pattern, text)]
        if found and len(found) >= fewest and (sql := _date_sql(what, found)):
            return WrittenForm(what, found[0], sql if len(found) == len(values) else _tried(sql))
    if mixed := _mixed_dates(values, fewest):
        return mixed
    signed = [text for text in values if SIGNED.fullmatch(text)]
    plain = sum(re.fullmatch(DIGITS, text) is not None for text in values)
    if signed and len(signed) + plain >= fewest and not any(map(DECIMAL_COMMA.search, values)):
        return WrittenForm(OTHER_SIGNS, signed[0], SIGNED_SQL)
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
    if values and all(map(NUMBER.fullmatch, values)) and not any(map(CODE.fullmatch, values)):
        return WrittenForm(MANY_DIGITS, max(values, key=len), "CAST({} AS double)")
    return None


def odd_numbers_sql(texts: Iterable[str]) -> str:
    """Return SQL for a column of plain numbers, some written as these texts; "" if it is not certain."""
    written = written_otherwise(texts)
    return written.sql if written is not None and written.what in BESIDE_PLAIN else ""


def _mixed_dates(texts: list[str], fewest: float) -> WrittenForm | None:
    """Find dates of several forms, each of which has one reading."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        what = next((what for what, pattern in (ISO_DATE | DATES).items() if re.fullmatch(pattern, text)), None)
        if what is not None:
            groups.setdefault(what, []).append(text)
    read = [_date_sql(what, found) for what, found in groups.items()]
    if len(groups) < 2 or sum(map(len, groups.values())) < fewest or None in read:
        return None
    tried = [_tried(sql or "") for sql in read]
    examples = " and ".join(found[0] for found in groups.values())
    return WrittenForm(MIXED, examples, f"coalesce({', '.join(tried)})".replace("{}", "{0}"))


def _tried(sql: str) -> str:
    """Return SQL that gives null for a text that is no such date, in place of an error."""
    if sql.startswith("to_timestamp("):
        return f"try_{sql}"
    return re.sub(r"to_date\((.*)\)", r"CAST(try_to_timestamp(\1) AS date)", sql)


def _twelve_hours(texts: list[str], fewest: float) -> WrittenForm | None:
    """Find times with AM or PM of one form."""
    found = [match for text in texts if (match := TWELVE.fullmatch(text))]
    shapes = {(match[3] is None, match[4], "," in match[0]) for match in found}
    days = [match[1].rstrip(",") for match in found]
    for what, pattern in (ISO_DATE | DATES).items():
        if found and len(found) >= fewest and len(shapes) == 1 and all(re.fullmatch(pattern, day) for day in days):
            sql = _date_sql(what, days)
            comma, seconds = "," * ("," in found[0][0]), "" if found[0][3] is None else ":ss"
            form = f"{comma} h:mm{seconds}{found[0][4]}a"
            if sql is not None:
                function = "to_timestamp" if len(found) == len(texts) else "try_to_timestamp"
                sql = f"{sql.replace('to_date', function)[:-2]}{form}')"
                return WrittenForm(TWELVE_HOURS, found[0][0], sql)
    return None


def _date_sql(what: str, texts: list[str]) -> str | None:
    """Return SQL that reads such dates; None if no order of day, month and year fits all, as in 99.99.99."""
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
        ISO: [("yyyy", "M", "d")],
        "dates with points or strokes": [("yyyy", "M", "d")],
        "dates with the day or month first": [("d", "M", "yyyy"), ("M", "d", "yyyy")],
        SHORT_YEAR: [("d", "M", "yy"), ("M", "d", "yy"), ("yy", "M", "d")],
    }[what]
    for order in orders:
        if all(_is_date(dict(zip(order, part, strict=True))) for part in parts):
            times = [text.partition(" ")[2] for text in texts]
            if not any(times):
                return f"to_date({{}}, '{mark.join(order)}')"
            if (form := _time_form(times)) is not None:
                return f"to_timestamp({{}}, '{mark.join(order)}{form}')"
            return f"to_date(substring_index({{}}, ' ', 1), '{mark.join(order)}')"
    return None


def _time_form(times: list[str]) -> str | None:
    """Find Spark's pattern for the text after a date; None where it is no time. `times`: some may be empty."""
    if not all(re.fullmatch(r"([0-9]{1,2}:[0-9]{2}(:[0-9]{2})?)?", time) for time in times):
        return None
    colons = {time.count(":") for time in times}
    seconds = {1: "", 2: ":ss"}.get(*colons - {0}) if len(colons - {0}) == 1 else "[:ss]"
    return f"[ H:mm{seconds}]" if 0 in colons else f" H:mm{seconds}"


def _is_date(parts: dict[str, int]) -> bool:
    return 1 <= parts["M"] <= MONTHS and 1 <= parts["d"] <= DAYS


def _number_sql(what: str, texts: list[str]) -> str:
    has_comma = what == DECIMAL_COMMAS or any(DECIMAL_COMMA.search(text) for text in texts)
    return COMMA_SQL if has_comma and not any(map(DECIMAL_POINT.search, texts)) else POINT_SQL
