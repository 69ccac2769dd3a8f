"""Baselines on tables as they come: nulls, NaN, filters, damaged files, nothing to fit on. Real Spark, small files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.linalg import Vectors

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import ROW_NUMBER, Column, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.conf.tasks import MULTILABEL, POISSON, REGRESSION, TASKS
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.baselines import linear, mllib
from sparkring.pipelines.evaluation.baselines.baseline import (
    Baselines,
    attempted,
    best_baseline,
    fit_baselines,
    in_driver,
)
from sparkring.pipelines.evaluation.baselines.guesses import Fitted, class_rates, constant_scores, mean_of_labels
from sparkring.pipelines.evaluation.baselines.mllib import label_logistic_scores, multinomial_scores
from sparkring.pipelines.evaluation.baselines.trees import TREES
from sparkring.pipelines.evaluation.evaluate import evaluate
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import ReadRequest
from sparkring.training.metrics import task_scores
from sparkring.training.worker.train import left_out
from tests.helpers.datasets import listed, manifest_of
from tests.pipelines.results import rank_result, train_result

SIZES = {"train": 240, "test": 120}
LABEL = Column(name="late", dtype="int8", role="label")


def write_table(folder: Path, columns: tuple[Column, ...], make: Callable[[int], dict[str, Any]]) -> Dataset:
    """Two files of one row group for each split; `make(seed)`: the columns of 120 or 60 rows."""
    files = []
    for number, (split, rows) in enumerate(SIZES.items()):
        for part in range(2):
            path = folder / f"data/{split}-{part}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            numbers = pa.array(range(part * rows // 2, (part + 1) * rows // 2), pa.int64())
            stored = pa.table(make(10 * number + part)).slice(0, rows // 2).append_column(ROW_NUMBER, numbers)
            pq.write_table(stored, path, write_page_checksum=True)
            files.append(listed(folder, path, split))
    manifest = manifest_of(columns=columns, files=files, name="b")
    return Dataset(manifest, open_storage(str(folder)))


def learnable(seed: int) -> dict[str, Any]:
    """`gaps` decides the label where it is; a third of it is null, some is NaN."""
    random = np.random.default_rng(seed)
    gaps = random.normal(size=120)
    late = (gaps + random.normal(scale=0.3, size=120) > 0).astype(np.int8)
    values = [None if i % 3 == 0 else math.nan if i % 7 == 1 else float(v) for i, v in enumerate(gaps)]
    return {
        "gaps": pa.array(values, pa.float64()),
        "code": random.integers(0, 4, 120).astype(np.int32),
        "month": np.arange(120) % 12,
        "late": late,
    }


GAPS = Column(name="gaps", dtype="float64", nulls="mask")
COLUMNS = (GAPS, Column(name="code", dtype="int32", cardinality=4), Column(name="month", dtype="int64"), LABEL)


@pytest.fixture(params=["driver", "spark"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that fits the baselines: one for rows that fit in the driver, one for any number of them."""
    if request.param == "driver":
        return linear
    monkeypatch.setattr(linear, "MOST_CELLS", 0)
    return mllib


def fitted(
    spark: Any, dataset: Dataset, task: str = "binary", label: Column = LABEL, data: DataConfig | None = None
) -> Baselines:
    train, test = (split_rows(dataset, split, data or DataConfig(), []) for split in ("train", "test"))
    read = [column for column in dataset.manifest.columns if column.role != "weight"]
    return but_trees(fit_baselines(spark, TASKS[task], train, test, read, [label]))


def but_trees(found: Baselines) -> Baselines:
    """The guess and the linear model, which the driver and Spark have in common; test_trees.py is about trees."""
    fitted, missing = ({n: each for n, each in of.items() if n != TREES} for of in (found.fitted, found.missing))
    return Baselines(fitted, missing)


@pytest.mark.parametrize("nulls", ["mask", "fill"])
def test_nulls_and_nan_are_filled_as_the_reader_does(tmp_path: Path, nulls: Any) -> None:
    """In the driver; Spark's fit is compared with the driver's below."""
    gaps = GAPS.model_copy(update={"nulls": nulls, "fill": 0.5 if nulls == "fill" else None})
    found = fitted(None, write_table(tmp_path, (gaps, *COLUMNS[1:]), learnable))
    assert found.missing == {}
    ours, guess = found.scores[linear.LOGISTIC], found.scores[linear.MAJORITY]
    assert ours["auc"] > 0.7 and ours["loss"] < guess["loss"]


@pytest.mark.spark
def test_each_of_several_labels_has_its_rate_and_its_regression(
    by: Any, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label that no test row has counts in the loss, not in the mean AUC; a vector of labels is as its columns.

    How near a fit of Spark's is to the best one is compared below: here each of three takes 5 steps, not 50.
    """
    fit = mllib.LogisticRegression
    monkeypatch.setattr(mllib, "LogisticRegression", lambda **settings: fit(**settings | {"maxIter": 5}))

    def make(seed: int) -> dict[str, Any]:
        rows, late = learnable(seed), learnable(seed)["late"]
        rows |= {"often": (np.arange(120) % 4 > 0).astype(np.int8), "never": np.zeros(120, np.int8)}
        return rows | {"all": [[float(a), float(b), 0.0] for a, b in zip(late, rows["often"], strict=True)]}

    several = [LABEL, *(Column(name=name, dtype="int8", role="label") for name in ("often", "never"))]
    vector = Column(name="all", dtype="float32", layout="vector", shape=(3,), role="label")
    dataset = write_table(tmp_path, (*COLUMNS[:3], *several, vector), make)
    features = [*COLUMNS[:3]]
    train, test = (split_rows(dataset, split, DataConfig(), []) for split in ("train", "test"))
    found = but_trees(fit_baselines(spark, MULTILABEL, train, test, [*features, *several], several))
    rates, logistic = found.scores[by.RATES], found.scores[by.LOGISTICS]
    assert not found.missing and rates["macro_auc"] == 0.5 and logistic["macro_auc"] > 0.6
    late = np.concatenate([make(s)["late"][:60] for s in (10, 11)]).mean()
    guess = np.concatenate([make(s)["late"] for s in (0, 1)]).mean()
    expected = [constant_scores(guess, late), constant_scores(0.75, 0.75), constant_scores(0.0, 0.0)]
    assert rates["loss"] == pytest.approx(sum(each["loss"] for each in expected) / 3, rel=1e-9)
    assert logistic["loss"] < rates["loss"]
    as_vector = fit_baselines(spark, MULTILABEL, train, test, [vector], [vector])
    assert as_vector.scores[by.RATES] == pytest.approx(rates, rel=1e-12)


def test_the_mean_auc_of_several_labels_is_of_those_that_some_test_rows_have_and_not_all() -> None:
    each = [{"loss": 0.2, "accuracy": 0.9, "auc": auc} for auc in (0.9, 0.7, 0.5, 0.5)]
    assert mean_of_labels(each, [0.3, 0.1, 0.0, 1.0])["macro_auc"] == pytest.approx(0.8)
    assert mean_of_labels(each[2:], [0.0, 1.0]) == pytest.approx({"loss": 0.2, "accuracy": 0.9})


def test_more_labels_than_are_fitted_in_turn_are_said_to_have_no_regression() -> None:
    with pytest.raises(ValueError, match="21 labels, more than 20"):
        label_logistic_scores([lambda: pytest.fail("must not be made")] * 21)


@pytest.mark.spark
def test_without_scalar_features_there_is_the_majority_rate(by: Any, spark: Any, tmp_path: Path) -> None:
    vector = Column(name="v", dtype="float64", layout="vector", shape=(2,))
    dataset = write_table(
        tmp_path, (vector, LABEL), lambda seed: {"v": [[1.0, 2.0]] * 120, "late": learnable(seed)["late"]}
    )
    found = fitted(spark, dataset)
    assert list(found.scores) == [by.MAJORITY] and found.missing == {}


def rows_of(dataset: Dataset, split: str, *names: str) -> list[np.ndarray]:
    """The stored columns of a split, read from the files."""
    paths = sorted(Path(dataset.folder.uri.removeprefix("file://")).glob(f"data/{split}-*.parquet"))
    return [np.concatenate([pq.read_table(path)[name].to_numpy() for path in paths]) for name in names]


def design(code: np.ndarray, x: np.ndarray) -> np.ndarray:
    """One-hot codes, the number, and a constant, (N, 6)."""
    return np.column_stack([np.eye(4)[code], x, np.ones(len(x))])


PLAIN = (Column(name="code", dtype="int32", cardinality=4), Column(name="x", dtype="float64"))
COST = Column(name="cost", dtype="float64", role="label")
KIND = Column(name="kind", dtype="int64", role="label")


def costs(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    code, x = random.integers(0, 4, 120).astype(np.int32), random.normal(size=120)
    return {"code": code, "x": x, "cost": 50 + 10 * code + 3 * x + random.normal(size=120)}


@pytest.mark.spark
def test_a_regression_is_compared_with_the_mean_and_least_squares(by: Any, spark: Any, tmp_path: Path) -> None:
    dataset = write_table(tmp_path, (*PLAIN, COST), costs)
    found = fitted(spark, dataset, "regression", COST)
    (code, x, cost), (test_code, test_x, truth) = (rows_of(dataset, s, "code", "x", "cost") for s in SIZES)
    weights, *_ = np.linalg.lstsq(design(code, x), cost, rcond=None)
    guesses = {by.MEAN: np.full(len(truth), cost.mean()), by.LINEAR: design(test_code, test_x) @ weights}
    assert found.missing == {} and list(found.scores) == [by.MEAN, by.LINEAR]
    for name, guess in guesses.items():
        squared = np.mean((guess - truth) ** 2)
        expected = {"loss": squared, "rmse": squared**0.5, "abs_error": np.mean(abs(guess - truth))}
        assert found.scores[name] == pytest.approx(expected | {"r2": 1 - squared / truth.var()}, rel=2e-3), name
    assert found.scores[by.MEAN]["r2"] <= 0 < 0.95 < found.scores[by.LINEAR]["r2"]


@pytest.mark.spark
def test_equal_labels_have_no_share_of_variance(by: Any, spark: Any, tmp_path: Path) -> None:
    dataset = write_table(tmp_path, (*PLAIN, COST), lambda seed: costs(seed) | {"cost": np.full(120, 0.1)})
    found = fitted(spark, dataset, "regression", COST)
    assert found.missing == {} and found.scores[by.MEAN].keys() == {"loss", "rmse", "abs_error"}


WEIGHT = Column(name="w", dtype="float64", role="weight")


def weighted(dataset: Dataset) -> Dataset:
    """The dataset, whose rows count by the column `w`."""
    features = {"version": 1, "inputs": {}, "features": [], "weight": {"column": "w", "mean": 1.0}}
    return replace(dataset, manifest=DatasetManifest.model_validate(dict(dataset.manifest) | {"features": features}))


@pytest.mark.spark
def test_weighted_rows_are_compared_with_weighted_least_squares(by: Any, spark: Any, tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        return costs(seed) | {"w": np.random.default_rng(seed + 100).random(120) * (np.arange(120) % 4)}

    dataset = weighted(write_table(tmp_path, (*PLAIN, COST, WEIGHT), make))
    found = fitted(spark, dataset, "regression", COST)
    (code, x, cost, w), (test_code, test_x, truth, test_w) = (
        rows_of(dataset, split, "code", "x", "cost", "w") for split in SIZES
    )
    root = np.sqrt(w)
    plane, *_ = np.linalg.lstsq(design(code, x) * root[:, None], cost * root, rcond=None)
    guesses = {by.MEAN: np.full(len(truth), np.average(cost, weights=w)), by.LINEAR: design(test_code, test_x) @ plane}
    assert found.missing == {} and list(found.scores) == [by.MEAN, by.LINEAR]
    for name, guess in guesses.items():
        expected = task_scores(REGRESSION, truth, guess, test_w)
        assert found.scores[name] == pytest.approx(expected, rel=2e-3), name
        assert found.scores[name]["loss"] != pytest.approx(np.mean((guess - truth) ** 2), rel=1e-2)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("by", "task"),
    [("driver", "binary"), ("driver", "multiclass")]
    + [pytest.param("spark", task, marks=pytest.mark.slow) for task in ("binary", "multiclass")],
    indirect=["by"],
)
def test_rows_of_weight_0_change_nothing_and_equal_weights_neither(
    by: Any, spark: Any, tmp_path: Path, task: str
) -> None:
    label = LABEL if task == "binary" else KIND

    def make(seed: int) -> dict[str, Any]:
        made = kinds(seed)
        made["late"] = (made["kind"] == 1).astype(np.int8)
        return made | {"w": 2.5 * (np.arange(120) % 3 > 0)}

    dataset = write_table(tmp_path, (*PLAIN, label, WEIGHT), make)
    found = fitted(spark, weighted(dataset), task, label)
    filters = DataConfig.model_validate({"filters": [["w", ">", 0]]})
    train, test = (split_rows(dataset, split, filters, []) for split in SIZES)
    alone = attempted(linear.linear_fits(TASKS[task], True, lambda: linear.make_designs(train, test, PLAIN, [label])))
    assert found.missing == alone.missing == {} and len(found.scores) == len(alone.scores) == 2
    exact = 1e-6 if by is linear else 2e-2  # Spark's own fit of the same rows differs by as much
    for (name, scores), expected, rel in zip(found.scores.items(), alone.scores.values(), (1e-6, exact), strict=True):
        assert scores == pytest.approx(expected, rel=rel), name
    stored = (np.unique(*rows_of(dataset, split, label.name), return_counts=True) for split in SIZES)
    rates = class_rates(*(dict(zip(values.tolist(), rows.tolist(), strict=True)) for values, rows in stored))
    guess = found.scores[by.MAJORITY if task == "binary" else by.CLASS_RATES]
    assert guess["loss"] != pytest.approx(rates["loss"], rel=1e-3), "weights count"


@pytest.mark.spark
def test_rates_are_compared_with_their_mean_and_a_poisson_regression(by: Any, spark: Any, tmp_path: Path) -> None:
    """Claims per exposure, weighted by the exposure; the fit is that of Newton's method on the same rows."""

    def make(seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        made = costs(seed)
        exposure = random.uniform(0.2, 2.0, 120)
        claims = random.poisson(exposure * np.exp(0.3 * made["code"] + 0.4 * made["x"] - 0.5))
        return made | {"cost": claims / exposure, "w": exposure}

    dataset = weighted(write_table(tmp_path, (*PLAIN, COST, WEIGHT), make))
    found = fitted(spark, dataset, "poisson", COST)
    (code, x, rate, w), (test_code, test_x, truth, test_w) = (
        rows_of(dataset, split, "code", "x", "cost", "w") for split in SIZES
    )
    features, weights = design(code, x)[:, :5], np.zeros(5)
    for _ in range(25):
        expected = np.exp(features @ weights)
        weights += np.linalg.solve((features.T * w * expected) @ features, features.T @ (w * (rate - expected)))
    mean_rate = np.full(len(truth), np.average(rate, weights=w))
    guesses = {by.MEAN: mean_rate, by.RATE: np.exp(design(test_code, test_x)[:, :5] @ weights)}
    assert found.missing == {} and list(found.scores) == [by.MEAN, by.RATE]
    for name, guess in guesses.items():
        expected_scores = task_scores(POISSON, truth, guess, test_w)
        assert found.scores[name] == pytest.approx(expected_scores, rel=2e-2, abs=2e-3), name
    assert found.scores[by.RATE]["d2"] > 0.1 > found.scores[by.MEAN]["d2"]


def kinds(seed: int) -> dict[str, Any]:
    """Of the test rows (seeds from 10), some have the class 3, which no training row has."""
    random = np.random.default_rng(seed)
    code, x = random.integers(0, 4, 120).astype(np.int32), random.normal(size=120)
    logits = np.column_stack([0.5 * code, 2 * x, np.ones(120)]) + random.gumbel(size=(120, 3))
    kind = logits.argmax(axis=1)
    kind[:5] = 3 if seed >= 10 else kind[:5]
    return {"code": code, "x": x, "kind": kind}


def softmax_regression(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Weights (features, 3) that gradient descent finds."""
    weights = np.zeros((features.shape[1], 3))
    for _ in range(4000):
        odds = np.exp(features @ weights)
        weights -= 0.5 * features.T @ (odds / odds.sum(axis=1, keepdims=True) - np.eye(3)[labels]) / len(labels)
    return weights


@pytest.mark.spark
def test_classes_are_compared_with_their_rates_and_a_multinomial_regression(
    by: Any, spark: Any, tmp_path: Path
) -> None:
    dataset = write_table(tmp_path, (*PLAIN, KIND), kinds)
    found = fitted(spark, dataset, "multiclass", KIND)
    (code, x, kind), (test_code, test_x, truth) = (rows_of(dataset, s, "code", "x", "kind") for s in SIZES)
    odds = np.exp(design(test_code, test_x) @ softmax_regression(design(code, x), kind))
    rates = np.bincount(kind, minlength=3) / len(kind)
    guesses = {by.CLASS_RATES: np.tile(rates, (len(truth), 1)), by.MULTINOMIAL: odds / odds.sum(axis=1, keepdims=True)}
    assert found.missing == {} and list(found.scores) == [by.CLASS_RATES, by.MULTINOMIAL] and set(truth) == {0, 1, 2, 3}
    for name, probabilities in guesses.items():
        of_label = np.column_stack([probabilities, np.zeros(len(truth))])[np.arange(len(truth)), truth]
        guess, f1s = probabilities.argmax(axis=1), []
        for one in {*truth, *guess}:
            f1s.append(2 * sum((guess == one) & (truth == one)) / (sum(guess == one) + sum(truth == one)))
        expected = {"loss": -np.log(np.maximum(of_label, 1e-15)).mean(), "accuracy": (guess == truth).mean()}
        assert found.scores[name] == pytest.approx(expected | {"macro_f1": np.mean(f1s)}, rel=5e-3), name


def test_rates_of_classes_are_probabilities_and_the_most_frequent_one_is_the_guess() -> None:
    found = class_rates({0: 1, 1: 2, 2: 1}, {0: 2, 2: 6})
    loss = -(2 * math.log(0.25) + 6 * math.log(0.25)) / 8
    assert found == {"loss": pytest.approx(loss), "accuracy": 0.0, "macro_f1": 0.0}
    assert class_rates({1: 3, 0: 3}, {0: 3, 1: 1})["accuracy"] == 0.75
    assert class_rates({0: 3}, {1: 1})["loss"] == pytest.approx(-math.log(1e-15))


@pytest.mark.spark
def test_a_multinomial_regression_of_too_many_coefficients_is_not_fitted(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkring.pipelines.evaluation.baselines.guesses.MOST_COEFFICIENTS", 14)
    frame = spark.createDataFrame([(Vectors.dense([0.0] * 5), 2.0)], ["__features", "__label"])
    with pytest.raises(ValueError, match="15 coefficients, more than 14"):
        multinomial_scores(frame, frame)


# Spark reads the same rows: its frame is counted here, and its fit is the driver's below.
@pytest.mark.parametrize("by", ["driver", pytest.param("spark", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.spark
def test_all_is_compared_on_the_rows_the_ranks_read(by: Any, spark: Any, tmp_path: Path) -> None:
    """Filters and a damaged test file: predictions, groups and baselines are of the same rows."""
    dataset = write_table(tmp_path, COLUMNS, learnable)
    spoiled = tmp_path / "data/test-0.parquet"
    spoiled.write_bytes(spoiled.read_bytes()[:-1] + b"x")
    data = {"filters": [["month", "<", 5], ["gaps", ">", -1.0]], "on_corrupt": "quarantine", "tail": "pad"}
    config = RunConfig.model_validate(
        {"name": "b", "dataset": str(tmp_path), "data": data, "report": {"share_by": ["month"]}}
    )
    request = ReadRequest(dataset.folder, dataset.manifest, "test", ["month", "late"], 16)
    reader = make_reader(config.data, request, evaluation=True)
    batches = [(batch, batch.row_weights() > 0) for batch in reader.batches(0)]
    left: dict[str, Any] = {"test_left_out": left_out(reader), "train_left_out": []}
    reader.close()
    assert left["test_left_out"] == ["data/test-0.parquet"]
    scored = {
        "id": np.concatenate([b.ids[real].numpy() for b, real in batches]),
        "label": np.concatenate([b.columns["late"][real].numpy() for b, real in batches]),
        "prediction": np.concatenate([b.columns["month"][real].numpy() / 12 for b, real in batches]),
    }
    run = open_storage(str(tmp_path / "run"))
    run.put_atomic("p.parquet", b"")
    pq.write_table(pa.table(scored), tmp_path / "run/p.parquet")
    trained = train_result(train=rank_result(test={}, **left), predictions=["p.parquet"], scores={})
    job: Any = SimpleNamespace(spark=spark, config=config, dataset=dataset, folder=run)
    found, held_out = evaluate(job, trained)
    assert held_out is not None
    assert list(found.scores) == ["this model", by.MAJORITY, by.LOGISTIC, *([TREES] if by is linear else [])]
    assert (found.trees_gap is not None, list(found.missing)) == ((True, []) if by is linear else (False, [TREES]))
    best = best_baseline(found.scores)
    assert found.best_gap is not None and best in (by.MAJORITY, by.LOGISTIC), "trees know less of noise"
    gap = (found.best_gap.ours, found.best_gap.theirs)
    assert gap == pytest.approx((found.scores["this model"]["loss"], found.scores[best]["loss"]), rel=1e-9)
    assert (found.best_gap.half_width is not None) == (by is linear), "Spark keeps its predictions"
    assert held_out.groups["month"].astype(int).tolist() == (held_out.scores * 12).round().astype(int).tolist()
    kept = pq.read_table(tmp_path / "data/test-1.parquet").to_pandas().query("month < 5 and gaps > -1")
    assert len(kept) == len(held_out.labels) and held_out.labels.tolist() == kept["late"].tolist()
    test, train = (split_rows(dataset, s, config.data, left["test_left_out"]) for s in ("test", "train"))
    assert test.frame(spark, ["late"]).count() == len(kept)
    share = np.mean(train.column("late").to_pylist())
    assert {split: (each.rows, each.shares["1"]) for split, each in found.labels.items()} == {
        "train": (len(train.row_numbers()), pytest.approx(share)),
        "test": (len(kept), pytest.approx(kept["late"].mean())),
    }
    assert found.scores[by.MAJORITY] == pytest.approx(constant_scores(float(share), float(kept["late"].mean())))
    unfiltered = config.model_copy(update={"data": config.data.model_copy(update={"filters": []})})
    job.config = unfiltered
    for left_out_files, rows in ((left["test_left_out"], 60), ([], 120)):
        trained = replace(trained, train=rank_result(test={}, test_left_out=left_out_files))
        with pytest.raises(RuntimeError, match=f"for {rows} test rows"):
            evaluate(job, trained)


def test_a_baseline_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Fitted:
        raise RuntimeError("out of memory\n and more")

    found = attempted(
        {"a": fails, "b": lambda: Fitted({"loss": math.nan, "auc": 0.5}), "c": lambda: Fitted({"loss": 0.5})}
    )
    assert found.scores == {"c": {"loss": 0.5}}
    assert found.missing == {"a": "RuntimeError: out of memory", "b": "ValueError: loss: not a finite number"}
    assert len(caplog.records) == 2 and "baseline a: RuntimeError: out of memory" in caplog.text


def test_the_majority_guess_is_wrong_where_classes_flip() -> None:
    assert constant_scores(0.4, 0.6)["accuracy"] == pytest.approx(0.4)
    assert constant_scores(0.7, 0.6)["accuracy"] == 0.6
    assert constant_scores(0.4, 0.3)["accuracy"] == 0.7


def test_rows_that_do_not_fit_in_the_driver_go_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are counted with masks; of classes a row needs a probability each."""
    dataset = write_table(tmp_path, (GAPS, *PLAIN, KIND), lambda seed: {**kinds(seed), "gaps": np.zeros(120)})
    train, test = (split_rows(dataset, split, DataConfig(), []) for split in ("train", "test"))
    features = [GAPS, *PLAIN]
    for task, cells in (("regression", 4), ("binary", 4), ("multiclass", 4), ("multiclass", 5)):
        scalar = features if cells == 4 else features[1:2]
        most = 360 * (4 if cells == 4 else 3)
        monkeypatch.setattr(linear, "MOST_CELLS", most)
        assert in_driver(TASKS[task], train, test, scalar, [KIND]), (task, cells)
        monkeypatch.setattr(linear, "MOST_CELLS", most - 1)
        assert not in_driver(TASKS[task], train, test, scalar, [KIND]), (task, cells)


@pytest.mark.spark
def test_the_driver_and_spark_fit_the_same_logistic_regression(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers far from 0 and 1, a constant one, nulls and NaN, masked or filled, and codes that no training row has."""

    def make(seed: int) -> dict[str, Any]:
        rows = learnable(seed)
        rows["gaps"] = pa.array([None if v is None else 1e6 + 1e3 * v for v in rows["gaps"].to_pylist()], pa.float64())
        more = {"filled": learnable(seed + 1)["gaps"], "same": np.full(120, 0.1)}
        return rows | more | {"code": rows["code"] + (seed >= 10)}

    filled = Column(name="filled", dtype="float64", nulls="fill", fill=0.5)
    same = Column(name="same", dtype="float64")
    columns = (GAPS, filled, Column(name="code", dtype="int32", cardinality=5), same, LABEL)
    dataset = write_table(tmp_path, columns, make)
    ours = fitted(spark, dataset)
    monkeypatch.setattr(linear, "MOST_CELLS", 0)
    theirs = fitted(spark, dataset)
    assert ours.missing == theirs.missing == {}
    assert ours.scores[linear.MAJORITY] == pytest.approx(theirs.scores[mllib.MAJORITY], rel=1e-12)
    assert ours.scores[linear.LOGISTIC] == pytest.approx(theirs.scores[mllib.LOGISTIC], rel=2e-2)


def test_one_class_of_training_rows_is_the_only_guess(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        return kinds(seed) | {"kind": np.full(120, 2) if seed < 10 else np.arange(120) % 3}

    dataset = write_table(tmp_path, (*PLAIN, KIND), make)
    train, test = (split_rows(dataset, split, DataConfig(), []) for split in ("train", "test"))
    found = attempted(
        linear.linear_fits(TASKS["multiclass"], True, lambda: linear.make_designs(train, test, PLAIN, [KIND]))
    )
    rates = found.scores[linear.CLASS_RATES]
    assert found.missing == {} and found.scores[linear.MULTINOMIAL] == pytest.approx(rates, rel=1e-12)
    assert found.scores[linear.MULTINOMIAL]["accuracy"] == pytest.approx(1 / 3)
