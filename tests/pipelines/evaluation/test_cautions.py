"""A run warns of groups on both sides of the split, of columns that give the label away, and of unseen values."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import ROW_NUMBER, Column
from sparkring.conf.storage import open_storage
from sparkring.conf.tasks import REGRESSION
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.cautions import ScoredSplits, find_cautions, new_categories
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.training.worker.result import Importance
from tests.helpers.datasets import listed, manifest_of


def splits(folder: Path, rows: dict[str, Any], order: np.ndarray, key: Any = ()) -> ScoredSplits:
    """A dataset of the rows in an order: 80 % train, then valid and test."""
    table, files = pa.table(rows).take(pa.array(order)), []
    for split, first, last in (("train", 0, 0.8), ("valid", 0.8, 0.9), ("test", 0.9, 1.0)):
        some = table.slice(int(first * len(table)), int((last - first) * len(table) + 0.5))
        path = folder / f"data/{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        numbers = pa.array(range(len(some)), pa.int64())
        pq.write_table(some.append_column(ROW_NUMBER, numbers), path, write_page_checksum=True)
        files.append(listed(folder, path, split))
    kinds, roles = {"user": "string", "month": "int64"}, {"user": "meta", "y": "label"}
    columns = [Column(name=n, dtype=kinds.get(n, "float64"), role=roles.get(n, "feature")) for n in rows]
    dataset = Dataset(manifest_of(columns=tuple(columns), files=files, name="b"), open_storage(str(folder)))
    found = {split: split_rows(dataset, split, DataConfig(), []) for split in ("train", "valid", "test")}
    return ScoredSplits(REGRESSION, found, [n for n in rows if n not in ("user", "y")], "y", key)


def visits(leak: float = 1.0) -> dict[str, Any]:
    """Users with a hidden quantity of their own. `leak`: how far the dose is from the label."""
    draw = np.random.default_rng(0)
    of, many = np.repeat(np.arange(100), 20), 2000
    y = 2 * draw.normal(size=100)[of] + 0.3 * draw.normal(size=many)
    return {
        "user": [f"u{each}" for each in of],
        "height": draw.normal(size=100)[of],
        "dose": y + 3 * draw.normal(size=many) if leak else np.exp(y),
        "month": draw.integers(1, 13, many),
        "y": y,
    }


def shuffled(rows: int = 2000) -> np.ndarray:
    return np.random.default_rng(1).permutation(rows)


def test_groups_on_both_sides_of_a_random_split_are_told_with_both_losses(tmp_path: Path) -> None:
    (told,) = find_cautions(splits(tmp_path, visits(), shuffled()), [])
    assert told.startswith("rows of one user are in train and test (100% of the test rows): trees have a RMSE of ")
    assert "set etl.split.key to [user]" in told


def test_groups_are_not_told_where_none_is_on_both_sides_or_the_split_is_by_time_or_by_them(tmp_path: Path) -> None:
    assert find_cautions(splits(tmp_path / "order", visits(), np.arange(2000)), []) == []
    for name, key in (("key", ["user"]), ("time", None)):
        assert find_cautions(splits(tmp_path / name, visits(), shuffled(), key), []) == []


def test_a_column_that_gives_the_label_is_told_with_its_share_of_the_importance(tmp_path: Path) -> None:
    found = [Importance(feature=n, mean=mean, low=0, high=1) for n, mean in (("dose", 3.0), ("height", 1.0))]
    (told,) = find_cautions(splits(tmp_path, visits(leak=0), np.arange(2000)), found)
    assert told.startswith("too good to be true: dose ") and "and 75% of what the model depends on" in told


@pytest.mark.parametrize("column", ["month", "day", "dose"])
def test_values_that_training_never_saw_are_told(tmp_path: Path, column: str) -> None:
    rows = visits()
    rows["month"] = np.arange(2000) // 170
    rows["day"] = np.arange(2000) + 19_000.5
    rows["dose"] = np.arange(2000.0)
    rows = {n: of for n, of in rows.items() if n in (column, "height", "y")}
    told = find_cautions(splits(tmp_path, rows, np.arange(2000), None), [])
    lines = [line for line in told if line.startswith(f"{column}: 100% of the test rows have values that training")]
    assert len(lines) == 1


def test_what_fails_is_a_warning_since_the_model_is_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = splits(tmp_path, visits(), shuffled())
    (tmp_path / "data/test.parquet").unlink()
    with caplog.at_level(logging.WARNING):
        assert find_cautions(broken, []) == []
    assert "groups of features were not looked at" in caplog.text


def test_a_category_of_which_many_test_rows_have_new_values_is_told() -> None:
    (told,) = new_categories({"shop": 30, "kind": 3}, 100)
    assert told.startswith("shop: 30% of the test rows have values that training has not")
