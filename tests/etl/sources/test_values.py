"""A text becomes a value that loses nothing, or is refused: by type, over odd texts, and beside DuckDB."""

import datetime as dt
import math
import random
import re
from decimal import Decimal
from fractions import Fraction

import duckdb
import pyarrow as pa
import pytest

from sparkring.etl.sources.values import BLANKS, arrow_type, convert, parser

EPOCH = dt.datetime(1970, 1, 1)
KINDS = ["boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "decimal(10,2)", "decimal(38,0)"]
KINDS += ["decimal(5,5)", "date", "timestamp", "timestamp_ntz"]


def value_of(text, kind):
    """The value, or None where it is refused."""
    try:
        return parser(kind)(text.strip(BLANKS))
    except (ValueError, ArithmeticError):
        return None


# By type: what is kept | what is refused.
CASES = {
    "timestamp": (
        [
            "2013-01-01",
            "2013-01-01 10:00",
            "2013-01-01T10:00:00Z",
            "2013-01-01 00:00:00.1234560",
            "2013-03-10 02:30:00",
            "2013-03-10 02:30:00-05:00",
            "2013-03-10 02:30:00 UTC",
            "2013-03-10 02:30+05",
        ],
        [
            "12:30:00",
            "T12:30",
            "2013",
            "2013-01",
            "2013-01-01 24:00:00",
            "2013-01-01 00:00:60",
            "2013-02-29",
            "2013-03-10 02:30:00 America/New_York",
            "2013-11-03 01:30:00 EST",
            "2013-01-01 00:00+19:00",
            "2013-01-01+01:00",
            "2013-01-01T00:00:00+05:",
            "2013-01-01 00:00:00.1234567",
            "2013-01-01 10",
            "2013-01-01 10:00:00 soon",
        ],
    ),
    "timestamp_ntz": (
        ["2013-01-01 00:00:00.5"],
        ["2013-01-01 00:00:00+02:00", "2013-01-01T00:00:00Z", "12:30:00"],
    ),
    "date": (
        ["2013-01-01", "2013-1-1", "2013-01-01 00:00:00"],
        ["2013", "2013-01", "2013-13-01", "2013-02-29", "2013-01-01 10:30:00", "2013-01-01 soon", "01/02/2013"],
    ),
    "float": (
        ["16777216", "16777218", "0.1", "0.100000000000", "1e-45", "NaN", "-inf", "3.4028235e38"],
        ["16777217", "460792820000", "1e39", "1e-46", "3.14159265", "0.1000000001"],
    ),
    "double": (
        [
            "9007199254740992",
            "0.1",
            "0.100000000000000000000",
            "1e23",
            "5e-324",
            "1.7976931348623157e308",
            "-0.0",
            "5.960464477539063e-08",  # 2**-24 is halfway between the two; Python writes the first
            "5.960464477539062e-08",
        ],
        [
            "5.9604644775390624e-08",
            "5.9604644775390626e-08",
            "9007199254740990.5",
            "18014398509481990",
            "9007199254740993",
            "100000000000000000000000",
            "1e-400",
            "1e400",
            "0.1234567890123456789",
            "1d",
            "0x1p3",
            "1_000",
            "1,5",
            "",
            "٣",
        ],
    ),
    "decimal(10,2)": (
        ["1.24", "1.2400", "-.5", "12e-1", "7", "99999999.99", "0e-99"],
        ["1.239", "1239e-3", "0.001", "1e-400", "100000000", "1e8", "NaN"],
    ),
    "int": (
        ["7", "-7", "+7", " 7\t", "0007", "2147483647", "-2147483648"],
        ["2147483648", "-2147483649", "1.0", "1e3", "1_0", "0x7", "7\n", "", "٣", "9" * 5000],
    ),
    "boolean": (
        ["true", "FALSE", "t", "N", "yes", "0"],
        ["2", "on", "", "truth", "yeſ", "falſe"],
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_text_that_would_become_another_value_is_refused(kind):
    kept, refused = CASES[kind]
    assert [t for t in kept if value_of(t, kind) is None] == []
    assert [t for t in refused if value_of(t, kind) is not None] == []


def odd_texts(count):
    """Numbers of up to 40 digits, days and times, whole and broken, among words and blanks."""
    rng = random.Random(3)

    def digits(most):
        return "".join(rng.choice("0001234567899") for _ in range(rng.randint(0, most)))

    def number():
        point = rng.choice(["", "", ".", ".", ",", ".."])
        exponent = rng.choice(["", "", "", f"e{rng.randint(-400, 400)}", "E+7", "e", "e-5", "f", "d", "L"])
        return rng.choice(["", "", "-", "+", "--"]) + digits(rng.choice([3, 9, 20])) + point + digits(9) + exponent

    def moment():
        year, month, day = rng.choice(["2013", "1900", "1", "0000", "12013"]), rng.randint(0, 13), rng.randint(0, 32)
        date = rng.choice(["{}-{:02d}-{:02d}", "{}-{}-{}", "{}/{}/{}", "{}-{:02d}"]).format(year, month, day)
        time = f"{rng.randint(0, 25):02d}:{rng.randint(0, 61):02d}" + rng.choice(["", f":{rng.randint(0, 61):02d}"])
        fraction = rng.choice(["", "", f".{digits(8)}"])
        zone = rng.choice(["", "", "Z", "+05:30", "-0800", "+19", " UTC", " Europe/Paris", " EST", "z"])
        return rng.choice([date, time, date + rng.choice(" T_") + time + fraction + zone])

    words = ["", " ", "NaN", "-Infinity", "inf", "true", "F", "null", "0x10", "1_0", "٣", "7\n", "\x00", "e5", "."]
    makers = [number, number, moment, moment, lambda: rng.choice(words)]
    return [rng.choice(["", "", " "]) + rng.choice(makers)() + rng.choice(["", "", "\t"]) for _ in range(count)]


def is_kept(text, kind, value):
    """Whether `value` says what the text says: an oracle of another make than `parse`."""
    text = re.sub(r"-([0-9])(?![0-9])", r"-0\1", text.strip(" \t")) if "-" in text[3:] else text.strip(" \t")
    if kind == "boolean":
        return text.lower() in ({"true", "t", "yes", "y", "1"} if value else {"false", "f", "no", "n", "0"})
    if kind == "date":
        return (EPOCH + dt.timedelta(days=value)).date() == dt.datetime.fromisoformat(text[:10].strip("T ")).date()
    if kind.startswith("timestamp"):
        instant = dt.datetime.fromisoformat(text.removesuffix(" UTC"))
        utc = instant.astimezone(dt.UTC).replace(tzinfo=None) if instant.tzinfo else instant
        return value == (utc - EPOCH) // dt.timedelta(microseconds=1)
    if not math.isfinite(value):
        return text.casefold().lstrip("+-")[:3] in ("nan", "inf")
    if kind in ("float", "double"):  # within half a unit of the last place written
        mantissa, _, exponent = text.casefold().partition("e")
        places = len(mantissa.partition(".")[2].rstrip("0")) - int(exponent or 0)
        return abs(Fraction(value) - Fraction(Decimal(text))) <= Fraction(10) ** -places / 2
    return value == Decimal(text)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_what_the_text_says(kind):
    values = [(text, value_of(text, kind)) for text in odd_texts(2000)]
    kept = [(text, value) for text, value in values if value is not None]
    assert len(kept) > 3
    assert [(text, value) for text, value in kept if not is_kept(text, kind, value)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_is_its_values_one_by_one(kind):
    """The way through Arrow, for plain texts, gives what `parse` gives, and so does the way for the others."""
    texts = odd_texts(500)
    plain = [str(n) for n in (0, 7, -12, 99, 999999999, 10**14)] + ["0.5", "-12.25", "100.001", "99999.99999"]
    plain += ["2013-02-28", "1999-12-31", "2013-02-30", "2013-01-01 23:59:59", "2013-01-01T00:00:00Z", "true", "False"]
    for text in [*texts, *plain]:
        single, bad = convert(pa.array([text]), kind)
        value = value_of(text, kind)
        assert bad == ([0] if value is None else []), (text, single)
        assert same(single, pa.array([value], physical(kind)).cast(arrow_type(kind))), text
    column, bad = convert(pa.array([None, *texts]), kind)
    assert bad == [i + 1 for i, t in enumerate(texts) if value_of(t, kind) is None]
    assert column.null_count == len(bad) + 1


def same(one, other):
    return one.equals(other) or str(one) == str(other) == str(pa.array([math.nan], one.type))


def physical(kind):
    return {"date": pa.int32(), "timestamp": pa.int64(), "timestamp_ntz": pa.int64()}.get(kind, arrow_type(kind))


def test_duckdb_reads_the_same_values_where_it_reads_them():
    """DuckDB rounds where this refuses, and refuses forms this keeps; a value both keep is one value."""
    names = {"timestamp_ntz": "TIMESTAMP", "timestamp": "TIMESTAMPTZ", "int": "INTEGER"}
    connection = duckdb.connect(config={"threads": 1})
    connection.execute("SET TimeZone = 'UTC'")
    texts = odd_texts(2000)
    for kind in KINDS:
        ours, _ = convert(pa.array(texts), kind)
        table = pa.table({"i": range(len(texts)), "t": texts})
        connection.register("texts", table)
        theirs = connection.sql(f"SELECT try_cast(t AS {names.get(kind, kind)}) v FROM texts ORDER BY i")
        there = theirs.to_arrow_table()["v"].combine_chunks().cast(arrow_type(kind))
        both = [i for i in range(len(texts)) if ours[i].is_valid and there[i].is_valid]
        different = [(texts[i], ours[i], there[i]) for i in both if not same(ours[i : i + 1], there[i : i + 1])]
        assert not different and len(both) > 2, (kind, different[:5])
