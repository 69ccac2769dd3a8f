"""Recall and NDCG of lists against a naive oracle: every order of equal predictions is tried, list by list."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.report import RankingConfig
from sparkring.conf.manifest import Column
from sparkring.conf.storage import open_storage
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.ranking import make_ranking, popularity, ranking_scores
from sparkring.pipelines.evaluation.split_rows import split_rows
from tests.helpers.datasets import manifest_of, unread_file

Row = tuple[int, bool, int]  # list, positive, prediction
ROWS = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 3)), min_size=1, max_size=7)
KS = [1, 2, 5]
USER = RankingConfig(group="user", k=[2])


def orders(rows: list[Row]) -> list[list[bool]]:
    """Whether positive, from first to last, of every order of a list that its predictions allow."""
    predictions = sorted({prediction for _, _, prediction in rows}, reverse=True)
    ties = [[positive for _, positive, prediction in rows if prediction == one] for one in predictions]
    choices = [sorted(set(itertools.permutations(tie))) for tie in ties]  # of equally many orders each
    return [list(itertools.chain(*chosen)) for chosen in itertools.product(*choices)]


def oracle(rows: list[Row], k: int) -> tuple[float, float] | None:
    """Mean recall and NDCG over the lists with a positive row."""
    recalls, gains = [], []
    for name in {name for name, _, _ in rows}:
        listed = [row for row in rows if row[0] == name]
        positives = sum(positive for _, positive, _ in listed)
        if not positives:
            continue
        tried = orders(listed)
        best = sum(1 / math.log2(2 + place) for place in range(min(positives, k)))
        recalls.append(float(sum(Fraction(sum(one[:k]), positives) for one in tried) / len(tried)))
        found = [sum(1 / math.log2(2 + place) for place, hit in enumerate(one[:k]) if hit) for one in tried]
        gains.append(math.fsum(found) / len(tried) / best)
    return (math.fsum(recalls) / len(recalls), math.fsum(gains) / len(gains)) if recalls else None


def scored(rows: list[Row], ks: list[int] = KS) -> dict[str, float]:
    names, positive, predictions = zip(*rows, strict=True)
    return ranking_scores(np.array(names), np.array(positive), np.array(predictions) / 4, ks)


@settings(max_examples=200)
@given(ROWS)
def test_scores_equal_the_mean_over_every_order_of_ties(rows: list[Row]) -> None:
    if oracle(rows, 1) is None:
        with pytest.raises(ValueError, match=r"of .* test rows? none is positive"):
            scored(rows)
        return
    found = scored(rows)
    for k in KS:
        assert (found[f"recall_at_{k}"], found[f"ndcg_at_{k}"]) == pytest.approx(oracle(rows, k), abs=1e-12)


@given(ROWS, st.randoms())
def test_the_order_in_which_rows_come_changes_no_bit(rows: list[Row], random: Any) -> None:
    rows = [*rows, (0, True, 1)]
    shuffled = random.sample(rows, len(rows))
    assert scored(rows) == scored(shuffled)


def test_many_lists_of_distinct_predictions_equal_a_sort_of_each() -> None:
    draw = np.random.default_rng(3)
    names, positive, predictions = draw.integers(0, 300, 9000), draw.random(9000) < 0.1, draw.random(9000)
    recalls, gains = [], []
    for name in range(300):
        mine = names == name
        ordered = positive[mine][np.argsort(-predictions[mine])]
        if ordered.any():
            discount = 1 / np.log2(2 + np.arange(len(ordered)))
            recalls.append(ordered[:10].sum() / ordered.sum())
            gains.append((ordered * discount)[:10].sum() / discount[: min(10, ordered.sum())].sum())
    found = ranking_scores(names, positive, predictions, [10])
    assert len(recalls) < 300
    assert found == pytest.approx({"recall_at_10": np.mean(recalls), "ndcg_at_10": np.mean(gains)}, rel=1e-12)


def test_lists_are_counted_by_what_they_can_say() -> None:
    users = pa.chunked_array([["a", "a", "a", "b", "b", "c", "d"]])
    labels, predictions = np.array([1.0, 0, 0, 1, 0, 0, 1]), np.linspace(0, 1, 7)
    counts = make_ranking(USER, users, labels, None).counts
    assert (counts.column, counts.counted, counts.without_positive) == ("user", 3, 1)
    assert (counts.rows, counts.short) == (6, 2), "b and d have no more than two rows"
    assert make_ranking(USER, users, labels, None).scores(predictions)["recall_at_2"] == pytest.approx(2 / 3)


def test_rows_of_weight_0_are_in_no_list() -> None:
    users, labels = pa.chunked_array([["a", "a", "b", "b"]]), np.array([1.0, 0, 1, 0])
    ranking = make_ranking(USER, users, labels, np.array([1.0, 2.0, 0.0, 0.0]))
    assert (ranking.counts.counted, ranking.counts.without_positive, ranking.counts.rows) == (1, 0, 2)
    assert ranking.scores(np.array([0.1, 0.9, 0.9, 0.1]))["ndcg_at_2"] == pytest.approx(1 / math.log2(3))


@pytest.mark.parametrize(
    "chunks",
    [
        [["null", "a", None], ["a", None]],
        [[2**53 + 1, 2**53, None], [2**53, None]],
        [[True, False, None], [False, None]],
        [pa.array(["y", "x", None]).dictionary_encode(), pa.array(["x", None]).dictionary_encode()],
    ],
    ids=["texts", "numbers", "booleans", "dictionaries"],
)
def test_rows_of_nobody_are_in_no_list(chunks: list[Any]) -> None:
    ranking = make_ranking(USER, pa.chunked_array(chunks), np.array([1.0, 0, 1, 1, 1]), None)
    assert (ranking.counts.counted, ranking.counts.rows) == (2, 3)
    assert ranking.lists.tolist() == [1, 0, 0], "by value, whichever row is first"


def dataset(folder: Path, weighted: bool = False, texts: bool = False) -> Dataset:
    """Two training files, the second of one row, and a test file of items of which one has no training row."""
    parts = {
        "train": [(["x", "y", "x", None], [1, 1, 0, 1], [1.0, 1, 1, 1]), (["x"], [1], [0.0])],
        "test": [(["y", "x", "z", None, "x"], [0, 1, 0, 1, 0], [1.0] * 5)],
    }
    files = []
    for split, tables in parts.items():
        for number, (items, labels, weights) in enumerate(tables):
            path = folder / f"{split}-{number}.parquet"
            shown: list[Any] = [("no", "yes")[label] for label in labels] if texts else labels
            pq.write_table(pa.table({"item": pa.array(items, pa.string()), "taken": shown, "w": weights}), path)
            rows = len(items)
            files.append(unread_file(split, rows, path.name))
    label = Column(name="taken", dtype="string" if texts else "int64", role="label")
    columns = (Column(name="item", dtype="string"), label, Column(name="w", dtype="float64", role="meta"))
    state = {"name": "taken", "kind": "classes", "column": "taken", "values": ["no", "yes"], "counts": {}}
    features: dict[str, Any] = {"version": 2, "inputs": {}, "features": []} if texts or weighted else {}
    features |= {"labels": [state]} if texts else {}
    features |= {"weight": {"column": "w", "mean": 1.0}} if weighted else {}
    manifest = manifest_of(columns=columns, files=files, features=features)
    return Dataset(manifest, open_storage(str(folder)))


@pytest.mark.parametrize(
    ("options", "x"), [({}, 2), ({"weighted": True}, 1), ({"texts": True}, 2)], ids=["plain", "weighted", "texts"]
)
def test_popularity_counts_the_positive_training_rows_of_an_item(tmp_path: Path, options: Any, x: int) -> None:
    of = {name: split_rows(dataset(tmp_path, **options), name, DataConfig(), []) for name in ("train", "test")}
    assert popularity(of["train"], of["test"], "item", "taken").tolist() == [1, x, 0, 1, x]
