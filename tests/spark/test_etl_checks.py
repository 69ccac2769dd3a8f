"""Rules: what fails, what is quarantined, what stops the job; rows in = rows out + quarantined."""

import pytest

from sparkring.conf.blocks.etl import CheckConfig, SplitConfig
from sparkring.etl import checks
from sparkring.etl.errors import ChecksFailed, EtlError
from sparkring.etl.split import SPLIT, add_split, check_splits

pytestmark = pytest.mark.spark
ROWS = [(1, "a", 1.0), (2, "b", None), (3, "zz", 99.0), (3, "a", 5.0), (4, None, -1.0)]


@pytest.fixture(scope="module")
def tables(spark):
    rows = spark.createDataFrame(ROWS, "id int, kind string, x double")
    kinds = spark.createDataFrame([("a",), ("b",), ("a",), (None,)], "k string")
    return {"rows": rows, "kinds": kinds}


def rule(name, kind, **keys):
    return CheckConfig(name=name, kind=kind, **keys)


def marked(tables, *rules):
    rows = add_split(tables["rows"], SplitConfig(shares={"train": 1.0}), ["id"])
    return checks.mark(rows, list(rules), tables, ["id", "x"])


RULES = [
    rule("low", "range", column="x", min=0, max=50, level="row"),
    rule("known", "referential", column="kind", to="kinds.k", level="row"),
    rule("once", "unique", columns=["id"], level="row"),
    rule("filled", "null_share", column="x", max_share=0.2),
    rule("sane", "expression", sql="id + x > 0", max_share=0.4),
]


def test_every_kind_counts_its_failing_rows_in_one_pass(tables):
    found = checks.count(marked(tables, *RULES), RULES)
    assert found.failing == {"low": 2, "known": 1, "once": 1, "filled": 1, "sane": 1}
    # (3, "zz") fails `low` first and is quarantined once, though it fails `known` and shares its id.
    assert found.quarantined == {"low": 2}
    assert found.rows_in == 5 == sum(found.splits.values()) + sum(found.quarantined.values())


def test_good_and_bad_rows_are_the_whole_and_bad_rows_name_their_rule(tables):
    frame = marked(tables, *RULES)
    good, bad = checks.good(frame).collect(), checks.bad(frame).collect()
    assert len(good) + len(bad) == 5 and good[0].asDict().keys() == {"id", "kind", "x", SPLIT}
    assert {(r.id, r.x): r.rule for r in bad} == {(3, 99.0): "low", (4, -1.0): "low"}


def test_rows_may_have_a_column_called_rule(tables):
    named = {**tables, "rows": tables["rows"].withColumnRenamed("kind", "Rule")}
    bad = checks.bad(marked(named, RULES[0]))
    assert bad.columns[-1] == checks.RULE and {(r.Rule, r[checks.RULE]) for r in bad.collect()} == {
        ("zz", "low"),
        (None, "low"),
    }


@pytest.mark.parametrize("name", ["it's", "a/b", "", ".hidden", "two words"])
def test_a_split_whose_name_can_be_no_file_is_refused(name):
    with pytest.raises(EtlError, match=r"etl\.split\.column = 'part': .* names no split"):
        check_splits({"train": 3, name: 2}, SplitConfig(kind="column", column="part"))
    assert check_splits({"train": 3, "Fold-1.b": 2}, SplitConfig(kind="column", column="part"))


def test_unique_keeps_the_row_of_the_smallest_key(tables):
    frame = marked(tables, rule("once", "unique", columns=["id"], level="row"))
    assert [(r.id, r.x) for r in checks.bad(frame).collect()] == [(3, 99.0)]
    assert [
        (r.id, r.x)
        for r in checks.bad(marked({**tables, "rows": tables["rows"].repartition(5)}, *RULES[2:3])).collect()
    ] == [(3, 99.0)]


def test_a_range_includes_its_bounds(tables):
    ids = [row["id"] for row in tables["rows"].collect()]
    inside = rule("inside", "range", column="id", min=min(ids), max=max(ids))
    assert checks.count(marked(tables, inside), [inside]).failing == {"inside": 0}


def test_all_failed_dataset_rules_are_listed(tables):
    rules = [
        rule("filled", "null_share", column="x", max_share=0.1),
        rule("fine", "range", column="id", min=1),
        rule("one_kind", "referential", column="kind", to="kinds.k"),
        rule("few_low", "range", column="x", min=0, level="row", max_share=0.1),
    ]
    with pytest.raises(ChecksFailed) as caught:
        checks.judge(checks.count(marked(tables, *rules), rules), rules)
    message = str(caught.value)
    assert "3 of 4 rules failed" in message and "fine" not in message
    assert all(n in message for n in ("filled: x is not null: 1 of 5", "one_kind: kind occurs in kinds.k", "few_low"))
    assert [e["passed"] for e in caught.value.report] == [False, True, False, False]


def test_no_row_at_all_is_an_error(tables):
    with pytest.raises(EtlError, match="gave no row at all"):
        checks.judge(checks.count(marked({**tables, "rows": tables["rows"].limit(0)}, *RULES), RULES), RULES)


def test_all_rows_quarantined_is_an_error(tables):
    rules = [rule("never", "expression", sql="id > 100", level="row")]
    with pytest.raises(EtlError, match="all 5 rows were quarantined"):
        checks.judge(checks.count(marked(tables, *rules), rules), rules)


@pytest.mark.parametrize(
    "bad",
    [
        rule("r", "range", column="nope", min=0),
        rule("r", "expression", sql="nope > 1"),
        rule("r", "unique", columns=["nope"]),
        rule("r", "referential", column="nope", to="kinds.k"),
    ],
)
def test_a_rule_about_a_missing_column_is_named(tables, bad):
    with pytest.raises(EtlError, match=r"'?r'?.*nope"):
        marked(tables, bad)


def test_rows_without_a_split_are_quarantined(spark):
    rows = spark.createDataFrame([("2024-01-01",), ("2024-02-02",), (None,)], "day string").selectExpr("date(day) day")
    config = SplitConfig(kind="time", column="day", boundaries={"test": "2024-02-01"})
    frame = checks.mark(add_split(rows, config, []), [], {}, ["day"])
    found = checks.count(frame, [])
    assert found.splits == {"train": 1, "test": 1} and found.quarantined == {checks.UNSPLIT: 1}


def test_time_boundaries_are_the_first_instant_of_their_split(spark):
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    days = ["2024-01-31T23:59:59Z", "2024-02-01T00:00:00Z", "2024-03-01T11:59:59Z", "2024-03-01T12:00:00Z"]
    rows = session.createDataFrame([(d,) for d in days], "t string").selectExpr("timestamp(t) t")
    config = SplitConfig(kind="time", column="t", boundaries={"valid": "2024-02-01", "test": "2024-03-01T12:00:00"})
    assert [r[SPLIT] for r in add_split(rows, config, []).orderBy("t").collect()] == ["train", "valid", "valid", "test"]


def test_a_hash_split_has_its_shares_and_does_not_move_with_partitions(spark):
    config = SplitConfig(shares={"train": 0.7, "valid": 0.1, "test": 0.2})
    rows = add_split(spark.range(20_000), config, ["id"])
    counts = {r[SPLIT]: r["count"] for r in rows.groupBy(SPLIT).count().collect()}
    assert all(abs(counts[s] / 20_000 - share) < 0.015 for s, share in config.shares.items())
    again = add_split(spark.range(20_000).repartition(7), config, ["id"])
    assert rows.exceptAll(again).count() == 0
