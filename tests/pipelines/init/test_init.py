"""`sparkring init`: what it decides of a table's columns, what it refuses, and that what it writes is valid."""

from __future__ import annotations

import gzip
import math
import re
import shlex
import sys
from calendar import month_abbr
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image

from sparkring.conf.load import ConfigError, load_config
from sparkring.pipelines.cli import main, parse
from sparkring.pipelines.init import table
from sparkring.pipelines.init.columns import Columns, decide_columns, identifiers
from sparkring.pipelines.init.folder import near_path, readme, run_name
from sparkring.pipelines.init.images import IMAGES
from sparkring.pipelines.init.sample import read_sample, text_type
from sparkring.pipelines.init.split import with_split
from sparkring.pipelines.init.table import TABLE, Budget, table_project
from sparkring.pipelines.init.written import written_otherwise
from sparkring.pipelines.run.exit_codes import Exit

ROWS = 400
RANDOM = np.random.default_rng(0)
PLAIN: dict[str, Any] = {
    "id": [1000 + i for i in range(ROWS)],
    "Size m2": RANDOM.integers(30, 300, ROWS),
    "zip": RANDOM.choice(["00123", "10115"], ROWS),
    "rooms": RANDOM.integers(1, 6, ROWS),
    "owned": RANDOM.choice(["yes", "no"], ROWS),
    "sold on": np.datetime64("2023-01-01") + RANDOM.integers(0, 300, ROWS),
    "note": [f"note {i}" for i in range(ROWS)],
    "street": [f"street {i % 300}" for i in range(ROWS)],
    "town": ["Bonn"] * ROWS,
    "kind": RANDOM.choice(["flat", "house", "loft"], ROWS),
    "price": RANDOM.normal(500, 100, ROWS).round(2),
}


def write_csv(folder: Path, **columns: Any) -> str:
    pacsv.write_csv(pa.table(PLAIN | columns), folder / "rows.csv", pacsv.WriteOptions(quoting_style="none"))
    return str(folder / "rows.csv")


def decide(folder: Path, label: str, task: str | None = None, **columns: Any) -> Columns:
    return decide_columns(read_sample(write_csv(folder, **columns)), label, task)


def test_features_are_chosen_by_type_and_distinct_values(tmp_path: Path) -> None:
    found = decide(tmp_path, "price")
    assert found.features == {
        "Size_m2": {"kind": "numeric"},
        "zip": {"kind": "categorical"},
        "rooms": {"kind": "categorical"},
        "owned": {"kind": "categorical"},
        "sold_on_month": {"kind": "cyclic", "period": 12},
        "sold_on_weekday": {"kind": "cyclic", "period": 7},
        "kind": {"kind": "categorical"},
    }
    assert found.selected["sold_on_month"] == "month(`sold on`)" and found.dates == ["sold_on"]
    assert found.key == ["id"] and found.selected["id"] == "`id`"
    assert {name: why.partition(":")[0] for name, why in found.left_out.items()} == {
        "id": "an id, or free text",
        "note": "an id, or free text",
        "street": "free text, or nearly an id",
        "town": "the same value in every row",
    }


def test_whole_numbers_that_repeat_are_amounts_and_codes(tmp_path: Path) -> None:
    """Unless a value has too few rows to be known by, or there are so few values that codes alone do."""
    many = 5000
    draw = np.random.default_rng(1)
    columns: dict[str, Any] = {
        "age": draw.integers(17, 90, many),
        "few": draw.integers(0, 5, many),
        "wide": draw.integers(0, 2000, many),
        "part": draw.integers(0, 50, many) / 2,
        "zone id": draw.integers(0, 60, many),
        "y": draw.normal(size=many),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    found = decide_columns(read_sample(str(tmp_path / "rows.parquet")), "y")
    assert found.features == {
        "age": {"kind": "numeric"},
        "age_code": {"kind": "categorical", "column": "age", "min_count": 5},
        "few": {"kind": "categorical"},
        "wide": {"kind": "numeric"},
        "part": {"kind": "numeric"},
        "zone_id": {"kind": "numeric"},
        "zone_id_code": {"kind": "categorical", "column": "zone_id", "min_count": 5},
    }
    assert {"age_code", "zone_id_code"}.isdisjoint(found.selected) and not found.remarks
    project = table_project(str(tmp_path / "rows.parquet"), "y", None, tmp_path / "mine")
    assert "amounts whose values are codes too, as they repeat: age, zone_id" in project.decided
    taken = pa.table(columns | {"Age_Code": draw.normal(size=many), "age_code_2": draw.normal(size=many)})
    pq.write_table(taken, tmp_path / "rows.parquet")
    assert "age_code_3" in decide_columns(read_sample(str(tmp_path / "rows.parquet")), "y").features


def test_of_many_texts_those_with_too_few_rows_to_be_known_by_are_told(tmp_path: Path) -> None:
    """A column of which no value has enough rows would be one code in every row."""
    many = 6000
    common = [f"c{i % 400}" if i < many / 2 else f"r{i % 800}" for i in range(many)]  # 7 or 8 rows each, 3 or 4 each
    columns = {
        "shop": common,
        "client": [f"k{i % 2000}" for i in range(many)],
        "paid": [f"{i % 1200},{'5' * (i % 7 > 0)}5" for i in range(many)],
        "area": [f"a{i % 1100}" for i in range(many)],
        "y": np.random.default_rng(1).normal(size=many),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    found = decide_columns(read_sample(str(tmp_path / "rows.parquet")), "y")
    assert found.features == {name: {"kind": "categorical", "min_count": 5} for name in ("shop", "paid", "area")}
    assert found.left_out["client"] == "nearly an id: 2000 distinct values, of which none has 5 rows to be known by"
    known = "values with 5 rows or more to be known by"
    rare = f"; {known}: 342 of 2,058; the others, in 72% of the rows, share one code"
    paid = found.remarks.pop("paid")
    assert paid.startswith("its texts are numbers with a decimal comma") and paid.endswith(rare)
    assert found.remarks == {"shop": f"{known}: 400 of 1,200; the others, in 50% of the rows, share one code"}


SLOW = {"refit": True, "learning_rate": 0.025, "early_stopping_rounds": 100, "rounds": 2500}


def test_a_recipe_of_trees_has_no_block_of_a_network(tmp_path: Path) -> None:
    pq.write_table(pa.table(PLAIN), tmp_path / "rows.parquet")
    words = ["init", "table", str(tmp_path / "mine"), "--data", str(tmp_path / "rows.parquet"), "--label", "price"]
    assert main([*words, "--family", "trees"]) == 0
    written = yaml.safe_load((tmp_path / "mine/recipe.yaml").read_text())
    assert written["model"] == {"family": "trees", "task": "regression"}
    assert written.keys() == {"name", "etl", "model", "trees", "predict"} and written["trees"] == SLOW
    assert load_config(str(tmp_path / "mine/recipe.yaml")).config.model.is_trees


@pytest.mark.parametrize(
    ("claims", "is_told"),
    [
        ([i % 13 for i in range(ROWS)], False),  # half of them above 5
        ([min(i % 40, 17) if i % 3 == 0 else 0 for i in range(ROWS)], True),
        ([min(i % 40, 17) + 1 if i % 3 == 0 else 1 for i in range(ROWS)], False),  # no 0
        ([float(min(i % 40, 17) if i % 3 == 0 else 0) + 0.5 for i in range(ROWS)], False),
    ],
)
def test_a_label_that_looks_like_counts_is_told(tmp_path: Path, claims: list[float], is_told: bool) -> None:
    pq.write_table(pa.table(PLAIN | {"claims": claims}), tmp_path / "rows.parquet")
    project = table_project(str(tmp_path / "rows.parquet"), "claims", "regression", tmp_path / "mine")
    assert any("--task poisson" in line for line in project.look_at) == is_told


@pytest.mark.parametrize(("has_trees", "family"), [(True, "both"), (False, None)])
def test_both_families_are_the_default_where_trees_can_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_trees: bool, family: str | None
) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: object() if has_trees else None)
    pq.write_table(pa.table(PLAIN), tmp_path / "rows.parquet")
    project = table_project(str(tmp_path / "rows.parquet"), "price", None, tmp_path / "mine")
    assert project.recipe["model"].get("family") == family
    assert project.decided[-1].startswith("model: a network")
    assert ("sparkring[trees]" in project.decided[-1]) != has_trees
    alone = table_project(str(tmp_path / "rows.parquet"), "price", None, tmp_path / "mine", "net")
    assert "family" not in alone.recipe["model"] and ("[trees]" in alone.decided[-1]) != has_trees


def test_trees_of_a_large_table_are_neither_slow_nor_grown_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table(PLAIN), tmp_path / "rows.parquet")
    for most, is_slow in ((ROWS, True), (ROWS - 1, False)):
        monkeypatch.setattr(table, "MOST_SLOW", most)
        project = table_project(str(tmp_path / "rows.parquet"), "price", None, tmp_path / "mine", "both")
        assert ("trees" in project.recipe) == is_slow


def test_a_recipe_of_both_families_is_that_of_a_network_with_its_family(tmp_path: Path) -> None:
    pq.write_table(pa.table(PLAIN), tmp_path / "rows.parquet")
    made = {}
    for family in ("net", "both"):
        words = ["init", "table", str(tmp_path / family), "--data", str(tmp_path / "rows.parquet"), "--label", "price"]
        assert main([*words, "--family", family]) == 0
        made[family] = yaml.safe_load((tmp_path / family / "recipe.yaml").read_text())
    assert load_config(str(tmp_path / "both/recipe.yaml")).config.model.families == ("trees", "net")
    assert made["both"]["model"].pop("family") == "both" and made["both"].pop("trees") == SLOW
    assert made["both"] | {"name": "net"} == made["net"]


@pytest.mark.parametrize(("spread", "is_told"), [(12_000.0, True), (13_000.0, False)])
def test_a_label_that_32_bit_numbers_round_is_told(tmp_path: Path, spread: float, is_told: bool) -> None:
    """Around 1.7e9, as seconds since 1970 are, they are 128 apart."""
    seconds = 1.7e9 + spread * np.where(np.arange(ROWS) % 2, 1.0, -1.0)
    pq.write_table(pa.table({"rooms": PLAIN["rooms"], "at": seconds}), tmp_path / "rows.parquet")
    said = table_project(str(tmp_path / "rows.parquet"), "at", "regression", tmp_path / "mine").look_at
    told = (
        "at varies by 1.2e+04 around 1700000000, where models are trained by 32-bit numbers, in steps of 128: subtract"
    )
    assert [line for line in said if "32-bit" in line] == [
        f"{told} 1700000000 in the view, and add it to predictions"
    ] * is_told


@pytest.mark.parametrize(("rare", "is_told"), [(3, True), (19, True), (20, False), (200, False)])
def test_a_rare_label_is_told(tmp_path: Path, rare: int, is_told: bool) -> None:
    fraud = [None if i == ROWS else int(i < rare) for i in range(ROWS + 1)]
    kept = {name: [*PLAIN[name], PLAIN[name][0]] for name in ("rooms", "price")}
    pq.write_table(pa.table(kept | {"fraud": fraud}), tmp_path / "rows.parquet")
    said = "\n".join(table_project(str(tmp_path / "rows.parquet"), "fraud", None, tmp_path / "mine").look_at)
    assert (f"only {rare / ROWS:.2%} of the rows have the rarer label" in said) == is_told


@pytest.mark.parametrize(
    ("copies", "with_id", "share"), [(5, False, "1%"), (4, False, ""), (ROWS, False, "50%"), (ROWS, True, "")]
)
def test_the_share_of_duplicates_is_told(tmp_path: Path, copies: int, with_id: bool, share: str) -> None:
    """ROWS different rows, of which some are there twice; not where an id is the key."""
    rows = {"rooms": [*range(ROWS)], "price": np.linspace(0, 1, ROWS) ** 2}
    rows = {name: [*values, *values[:copies]] for name, values in rows.items()}
    ids = {"id": [f"row {n}" for n in range(ROWS + copies)]} if with_id else {}
    pq.write_table(pa.table(rows | ids), tmp_path / "rows.parquet")
    told = table_project(str(tmp_path / "rows.parquet"), "price", None, tmp_path / "mine").look_at
    assert [line.partition(" of ")[0] for line in told if "duplicates" in line] == [share] * bool(share)


@pytest.mark.parametrize(
    ("values", "is_log"),
    [
        (np.exp(np.linspace(0, 12, ROWS)).round(), True),
        (np.exp(np.linspace(0, 12, ROWS)), True),
        ([None if i % 9 == 0 else math.exp(i / 40) for i in range(ROWS)], True),
        (np.exp(np.linspace(0, 12, ROWS)) - 2, False),  # has a number below 0
        (np.linspace(0, 9, ROWS), False),
        ([0.5] * (ROWS - 1) + [None], False),
        ([Decimal(i**9) / 4 for i in range(ROWS)], True),
        ([2**62 + i // 2 for i in range(ROWS)], False),  # no double holds them
        ([(2**53 + 1) * (i % 40 == 0) + i // 2 for i in range(ROWS)], True),
    ],
)
def test_numbers_with_a_long_tail_are_taken_by_their_logarithm(tmp_path: Path, values: Any, is_log: bool) -> None:
    kept = {name: PLAIN[name] for name in ("rooms", "price")}
    pq.write_table(pa.table(kept | {"x": values}), tmp_path / "rows.parquet")
    x = decide_columns(read_sample(str(tmp_path / "rows.parquet")), "price").features["x"]
    assert x == {"kind": "numeric"} | ({"transform": "log1p"} if is_log else {})


@pytest.mark.parametrize(
    ("values", "task"),
    [
        ([0, 1], "binary"), ([3, 7], "binary"), (["yes", "no"], "binary"), (["ham", "spam"], "binary"),
        ([0.0, 1.0], "binary"), (["a", "b", "c"], "multiclass"), ([1, 2, 3], "multiclass"),
        (list(range(20)), "regression"), ([0.5, 1.5, 2.5], "regression"),
    ],
)  # fmt: skip
def test_the_label_says_which_task_it_is(tmp_path: Path, values: list[Any], task: str) -> None:
    found = decide(tmp_path, "y", y=[values[i % len(values)] for i in range(ROWS)])
    assert found.label.task == task and [*found.label.columns] == ["y"]


def decide_parquet(folder: Path, task: str | None = None, **columns: Any) -> Columns:
    pq.write_table(pa.table(columns), folder / "t.parquet")
    return decide_columns(read_sample(str(folder / "t.parquet")), "y", task)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_infinite_numbers_are_nulls_and_a_label_that_is_none_is_left_out(tmp_path: Path, kind: str) -> None:
    """They ended in a recipe that no command took, or in an ETL that refused the column."""
    x, y = np.arange(100).astype(kind) / 7, np.arange(100)[::-1].astype(kind) % 13 / 3
    x[[3, 5]], y[[7, 9]] = [np.inf, -np.inf], [np.inf, np.nan]
    columns = decide_parquet(tmp_path, x=x, nan=np.where(x > 5, np.nan, x * x), y=y)
    assert columns.selected["x"] == "IF(abs(`x`) < double('infinity'), `x`, NULL)"
    assert columns.remarks["x"] == "its infinite values are taken for nulls, in the view"
    known = y[np.isfinite(y)].astype("float64")
    assert (columns.label.mean, columns.label.deviation) == pytest.approx((known.mean(), known.std()))
    said = table.look_at(read_sample(str(tmp_path / "t.parquet")), columns)
    assert "2 rows without finite y: the check label_known leaves them out" in said


def test_a_flag_of_0_1_and_nan_is_one_label_of_two_values(tmp_path: Path) -> None:
    columns = decide_parquet(
        tmp_path, x=np.arange(100) % 7 / 3, y=np.where(np.arange(100) % 9, np.arange(100) % 2, np.nan)
    )
    assert columns.label.task == "binary"
    assert columns.label.columns == {"y": "CAST(IF(abs(`y`) < double('infinity'), `y`, NULL) AS int)"}


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ([f"{n % 40},5" for n in range(200)], "write numbers with a decimal point, 0.5 for 0,5"),
        ([f"{n % 40} %" for n in range(200)], "they are percentages, such as '0 %'"),
        ([f"{n % 28 + 1}.12.2023" for n in range(200)], "they are dates with the day or month first"),
        (
            [f"{n % 40}" if n % 40 else "unknown" for n in range(200)],
            "all but 1 text are numbers; leave 'unknown' empty",
        ),
    ],
)
def test_a_label_of_numbers_in_another_form_is_not_taken_for_classes(
    tmp_path: Path, texts: list[str], why: str
) -> None:
    """395 amounts such as 2,50, each in some rows, were a task of 395 classes."""
    with pytest.raises(ConfigError) as error:
        decide_parquet(tmp_path, x=np.arange(200), y=texts)
    assert why in str(error.value) and "where they are classes: --task multiclass" in str(error.value)
    assert decide_parquet(tmp_path, "multiclass", x=np.arange(200) % 9 / 2, y=texts).label.task == "multiclass"


@pytest.mark.parametrize("texts", [[f"{n % 40:05}" for n in range(200)], [f"M{n % 40}" for n in range(200)]])
def test_codes_are_classes(tmp_path: Path, texts: list[str]) -> None:
    assert decide_parquet(tmp_path, x=np.arange(200) % 9 / 2, y=texts).label.task == "multiclass"


LATE = np.arange(400) % 3 == 0
NOISE = np.random.default_rng(0).normal(size=400)


@pytest.mark.parametrize(
    ("y", "column", "is_told"),
    [
        (LATE, np.where(LATE, "Y", "N"), True),
        (LATE, LATE * 10 + np.arange(400) % 5, True),  # each value goes with one class
        (LATE, np.where(LATE, 5 + NOISE / 100, NOISE / 100), True),  # all numbers of one are above the other's
        (LATE, [f"2024-01-{n % 28 + 1:02}" if n % 3 else None for n in range(400)], True),  # written with the label
        (LATE, NOISE, False),
        (LATE, [f"c{n % 15}" for n in np.random.default_rng(1).integers(0, 15, 400)], False),
        (np.arange(400) == 7, np.where(np.arange(400) == 7, "Y", "N"), False),  # of one row nothing is known
        (NOISE, NOISE * 1.8 + 32, True),  # another unit
        (NOISE, -NOISE, True),
        (NOISE, NOISE + np.arange(400) % 2, False),
    ],
)
def test_a_column_that_says_what_the_label_is_is_told(tmp_path: Path, y: Any, column: Any, is_told: bool) -> None:
    """A copy of the label gave an AUC of 1, and no word."""
    sample = read_sample(write_csv(tmp_path, x=np.arange(400) % 7 / 3, copy=column, y=y))
    told = with_split(sample, decide_columns(sample, "y"), "y").remarks
    assert ("says what y is in all rows" in told.get("copy", "")) == is_told and "x" not in told


def test_a_task_may_be_given(tmp_path: Path) -> None:
    values = [i % 5 for i in range(ROWS)]
    assert decide(tmp_path, "y", "regression", y=values).label.mean == 2.0
    assert decide(tmp_path, "y", "poisson", y=values).label.columns == {"y": "CAST(`y` AS double)"}
    with pytest.raises(ConfigError, match=r"--task poisson: 'y' has values from -1 to 3, and counts and rates are at"):
        decide(tmp_path, "y", "poisson", y=[value - 1 for value in values])
    assert decide(tmp_path, "y", "multiclass", y=values).label.columns == {"y": "CAST(`y` AS string)"}
    with pytest.raises(ConfigError, match=r"--task binary: 'y' has 5 values \(0, 1, 2, 3, 4\), and binary has 2"):
        decide(tmp_path, "y", "binary", y=values)
    with pytest.raises(ConfigError, match=r"--task regression: 'kind' is string .*regression needs a number"):
        decide(tmp_path, "kind", "regression")


def test_several_columns_of_0_and_1_are_labels_of_one_task(tmp_path: Path) -> None:
    flags = {
        "new": [i % 2 for i in range(ROWS)],
        "is far": [None if i == 3 else float(i % 3 == 0) for i in range(ROWS)],
    }
    data = write_csv(tmp_path, **flags)
    found = decide_columns(read_sample(data), "new, is far")
    assert found.label.columns == {"new": "CAST(`new` AS int)", "is_far": "CAST(`is far` AS int)"}
    assert found.label.task == "multilabel" and not {"new", "is_far"} & {*found.features, *found.selected}
    for label, task, message in (
        ("new,rooms", None, r"--label rooms: has the values .*each of several labels is 0 and 1"),
        ("new,kind", None, r"--label kind: has the values \['flat'"),
        ("new,far", None, r"--label far: no such column"),
        ("new,new", None, r"--label new,new: names columns with a comma between, each once"),
        ("new,", None, r"--label new,: names columns"),
        ("new,is far", "binary", r"--task binary: has one label, and \['new', 'is far'\] are several"),
        ("new", "multilabel", r"--task multilabel: 'new' is one label; name several columns with commas"),
    ):
        with pytest.raises(ConfigError, match=message):
            decide_columns(read_sample(data), label, task)
    project = table_project(data, "new,is far", None, tmp_path / "mine")
    assert project.recipe["etl"]["label"] == ["new", "is_far"] and project.recipe["model"]["task"] == "multilabel"
    (check,) = project.recipe["etl"]["checks"]
    assert check["sql"] == "new IS NOT NULL AND is_far IS NOT NULL"
    assert any("1 row without new or is_far" in line for line in project.look_at)


def test_a_column_of_arrays_of_texts_is_a_label_of_tags(tmp_path: Path) -> None:
    tags = [[["old", "new"][i % 2]] * (i % 3) for i in range(ROWS)]
    plain = {name: PLAIN[name] for name in ("rooms", "kind")}
    pq.write_table(pa.table(plain | {"tags": tags}), tmp_path / "rows.parquet")
    found = decide_columns(read_sample(str(tmp_path / "rows.parquet")), "tags")
    assert (found.label.columns, found.label.task) == ({"tags": "`tags`"}, "multilabel")
    assert found.label.why == "2 tags: new, old"
    tags[1], tags[5] = None, ["old", None]
    pq.write_table(pa.table(plain | {"tags": tags}), tmp_path / "nulls.parquet")
    project = table_project(str(tmp_path / "nulls.parquet"), "tags", None, tmp_path / "mine")
    (check,) = project.recipe["etl"]["checks"]
    assert check["sql"] == "tags IS NOT NULL AND NOT exists(tags, tag -> tag IS NULL)", "as the ETL proposes"
    assert any("2 rows without tags" in line for line in project.look_at)


def test_numbers_with_a_word_for_null_are_numbers(tmp_path: Path) -> None:
    words = [None if i % 10 else "NA" for i in range(ROWS)]
    data = write_csv(tmp_path, size=[word or str(i % 40) for i, word in enumerate(words)])
    sample = read_sample(data)
    assert (sample.types["size"], sample.options) == ("bigint", {"nulls": {"size": ["NA"]}})
    assert sample.rows.column("size").null_count == ROWS / 10


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["1", "-20"], "bigint"), (["1", "2.5", "1e3"], "double"), (["00123", "4"], "string"), (["0", "0.5"], "double"),
        (["true", "False"], "boolean"), (["2024-01-31"], "date"),
        (["2024-01-31 10:00:00", "2024-02-01T00:00Z"], "timestamp"),
        (["31.01.2024"], "string"), (["1", "x"], "string"), ([], "string"),
    ],
)  # fmt: skip
def test_types_of_texts(texts: list[str], kind: str) -> None:
    assert text_type(pa.array(texts, pa.string())) == kind


def test_separators_encodings_and_parquet(tmp_path: Path) -> None:
    lines = ["größe;straße", *[f"{i % 7},5;a{i % 3}" for i in range(60)]]
    (tmp_path / "de.csv").write_text("\n".join(lines), encoding="windows-1252")
    sample = read_sample(str(tmp_path / "de.csv"))
    assert sample.options == {"sep": ";", "encoding": "windows-1252"} and list(sample.types) == ["größe", "straße"]
    kinds = pa.array(PLAIN["kind"]).dictionary_encode()
    (tmp_path / "parts").mkdir()
    for part in "ab":
        table = pa.table({"kind": kinds, "tags": [[1, 2]] * ROWS, "price": PLAIN["price"]})
        pq.write_table(table, tmp_path / "parts" / f"{part}.parquet")
    sample = read_sample(str(tmp_path / "parts"), most_rows=ROWS + 1)
    assert (sample.rows.num_rows, sample.is_whole) == (ROWS + 1, False)
    assert sample.types == {"kind": "string", "tags": "array<bigint>", "price": "double"}
    found = decide_columns(sample, "price")
    assert found.features == {"kind": {"kind": "categorical"}} and "no single value" in found.left_out["tags"]
    recipe = table_project(str(tmp_path / "parts"), "price", None, tmp_path / "x").recipe
    assert recipe["etl"]["sources"]["raw"]["columns"] == {"kind": "string", "price": "double"}


def test_names_that_sql_cannot_take_get_others() -> None:
    names = ["a b", "a-b", "A_B", "2nd", "", "sparkring_x", "größe", "m²", "½"]
    made = identifiers(names)
    assert list(made.values()) == [
        "a_b",
        "a_b_2",
        "A_B_3",
        "c_2nd",
        "column",
        "c_sparkring_x",
        "größe",
        "m",
        "column_2",
    ]
    assert run_name("Größe (m²).v2") == "gr-e-m-v2" and run_name("§") == "mine"


def test_names_that_spark_takes_in_backquotes_only_have_them(tmp_path: Path) -> None:
    """Spark refuses a bare `größe`, and reads a bare `null` or `all` as something else."""
    data = write_csv(
        tmp_path, **{"größe m²": PLAIN["rooms"], "all": PLAIN["kind"], "preis": PLAIN["price"], "ß": PLAIN["price"]}
    )
    recipe = table_project(data, "ß", None, tmp_path / "mine").recipe
    lines = [line.strip().removesuffix(",") for line in recipe["etl"]["views"]["prepared"].splitlines()]
    assert {"`größe m²` AS `größe_m`", "`all`", "preis", "CAST(`ß` AS double) AS c_ß"} - {*lines} == {
        "CAST(`ß` AS double) AS c_ß"
    }
    assert "CAST(`ß` AS double) AS `c_ß`" in lines
    assert recipe["etl"]["checks"][0]["sql"] == "`c_ß` IS NOT NULL" and recipe["etl"]["label"] == "c_ß"


def test_the_readme_asks_the_model_for_the_first_row(tmp_path: Path) -> None:
    odd = {"price": [None, *PLAIN["price"][1:]], "at": [datetime(2024, 3, 3, 7, i % 60) for i in range(ROWS)]}
    parts = {"x": [math.nan, *range(ROWS - 1)], "d": [Decimal("1.50")] * (ROWS - 1) + [Decimal("2.00")]}
    plain = {name: PLAIN[name] for name in ("Size m2", "owned", "kind")}
    pq.write_table(pa.table(plain | odd | parts), tmp_path / "rows.parquet")
    text = readme(table_project(str(tmp_path / "rows.parquet"), "kind", None, tmp_path / "mine"))
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    made: dict[str, Any] = {}
    exec("".join(code.partition("rows = ")[1:])[: -len("print(model.predict(rows))\n")], {"pd": pd}, made)
    row = made["rows"].iloc[0].to_dict()
    assert row == {
        "Size_m2": PLAIN["Size m2"][0], "owned": PLAIN["owned"][0], "price": None, "at_month": 3, "at_weekday": 1,
        "at_hour": 7, "x": None, "d": 1.5,
    }, "the 3rd of March 2024 is a Sunday, Spark's first day"  # fmt: skip


def test_a_label_of_numbers_among_words_says_which_words(tmp_path: Path) -> None:
    mixed = ["fehlt" if i % 50 == 0 else f"{i}.5" for i in range(ROWS)]
    pq.write_table(pa.table({"x": PLAIN["rooms"], "y": mixed}), tmp_path / "mixed.parquet")
    with pytest.raises(
        ConfigError, match=r"all but 1 text are numbers; leave 'fehlt' empty in the file, or name another"
    ):
        decide_columns(read_sample(str(tmp_path / "mixed.parquet")), "y")
    commas = [f"{i},5" for i in range(ROWS)]
    pq.write_table(pa.table({"x": PLAIN["rooms"], "y": commas}), tmp_path / "commas.parquet")
    with pytest.raises(ConfigError, match=r"write numbers with a decimal point, 0\.5 for 0,5, or name another label"):
        decide_columns(read_sample(str(tmp_path / "commas.parquet")), "y")
    assert decide(tmp_path, "y", y=["n/a" if i % 50 == 0 else f"{i}.5" for i in range(ROWS)]).label.task == "regression"


@pytest.mark.parametrize("rows", [50, 400, 10_000, 1_000_000])
@pytest.mark.parametrize("budget", [TABLE, IMAGES])
def test_an_epoch_has_several_steps(rows: int, budget: Budget) -> None:
    batch, epochs = budget.batch_and_epochs(rows)
    steps = rows * 0.8 / batch
    assert batch % 2 == 0 and budget.smallest_batch <= batch <= budget.largest_batch
    assert steps >= budget.steps_per_epoch or batch == budget.smallest_batch
    assert 0.7 * budget.steps <= epochs * steps <= 1.3 * budget.steps or epochs in (3, budget.most_epochs)


REFUSED: list[tuple[str, list[str], str]] = [
    ("nowhere.csv", ["--label", "price"], "no such file or folder"),
    ("rows.csv", ["--label", "prize"], "--label prize: no such column; did you mean 'price'?"),
    ("rows.csv", ["--label", "town"], "has one value, 'Bonn', in all rows; there is nothing to learn"),
    ("rows.csv", ["--label", "empty"], "has no value in all rows; there is nothing to learn"),
    ("rows.csv", ["--label", "note"], "400 distinct texts in 400 rows are no classes"),
    ("rows.csv", ["--label", "sold on"], "is date; a label is a number, a text or true and false"),
    ("few.csv", ["--label", "b"], "has 3 rows; at least 50 are needed"),
    ("ids.csv", ["--label", "b"], "no column can be a feature (a: an id, or free text"),
    (
        "twice.csv",
        ["--label", "a"],
        "columns 1 and 2 are 'a' and 'A', one name to Spark, which ignores case; rename one: in",
    ),
    ("index.csv", ["--label", "a"], "column 1 of the header has no name"),
    ("none.csv", ["--label", "a"], "is empty; a csv file begins with its header"),
    ("header.csv", ["--label", "a"], "there is no row in it"),
    ("torn.csv", ["--label", "a"], "torn.csv: 1 problem\n  - line 3: '5' (and 1 more) begins or ends with a carriage"),
    ("long.csv", ["--label", "a"], "long.csv: 1 problem\n  - line 2: '1,2,3' is not a line of 2 fields"),
    ("broken.parquet", ["--label", "a"], "is no readable parquet file"),
    ("notes.txt", ["--label", "a"], "a table is files of one kind: .csv"),
]


@pytest.mark.parametrize(("name", "words", "said"), REFUSED)
def test_bad_input_is_one_message_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: list[str], said: str
) -> None:
    write_csv(tmp_path, empty=[None] * ROWS)
    texts = {
        "few": "a,b\n" + "1,2\n" * 3, "ids": "a,b\n" + "".join(f"x{i},{i % 2}\n" for i in range(60)),
        "twice": "a,A\n1,2\n", "index": ",a\n0,1\n", "none": "", "header": "a,b\n",
        "torn": "a,b\n1,2\n5\r6\n", "long": "a,b\n1,2,3\n",
    }  # fmt: skip
    for stem, text in texts.items():
        (tmp_path / f"{stem}.csv").write_bytes(text.encode())
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "notes.txt").write_text("x")
    assert main(["init", "table", str(tmp_path / "new"), "--data", str(tmp_path / name), *words]) == Exit.USAGE
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown and not (tmp_path / "new").exists()


def test_no_file_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_csv(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/README.md").write_text("precious")
    words = ["init", "table", str(tmp_path / "mine"), "--data", data, "--label", "price"]
    assert main(words) == Exit.USAGE and "is there and not empty" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["README.md"]
    (tmp_path / "mine/README.md").unlink()
    assert main(words) == Exit.OK


def next_commands(said: str) -> list[list[str]]:
    """The words of each command that is printed under `next:`; each is one that the command line takes."""
    lines = [line.strip() for line in said.partition("\nnext:\n")[2].splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("sparkring ")]
    for words in commands:
        parse(words)
    return commands


@pytest.mark.parametrize(("label", "task"), [("price", "regression"), ("kind", "multiclass"), ("owned", "binary")])
def test_what_is_written_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], label: str, task: str
) -> None:
    data = write_csv(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "table", "--data", data, "--label", label]) == Exit.OK
    said = capsys.readouterr().out
    assert "left out: note (an id" in said and f"label {label}: {task}" in said and "  cd rows\n" in said
    assert ["serve-check", "models:/rows@champion"] in next_commands(said)
    monkeypatch.chdir(tmp_path / "rows")
    assert main(["config", "validate", "recipe.yaml"]) == Exit.OK
    config = load_config("recipe.yaml").config
    assert config.predict is not None and config.predict.keep == ["id", label]
    assert (config.name, config.model.task, config.etl and config.etl.label) == ("rows", task, label)
    assert "left out: town" in (tmp_path / "rows/README.md").read_text()


def test_a_label_that_is_called_as_predictions_are_is_not_kept_beside_them(tmp_path: Path) -> None:
    data = write_csv(tmp_path, prediction=[i % 7 / 2 for i in range(ROWS)])
    assert table_project(data, "prediction", None, tmp_path / "x").recipe["predict"]["keep"] == ["id"]


def test_text_is_a_folder_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "text", "--data", "notes"]) == Exit.USAGE and "no such folder" in capsys.readouterr().err
    (tmp_path / "notes").mkdir()
    for i in range(99):
        (tmp_path / f"notes/{i}.txt").write_text(f"note {i} " * 200)
    assert main(["init", "text", "new", "--data", "notes"]) == Exit.USAGE and "has 99 files" in capsys.readouterr().err
    (tmp_path / "notes/x.bin").write_bytes(b"\xff\x00")
    assert main(["init", "text", "new", "--data", "notes"]) == Exit.USAGE
    assert "x.bin: is not UTF-8 text" in capsys.readouterr().err
    (tmp_path / "notes/x.bin").write_text("a note " * 200)
    assert main(["init", "text", "new", "--data", "notes"]) == Exit.OK
    assert main(["config", "validate", "new/recipe.yaml"]) == Exit.OK
    etl = load_config("new/recipe.yaml").config.etl
    assert etl is not None and etl.text is not None and etl.text.tokenizer == "bytes"


def test_a_project_of_a_folder_here_gets_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "pets", ("cat", "dog"), 30)
    assert main(["init", "images", "--data", "pets"]) == Exit.OK
    assert "  cd pets-recipe\n" in capsys.readouterr().out and (tmp_path / "pets-recipe/recipe.yaml").exists()
    assert main(["init", "images", "--data", "pets"]) == Exit.USAGE, "the second time it is there"
    write_csv(tmp_path)
    assert main(["init", "table", "--data", "rows.csv", "--label", "price"]) == Exit.OK
    assert "  cd rows\n" in capsys.readouterr().out


def write_images(
    folder: Path, classes: tuple[str, ...], images: int, mode: str = "RGB", sizes: tuple[int, ...] = (24,)
) -> None:
    """Noise, brighter by class."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(images):
            side = sizes[i % len(sizes)]
            pixels = RANDOM.integers(0, 60, (side, side + 4, 3)) + 60 * number
            Image.fromarray(pixels.astype(np.uint8)).convert(mode).save(folder / name / f"{i}.png")


@pytest.mark.parametrize(
    ("classes", "mode", "sizes", "shape", "fit", "task"),
    [
        (("cat", "dog"), "L", (24,), [24, 28, 1], "resize", "binary"),
        (("cat", "dog", "red fox"), "RGB", (24, 40), [64, 64, 3], "crop", "multiclass"),
    ],
)
def test_images_are_a_folder_per_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], classes: tuple[str, ...],
    mode: str, sizes: tuple[int, ...], shape: list[int], fit: str, task: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "pets", classes, 30, mode, sizes)
    (tmp_path / "pets/README.txt").write_text("not an image")
    assert main(["init", "images", "new", "--data", "pets"]) == Exit.OK
    assert "export PYTHONPATH=$PWD" in capsys.readouterr().out
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    monkeypatch.delitem(sys.modules, "cnn", raising=False)
    assert main(["config", "validate", "new/recipe.yaml"]) == Exit.OK
    config = load_config("new/recipe.yaml").config
    assert config.etl is not None and config.model.task == task
    photo = config.etl.features["photo"].model_dump()
    assert (photo["shape"], photo["fit"]) == (shape, fit)
    model = sys.modules["cnn"].Cnn(**config.model.args)
    outputs = model(torch.zeros(5, *shape, dtype=torch.uint8))
    assert outputs.shape == ((5,) if task == "binary" else (5, 3))
    monkeypatch.delitem(sys.modules, "cnn")


def test_images_without_classes_or_too_few_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["init", "images", "new", "--data", "pets"]
    assert main(words) == Exit.USAGE and "no such folder" in capsys.readouterr().err
    write_images(tmp_path / "pets", ("cat",), 30)
    assert main(words) == Exit.USAGE and "has images in 1 folder (cat); each class is" in capsys.readouterr().err
    write_images(tmp_path / "pets", ("dog",), 5)
    assert main(words) == Exit.USAGE and "has 35 images in its folders" in capsys.readouterr().err
    write_images(tmp_path / "pets", ("dog",), 30)
    (tmp_path / "pets/cat/0.png").write_bytes(b"no image")
    assert main(words) == Exit.USAGE and "0.png: 1 problem" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# --- files of other writers


@pytest.mark.parametrize(
    ("write", "what", "sql"),
    [
        (lambda i: f"{i % 97},{i % 9 + 1}", "numbers with a decimal comma", "replace"),
        (lambda i: f"{i % 7 + 1},{i % 900 + 100}", "numbers with thousands separators", "'[^0-9.-]'"),
        (lambda i: f"{i % 7 + 1} {i % 900 + 100},5", "numbers with thousands separators", "'[^0-9,-]'"),
        (lambda i: f"{i % 7 + 1}.{i % 900 + 100},50", "numbers with a decimal comma", "'[^0-9,-]'"),
        (lambda i: f"${i % 7 + 1},{i % 900 + 100}.50", "amounts with a currency", "'[^0-9.-]'"),
        (lambda i: f"{i % 300},50 \u20ac", "amounts with a currency", "'[^0-9,-]'"),
        (lambda i: f"{i % 300}.5%", "percentages", "'[^0-9.-]'"),
        (lambda i: f"{i % 28 + 1}.{i % 12 + 1}.{2000 + i % 5}", "dates with the day or month first", "'d.M.yyyy'"),
        (lambda i: f"{i % 12 + 1}/{i % 28 + 1}/{2000 + i % 5}", "dates with the day or month first", "'M/d/yyyy'"),
        (lambda i: f"{2000 + i % 5}/{i % 12 + 1}/{i % 28 + 1}", "dates with points or strokes", "'yyyy/M/d'"),
        (lambda i: f"{i % 28 + 1}-{i % 12 + 1}-{20 + i % 5}", "dates with two digits of the year", "'d-M-yy'"),
        (lambda i: f"{i % 28 + 1} {month_abbr[i % 12 + 1]} {2000 + i % 5}", "the month's name", "'d MMM yyyy'"),
        (lambda i: f"{i % 300}.5 kg", "numbers with a unit", "' ?kg$'"),
    ],
)
def test_numbers_and_dates_that_are_texts_to_spark_are_named_with_a_remedy(tmp_path: Path, write, what, sql) -> None:
    """As a feature of many values, as one of few, and as the label."""
    columns = {"many": [write(i) for i in range(ROWS)], "few": [write(i % 5) for i in range(ROWS)]}
    pq.write_table(pa.table({**columns, "x": PLAIN["rooms"], "y": PLAIN["price"]}), tmp_path / "t.parquet")
    sample = read_sample(str(tmp_path / "t.parquet"))
    found = decide_columns(sample, "y")
    assert what in (found.left_out | found.remarks)["many"] and sql in (found.left_out | found.remarks)["many"]
    assert what in found.remarks["few"] and found.features["few"] == {"kind": "categorical"}
    shown = table_project(str(tmp_path / "t.parquet"), "y", None, tmp_path / "x").look_at
    assert any(line.startswith("few: its texts are") for line in shown)
    texts = pa.table({"y": [write(i * 7) for i in range(ROWS)], "x": PLAIN["rooms"]})
    if len(set(texts["y"].to_pylist())) > ROWS // 2:
        pq.write_table(texts, tmp_path / "label.parquet")
        with pytest.raises(ConfigError, match=r"write (plain )?numbers"):
            decide_columns(read_sample(str(tmp_path / "label.parquet")), "y")


@pytest.mark.spark
@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["1,5", "12", "-3,25"], [1.5, 12.0, -3.25]),
        (["1.234,50", "7,1", "1.234.567"], [1234.5, 7.1, 1234567.0]),
        (["1,234", "999", "1,234.5"], [1234.0, 999.0, 1234.5]),
        (["$1,234.50", "$7", "-$5.00"], [1234.5, 7.0, -5.0]),
        (["1.234,50 \u20ac", "3,00 \u20ac"], [1234.5, 3.0]),
        (["12.5%", "3 %"], [12.5, 3.0]),
        (["12,50 %"], [12.5]),
        (["1 234,5"], [1234.5]),
        (["1\u202f304,50", "125,73", "-3,00"], [1304.5, 125.73, -3.0]),
        (["\u20b91,00,100", "\u20b912,34,567.50", "\u20b95"], [100100.0, 1234567.5, 5.0]),
        (["1,00,100", "12,345", "7"], [100100.0, 12345.0, 7.0]),
        (["31.12.2024", "1.2.2023 10:00"], [datetime(2024, 12, 31), datetime(2023, 2, 1, 10)]),
        (["31.12.2024 23:59", "1.2.2023 7:05"], [datetime(2024, 12, 31, 23, 59), datetime(2023, 2, 1, 7, 5)]),
        (["31.12.2024 23:59:58"], [datetime(2024, 12, 31, 23, 59, 58)]),
        (["31/12/2024 23:59", "1/2/2023 7:05:09"], [datetime(2024, 12, 31, 23, 59), datetime(2023, 2, 1, 7, 5, 9)]),
        (["2024.12.31 23:59"], [datetime(2024, 12, 31, 23, 59)]),
        (["31.12.2024 um 8", "1.2.2023 "], [datetime(2024, 12, 31).date(), datetime(2023, 2, 1).date()]),
        (["12/31/2024", "1/2/2023"], [datetime(2024, 12, 31).date(), datetime(2023, 1, 2).date()]),
        (["2024/12/31"], [datetime(2024, 12, 31).date()]),
        (["31.12.24", "1.2.23 10:00"], [datetime(2024, 12, 31), datetime(2023, 2, 1, 10)]),
        (["12/31/24", "1/2/23"], [datetime(2024, 12, 31).date(), datetime(2023, 1, 2).date()]),
        (["99-1-31", "24-12-31"], [datetime(2099, 1, 31).date(), datetime(2024, 12, 31).date()]),
        (["1 Jan 2024", "31 May 2023"], [datetime(2024, 1, 1).date(), datetime(2023, 5, 31).date()]),
        (["01-JAN-2024", "31-dec-2023"], [datetime(2024, 1, 1).date(), datetime(2023, 12, 31).date()]),
        (["March 1, 2024", "May 31, 2023"], [datetime(2024, 3, 1).date(), datetime(2023, 5, 31).date()]),
        (["Mar 1 2024"], [datetime(2024, 3, 1).date()]),
        (["5 kg", "-1,234.5 kg"], [5.0, -1234.5]),
        (["5,5 km/h", "1.234,5 km/h"], [5.5, 1234.5]),
        (["12m2", "7.25m2"], [12.0, 7.25]),
        (["21.5\u00b0C", "3\u00b0C"], [21.5, 3.0]),
        (["(1.25)", "1,300.5", "7"], [-1.25, 1300.5, 7.0]),
        (["\u22121.25", "\u20132", "3"], [-1.25, -2.0, 3.0]),
        (["5-", "6 -", "7"], [-5.0, -6.0, 7.0]),
        (["(1.25)", "-3", "4", "\u22125"], [-1.25, -3.0, 4.0, -5.0]),
        (["9007199254740993.0", "1.5"], [9007199254740992.0, 1.5]),
        (["1/2/2024 3:04 PM", "12/31/2024 11:59 AM"], [datetime(2024, 1, 2, 15, 4), datetime(2024, 12, 31, 11, 59)]),
        (["2024-01-02 03:04:05 am", "2024-1-3 12:00:00 PM"], [datetime(2024, 1, 2, 3, 4, 5), datetime(2024, 1, 3, 12)]),
        (["31.12.2024, 1:00pm"], [datetime(2024, 12, 31, 13)]),
        (["2024-01-02 03:04:05.123456789"], [datetime(2024, 1, 2, 3, 4, 5, 123456)]),
        (
            ["2024-01-02", "31/12/2023", "Jan 5, 2024"],
            [datetime(2024, 1, 2).date(), datetime(2023, 12, 31).date(), datetime(2024, 1, 5).date()],
        ),
    ],
)
def test_the_sql_of_the_remedy_reads_the_texts(spark: Any, texts: list[str], values: list[Any]) -> None:
    written = written_otherwise(texts)
    assert written is not None
    rows = spark.createDataFrame([(text,) for text in texts], "x string").selectExpr(written[2].format("x"))
    assert [row[0] for row in rows.collect()] == values


@pytest.mark.parametrize("negative", ["($5.00)", "$5.00-", "(5.00)", "5.00 -"])
def test_amounts_whose_sign_the_sql_would_lose_get_none(negative: str) -> None:
    assert written_otherwise([*(f"${i}.50" for i in range(50)), negative]) is None


@pytest.mark.parametrize(
    "texts",
    [
        ["5 kg", "200 g"],
        ["5 kg", "200"],
        ["1st", "2nd", "3rd"],
        ["99.99.99", "40.1.77"],
        ["1 Jan 2024", "2 January 2024"],
        ["1 Jan 2024", "Jan 2 2024"],
    ],
)
def test_texts_that_no_one_rule_reads_get_no_remedy(texts: list[str]) -> None:
    assert written_otherwise(texts) is None


def test_words_and_codes_are_no_numbers_written_otherwise(tmp_path: Path) -> None:
    values = {"w": RANDOM.choice(["a,b", "10-12", "v1.2.3", "100%ig"], ROWS), "x": PLAIN["rooms"], "y": PLAIN["price"]}
    pq.write_table(pa.table(values), tmp_path / "t.parquet")
    assert not decide_columns(read_sample(str(tmp_path / "t.parquet")), "y").remarks


def test_repeated_whole_numbers_that_are_called_ids_are_remarked(tmp_path: Path) -> None:
    ids = RANDOM.integers(1000, 1100, ROWS)
    values = {"customer_id": ids, "storeId": ids, "paid": ids, "y": PLAIN["price"]}
    pq.write_table(pa.table(values), tmp_path / "t.parquet")
    found = decide_columns(read_sample(str(tmp_path / "t.parquet")), "y")
    assert [*found.remarks] == ["customer_id", "storeId"]
    assert "set etl.features.customer_id.kind to categorical" in found.remarks["customer_id"]


def test_types_that_spark_reads_as_others_are_features(tmp_path: Path) -> None:
    """Unsigned integers of polars, durations of pandas; a decimal of 50 digits is left out by name."""
    amounts = np.arange(ROWS) // 2 * 300  # with repeats: of whole numbers that have none, columns are ids
    table = pa.table(
        {f"u{bits}": pa.array(amounts % 200, getattr(pa, f"uint{bits}")()) for bits in (8, 16, 32, 64)}
        | {
            "took": pa.array(amounts, pa.duration("ns")),
            "big": pa.array([Decimal(1), Decimal(2)] * 200, pa.decimal256(50)),
        }
        | {"y": PLAIN["price"]}
    )
    pq.write_table(table, tmp_path / "t.parquet")
    sample = read_sample(str(tmp_path / "t.parquet"))
    found = decide_columns(sample, "y")
    assert [*found.features] == ["u8", "u16", "u32", "u64", "took"] and "at most" not in found.left_out["big"]
    assert sample.types["took"] == "bigint" and sample.rows["took"].to_pylist() == amounts.tolist()
    columns = table_project(str(tmp_path / "t.parquet"), "y", None, tmp_path / "x").recipe["etl"]["sources"]["raw"][
        "columns"
    ]
    assert columns == {
        "u8": "smallint",
        "u16": "int",
        "u32": "bigint",
        "u64": "decimal(20,0)",
        "took": "bigint",
        "y": "double",
    }


def test_folders_of_partitions_are_columns(tmp_path: Path) -> None:
    """As pandas writes them with partition_cols; one of the columns is the label's best feature."""
    frame = pd.DataFrame({"country": RANDOM.choice(["DE", "F R"], ROWS), "year": RANDOM.choice([2023, 2024], ROWS)})
    frame = frame.assign(x=PLAIN["rooms"], y=PLAIN["price"])
    frame.to_parquet(tmp_path / "t", partition_cols=["country", "year"])
    sample = read_sample(str(tmp_path / "t"))
    assert sample.partitions == {"country": "string", "year": "bigint"}
    assert sorted(sample.rows["country"].to_pylist()) == sorted(frame["country"])
    assert sorted(read_sample(str(tmp_path / "t"), 50).rows.column_names) == sorted(frame.columns)
    recipe = table_project(str(tmp_path / "t"), "y", None, tmp_path / "x").recipe
    source = recipe["etl"]["sources"]["raw"]
    assert source["partitions"] == {"country": "string", "year": "bigint"} and [*source["columns"]] == ["x", "y"]
    assert {"country", "year"} <= recipe["etl"]["features"].keys()
    assert main(["init", "table", str(tmp_path / "new"), "--data", str(tmp_path / "t"), "--label", "y"]) == Exit.OK
    assert main(["config", "validate", str(tmp_path / "new/recipe.yaml")]) == Exit.OK


def test_a_column_that_only_later_files_have_is_a_feature(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    table = pa.table({"x": PLAIN["rooms"], "y": PLAIN["price"]})
    pq.write_table(table, tmp_path / "t/0.parquet")
    pq.write_table(table.append_column("z", pa.array(PLAIN["kind"])), tmp_path / "t/1.parquet")
    recipe = table_project(str(tmp_path / "t"), "y", None, tmp_path / "x").recipe
    assert recipe["etl"]["sources"]["raw"]["missing_columns"] == "null" and "z" in recipe["etl"]["features"]
    pq.write_table(table.append_column("z", pa.array(PLAIN["rooms"])), tmp_path / "t/2.parquet")
    with pytest.raises(ConfigError, match=r"2\.parquet.*\n.*column 'z' is bigint, and string in .*1\.parquet"):
        read_sample(str(tmp_path / "t"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_csv_with_a_byte_order_mark_is_read(tmp_path: Path, encoding: str) -> None:
    lines = ["größe;y", *[f"{i % 7};{i % 50}.5" for i in range(ROWS)]]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n", encoding=encoding)
    sample = read_sample(str(tmp_path / "t.csv"))
    assert sample.types == {"größe": "bigint", "y": "double"} and sample.rows.num_rows == ROWS
    assert main(["init", "table", str(tmp_path / "new"), "--data", str(tmp_path / "t.csv"), "--label", "y"]) == Exit.OK
    assert main(["config", "validate", str(tmp_path / "new/recipe.yaml")]) == Exit.OK


ODD_FILES: list[tuple[str, Any, str]] = [
    ("t.json", b"{}", "t.json is JSON; save it as Parquet"),
    ("t.xlsx", b"PK", "is a workbook of Excel; save its sheet as CSV"),
    ("t.csv.zst", b"x", "is compressed with zstd; decompress it first"),
    ("t.csv", b"sep=;\na;b\n1;2\n", "line 1 is 'sep=;', a mark for Excel"),
    (
        "t.parquet",
        pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]),
        "columns 1 and 2 are 'a' and 'a', one name",
    ),
    ("t.parquet", pa.table({"size": [1], "SIZE": [2]}), "columns 1 and 2 are 'size' and 'SIZE', one name"),
    ("t.csv", b"PAR1\x15\x04", "is a Parquet file; call it .parquet"),
    ("t.csv", b"PK\x03\x04xl", "is a workbook of Excel"),
    ("t.csv", gzip.compress(b"a,b\n1,2\n", mtime=0), "is compressed with gzip; call it .csv.gz"),
    ("t.csv", "a,b\n1,2\n".encode("utf-32"), "is UTF-32; save it as CSV UTF-8"),
    ("t.csv", "a,b\n1,2\n".encode("utf-16-le"), "line 1 holds bytes of zero"),
    ("a[1].csv", b"a,b\n1,2\n", "takes [ in a path for a pattern"),
    ("k=/t.csv", b"a,b\n1,2\n", "its folder k= gives no value"),
    ("A=1/t.csv", b"a,b\n1,2\n", "columns 1 and 3 are 'a' and 'A', one name"),
    ("A=1/t.parquet", pa.table({"a": [1]}), "columns 1 and 2 are 'a' and 'A', one name"),
    ("a=1/t.parquet", pa.table({"a": [1.5]}), "column 'a' is double, and bigint by the names of its folders"),
]


@pytest.mark.parametrize(("name", "content", "words"), ODD_FILES)
@pytest.mark.parametrize("in_folder", [False, True])
def test_what_is_no_table_that_is_read_is_named_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: Any, words: str, in_folder: bool
) -> None:
    path = tmp_path / "data" / name
    path.parent.mkdir(parents=True)
    pq.write_table(content, path) if isinstance(content, pa.Table) else path.write_bytes(content)
    of_folder = in_folder or "=" in name
    data = tmp_path / "data" if of_folder and "[" not in name else path
    assert main(["init", "table", str(tmp_path / "new"), "--data", str(data), "--label", "a"]) == Exit.USAGE
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown


@pytest.mark.parametrize("hidden", [".ipynb_checkpoints/t-checkpoint.csv", "._t.csv", "_temporary/0/t.csv"])
def test_files_that_the_etl_passes_over_are_not_looked_at(tmp_path: Path, hidden: str) -> None:
    (tmp_path / hidden).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / hidden).write_text("a,b\n9,9\n")
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    assert read_sample(str(tmp_path)).rows.to_pylist() == [{"a": 1, "b": 2}]


def test_a_csv_of_a_folder_with_another_header_is_named(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("a,b\n1,2\n")
    (tmp_path / "1.csv").write_text("b,a\n1,2\n")
    with pytest.raises(ConfigError, match=r"1\.csv.*\n.*stand in another order.*\n.*the first is .*0\.csv"):
        read_sample(str(tmp_path))


def test_a_project_and_the_data_next_to_it_can_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    pq.write_table(pa.table(PLAIN), home / "rows.parquet")
    monkeypatch.chdir(home)
    words = ["init", "table", "mine", "--data", "rows.parquet", "--label", "price", "--family", "trees"]
    assert main(words) == Exit.OK
    assert yaml.safe_load((home / "mine/recipe.yaml").read_text())["etl"]["sources"]["raw"]["path"] == "../rows.parquet"
    monkeypatch.chdir(tmp_path)
    home.rename(tmp_path / "moved")
    assert main(["config", "validate", "moved/mine/recipe.yaml"]) == Exit.OK


@pytest.mark.parametrize(
    ("path", "folder", "written"),
    [
        ("/home/me/mine/in/rows", "/home/me/mine", "./in/rows"),
        ("/home/me/rows", "/home/me/mine", "../rows"),
        ("/lake/rows", "/home/me/mine", "/lake/rows"),
        ("/rows", "/mine", "/rows"),
        ("/home/mere/rows", "/home/me/mine", "/home/mere/rows"),
    ],
)
def test_only_data_next_to_a_project_has_a_relative_path(path: str, folder: str, written: str) -> None:
    assert near_path(path, Path(folder)) == written
