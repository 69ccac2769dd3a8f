"""Convert text to values of the declared type without any loss, or refuse it: what a cell of a text file means.

`parser` is the definition, one value at a time. `convert` does whole columns: texts whose form leaves no doubt go
through Arrow, the others through `parser`.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import struct
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

BLANKS = " \t"
TRUE, FALSE = {"true", "t", "yes", "y", "1"}, {"false", "f", "no", "n", "0"}
INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")
NOT_A_NUMBER = re.compile(r"nan|[+-]?inf(inity)?", re.IGNORECASE)
DAY = r"([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})"
DATE = re.compile(rf"{DAY}(?:[ T]00:00(?::00(?:\.0*)?)?)?")
TIMESTAMP = re.compile(rf"{DAY}(?:[ T]([0-9]{{1,2}}):([0-9]{{2}})(?::([0-9]{{2}})(?:\.([0-9]+))?)?)?(.*)")
ZONE = re.compile(r"([+-])([0-9]{2})(?::?([0-9]{2}))?")
EPOCH = dt.datetime(1970, 1, 1)
MICROSECOND = dt.timedelta(microseconds=1)
MOST_HOURS = 18  # no place on Earth is further from UTC, and Spark knows no further

# By Spark's name of a type: Arrow's, and texts that Arrow reads as `parser` does: numbers of no more digits than every
# binary number of the type keeps, instants to the second in UTC. The property tests compare the two.
_INSTANT = "[12][0-9]{3}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}"
_KINDS: dict[str, tuple[pa.DataType, str]] = {
    "boolean": (pa.bool_(), "(?i)true|false"),
    "tinyint": (pa.int8(), "-?[0-9]{1,2}"),
    "smallint": (pa.int16(), "-?[0-9]{1,4}"),
    "int": (pa.int32(), "-?[0-9]{1,9}"),
    "bigint": (pa.int64(), "-?[0-9]{1,18}"),
    "float": (pa.float32(), r"-?([0-9]{1,6}|[0-9]{1,3}\.[0-9]{1,3})"),
    "double": (pa.float64(), r"-?([0-9]{1,15}|[0-9]{1,10}\.[0-9]{1,5}|[0-9]{1,5}\.[0-9]{1,10})"),
    "date": (pa.date32(), "[12][0-9]{3}-[0-9]{2}-[0-9]{2}"),
    "timestamp": (pa.timestamp("us", "UTC"), f"{_INSTANT}Z?"),
    "timestamp_ntz": (pa.timestamp("us"), _INSTANT),
    "string": (pa.string(), ".*"),
    "binary": (pa.binary(), ".*"),
}
TEXTS = ("string", "binary")
DECIMAL = re.compile(r"decimal\(([0-9]+),([0-9]+)\)")


def arrow_type(kind: str) -> pa.DataType | None:
    """Find the Arrow type of a Spark type that a text can be; None for every other type."""
    if decimal := DECIMAL.fullmatch(kind):
        return pa.decimal128(*map(int, decimal.groups()))
    return _KINDS[kind][0] if kind in _KINDS else None


def convert(texts: pa.Array, kind: str) -> tuple[pa.Array, list[int]]:
    """Convert strings to type `kind`; returns the column, and the positions of wrong texts (null in it)."""
    arrow = arrow_type(kind)
    if kind in TEXTS:
        return texts.cast(arrow), []
    plain = pc.match_substring_regex(texts, f"^(?:{_plain_form(kind)})$")
    if pc.all(plain).as_py() is not False:  # nulls do not count
        try:
            naive = pc.utf8_rtrim(texts, "Z").cast(pa.timestamp("us")) if kind.startswith("timestamp") else texts
            return naive.cast(arrow), []
        except pa.ArrowInvalid:  # such as the 30th of February: which one, `parser` finds
            pass
    parse, bad = parser(kind), []
    values: list[Any] = []
    for index, text in enumerate(texts.to_pylist()):
        try:
            values.append(None if text is None else parse(text.strip(BLANKS)))
        except (ValueError, ArithmeticError):
            values.append(None)
            bad.append(index)
    physical = {"date": pa.int32(), "timestamp": pa.int64(), "timestamp_ntz": pa.int64()}.get(kind, arrow)
    return pa.array(values, physical).cast(arrow), bad


def _plain_form(kind: str) -> str:
    if not (decimal := DECIMAL.fullmatch(kind)):
        return _KINDS[kind][1]
    precision, scale = map(int, decimal.groups())
    whole = f"-?[0-9]{{1,{max(precision - scale, 1)}}}"
    return rf"{whole}(\.[0-9]{{1,{scale}}})?" if scale else whole


def parser(kind: str) -> Callable[[str], Any]:
    """Return the function from text, without blanks around it, to the value as Arrow takes it.

    Dates are days, instants microseconds since 1970 UTC. It raises ValueError or ArithmeticError for a wrong text.
    """
    if decimal := DECIMAL.fullmatch(kind):
        precision, scale = map(int, decimal.groups())
        return lambda text: _decimal(text, precision, scale)
    parsers: dict[str, Callable[[str], Any]] = {
        "boolean": _boolean,
        "tinyint": partial(_integer, limit=1 << 7),
        "smallint": partial(_integer, limit=1 << 15),
        "int": partial(_integer, limit=1 << 31),
        "bigint": partial(_integer, limit=1 << 63),
        "float": partial(_float, single=True),
        "double": partial(_float, single=False),
        "date": _date,
        "timestamp": partial(_timestamp, zoned=True),
        "timestamp_ntz": partial(_timestamp, zoned=False),
    }
    return parsers[kind]


def scalar(text: str, kind: str) -> Any:
    """Convert one text to the Python value of its type: a `timestamp` is a datetime in UTC.

    It raises ValueError or ArithmeticError for a wrong text.
    """
    if kind == "string":
        return text
    value = parser(kind)(text)
    if kind == "date":
        return (EPOCH + dt.timedelta(days=value)).date()
    if kind in ("timestamp", "timestamp_ntz"):
        moment = EPOCH + value * MICROSECOND
        return moment.replace(tzinfo=dt.UTC) if kind == "timestamp" else moment
    return value


def _boolean(text: str) -> bool:
    if text.lower() not in TRUE | FALSE:  # not casefold(), which makes an s of ſ
        raise ValueError(text)
    return text.lower() in TRUE


def _integer(text: str, *, limit: int) -> int:
    value = int(_matched(INTEGER, text)[0])
    if not -limit <= value < limit:
        raise ValueError(text)
    return value


def _float(text: str, *, single: bool) -> float:
    """Parse a number; ValueError if the binary value does not keep all n significant digits of the text.

    The value rounded to n digits must be the text's number again. Zeros at the end of a fraction do not count, those of
    an integer do. A number halfway between two texts keeps both: writers differ in which one they round to.
    """
    if NOT_A_NUMBER.fullmatch(text):
        return float(text)
    mantissa = _matched(NUMBER, text)[1]
    value = float(text)
    if single:
        (value,) = struct.unpack("f", struct.pack("f", value))  # OverflowError beyond its range
    digits = (mantissa.rstrip("0").replace(".", "") if "." in mantissa else mantissa).lstrip("0")
    if digits and not _rounds_to(value, Decimal(text), len(digits)):
        raise ValueError(text)
    return value


def _rounds_to(value: float, text: Decimal, digits: int) -> bool:
    if Decimal(f"{value:.{digits - 1}e}") == text:
        return True
    if not (math.isfinite(value) and value):
        return False
    with localcontext(prec=1100):  # a double has at most 767 significant digits
        return abs(Decimal(value) - text) == Decimal((0, (5,), text.adjusted() - digits))


def _decimal(text: str, precision: int, scale: int) -> Decimal:
    value = Decimal(_matched(NUMBER, text)[0])
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    kept = "".join(map(str, digits)).lstrip("0")
    exponent, kept = exponent + len(kept) - len(kept.rstrip("0")), kept.rstrip("0")
    if kept and (-exponent > scale or len(kept) + exponent > precision - scale):
        raise ValueError(text)
    return Decimal((sign, tuple(map(int, kept)) or (0,), exponent if kept else 0))


def _date(text: str) -> int:
    year, month, day = map(int, _matched(DATE, text).groups())
    return (dt.datetime(year, month, day) - EPOCH).days


def _timestamp(text: str, *, zoned: bool) -> int:
    """Parse a timestamp to microseconds; UTC without a zone.

    Zones are `Z`, `UTC` or an offset: named ones repeat hours.
    """
    *parts, fraction, zone = _matched(TIMESTAMP, text).groups()
    micros = (fraction or "").rstrip("0").ljust(6, "0")
    if len(micros) > 6:
        raise ValueError(text)
    year, month, day, hour, minute, second = (int(p or 0) for p in parts)
    wall = dt.datetime(year, month, day, hour, minute, second, int(micros))
    return (wall - EPOCH) // MICROSECOND - _offset_s(zone.strip(BLANKS), zoned, parts[3] is not None) * 1_000_000


def _offset_s(zone: str, zoned: bool, has_time: bool) -> int:
    if zone and not (zoned and has_time):
        raise ValueError(zone)
    if zone in ("", "Z", "UTC"):
        return 0
    sign, hours, minutes = _matched(ZONE, zone).groups()
    offset = int(hours) * 60 + int(minutes or 0)
    if int(minutes or 0) > 59 or offset > MOST_HOURS * 60:
        raise ValueError(zone)
    return (-60 if sign == "-" else 60) * offset


def _matched(form: re.Pattern[str], text: str) -> re.Match[str]:
    found = form.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return found
