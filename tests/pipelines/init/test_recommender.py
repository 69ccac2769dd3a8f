"""`sparkring init recommender`: what it finds in a file of interactions, what it refuses, and that it is valid."""

from __future__ import annotations

import datetime as dt
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch

from sparkring.conf.load import load_config
from sparkring.pipelines.cli import main
from sparkring.pipelines.init.interactions import Interactions, Roles, decide_interactions, is_fact_of, literal
from sparkring.pipelines.init.recommender import (
    FACTORS,
    MOST_TEST_USERS,
    batch_and_epochs,
    chosen_users,
    recommender_project,
)
from sparkring.pipelines.init.sample import read_columns, read_sample
from sparkring.pipelines.run.exit_codes import Exit
from tests.pipelines.init.test_init import next_commands

ROWS = 2000
ROLES = Roles("user id", "movie", "at")
WORDS = ["--user", "user id", "--item", "movie", "--time", "at"]


def interactions(**changes: Any) -> dict[str, Any]:
    """Users of an age, movies of a genre and a title, a device of each interaction; some of 2,000 seconds in order."""
    draw = np.random.default_rng(1)
    users, movies = draw.integers(0, 60, ROWS), draw.integers(0, 40, ROWS)
    return {
        "user id": users, "movie": [f"m{n}" for n in movies], "at": np.arange(ROWS) // 2,
        "genre": [f"g{n % 5}" for n in movies], "age": users % 30 + 18, "device": draw.choice(["tv", "phone"], ROWS),
        "title": [f"A movie {n}" for n in movies], "stars": draw.choice(5, ROWS, p=[0.1, 0.1, 0.2, 0.3, 0.3]) + 1,
        "clicked": draw.choice(["no", "yes"], ROWS), "period": draw.integers(1000, 9000, ROWS),
    } | changes  # fmt: skip


def write(folder: Path, **changes: Any) -> str:
    pacsv.write_csv(pa.table(interactions(**changes)), folder / "seen.csv")
    return str(folder / "seen.csv")


def decide(folder: Path, roles: Roles = ROLES, **changes: Any) -> Interactions:
    return decide_interactions(read_sample(write(folder, **changes)), roles)


def test_features_are_those_of_items_and_users_where_rows_are_drawn(tmp_path: Path) -> None:
    found = decide(tmp_path)
    assert found.facts == {"item": {"genre": "genre"}, "user": {"age": "age"}, "row": {}}
    assert found.features == {"genre": {"kind": "categorical"}, "age": {"kind": "numeric"}}
    assert (found.users, found.items, found.unknown) == (60, 40, 0)
    assert found.left_out["title"] == "a name: 40 texts of 40 items"
    assert all(found.left_out[name].startswith("of the interaction") for name in ("device", "stars", "clicked"))


def test_features_are_any_where_the_file_has_a_label(tmp_path: Path) -> None:
    found = decide(tmp_path, Roles("user id", "movie", "at", "clicked"))
    assert list(found.facts["row"]) == ["genre", "age", "device", "stars", "period_2"]
    assert (found.label.name, found.label.sql) == ("clicked", "`clicked`") and "title" in found.left_out


def test_a_rating_is_cut_where_the_rows_are_nearest_to_halves(tmp_path: Path) -> None:
    label = decide(tmp_path, Roles("user id", "movie", "at", "stars")).label
    assert (label.name, label.sql) == ("taken", "CAST(`stars` >= 4 AS int)")
    assert "stars of at least 4, 6" in label.why
    played_ms = [1_234_560 + row % 6 for row in range(ROWS)]
    label = decide(tmp_path, Roles("user id", "movie", "at", "stars"), stars=played_ms).label
    assert label.sql == "CAST(`stars` >= 1234563 AS int)", "all digits of the value"
    label = decide(tmp_path, Roles("user id", "movie", "at", "stars"), stars=[ms / 1e7 for ms in played_ms]).label
    assert label.sql == "CAST(`stars` >= 0.1234563 AS int)"


def test_rows_are_held_out_by_time(tmp_path: Path) -> None:
    roles = Roles("user id", "movie", "at", "clicked")
    found = decide(tmp_path, roles)
    assert (found.valid_from, found.test_from) == ("800", "900")
    many = decide(tmp_path, roles, at=[0] * (ROWS - 2) + [1, 2])
    assert (many.valid_from, many.test_from) == ("1", "2"), "each split has rows, whatever their shares"
    late = decide(tmp_path, roles, at=[0, 1] + [2] * (ROWS - 2))
    assert (late.valid_from, late.test_from) == ("1", "2")
    assert late.test_users == 60 and found.test_users == len({*interactions()["user id"][1800:]})


def test_of_rows_that_are_all_positive_the_first_of_each_pair_are_held_out(tmp_path: Path) -> None:
    rows = interactions()
    first: dict[tuple[int, str], int] = {}
    for user, item, at in zip(rows["user id"], rows["movie"], rows["at"], strict=True):
        first.setdefault((user, item), at)
    times = sorted(first.values())
    valid, test = (next(t for t in times if times.index(t) >= share * len(times)) for share in (0.8, 0.9))
    found = decide(tmp_path)
    assert (found.valid_from, found.test_from) == (str(valid), str(test)) and valid < 800
    assert found.test_users == len({user for (user, _), at in first.items() if at >= test})


@pytest.mark.parametrize(
    ("value", "kind", "sql"),
    [
        (7, "bigint", "7"), (2.5, "double", "2.5"), (dt.date(2024, 1, 31), "date", "DATE '2024-01-31'"),
        (dt.datetime(2024, 1, 31, 1, 2, 3), "timestamp_ntz", "TIMESTAMP_NTZ '2024-01-31 01:02:03'"),
        (dt.datetime(2024, 1, 31, 1, tzinfo=dt.timezone(dt.timedelta(hours=2))), "timestamp",
         "TIMESTAMP '2024-01-30 23:00:00'"),
    ],
)  # fmt: skip
def test_a_time_is_written_as_sql_in_utc(value: Any, kind: str, sql: str) -> None:
    assert literal(value, kind) == sql


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_times_beyond_the_sample_count(tmp_path: Path, ending: str) -> None:
    write(tmp_path)
    pq.write_table(pa.table(interactions()), tmp_path / "seen.parquet")
    sample = read_sample(str(tmp_path / f"seen.{ending}"), most_rows=300)
    assert not sample.is_whole
    assert read_columns(sample, ["at"])["at"].to_pylist() == (np.arange(ROWS) // 2).tolist()
    assert decide_interactions(sample, ROLES) == decide_interactions(read_sample(str(sample.path)), ROLES)


def test_of_many_test_users_some_are_chosen_by_hash(tmp_path: Path) -> None:
    found = decide(tmp_path)
    assert chosen_users(found) == ""
    found.test_users = 4 * MOST_TEST_USERS
    assert chosen_users(found) == "pmod(xxhash64(user_id), 1000) < 250"


@pytest.mark.parametrize("rows", [100, 5000, 1_000_000, 50_000_000])
def test_an_epoch_has_several_steps(rows: int) -> None:
    batch, epochs = batch_and_epochs(rows)
    assert rows / batch >= 8 and batch % 2 == 0 and 3 <= epochs <= 10


REFUSED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({}, {"--user": "user"}, "--user user: no such column; did you mean 'user id'?"),
    ({}, {"--item": "user id"}, "--user user id: named twice; each of --user, --item, --time is a column of its own"),
    ({"user id": np.arange(ROWS) / 2}, {}, "--user user id: is double; ids are whole numbers or texts"),
    ({}, {"--time": "genre"}, "--time genre: is string; rows are held out by time, so it is a date, a timestamp or"),
    ({"at": [1, 2] * (ROWS // 2)}, {}, "--time at: has 2 distinct times; rows before, between and after two are"),
    ({"movie": ["a", "b"] * (ROWS // 2)}, {}, "--item: has 2 items; at least 20 are needed"),
    ({}, {"--label": "genre"}, "--task binary: 'genre' has 5 values"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "options", "said"), REFUSED)
def test_bad_input_is_one_message_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], options: dict[str, str], said: str
) -> None:
    given = dict(zip(WORDS[::2], WORDS[1::2], strict=True)) | options
    words = [word for pair in given.items() for word in pair]
    data = write(tmp_path, **changes)
    assert main(["init", "recommender", str(tmp_path / "new"), "--data", data, *words]) == Exit.USAGE
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown and not (tmp_path / "new").exists()


@pytest.mark.parametrize("label", [[], ["--label", "stars"], ["--label", "clicked"]])
def test_what_is_written_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], label: list[str]
) -> None:
    data = write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "recommender", "new", "--data", data, *WORDS, *label]) == Exit.OK
    said = capsys.readouterr().out
    assert "held out by time: valid from " in said
    assert [words[0] for words in next_commands(said)] == ["config", "run", "run", "predict", "serve-check", "ui"]
    assert "export PYTHONPATH=$PWD" in said
    monkeypatch.chdir(tmp_path / "new")
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    monkeypatch.delitem(sys.modules, "factors", raising=False)
    assert main(["config", "validate", "recipe.yaml"]) == Exit.OK
    monkeypatch.delitem(sys.modules, "factors")
    config = load_config("recipe.yaml", ["report.must_beat=[ndcg_at_10, loss]"]).config
    assert config.report.ranking is not None and config.report.ranking.group == "user_id"
    assert config.predict is not None and config.etl is not None and config.predict.rows in config.etl.views


def test_rows_that_lack_an_id_are_counted(tmp_path: Path) -> None:
    project = recommender_project(write(tmp_path, movie=[None, *interactions()["movie"][1:]]), ROLES, tmp_path / "new")
    assert "1 row without user, item or time: left out" in project.look_at


def test_the_model_sums_the_products_of_every_pair_of_columns() -> None:
    made: dict[str, Any] = {}
    exec(FACTORS, made)
    model = made["Factors"]({"user": 5, "items": 7}, ["age", "age__null"], width=3)
    with torch.no_grad():
        for values in model.parameters():
            values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(0)))
    user, items = torch.tensor([1, 4]), torch.tensor([6, 0])
    age, null = torch.tensor([0.5, -2.0]), torch.tensor([0.0, 1.0])
    found = model({"user": user, "items": items, "age": age, "age__null": null})
    parts = [model.tables[0](user), model.tables[1](items), age[:, None] * model.of_number[0]]
    parts.append(null[:, None] * model.of_number[1])
    pairs = sum((a[:, 1:] * b[:, 1:]).sum(dim=1) for a, b in itertools.combinations(parts, 2))
    torch.testing.assert_close(found, model.bias + sum(part[:, 0] for part in parts) + pairs)
    alone = made["Factors"]({"user": 5, "items": 7}, [])
    alone({"user": user, "items": items}).sum().backward()
    assert all(parameter.grad is not None for parameter in alone.parameters()), "each parameter is used"


def test_rows_without_an_id_say_nothing_about_whose_a_column_is() -> None:
    rows = pa.table({"film": ["a", "b", "a", None, None], "genre": ["x", "y", "x", "y", "x"], "at": [1, 2, 3, 4, 5]})
    assert is_fact_of(rows, "film", "genre") and not is_fact_of(rows, "film", "at")
