"""How much the loss of test rows depends on a column, for models of either family."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xgboost
from scipy import stats

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import open_storage
from sparkring.conf.tasks import BINARY, REGRESSION
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.evaluate import HeldOut, measure_importance
from sparkring.pipelines.evaluation.importance import (
    MOST_REPEATS,
    MOST_SCORED,
    Sample,
    SampleSize,
    find_importances,
    mean_and_half_width,
    permuted,
    sample_rows,
)
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.training.model.recipe_model import pick_columns
from sparkring.training.trees.columns import TreeColumns, seen_by
from sparkring.training.trees.model import write_trees
from sparkring.training.worker.result import Evaluated, read_result
from tests.pipelines.results import rank_result, train_result
from tests.pipelines.test_trees_serving import matrix, raw_rows
from tests.training.trees.tables import write_homes


class Sum:
    """Stands for a model that predicts a + 2 b, and reads c."""

    stored_columns: tuple[str, ...] = ("a", "b", "c")

    def scores_of_stored(self, rows: pa.Table) -> np.ndarray:
        found: np.ndarray = rows["a"].to_numpy() + 2 * rows["b"].to_numpy()
        return found


def sums(rows: int = 4000) -> Sample:
    random = np.random.default_rng(0)
    values = {name: random.normal(size=rows) for name in ("a", "b", "c")}
    return Sample(pa.table(values), values["a"] + 2 * values["b"], np.full(rows, 1 / rows))


def test_the_loss_grows_as_far_as_the_label_depends_on_the_column() -> None:
    """A squared error grows by the expected square of the difference of two rows: 2, and 8 of twice the number."""
    model: Any = Sum()
    found = {each.feature: each for each in find_importances(model, REGRESSION, sums(), repeats=3)}
    assert [*found] == ["b", "a", "c"]
    for name, expected in {"a": 2.0, "b": 8.0}.items():
        assert found[name].low < expected < found[name].high
        assert found[name].high - found[name].low < expected / 5
    assert found["c"].mean == found["c"].low == found["c"].high == 0
    assert find_importances(model, REGRESSION, sums(), repeats=3) == [*found.values()]


def test_rows_count_by_their_weight() -> None:
    sample, model = sums(), any_model()
    heavy = np.where(np.abs(sample.labels) > 3, 1.0, 0.0)
    found = find_importances(model, REGRESSION, replace(sample, weights=heavy / heavy.sum()), repeats=2)
    assert found[0].mean > 12, "far from the mean another row's value is farther away"


def any_model() -> Any:
    return Sum()


def test_each_repeat_is_another_order_of_the_column_alone() -> None:
    table = pa.table({"a": range(50), "b": range(50)})
    first, second = permuted(table, "b", repeats=2, number=1)
    assert first["a"] == second["a"] == table["a"] and first["b"] != second["b"] != table["b"]
    assert sorted(first["b"].to_pylist()) == [*range(50)]


def test_a_mean_of_equal_values_is_certain_and_weights_widen_an_interval() -> None:
    assert mean_and_half_width(np.ones(4), np.full(4, 0.25)) == (1.0, 0.0)
    values = np.array([0.0, 1.0, 0.0, 1.0])
    _, alike = mean_and_half_width(values, np.full(4, 0.25))
    _, uneven = mean_and_half_width(values, np.array([0.45, 0.45, 0.05, 0.05]))
    assert alike == pytest.approx(stats.t.ppf(0.975, 3) * values.std(ddof=1) / 2) and uneven > alike
    assert mean_and_half_width(np.array([0.0, 1.0]), np.full(2, 0.5))[1] > 6, "two rows say nearly nothing"


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1e-300]])
def test_one_row_that_counts_says_nothing_of_how_certain_a_mean_is(weights: list[float]) -> None:
    mean, half_width = mean_and_half_width(np.arange(1.0, 1 + len(weights)), np.array(weights))
    assert mean == 1.0 and math.isinf(half_width)


@pytest.mark.parametrize(("rows", "columns"), [(100, 3), (5000, 27), (10**7, 27), (10**7, 10**6), (3, 0)])
def test_the_rows_that_are_scored_are_bounded(rows: int, columns: int) -> None:
    size = SampleSize.of(rows, columns)
    assert 1 <= size.rows <= rows and 1 <= size.repeats <= MOST_REPEATS
    assert size.rows * size.repeats * columns <= max(MOST_SCORED, columns)
    assert size == SampleSize(100, 5) or rows != 100


def trained_trees(folder: Path, weigh: bool = False) -> tuple[Any, Any, Any, HeldOut]:
    """A job's model of homes, and what the evaluation hands on."""
    table = write_homes(folder / "table", weigh=weigh)
    config = RunConfig.model_validate({"name": "homes", "dataset": str(table), "model": {"family": "trees"}})
    dataset = Dataset(read_manifest(open_storage(str(table))), open_storage(str(table)))
    seen = seen_by(config.model, dataset.manifest)
    columns = TreeColumns.of(seen, pick_columns(seen, config.model).features)
    labels = pq.read_table(table / "test.parquet")["label"].to_numpy()
    data = xgboost.QuantileDMatrix(
        matrix(raw_rows(table)), labels, feature_names=columns.names, feature_types=columns.types,
        enable_categorical=True,
    )  # fmt: skip
    run = open_storage(str(folder / "run"))
    write_trees(run.at("model"), xgboost.train({"objective": "binary:logistic", "nthread": 1}, data, 15))
    weights = np.arange(len(labels)) % 3 + 0.5 if weigh else None
    rows = split_rows(dataset, "test", config.data, [])
    job = SimpleNamespace(config=config, dataset=dataset, folder=run)
    trained = SimpleNamespace(train=rank_result(weights="model"))
    return job, trained, rows, HeldOut(labels, labels, weights=weights)


@pytest.mark.parametrize("weigh", [False, True])
def test_of_trees_the_columns_that_decide_about_the_label_come_first(weigh: bool, tmp_path: Path) -> None:
    job, trained, rows, held_out = trained_trees(tmp_path, weigh)
    found, measured = measure_importance(job, trained, rows, held_out)
    assert measured == 200 and {each.feature for each in found} == {"price", "city", "area", "place"}
    assert all(each.low < each.mean < each.high for each in found) and found[0].low > 0
    assert found[0].feature in ("price", "place") and found == measure_importance(job, trained, rows, held_out)[0]


def test_evenly_spaced_rows_of_all_files_are_read_but_none_that_counts_for_nothing(tmp_path: Path) -> None:
    _, _, rows, held_out = trained_trees(tmp_path)
    files = (rows.files[0], rows.files[0])
    both = replace(rows, files=files, first_rows=(0, 200))
    labels = np.arange(400.0)
    weights = (np.arange(400) % 2) * (1 + labels)
    sample = sample_rows(both, ["city", "area"], labels, weights, most=50)
    assert sample.table.column_names == ["city", "area"] and len(sample.table) == 50
    assert (sample.labels % 2 == 1).all() and {0, 399} & {*sample.labels} == {399}
    area = pq.read_table(tmp_path / "table/test.parquet")["area"].to_pylist()
    assert sample.table["area"].to_pylist() == [area[int(row) % 200] for row in sample.labels]
    np.testing.assert_allclose(sample.weights, (1 + sample.labels) / (1 + sample.labels).sum())
    assert len(held_out.labels) == 200


def test_without_the_key_or_with_a_model_that_fails_the_report_goes_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, trained, rows, held_out = trained_trees(tmp_path)
    job.folder.put_atomic("model/trees.ubj", b"broken")
    assert measure_importance(job, trained, rows, held_out) == ([], 0)
    assert "importance of columns: StoredError: " in caplog.text
    caplog.clear()
    one = replace(held_out, weights=np.eye(1, len(held_out.labels))[0])
    job, trained, rows, _ = trained_trees(tmp_path / "again")
    assert measure_importance(job, trained, rows, one) == ([], 0) and not caplog.text
    job.config = RunConfig.model_validate(job.config.model_dump() | {"report": {"importance": False}})
    assert measure_importance(job, trained, rows, held_out) == ([], 0) and not caplog.text


def test_a_summary_keeps_importances_and_mlflow_gets_them_as_a_table(tmp_path: Path) -> None:
    model: Any = Sum()
    found = find_importances(model, REGRESSION, sums(100), repeats=1)
    result = train_result(importance=found, importance_rows=100)
    folder = open_storage(str(tmp_path))
    folder.put_atomic("summary.json", result.to_json())
    assert read_result(folder).importance == found
    table = Evaluated(importance=found).importance_table()
    assert table["columns"][0] == "feature" and [row[0] for row in table["data"]] == ["b", "a", "c"]


def test_log_loss_of_classes_is_what_grows_for_a_binary_task() -> None:
    class Sure:
        stored_columns = ("a",)

        def scores_of_stored(self, rows: pa.Table) -> np.ndarray:
            return np.where(rows["a"].to_numpy() > 0, 0.9, 0.1)

    a = np.tile([1.0, -1.0], 500)
    model: Any = Sure()
    (found,) = find_importances(model, BINARY, Sample(pa.table({"a": a}), a > 0, np.full(1000, 1e-3)), repeats=5)
    assert found.mean == pytest.approx(np.log(9) / 2, rel=0.05)
