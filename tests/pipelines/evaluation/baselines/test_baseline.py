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
from sklearn.linear_model import LogisticRegression

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import ROW_NUMBER, Column, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.conf.tasks import BINARY, MULTICLASS, MULTILABEL, POISSON, REGRESSION, TASKS, TaskKind
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.baselines import baseline, linear
from sparkring.pipelines.evaluation.baselines import design as designs
from sparkring.pipelines.evaluation.baselines.baseline import (
    Baselines,
    Fitted,
    attempted,
    best_baseline,
    fit_baselines,
    score,
)
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


def fitted(dataset: Dataset, task: str = "binary", label: Column = LABEL, data: DataConfig | None = None) -> Baselines:
    train, test = (split_rows(dataset, split, data or DataConfig(), []) for split in ("train", "test"))
    read = [column for column in dataset.manifest.columns if column.role != "weight"]
    return but_trees(fit_baselines(TASKS[task], train, test, read, [label]))


def but_trees(found: Baselines) -> Baselines:
    """The guess and the linear model; test_trees.py is about trees."""
    fitted, missing = ({n: each for n, each in of.items() if n != TREES} for of in (found.fitted, found.missing))
    return Baselines(fitted, missing)


@pytest.mark.parametrize("nulls", ["mask", "fill"])
def test_nulls_and_nan_are_filled_as_the_reader_does(tmp_path: Path, nulls: Any) -> None:
    gaps = GAPS.model_copy(update={"nulls": nulls, "fill": 0.5 if nulls == "fill" else None})
    found = fitted(write_table(tmp_path, (gaps, *COLUMNS[1:]), learnable))
    assert found.missing == {}
    ours, guess = found.scores[linear.LOGISTIC], found.scores[linear.MAJORITY]
    assert ours["auc"] > 0.7 and ours["loss"] < guess["loss"]


def log_loss(guess: float, share: float) -> float:
    """The loss of one guess for rows of which `share` are positive."""
    return -(share * math.log(guess) + (1 - share) * math.log(1 - guess))


def test_each_of_several_labels_has_its_rate_and_its_regression(tmp_path: Path) -> None:
    """A label that no test row has counts in the loss, not in the mean AUC; a vector of labels is as its columns."""

    def make(seed: int) -> dict[str, Any]:
        rows, late = learnable(seed), learnable(seed)["late"]
        rows |= {"often": (np.arange(120) % 4 > 0).astype(np.int8), "never": np.zeros(120, np.int8)}
        return rows | {"all": [[float(a), float(b), 0.0] for a, b in zip(late, rows["often"], strict=True)]}

    several = [LABEL, *(Column(name=name, dtype="int8", role="label") for name in ("often", "never"))]
    vector = Column(name="all", dtype="float32", layout="vector", shape=(3,), role="label")
    dataset = write_table(tmp_path, (*COLUMNS[:3], *several, vector), make)
    features = [*COLUMNS[:3]]
    train, test = (split_rows(dataset, split, DataConfig(), []) for split in ("train", "test"))
    found = but_trees(fit_baselines(MULTILABEL, train, test, [*features, *several], several))
    rates, logistic = found.scores[linear.RATES], found.scores[linear.LOGISTICS]
    assert not found.missing and rates["macro_auc"] == 0.5 and logistic["macro_auc"] > 0.6
    late = np.concatenate([make(s)["late"][:60] for s in (10, 11)]).mean()
    guess = np.concatenate([make(s)["late"] for s in (0, 1)]).mean()
    assert rates["loss"] == pytest.approx((log_loss(guess, late) + log_loss(0.75, 0.75)) / 3, rel=1e-9)
    assert logistic["loss"] < rates["loss"]
    as_vector = fit_baselines(MULTILABEL, train, test, [vector], [vector])
    assert as_vector.scores[linear.RATES] == pytest.approx(rates, rel=1e-12)


def test_more_labels_than_are_fitted_in_turn_are_said_to_have_no_regression() -> None:
    rows = designs.Design(np.ones((4, 1)), np.zeros((4, 1), np.int32), np.eye(4, 21), None, (), 1)
    with pytest.raises(ValueError, match="21 labels, more than 20"):
        linear.fit_logistic(rows)


def test_without_scalar_features_there_is_the_majority_rate(tmp_path: Path) -> None:
    vector = Column(name="v", dtype="float64", layout="vector", shape=(2,))
    dataset = write_table(
        tmp_path, (vector, LABEL), lambda seed: {"v": [[1.0, 2.0]] * 120, "late": learnable(seed)["late"]}
    )
    found = fitted(dataset)
    assert list(found.scores) == [linear.MAJORITY] and found.missing == {}


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


def test_a_regression_is_compared_with_the_mean_and_least_squares(tmp_path: Path) -> None:
    dataset = write_table(tmp_path, (*PLAIN, COST), costs)
    found = fitted(dataset, "regression", COST)
    (code, x, cost), (test_code, test_x, truth) = (rows_of(dataset, s, "code", "x", "cost") for s in SIZES)
    weights, *_ = np.linalg.lstsq(design(code, x), cost, rcond=None)
    guesses = {linear.MEAN: np.full(len(truth), cost.mean()), linear.LINEAR: design(test_code, test_x) @ weights}
    assert found.missing == {} and list(found.scores) == [linear.MEAN, linear.LINEAR]
    for name, guess in guesses.items():
        squared = np.mean((guess - truth) ** 2)
        expected = {"loss": squared, "rmse": squared**0.5, "abs_error": np.mean(abs(guess - truth))}
        assert found.scores[name] == pytest.approx(expected | {"r2": 1 - squared / truth.var()}, rel=2e-3), name
    assert found.scores[linear.MEAN]["r2"] <= 0 < 0.95 < found.scores[linear.LINEAR]["r2"]


def test_equal_labels_have_no_share_of_variance(tmp_path: Path) -> None:
    dataset = write_table(tmp_path, (*PLAIN, COST), lambda seed: costs(seed) | {"cost": np.full(120, 0.1)})
    found = fitted(dataset, "regression", COST)
    assert found.missing == {} and found.scores[linear.MEAN].keys() == {"loss", "rmse", "abs_error"}


WEIGHT = Column(name="w", dtype="float64", role="weight")


def weighted(dataset: Dataset) -> Dataset:
    """The dataset, whose rows count by the column `w`."""
    features = {"version": 1, "inputs": {}, "features": [], "weight": {"column": "w", "mean": 1.0}}
    return replace(dataset, manifest=DatasetManifest.model_validate(dict(dataset.manifest) | {"features": features}))


def test_weighted_rows_are_compared_with_weighted_least_squares(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        return costs(seed) | {"w": np.random.default_rng(seed + 100).random(120) * (np.arange(120) % 4)}

    dataset = weighted(write_table(tmp_path, (*PLAIN, COST, WEIGHT), make))
    found = fitted(dataset, "regression", COST)
    (code, x, cost, w), (test_code, test_x, truth, test_w) = (
        rows_of(dataset, split, "code", "x", "cost", "w") for split in SIZES
    )
    root = np.sqrt(w)
    plane, *_ = np.linalg.lstsq(design(code, x) * root[:, None], cost * root, rcond=None)
    guesses = {
        linear.MEAN: np.full(len(truth), np.average(cost, weights=w)),
        linear.LINEAR: design(test_code, test_x) @ plane,
    }
    assert found.missing == {} and list(found.scores) == [linear.MEAN, linear.LINEAR]
    for name, guess in guesses.items():
        expected = task_scores(REGRESSION, truth, guess, test_w)
        assert found.scores[name] == pytest.approx(expected, rel=2e-3), name
        assert found.scores[name]["loss"] != pytest.approx(np.mean((guess - truth) ** 2), rel=1e-2)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_rows_of_weight_0_change_nothing_and_equal_weights_neither(tmp_path: Path, task: str) -> None:
    label = LABEL if task == "binary" else KIND

    def make(seed: int) -> dict[str, Any]:
        made = kinds(seed)
        made["late"] = (made["kind"] == 1).astype(np.int8)
        return made | {"w": 2.5 * (np.arange(120) % 3 > 0)}

    dataset = write_table(tmp_path, (*PLAIN, label, WEIGHT), make)
    found = fitted(weighted(dataset), task, label)
    filters = DataConfig.model_validate({"filters": [["w", ">", 0]]})
    alone = fitted(dataset, task, label, filters)
    assert found.missing == alone.missing == {} and len(found.scores) == len(alone.scores) == 2
    for name, scores in found.scores.items():
        assert scores == pytest.approx(alone.scores[name], rel=1e-6), name
    name = linear.MAJORITY if task == "binary" else linear.CLASS_RATES
    assert found.scores[name]["loss"] != pytest.approx(fitted(dataset, task, label).scores[name]["loss"], rel=1e-3)


def test_rates_are_compared_with_their_mean_and_a_poisson_regression(tmp_path: Path) -> None:
    """Claims per exposure, weighted by the exposure; the fit is that of Newton's method on the same rows."""

    def make(seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        made = costs(seed)
        exposure = random.uniform(0.2, 2.0, 120)
        claims = random.poisson(exposure * np.exp(0.3 * made["code"] + 0.4 * made["x"] - 0.5))
        return made | {"cost": claims / exposure, "w": exposure}

    dataset = weighted(write_table(tmp_path, (*PLAIN, COST, WEIGHT), make))
    found = fitted(dataset, "poisson", COST)
    (code, x, rate, w), (test_code, test_x, truth, test_w) = (
        rows_of(dataset, split, "code", "x", "cost", "w") for split in SIZES
    )
    features, weights = design(code, x)[:, :5], np.zeros(5)
    for _ in range(25):
        expected = np.exp(features @ weights)
        weights += np.linalg.solve((features.T * w * expected) @ features, features.T @ (w * (rate - expected)))
    mean_rate = np.full(len(truth), np.average(rate, weights=w))
    guesses = {linear.MEAN: mean_rate, linear.RATE: np.exp(design(test_code, test_x)[:, :5] @ weights)}
    assert found.missing == {} and list(found.scores) == [linear.MEAN, linear.RATE]
    for name, guess in guesses.items():
        expected_scores = task_scores(POISSON, truth, guess, test_w)
        assert found.scores[name] == pytest.approx(expected_scores, rel=2e-2, abs=2e-3), name
    assert found.scores[linear.RATE]["d2"] > 0.1 > found.scores[linear.MEAN]["d2"]


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


def test_classes_are_compared_with_their_rates_and_a_multinomial_regression(tmp_path: Path) -> None:
    dataset = write_table(tmp_path, (*PLAIN, KIND), kinds)
    found = fitted(dataset, "multiclass", KIND)
    (code, x, kind), (test_code, test_x, truth) = (rows_of(dataset, s, "code", "x", "kind") for s in SIZES)
    odds = np.exp(design(test_code, test_x) @ softmax_regression(design(code, x), kind))
    rates = np.bincount(kind, minlength=3) / len(kind)
    guesses = {
        linear.CLASS_RATES: np.tile(rates, (len(truth), 1)),
        linear.MULTINOMIAL: odds / odds.sum(axis=1, keepdims=True),
    }
    assert (
        found.missing == {}
        and list(found.scores) == [linear.CLASS_RATES, linear.MULTINOMIAL]
        and set(truth) == {0, 1, 2, 3}
    )
    for name, probabilities in guesses.items():
        of_label = np.column_stack([probabilities, np.zeros(len(truth))])[np.arange(len(truth)), truth]
        guess, f1s = probabilities.argmax(axis=1), []
        for one in {*truth, *guess}:
            f1s.append(2 * sum((guess == one) & (truth == one)) / (sum(guess == one) + sum(truth == one)))
        expected = {"loss": -np.log(np.maximum(of_label, 1e-15)).mean(), "accuracy": (guess == truth).mean()}
        assert found.scores[name] == pytest.approx(expected | {"macro_f1": np.mean(f1s)}, rel=5e-3), name


def scores_of(kind: TaskKind, labels: list[int], guess: Any) -> dict[str, float]:
    """The scores of one guess for all rows, of which each is a file."""
    cell = (np.ones((1, 1)), np.zeros((1, 1), np.int32))
    files = [designs.Design(*cell, np.array([[label]]), None, (), 1) for label in labels]
    return score(kind, {"guess": linear.BaselineModel(lambda _: np.array([guess]), 0)}, files).scores["guess"]


def test_rates_of_classes_are_probabilities_and_a_class_without_training_rows_has_none() -> None:
    found = scores_of(MULTICLASS, [0, 0, 2, 2, 2, 3], [0.25, 0.5, 0.25])
    loss = -(5 * math.log(0.25) + math.log(1e-15)) / 6
    assert found == {"loss": pytest.approx(loss), "accuracy": 0.0, "macro_f1": 0.0}


def test_a_multinomial_regression_of_too_many_coefficients_is_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MOST_COEFFICIENTS", 14)
    rows = designs.Design(np.ones((3, 5)), np.zeros((3, 5), np.int32), np.array([[0.0], [1], [2]]), None, (), 5)
    with pytest.raises(ValueError, match="15 coefficients, more than 14"):
        linear.fit_multinomial(rows)


def test_all_is_compared_on_the_rows_the_ranks_read(tmp_path: Path) -> None:
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
    job: Any = SimpleNamespace(spark=None, config=config, dataset=dataset, folder=run)
    found, held_out = evaluate(job, trained)
    assert held_out is not None
    assert list(found.scores) == ["this model", linear.MAJORITY, linear.LOGISTIC, TREES]
    assert found.trees_gap is not None and found.missing == {}
    best = best_baseline(found.scores)
    assert found.best_gap is not None and best in (linear.MAJORITY, linear.LOGISTIC), "trees know less of noise"
    gap = (found.best_gap.ours, found.best_gap.theirs)
    assert gap == pytest.approx((found.scores["this model"]["loss"], found.scores[best]["loss"]), rel=1e-9)
    assert found.best_gap.half_width is not None
    assert held_out.groups["month"].astype(int).tolist() == (held_out.scores * 12).round().astype(int).tolist()
    kept = pq.read_table(tmp_path / "data/test-1.parquet").to_pandas().query("month < 5 and gaps > -1")
    assert len(kept) == len(held_out.labels) and held_out.labels.tolist() == kept["late"].tolist()
    test, train = (split_rows(dataset, s, config.data, left["test_left_out"]) for s in ("test", "train"))
    assert sum(batch.num_rows for batch in test.doubles(["late"])) == len(kept)
    share = np.mean(train.column("late").to_pylist())
    assert {split: (each.rows, each.shares["1"]) for split, each in found.labels.items()} == {
        "train": (len(train.row_numbers()), pytest.approx(share)),
        "test": (len(kept), pytest.approx(kept["late"].mean())),
    }
    majority = found.scores[linear.MAJORITY]
    assert majority["loss"] == pytest.approx(log_loss(float(share), kept["late"].mean())) and majority["auc"] == 0.5
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
    flips: list[tuple[list[int], float]] = [([1, 1, 1, 0, 0], 0.4), ([1, 1, 1, 0, 0], 0.7), ([1, 0, 0, 0, 0], 0.4)]
    assert [scores_of(BINARY, *each)["accuracy"] for each in flips] == [0.4, 0.6, 0.8]


def test_of_very_many_training_rows_the_first_of_each_file_are_fitted_and_all_test_rows_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells are counted with masks; of classes a row needs a probability each."""
    dataset = write_table(tmp_path, (GAPS, *PLAIN, KIND), lambda seed: {**kinds(seed), "gaps": np.zeros(120)})
    train, test = (split_rows(dataset, split, DataConfig(), []) for split in ("train", "test"))
    read = [GAPS, *PLAIN, KIND]
    whole = fit_baselines(TASKS["multiclass"], train, test, read, [KIND])
    assert {each.rows for each in whole.fitted.values()} == {240}
    monkeypatch.setattr(designs, "MOST_CELLS", 240 * 4 // 3)
    found = fit_baselines(TASKS["multiclass"], train, test, read, [KIND])
    assert found.missing == {} and {name: each.rows for name, each in found.fitted.items()} == {
        linear.CLASS_RATES: 80,
        linear.MULTINOMIAL: 80,
        TREES: 80,
    }
    assert all(len(each.predictions) == 120 for each in found.fitted.values() if each.predictions is not None)
    (kind,) = rows_of(dataset, "train", "kind")
    rates = np.bincount(np.concatenate([kind[:40], kind[120:160]]), minlength=3) / 80
    assert found.fitted[linear.CLASS_RATES].predictions is not None
    assert found.fitted[linear.CLASS_RATES].predictions[0][:3] == pytest.approx(rates)
    monkeypatch.setattr(designs, "MOST_CELLS", 3 * 50)  # of 4 cells: 37 rows, 19 of each file; of 3 classes: 50
    assert fit_baselines(TASKS["multiclass"], train, test, read, [KIND]).fitted[linear.MULTINOMIAL].rows == 38
    alone = fit_baselines(TASKS["multiclass"], train, test, [PLAIN[1], KIND], [KIND])
    assert (alone.fitted[linear.CLASS_RATES].rows, alone.fitted[linear.MULTINOMIAL].rows) == (150, 50)


def test_more_predictions_than_the_driver_holds_leave_the_baseline_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write_table(tmp_path, (*PLAIN, KIND), kinds)
    monkeypatch.setattr(baseline, "MOST_PREDICTIONS", 120 * 3)
    assert fitted(dataset, "multiclass", KIND).missing == {}
    monkeypatch.setattr(baseline, "MOST_PREDICTIONS", 120 * 3 - 1)
    missing = fitted(dataset, "multiclass", KIND).missing
    assert len(missing) == 2 and all("more than 359 predictions of test rows" in why for why in missing.values())


def test_a_logistic_regression_is_that_of_dense_one_hot_columns(tmp_path: Path) -> None:
    """Numbers far from 0 and 1, a constant one, nulls and NaN, masked or filled, and codes that no training row has."""

    def make(seed: int) -> dict[str, Any]:
        rows = learnable(seed)
        rows["gaps"] = pa.array([None if v is None else 1e6 + 1e3 * v for v in rows["gaps"].to_pylist()], pa.float64())
        more = {"filled": learnable(seed + 1)["gaps"], "same": np.full(120, 0.5)}
        return rows | more | {"code": rows["code"] + (seed >= 10)}

    filled = Column(name="filled", dtype="float64", nulls="fill", fill=0.5)
    same = Column(name="same", dtype="float64")
    columns = (GAPS, filled, Column(name="code", dtype="int32", cardinality=5), same, LABEL)
    dataset = write_table(tmp_path, columns, make)
    found = fitted(dataset)
    both = []
    for split in SIZES:
        paths = sorted(tmp_path.glob(f"data/{split}-*.parquet"))
        table = pa.concat_tables([pq.read_table(path) for path in paths])
        numbers = [np.nan_to_num(table[name].to_numpy(), nan=fill) for name, fill in (("gaps", 0.0), ("filled", 0.5))]
        numbers += [table["same"].to_numpy(), table["gaps"].is_valid().to_numpy().astype(float)]
        both.append((np.column_stack(numbers), np.eye(5)[table["code"].to_numpy()], table["late"].to_numpy()))
    (numbers, codes, late), (of_test, test_codes, test_late) = both
    middle, deviation = numbers.mean(axis=0), np.maximum(numbers.std(axis=0), 1e-9)
    model = LogisticRegression(C=1 / (1e-5 * 240), max_iter=5000)
    model.fit(np.column_stack([(numbers - middle) / deviation, codes]), late)
    odds = model.predict_proba(np.column_stack([(of_test - middle) / deviation, test_codes]))[:, 1]
    expected = task_scores(BINARY, test_late, odds)
    assert found.missing == {}
    assert found.scores[linear.LOGISTIC]["loss"] == pytest.approx(expected["loss"], rel=2e-2)


def test_one_class_of_training_rows_is_the_only_guess(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        return kinds(seed) | {"kind": np.full(120, 2) if seed < 10 else np.arange(120) % 3}

    dataset = write_table(tmp_path, (*PLAIN, KIND), make)
    found = fitted(dataset, "multiclass", KIND)
    rates = found.scores[linear.CLASS_RATES]
    assert found.missing == {} and found.scores[linear.MULTINOMIAL] == pytest.approx(rates, rel=1e-12)
    assert found.scores[linear.MULTINOMIAL]["accuracy"] == pytest.approx(1 / 3)
