"""ALS as a baseline: equal to Spark's own on the positive pairs alone, and defined for ids that training lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.recommendation import ALS

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.report import AlsConfig
from sparkring.conf.manifest import Column
from sparkring.conf.storage import open_storage
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.baselines import als
from sparkring.pipelines.evaluation.baselines.als import als_predictions, check_size, products
from sparkring.pipelines.evaluation.split_rows import SplitRows, split_rows
from tests.helpers.datasets import manifest_of, unread_file

Row = tuple[str | None, int | None, int, float]  # user, item, label, weight
CONFIG = AlsConfig(rank=3, iterations=1, reg=0.05, alpha=7.0)
USERS, ITEMS = 12, 9
TAKEN = [(user, item) for user in range(USERS) for item in range(ITEMS) if (user + item) % 3 == 0 and user * item % 5]
POSITIVE: list[Row] = [(f"u{user:02}", 100 * item, 1, 1.0) for user, item in TAKEN]
REPEATED: list[Row] = [POSITIVE[4], POSITIVE[4]]
NOT_FITTED: list[Row] = [("u00", 100, 0, 1.0), ("u01", 500, 1, 0.0), (None, 200, 1, 1.0), ("u03", None, 1, 1.0)]
TEST: list[Row] = [
    *((f"u{user:02}", 100 * item, 0, 1.0) for user in range(USERS) for item in range(1, ITEMS)),
    *(("new", 100 * item, 0, 1.0) for item in range(1, ITEMS)),
    ("u00", 77, 0, 1.0), (None, 200, 1, 1.0), ("u01", None, 0, 1.0),
]  # fmt: skip


def rows_of(folder: Path, train: list[Row], data: DataConfig | None = None) -> tuple[SplitRows, SplitRows]:
    """Training rows in two files, and those of TEST, as the readers serve them."""
    folder.mkdir(exist_ok=True)
    half, files = len(train) // 2, []
    for split, number, rows in (("train", 0, train[:half]), ("train", 1, train[half:]), ("test", 0, TEST)):
        user, item, label, weight = zip(*rows, strict=True)
        stored = pa.table({"user": pa.array(user, pa.string()), "item": pa.array(item, pa.int64()), "taken": label})
        path = folder / f"{split}-{number}.parquet"
        pq.write_table(stored.append_column("w", pa.array(weight, pa.float64())), path)
        count = len(rows)
        files.append(unread_file(split, count, path.name))
    columns = (
        Column(name="user", dtype="string"), Column(name="item", dtype="int64"),
        Column(name="taken", dtype="int64", role="label"), Column(name="w", dtype="float64", role="meta"),
    )  # fmt: skip
    manifest = manifest_of(
        columns=columns,
        files=files,
        features={"version": 2, "inputs": {}, "features": [], "weight": {"column": "w", "mean": 1.0}},
    )
    found = Dataset(manifest, open_storage(str(folder)))
    of_train, of_test = (split_rows(found, split, data or DataConfig(), []) for split in ("train", "test"))
    return of_train, of_test


def predicted(spark: Any, folder: Path, train: list[Row], data: DataConfig | None = None) -> np.ndarray:
    of_train, of_test = rows_of(folder, train, data)
    return als_predictions(spark, CONFIG, of_train, of_test, ("user", "item", "taken"))


@pytest.fixture(scope="module")
def found(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return predicted(spark, tmp_path_factory.mktemp("als"), POSITIVE + REPEATED + NOT_FITTED)


@pytest.mark.spark
def test_predictions_are_those_of_spark_on_the_positive_pairs(spark: Any, found: np.ndarray) -> None:
    """The same settings by hand: users and items numbered in their order, rows of a pair counted."""
    users, items = sorted({user for user, _ in TAKEN}), sorted({item for _, item in TAKEN})
    counts = dict.fromkeys(TAKEN, 1.0) | {TAKEN[4]: 3.0}
    frame = spark.createDataFrame(
        [(users.index(u), items.index(i), n) for (u, i), n in counts.items()], "u int, i int, n double"
    )
    model = ALS(
        rank=3, maxIter=1, regParam=0.05, alpha=7.0, implicitPrefs=True, seed=als.SEED,
        userCol="u", itemCol="i", ratingCol="n",
    ).fit(frame)  # fmt: skip
    x = {users[row.id]: np.array(row.features) for row in model.userFactors.collect()}
    y = {items[row.id]: np.array(row.features) for row in model.itemFactors.collect()}
    zero = np.zeros(3)
    mean = np.mean([*x.values()], axis=0)  # of users without a pair too, such as the first
    expected = [x.get(user, mean) @ y.get(item, zero) for user in range(USERS) for item in range(1, ITEMS)]
    expected += [mean @ y.get(item, zero) for item in range(1, ITEMS)]
    np.testing.assert_allclose(found[: len(expected)], expected, atol=2e-5)
    assert len(np.unique(found.round(4))) > 10, "the pairs differ, so a wrong place would show"


@pytest.mark.spark
def test_ids_that_training_lacks_have_predictions_too(found: np.ndarray) -> None:
    unknown_item, null_user, null_item = found[-3:]
    assert unknown_item == null_item == 0
    of_new = found[USERS * (ITEMS - 1) :][1]  # item 200
    assert null_user == of_new != 0, "both have the mean of the users' vectors"
    assert np.isfinite(found).all() and len(found) == len(TEST)


@pytest.mark.spark
def test_filtered_rows_are_not_fitted(spark: Any, found: np.ndarray, tmp_path: Path) -> None:
    """The reader's filter leaves the same pairs, of other files in another order."""
    odd: list[Row] = [("u02", 800, 1, 5.0), ("other", 900, 1, 5.0)]
    filters = DataConfig.model_validate({"filters": [["w", "<", 2]]})
    train = odd + (POSITIVE + REPEATED)[::-1]
    np.testing.assert_allclose(predicted(spark, tmp_path, train, filters), found, atol=1e-6)


@pytest.mark.spark
def test_nothing_to_fit_and_too_much_are_refused(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no positive training row has both"):
        predicted(spark, tmp_path, NOT_FITTED)
    check_size(2, 50_000_000, 50_000_000)
    with pytest.raises(ValueError, match=r"200,000,002 numbers of 50,000,001 lists and 50,000,000 items, more than"):
        check_size(2, 50_000_001, 50_000_000)


def test_rows_are_multiplied_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    lists, items = draw.normal(size=(4, 3)), draw.normal(size=(5, 3))
    of_list, of_item = draw.integers(0, 4, 11), draw.integers(0, 5, 11)
    monkeypatch.setattr(als, "CHUNK_ROWS", 4)
    np.testing.assert_allclose(products(lists, of_list, items, of_item), (lists @ items.T)[of_list, of_item])
