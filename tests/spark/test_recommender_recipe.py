"""The rows of conf/recipes/recommender.yaml on generated ratings: what is ranked, and that none knows of later ones."""

from __future__ import annotations

import math
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkring.conf.load import load_config
from sparkring.etl.views import build_rows
from sparkring.training.data.features.xxhash64 import hash_whole

pytestmark = pytest.mark.spark
USERS, FILMS, RATINGS = 25, 40, 700
KNOWN, VALID, TEST = date(1998, 2, 1), date(1998, 2, 1), date(1998, 2, 15)
CUT = date(1997, 12, 20)
Row = dict[str, Any]


@pytest.fixture(scope="module")
def ratings() -> list[Row]:
    """Each pair once; films above 35 are seen from February on only, users above 20 too."""
    draw = np.random.default_rng(2)
    pairs = draw.permutation(USERS * FILMS)[:RATINGS]
    begin, found = datetime(1997, 9, 20, tzinfo=UTC), []
    for user, film in zip(pairs // FILMS, pairs % FILMS, strict=True):
        is_new = user > 20 or film > 35
        seconds = int(draw.integers(12_000_000 if is_new else 0, 18_000_000))
        at = begin + timedelta(seconds=seconds - seconds % 40_000)  # several at the same second
        found.append(
            {"user_id": int(user), "movie_id": int(film), "rating": float(draw.integers(1, 6)), "rated_at": at}
        )
    return found


def built(spark: Any, ratings: list[Row]) -> list[Row]:
    """The rows of the recipe."""
    etl = load_config("recommender").config.etl
    assert etl is not None
    films = [{"movie_id": n, "title": f"{n}", "year": "1990", "genres": "Drama War"} for n in range(FILMS)]
    users = [{"user_id": n, "age": "34", "gender": "F", "occupation": "writer"} for n in range(USERS)]
    given = {"ratings": ratings, "movies": films, "users": users}
    tables = {name: spark.createDataFrame(pa.Table.from_pylist(rows)) for name, rows in given.items()}
    return [row.asDict() for row in build_rows(spark, tables, etl.views, etl.rows).collect()]


@pytest.fixture(scope="module")
def rows(spark: Any, ratings: list[Row]) -> list[Row]:
    return built(spark, ratings)


def liked_before(ratings: list[Row], day: date) -> list[Row]:
    return [row for row in ratings if row["rating"] >= 4 and row["rated_at"].date() < day]


def test_each_test_user_ranks_the_whole_catalog_but_for_what_was_rated_before(
    rows: list[Row], ratings: list[Row]
) -> None:
    catalog = {row["movie_id"] for row in ratings if row["rated_at"].date() < KNOWN}
    assert catalog == set(range(36)) or len(catalog) < 36
    before, expected = defaultdict(set), {}
    for row in ratings:
        if row["rated_at"].date() < TEST:
            before[row["user_id"]].add(row["movie_id"])
    for user in {row["user_id"] for row in ratings if row["rated_at"].date() >= TEST}:
        expected |= {(user, film): 0 for film in catalog - before[user]}
    for row in ratings:
        key = (row["user_id"], row["movie_id"])
        if row["rated_at"].date() >= TEST and key in expected and row["rating"] >= 4:
            expected[key] = 1
    found = {(row["user"], row["film"]): row["liked"] for row in rows if row["period"] == "test"}
    assert found == expected and sum(found.values()) > 10
    assert len(found) == sum(row["period"] == "test" for row in rows)


def test_every_rating_of_a_known_film_is_a_row_and_drawn_films_are_not_rated_by_then(
    rows: list[Row], ratings: list[Row]
) -> None:
    rated = {(row["user_id"], row["movie_id"]): row for row in ratings}
    first = {film: min(r["rated_at"].date() for r in ratings if r["movie_id"] == film) for film in range(FILMS)}
    given = {key: int(row["rating"] >= 4) for key, row in rated.items() if row["rated_at"].date() < KNOWN}
    trained = [row for row in rows if row["period"] == "train"]
    own = {(row["user"], row["film"]): row["liked"] for row in trained if is_rating(row, rated)}
    assert own == given
    drawn = [row for row in rows if row["period"] != "test" and not is_rating(row, rated)]
    assert len(drawn) > 300 and not any(row["liked"] for row in drawn)
    for row in drawn:
        pair = rated.get((row["user"], row["film"]))
        assert pair is None or pair["rated_at"].date() > row["day"]
        assert first[row["film"]] < row["day"]
    assert any((row["user"], row["film"]) in rated for row in drawn), "what is rated later may be drawn"


def is_rating(row: Row, rated: dict[tuple[int, int], Row]) -> bool:
    pair = rated.get((row["user"], row["film"]))
    return pair is not None and pair["rated_at"].date() == row["day"]


def test_histories_and_trends_are_of_earlier_days_and_of_training(rows: list[Row], ratings: list[Row]) -> None:
    for row in rows[:: len(rows) // 60]:
        day = min(row["day"], KNOWN)
        known = liked_before(ratings, day)
        mine = sorted(((r["rated_at"], r["movie_id"]) for r in known if r["user_id"] == row["user"]), reverse=True)
        assert row["watched"] == hash_whole(np.array([film for _, film in mine], np.int64)).tolist()
        for name, days in {"week": 7, "fortnight": 14, "month": 30, "ever": 1000}.items():
            recent = [r["movie_id"] for r in known if (day - r["rated_at"].date()).days <= days]
            expected = math.log((recent.count(row["film"]) + 0.5) / (len(recent) + 1))
            assert row[name] == pytest.approx(expected, abs=1e-12), (name, row)


def test_later_ratings_change_no_earlier_row(spark: Any, rows: list[Row], ratings: list[Row]) -> None:
    rated = {(row["user_id"], row["movie_id"]): row for row in ratings}

    def early(found: list[Row]) -> list[Row]:
        kept = [row for row in found if row["day"] < CUT and is_rating(row, rated)]
        return sorted(kept, key=lambda row: (row["user"], row["film"]))

    shortened = built(spark, [row for row in ratings if row["rated_at"].date() < CUT])
    assert early(shortened) == early(rows) and len(early(rows)) > 100
