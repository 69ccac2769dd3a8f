"""The SQL that `sparkring init recommender` writes: what is drawn, from what, and that nothing but the rows decides."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.etl.views import build_rows
from sparkring.pipelines.init import recommender
from sparkring.pipelines.init.interactions import Roles
from sparkring.pipelines.init.recommender import CANDIDATES, DRAWN, recommender_project

pytestmark = pytest.mark.spark
ROWS = 900
Rows = list[tuple[int, str, str, int, str | None]]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 users, 40 items of which one is never seen in training, repeated pairs, and rows without an item."""
    draw = np.random.default_rng(5)
    items = [f"i{n}" for n in draw.integers(0, 39, ROWS)]
    items[-5:] = ["new"] * 5
    columns = {
        "user": draw.integers(0, 30, ROWS),
        "item": [None if n % 97 == 0 else item for n, item in enumerate(items)],
        "at": np.arange(ROWS),
        "kind": [f"k{len(item) % 2}" for item in items],
    }
    path = tmp_path_factory.mktemp("raw") / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture(scope="module")
def rows(spark: Any, table: Path) -> Rows:
    return prepared(spark, table, 3)


def prepared(spark: Any, path: Path, partitions: int) -> Rows:
    """The rows of the recipe, from a table in so many partitions."""
    recipe = recommender_project(str(path), Roles("user", "item", "at"), path.parent / "new").recipe["etl"]
    tables = {"raw": spark.read.parquet(str(path)).repartition(partitions)}
    found = build_rows(spark, tables, recipe["views"], recipe["rows"])
    return sorted((r.user, r.item, r.period, r.taken, r.kind) for r in found.collect())


def test_names_that_spark_takes_in_backquotes_only_give_the_same_rows(spark: Any, table: Path, rows: Rows) -> None:
    path = table.parent / "odd.parquet"
    pq.write_table(pq.read_table(table).rename_columns(["käufer", "all", "at", "straße 1"]), path)
    recipe = recommender_project(str(path), Roles("käufer", "all", "at"), table.parent / "odd").recipe["etl"]
    found = build_rows(spark, {"raw": spark.read.parquet(str(path))}, recipe["views"], recipe["rows"])
    named = [found[name] for name in ("käufer", "all", "period", "taken", "straße_1")]
    assert sorted(map(tuple, found.select(*named).collect())) == rows
    (check,) = recipe["checks"]
    assert found.where(check["sql"]).count() == len(rows)


def first_seen(path: Path) -> dict[tuple[int, str], str]:
    """(user, item) -> the period of the first interaction, by a loop."""
    recipe = recommender_project(str(path), Roles("user", "item", "at"), path.parent / "new").recipe["etl"]
    test, valid = (int(time) for time in re.findall(r">= (\d+) THEN", recipe["views"]["first_seen"]))
    seen: dict[tuple[int, str], str] = {}
    for row in pq.read_table(path).to_pylist():
        if row["item"] is not None:
            of = "test" if row["at"] >= test else "valid" if row["at"] >= valid else "train"
            seen.setdefault((row["user"], row["item"]), of)
    return seen


def test_every_pair_is_a_positive_row_once_and_no_item_is_drawn_that_is_known_by_then(rows: Rows, table: Path) -> None:
    seen = first_seen(table)
    assert {(user, item): of for user, item, of, taken, _ in rows if taken} == seen
    assert len(rows) == len({row[:3] for row in rows}), "user, item and period are a key"
    trained = {item for (_, item), of in seen.items() if of == "train"}
    drawn = [row[:3] for row in rows if not row[3]]
    assert drawn and {item for _, item, _ in drawn} <= trained and "new" not in trained
    for user, item, of in drawn:
        known = seen.get((user, item))
        assert known is None or (of == "train" and known != "train") or (of == "valid" and known == "test")
    later = [1 for user, item, of in drawn if of == "train" and (user, item) in seen]
    assert later, "in training nothing is left out because of what comes later"
    assert {kind for *_, kind in rows} == {"k0", "k1"}


def test_as_many_are_drawn_as_is_said(rows: Rows, table: Path) -> None:
    seen = first_seen(table)
    drawn = Counter((user, of) for user, _, of, taken, _ in rows if not taken)
    positive = Counter((user, of) for (user, _), of in seen.items())
    assert all(n <= DRAWN * positive[key] for key, n in drawn.items() if key[1] != "test")
    assert sum(n for key, n in drawn.items() if key[1] == "train") > 0.2 * DRAWN * sum(
        n for key, n in positive.items() if key[1] == "train"
    ), "fewer, since items are drawn twice or known"
    assert {user for user, of in drawn if of == "test"} == {user for user, of in positive if of == "test"}
    assert all(n <= CANDIDATES for n in drawn.values())


@pytest.mark.slow
def test_the_rows_do_not_depend_on_partitions(spark: Any, rows: Rows, table: Path) -> None:
    assert prepared(spark, table, 7) == rows


@pytest.mark.slow
def test_of_many_test_users_all_rows_of_some_are_kept(spark: Any, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = prepared(spark, table, 2)
    monkeypatch.setattr(recommender, "MOST_TEST_USERS", 10)
    some = prepared(spark, table, 2)
    kept = {row[0] for row in some if row[2] == "test"}
    assert 0 < len(kept) < len({row[0] for row in rows if row[2] == "test"})
    assert some == [row for row in rows if row[2] != "test" or row[0] in kept]
