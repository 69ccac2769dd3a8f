"""A condition keeps the rows that Spark keeps: random conditions over random rows, each value null now and then."""

import contextlib
import datetime as dt
import random
from decimal import Decimal

import pytest
from pyspark.sql import functions as F

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.predicate import parse
from sparkring.etl.spark_platform.session import build_session

pytestmark = pytest.mark.spark
TYPES = {"day": "date", "country": "string", "n": "int", "small": "tinyint", "big": "bigint", "flag": "boolean"}
TYPES |= {"at": "timestamp", "wall": "timestamp_ntz", "price": "decimal(10,2)", "date": "date"}
COLUMNS = ", ".join(f"`{name}` {kind}" for name, kind in TYPES.items())
STRINGS = [
    "",
    " ",
    "a",
    "A",
    "b ",
    "é",
    "e\u0301",
    "O'Brien",
    'say "x"',
    "%41",
    "a/b=c",
    "line\nend",
    "日本",
    "😀",
    "\uffff",
    "\t",
]
DAYS = [dt.date(2024, 2, 28) + dt.timedelta(days=n) for n in range(4)] + [dt.date(1, 1, 1), dt.date(9999, 12, 31)]
MOMENTS = [dt.datetime(2024, 2, 29, 0, 0), dt.datetime(2024, 2, 29, 23, 59, 59, 999_999), dt.datetime(1969, 12, 31, 12)]
NUMBERS = [-129, -1, 0, 1, 2, 127, 2**31 - 1, -(2**63)]
PRICES = [Decimal("-0.01"), Decimal("0.00"), Decimal("1.50"), Decimal("99999999.99")]
VALUES = {
    "date": DAYS,
    "string": STRINGS,
    "tinyint": [-128, -1, 0, 1, 2, 127],
    "int": [-129, -1, 0, 1, 2, 127, 2**31 - 1],
    "bigint": NUMBERS,
    "boolean": [True, False],
    "timestamp": [moment.replace(tzinfo=dt.UTC) for moment in MOMENTS],
    "timestamp_ntz": MOMENTS,
    "decimal(10,2)": PRICES,
}


class Conditions:
    """Writes random conditions as people may write them."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def condition(self, depth):
        kind = self.draw.choice(["not", "and", "or", "leaf"] if depth else ["leaf"])
        if kind == "leaf":
            return self.leaf()
        if kind == "not":
            return f"{self.word('not')} ({self.condition(depth - 1)})"
        parts = [self.condition(depth - 1) for _ in range(self.draw.randint(2, 3))]
        return f" {self.word(kind)} ".join(f"({p})" if self.draw.random() < 0.6 else p for p in parts)

    def leaf(self):
        name = self.draw.choice(list(TYPES))
        column = self.draw.choice([name, name.upper(), f"`{name}`"])
        form = self.draw.choice(["compare", "compare", "compare", "between", "in", "null", "same", "columns", "flag"])
        literals = [self.literal(TYPES[name]) for _ in range(self.draw.randint(1, 4))]
        no = self.draw.choice(["", "NOT "])
        if form == "between":
            return f"{column} {no}BETWEEN {literals[0]} AND {self.literal(TYPES[name])}"
        if form == "in":
            return f"{column} {no}IN ({', '.join(literals)})"
        if form == "null":
            return f"{column} IS {no}NULL"
        if form == "same":
            return self.draw.choice([f"{column} <=> {literals[0]}", f"{column} IS {no}DISTINCT FROM {literals[0]}"])
        if form == "columns":
            one, other = self.draw.choice([("n", "big"), ("small", "n"), ("day", "date")])
            return f"{one} {self.operator()} {other}"
        if form == "flag":
            return self.draw.choice(["flag", "NOT flag", "flag IS NOT TRUE", "flag = FALSE", "flag IS FALSE"])
        sides = [column, literals[0]]
        return f" {self.operator()} ".join(sides if self.draw.random() < 0.8 else sides[::-1])

    def literal(self, kind):
        if self.draw.random() < 0.08:
            return "NULL"
        value = self.draw.choice(VALUES[kind])
        if kind == "string":
            return f'"{value}"' if "'" in value or (self.draw.random() < 0.3 and '"' not in value) else f"'{value}'"
        if kind == "date":
            return self.draw.choice(["", "DATE ", "date"]) + f"'{value}'"
        if kind == "timestamp":
            zone = self.draw.choice(["", "Z", "+00:00", " UTC"])
            return self.draw.choice(["", "TIMESTAMP "]) + f"'{value:%Y-%m-%d %H:%M:%S.%f}{zone}'"
        if kind == "timestamp_ntz":
            day = f"DATE '{value:%Y-%m-%d}'"
            return self.draw.choice([f"'{value}'", f"TIMESTAMP_NTZ '{value.isoformat()}'", day])
        if kind == "boolean":
            return str(value)
        return self.draw.choice([str(value), str(value), "1.5", ".5", "-0", "+1", "007", "9223372036854775807"])

    def operator(self):
        return self.draw.choice(["=", "==", "<>", "!=", "<", "<=", ">", ">=", "<=>"])

    def word(self, text):
        return self.draw.choice([text.upper(), text.lower()])


def check(spark, seed, conditions, rows):
    """Compare the three-valued truth of each condition for each row with what Spark says."""
    draw, written = random.Random(seed), Conditions(seed)
    values = [
        {name: None if draw.random() < 0.15 else draw.choice(VALUES[kind]) for name, kind in TYPES.items()}
        for _ in range(rows)
    ]
    texts = [written.condition(2) for _ in range(conditions)]
    session = build_session(spark, {})
    table = session.createDataFrame([tuple(row.values()) for row in values], COLUMNS).coalesce(1)
    found = table.select(
        F.struct(*TYPES).alias("row"), F.array(*(F.expr(text) for text in texts)).alias("truth")
    ).collect()
    assert len(found) == rows
    predicates = [parse("etl.sources.t.where", text, TYPES) for text in texts]
    for record in found:
        row = record["row"].asDict()
        if row["at"] is not None:  # collected in this machine's zone, without one
            row["at"] = row["at"].astimezone(dt.UTC)
        for predicate, truth in zip(predicates, record["truth"], strict=True):
            assert predicate.test(row) is truth, (predicate.text, {name: row[name] for name in predicate.columns})
            assert predicate.matches(row) is predicate.may_match(row) is (truth is True)


def test_random_conditions_are_as_true_as_in_spark(spark):
    check(spark, 1, conditions=60, rows=40)


@pytest.mark.slow
def test_many_random_conditions_are_as_true_as_in_spark(spark):
    for seed in range(2, 42):
        check(spark, seed, conditions=250, rows=60)


ODD = ["n = 1 = 2", "n = 1L", "country = 'a' 'b'", "country = 'a''b'", "country = 'a\\nb'", "country = r'x'", "n = 1e0"]
ODD += ["day = '2024'", "day = '2024-2-29 10:00'", "n = '1'", "country = 1", "at > day", "n ! = 1", "NOT n = 1 OR flag"]
ODD += [
    "-n = 1",
    "n = - 1",
    "n = -1.",
    "n = (((1)))",
    "flag = NOT TRUE",
    "n IN (1) IS NULL",
    "n BETWEEN 1 AND 2 AND flag",
]
ODD += [
    "flag AND n = 1 OR n = 2 AND NOT flag",
    "n = 1 -- and flag",
    "n = /* a */ 1",
    "day BETWEEN '2024-02-28' AND NULL",
]
ODD += ["n IS NULL IS NULL", "flag = flag IS NULL", "n NOT IN (1, 2) AND n NOT BETWEEN 0 AND 1", "n <> 1 <> flag"]
ODD += [
    "date = DATE '2024-02-28'",
    "date > '2024-02-28' AND day IS NOT NULL",
    "n > 0 == flag",
    "! flag",
    "!flag OR n=0",
]


def test_odd_texts_are_refused_or_mean_what_they_mean_to_spark(spark):
    predicates = []
    for text in ODD:
        with contextlib.suppress(EtlError):
            predicates.append(parse("k", text, TYPES))
    assert len(ODD) > len(predicates) > 12
    values = {"day": DAYS[0], "country": "ab", "small": 1, "big": 2, "at": MOMENTS[0], "wall": MOMENTS[0]}
    values |= {"price": PRICES[0], "date": DAYS[0]}
    rows = [values | {"n": n, "flag": flag} for n in (0, 1, 2, None) for flag in (True, False, None)]
    table = build_session(spark, {}).createDataFrame([tuple(row[name] for name in TYPES) for row in rows], COLUMNS)
    found = table.coalesce(1).select(F.array(*(F.expr(f"({p.text}\n)") for p in predicates)).alias("truth")).collect()
    for row, record in zip(rows, found, strict=True):
        row["at"] = row["at"].replace(tzinfo=dt.UTC)
        for predicate, truth in zip(predicates, record["truth"], strict=True):
            assert predicate.test(row) is truth, (predicate.text, row)
