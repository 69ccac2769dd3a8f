"""What a condition keeps, in SQL's three values, and that the rest is refused by name. Against Spark: tests/spark."""

import datetime as dt
import re
from decimal import Decimal

import pytest

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.predicate import parse

KEY = "etl.sources.t.where"
TYPES = {"day": "date", "country": "string", "n": "int", "big": "bigint", "flag": "boolean"}
TYPES |= {"at": "timestamp", "wall": "timestamp_ntz", "price": "decimal(10,2)", "x": "double"}
NOON = dt.datetime(2024, 1, 31, 12)
ROW = {"day": dt.date(2024, 1, 31), "country": None, "n": 3, "big": 7, "flag": True}
ROW |= {"at": NOON.replace(tzinfo=dt.UTC), "wall": NOON, "price": Decimal("1.50"), "x": 0.5}


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("day = DATE '2024-01-31'", True),
        ("DAY BETWEEN '2024-01-31' and '2024-02-01'", True),
        ("'2024-02-01' > day", True),
        ("country = 'a'", None),
        ("country <=> null", True),
        ("country IS NULL AND n IS NOT NULL", True),
        ("NOT country IN ('a', 'b')", None),
        ("n IN (3, NULL)", True),
        ("n IN (4, NULL)", None),
        ("n NOT IN (4, NULL)", None),
        ("n = 4 AND country = 'a'", False),
        ("n = 3 OR country = 'a'", True),
        ("n = 4 OR country = 'a'", None),
        ("n BETWEEN NULL AND 2", False),
        ("n < big AND n < 3.5 AND n > -1 AND `n` = (3)", True),
        ("flag AND NOT flag = FALSE AND flag IS TRUE", True),
        ("at = TIMESTAMP '2024-01-31 13:00:00+01:00' AND at > DATE '2024-01-31'", True),
        ("wall = '2024-01-31 12:00' AND wall = TIMESTAMP_NTZ '2024-01-31 12:00:00'", True),
        ("price = 1.5 AND price < 2", True),
        ("country IS DISTINCT FROM 'a'", True),
    ],
)
def test_a_condition_has_three_values_and_keeps_what_is_true(text, truth):
    predicate = parse(KEY, text, TYPES)
    assert predicate.test(ROW) is truth
    assert predicate.matches(ROW) is (truth is True)


def test_a_condition_says_which_columns_it_names():
    assert parse(KEY, "DAY > '2024-01-01' or `n` = 1 and day is null", TYPES).columns == {"day", "n"}


def test_a_partition_known_in_part_may_match_unless_a_part_of_the_and_says_no():
    predicate = parse(KEY, "(day > '2024-01-31' AND (country = 'a' OR n = 3) AND big = 7)", TYPES)
    first, second = {"day": dt.date(2024, 1, 31)}, {"day": dt.date(2024, 2, 1)}
    assert not predicate.may_match(first) and predicate.may_match(second) and predicate.may_match({})
    assert predicate.may_match(second | {"country": "b"})  # n is not known yet
    assert not predicate.may_match(second | {"country": "b", "n": 4})
    assert not parse(KEY, "day = '2024-02-01' OR n = 1", TYPES).may_match(first | {"n": 2})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hour = 3", "hour is not a partition column"),
        ("t.n = 3", "t.n is not a partition column"),
        ("n = '3'", "'3' cannot be compared with 'n', which is int"),
        ("country = 3", "3 cannot be compared with 'country', which is string"),
        ("flag = 1", "1 cannot be compared with 'flag', which is boolean"),
        ("day = 5", "5 cannot be compared with 'day', which is date"),
        ("day = '2024-01'", "'2024-01' is no date; write it whole"),
        ("day = '2024-02-30'", "'2024-02-30' is no date"),
        ("day = current_date", "CURRENT_DATE cannot be compared"),
        ("wall = TIMESTAMP '2024-01-31 00:00:00'", "which is timestamp_ntz"),
        ("wall = '2024-01-31 00:00:00Z'", "is no timestamp_ntz"),
        ("year(day) = 2024", "YEAR(day) is not understood; `where` of a source compares columns with literals, other "),
        ("'X' = upper(country)", "UPPER(country) is not understood"),
        ("n + 1 = 4", "n + 1 is not understood"),
        ("n = big + 1", "big + 1 is not a plain number"),
        ("n = day", "n and day have different types"),
        ("n = 1e3", "1e3 is not a plain number"),
        ("n = 3L", "is not a plain number"),
        ("n <= 9223372036854775808", "9223372036854775808 is beyond bigint"),
        ("price = 1.2345678901234567890123456789012", "more digits than Spark can compare"),
        ("x = 0.5", "'x' is double, which no condition"),
        ("country LIKE 'a%'", "country LIKE 'a%' is not understood"),
        ("n IN (SELECT 1)", "is not understood"),
        ("n BETWEEN SYMMETRIC 2 AND 1", "is not understood"),
        ("country = 'O''Brien'", "use the other kind"),
        ("country = 'a\\tb'", "a backslash is not understood"),
        ("country", "country is not understood"),
        ("1 = 1", "1 is no column"),
        ("TRUE", "TRUE is not understood"),
        ("n = 1; n = 2", "must be one SQL condition, not 2"),
        (" ", "must be one SQL condition, not 0"),
        ("n =", "not a SQL condition"),
        ("country = 'a", "not a SQL condition"),
        ("n = 1) OR (n = 2", "not a SQL condition"),
    ],
)
def test_what_is_not_understood_is_refused_with_key_condition_and_name(text, words):
    start = f"{KEY} = {text!r}: "
    with pytest.raises(EtlError, match=f"^{re.escape(start)}.*{re.escape(words)}.*partition columns are"):
        parse(KEY, text, TYPES)


def test_a_thousand_parts_are_no_deeper_than_one():
    text = " OR ".join(f"day = '2024-01-{n % 28 + 1:02}'" for n in range(1000)) + " OR n = 3"
    assert parse(KEY, text, TYPES).matches(ROW)


@pytest.mark.parametrize(
    "text",
    [
        "NOT " * 200 + "flag",
        "(" * 500 + "flag" + ")" * 500,
        "n = 1 AND (flag OR " * 200 + "flag" + ")" * 200,
        "n = " + "- " * 2000 + "1",
        "n = " + "CASE WHEN flag THEN " * 300 + "1" + " END" * 300,
        "n = 1" + "[" * 3000,
        "n IN " + "(SELECT 1 WHERE n IN " * 200 + "(1)" + ")" * 200,
    ],
)
def test_a_condition_that_is_nested_too_deeply_is_one_error(text):
    with pytest.raises(EtlError, match=r"^etl\.sources\.t\.where = "):
        parse(KEY, text, TYPES)


def test_a_condition_may_be_long():
    assert parse(KEY, " AND ".join(["n = 3"] * 500) + f" AND n IN ({', '.join(map(str, range(5000)))})", TYPES).matches(
        ROW
    )
