"""Whole trainings of trees without Spark: worlds, tasks, kills, resumption, and data that is hard to learn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xgboost

from sparkring.conf.load import load_config
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.group import WorkerGroup
from tests.training.test_worker import Job, kill_one_rank, write_table
from tests.training.trees.tables import write_homes

pytestmark = pytest.mark.ranks
ENTRY = "sparkring.training.worker.train_trees:train"
RECIPE = """
name: trees
dataset: {dataset}
model: {{family: trees}}
trees: {{rounds: 60, early_stopping_rounds: 10, learning_rate: 0.1, rows_per_leaf: 10}}
train: {{log_every_steps: 1, eval_batch: 64, threads_per_rank: 1, seed: 3}}
checkpoint: {{every_steps: 5}}
data: {{lanes: 8}}
tracking: {{enabled: false}}
"""


class TreesJob(Job):
    """What a training of trees left behind."""

    def __init__(self, folder: Path, table: Path, *words: str) -> None:
        super().__init__(folder, table)
        recipe = folder.with_suffix(".yaml")
        recipe.write_text(RECIPE.format(dataset=table))
        self.config = load_config(str(recipe), words).as_dict()

    def run(self, group: WorkerGroup, world: int, attempt: int = 1, **options: Any) -> TreesJob:  # type: ignore[override]
        super().run(group, world, attempt, entry=ENTRY, **options)
        return self

    @property
    def bits(self) -> bytes:
        return (self.folder / "model/trees.ubj").read_bytes()

    @property
    def booster(self) -> xgboost.Booster:
        return xgboost.Booster(model_file=self.folder / "model/trees.ubj")

    def predictions(self) -> np.ndarray:
        """The scores of the test rows, in the dataset's order."""
        parts = [pq.read_table(self.folder / each["predictions"]) for each in self.results if each["predictions"]]
        found: Any = pa.concat_tables(parts).sort_by("id")["prediction"].combine_chunks().to_numpy(zero_copy_only=False)
        return np.stack(found) if found.dtype == object else found


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_homes(tmp_path_factory.mktemp("homes"))


@pytest.fixture(scope="module")
def pair(group: WorkerGroup, table: Path, tmp_path_factory: pytest.TempPathFactory) -> TreesJob:
    """Two ranks, never disturbed."""
    return TreesJob(tmp_path_factory.mktemp("pair") / "run", table).run(group, 2)


def test_it_learns_stops_early_and_keeps_the_best_rounds(pair: TreesJob) -> None:
    result = pair.result
    assert result.engine == "xgboost" and result.finished and result.stopped_early
    assert result.steps == result.best_step + 10 and result.exported_step == result.best_step
    assert pair.booster.num_boosted_rounds() == result.best_step
    assert pair.valid[result.best_step]["valid/loss"] == min(values["valid/loss"] for values in pair.valid.values())
    assert pair.losses[result.steps] < 0.8 * pair.losses[1]
    assert result.test["auc"] > 0.8
    assert pair.booster.feature_names == ["price", "city", "area", "place__0", "place__1"]
    assert pair.booster.feature_types == ["q", "c", "q", "q", "q"]


def test_the_same_world_gives_the_same_bits(group: WorkerGroup, pair: TreesJob, table: Path, tmp_path: Path) -> None:
    assert TreesJob(tmp_path / "run", table).run(group, 2).bits == pair.bits


def test_another_world_differs_by_rounding_alone(
    group: WorkerGroup, pair: TreesJob, table: Path, tmp_path: Path
) -> None:
    """Each split of such a small table is found from the same intervals on any world."""
    words = ["trees.early_stopping_rounds=null", "trees.rounds=8", "trees.subsample=1", "trees.columns_per_tree=1"]
    alone, three = (TreesJob(tmp_path / f"run-{world}", table, *words).run(group, world) for world in (1, 3))
    assert three.result.valid == pytest.approx(alone.result.valid, rel=1e-4)
    np.testing.assert_allclose(three.predictions(), alone.predictions(), atol=1e-4)


def test_a_killed_rank_changes_nothing_in_the_end(
    group: WorkerGroup, pair: TreesJob, table: Path, tmp_path: Path
) -> None:
    job, killed = TreesJob(tmp_path / "run", table), list[int]()
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        job.run(group, 2, on_step=lambda step: kill_one_rank(step, 12, killed))
    job.run(group, 2, attempt=2)
    assert job.from_step >= 5, "from a checkpoint"
    assert job.bits == pair.bits and job.result.test == pair.result.test


def test_stopped_on_two_ranks_and_finished_on_three(
    group: WorkerGroup, pair: TreesJob, table: Path, tmp_path: Path
) -> None:
    words = ["trees.rounds=400", "trees.early_stopping_rounds=300"]  # so that the stop is heard before the last round
    control, job = Control(), TreesJob(tmp_path / "run", table, *words)
    job.run(group, 2, on_step=lambda step: control.stop() if step == 7 else None, control=control)
    assert not job.result.finished and 7 <= job.result.steps < 300 and job.result.weights is None
    job.run(group, 3, attempt=2)
    assert job.from_step >= 7 and job.result.finished
    assert job.result.test["loss"] == pytest.approx(pair.result.test["loss"], rel=0.1)


@pytest.mark.parametrize(
    ("kind", "metric", "outputs"),
    [("multiclass", "macro_f1", 3), ("regression", "r2", 1), ("poisson", "d2", 1)],
)
def test_other_tasks_are_learnt(group: WorkerGroup, tmp_path: Path, kind: str, metric: str, outputs: int) -> None:
    table = write_homes(tmp_path / "table", kind=kind)
    best = [] if kind == "poisson" else [f"train.best_metric={metric}", "train.best_mode=max"]
    job = TreesJob(tmp_path / "run", table, f"model.task={kind}", *best).run(group, 2)
    scores = job.predictions()
    assert scores.shape == ((200,) if outputs == 1 else (200, outputs)) and np.isfinite(scores).all()
    if kind != "poisson":
        assert job.result.test[metric] > 0.5
    else:
        labels = pq.read_table(table / "test.parquet")["label"].to_numpy()
        assert (scores > 0).all() and np.corrcoef(scores, labels)[0, 1] > 0.3


def test_several_labels_are_learnt(group: WorkerGroup, tmp_path: Path) -> None:
    """Each label has trees of its own; the columns are stored as tensors, and codes have no list."""
    words = ["model.task=multilabel", "model.label=tags", "train.best_metric=macro_auc", "train.best_mode=max"]
    job = TreesJob(tmp_path / "run", write_table(tmp_path / "tagged", tagged=True), *words).run(group, 2)
    assert job.predictions().shape == (200, 3) and job.result.test["macro_auc"] > 0.85
    assert job.booster.feature_types == ["c", "q", "q"]


def test_weights_count(group: WorkerGroup, tmp_path: Path) -> None:
    """Rows that weigh twice as much on each are the same rows: the mean is divided out."""
    table = write_homes(tmp_path / "table", weigh=True)
    weighted = TreesJob(tmp_path / "run", table).run(group, 2)
    assert weighted.bits != TreesJob(tmp_path / "plain", write_homes(tmp_path / "even")).run(group, 2).bits
    weights = np.arange(200) % 3 + 0.5
    labels = pq.read_table(table / "test.parquet")["label"].to_numpy()
    p = np.clip(weighted.predictions(), 1e-12, 1 - 1e-12)
    loss = -np.average(np.where(labels == 1, np.log(p), np.log(1 - p)), weights=weights)
    assert weighted.result.test["loss"] == pytest.approx(loss, rel=1e-5)


def test_trees_of_one_rank_are_those_of_the_library_alone(group: WorkerGroup, table: Path, tmp_path: Path) -> None:
    """On the rows in the order in which the rank reads them: equal bits."""
    words = ["trees.early_stopping_rounds=null", "trees.rounds=10", "train.export=last", "data.lanes=1"]
    words += ["trees.subsample=1", "trees.columns_per_tree=1", "trees.rows_per_leaf=0"]
    job = TreesJob(tmp_path / "run", table, *words).run(group, 1)
    assert trees_of(grown_alone(job, 10, table / "train.parquet")) == trees_of(job.booster)


def grown_alone(job: TreesJob, rounds: int, *files: Path) -> xgboost.Booster:
    """What the library alone grows on the rows of files, with the settings of a job, without samples."""
    stored = pa.concat_tables([pq.read_table(file) for file in files]).combine_chunks()
    price, area = (stored[name].to_numpy().astype(np.float32) for name in ("price", "area"))
    codes = {None: np.nan, "Oslo": 2, "Rome": 3, "Lima": 4, "Bern": 1}
    city = np.array([codes[name] for name in stored["city"].to_pylist()], np.float32)
    place = np.stack(stored["place"].combine_chunks().to_numpy(zero_copy_only=False))
    rows = np.column_stack([price, city, area, place]).astype(np.float32)
    matrix = xgboost.QuantileDMatrix(
        rows,
        stored["label"].to_numpy(),
        feature_names=job.booster.feature_names,
        feature_types=job.booster.feature_types,
        enable_categorical=True,
    )
    block = job.config["trees"]
    params = {
        "objective": "binary:logistic",
        "learning_rate": block["learning_rate"],
        "max_depth": block["max_depth"],
        "min_child_weight": block["rows_per_leaf"],
        "max_cat_threshold": block["categories_per_split"],
        "nthread": 1,
    }
    return xgboost.train(params, matrix, rounds)


def trees_of(booster: xgboost.Booster) -> Any:
    return json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]


def test_a_refit_grows_the_best_rounds_on_the_validation_rows_too(
    group: WorkerGroup, table: Path, tmp_path: Path
) -> None:
    """What is said of the validation rows is of the trees that have not seen them."""
    words = ["trees.subsample=1", "trees.columns_per_tree=1", "data.lanes=1", "trees.rows_per_leaf=0"]
    plain = TreesJob(tmp_path / "plain", table, *words).run(group, 1)
    job = TreesJob(tmp_path / "run", table, *words, "trees.refit=true").run(group, 1)
    assert job.result.exported_step == plain.result.best_step < job.result.steps
    alone = grown_alone(job, plain.result.best_step, table / "train.parquet", table / "valid.parquet")
    assert trees_of(alone) == trees_of(job.booster) != trees_of(plain.booster)
    assert job.result.exported_valid == plain.result.exported_valid and job.result.test != plain.result.test


def test_a_refit_of_several_ranks_has_the_same_bits_again(group: WorkerGroup, table: Path, tmp_path: Path) -> None:
    """Also where a command goes on after the last round; and where the rows are in pages."""
    words = ["trees.refit=true", "trees.rounds=12"]
    job = TreesJob(tmp_path / "run", table, *words).run(group, 2)
    bits, scored = job.bits, job.result.test
    assert TreesJob(tmp_path / "other", table, *words).run(group, 2).bits == bits
    (tmp_path / "run/model/trees.ubj").unlink()
    assert job.run(group, 2, attempt=2).bits == bits and job.result.test == scored
    paged = TreesJob(tmp_path / "paged", table, *words, "trees.memory_share=1e-12").run(group, 2)
    assert paged.result.test["loss"] == pytest.approx(scored["loss"], rel=0.05)


def test_hooks_see_rounds_and_change_nothing(group: WorkerGroup, pair: TreesJob, table: Path, tmp_path: Path) -> None:
    job = TreesJob(tmp_path / "run", table, "train.hooks=[tests.training.own_hooks:Notes]").run(group, 2)
    assert job.bits == pair.bits
    seen = [json.loads(line) for line in (tmp_path / "run/seen").read_text().splitlines()]
    steps = [each for each in seen if each["kind"] == "StepSeen"]
    assert [each["step"] for each in steps] == [*range(1, job.result.steps + 1)]
    assert steps[4]["loss"] == pytest.approx(job.losses[5], rel=1e-12)
    evaluations = [each for each in seen if each["kind"] == "EvaluationSeen"]
    assert evaluations[4]["metrics"]["loss"] == pair.valid[5]["valid/loss"]
    assert {each["step"] for each in seen if each["kind"] == "CheckpointSeen"} >= {5, 10}


def test_rows_that_do_not_fit_into_memory_are_kept_on_disk(
    group: WorkerGroup, pair: TreesJob, table: Path, tmp_path: Path
) -> None:
    """In other pages, so with other sums; the same small table has the same intervals."""
    words = ["trees.rounds=8", "trees.subsample=1", "trees.columns_per_tree=1", "trees.early_stopping_rounds=null"]
    held, paged = (
        TreesJob(tmp_path / f"run-{share}", table, *words, f"trees.memory_share={share}").run(group, 2)
        for share in (0.5, 1e-12)
    )
    np.testing.assert_allclose(paged.predictions(), held.predictions(), atol=1e-4)


# --- data that is hard to learn from


def test_a_column_that_is_constant_or_null_on_one_rank_is_learnt_from_the_others(
    group: WorkerGroup, tmp_path: Path
) -> None:
    """With 2 lanes the first rank reads every other block of rows."""

    def half_null(values: pa.Array, split: str) -> pa.Array:
        first = np.arange(len(values)) // 16 % 2 == 0
        return pa.array([None if one else value for one, value in zip(first, values.to_pylist(), strict=True)])

    table = write_homes(tmp_path / "table", price=half_null)
    assert TreesJob(tmp_path / "run", table, "data.lanes=2").run(group, 2).result.test["auc"] > 0.6
    empty = write_homes(tmp_path / "empty", price=lambda values, split: pa.nulls(len(values), pa.float64()))
    assert TreesJob(tmp_path / "none", empty).run(group, 2).result.test["auc"] > 0.6


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_label_of_one_class_is_predicted_always(group: WorkerGroup, tmp_path: Path, label: float) -> None:
    def only(values: pa.Array, split: str) -> pa.Array:
        return pa.array(np.full(len(values), label)) if split == "train" else values

    table = write_homes(tmp_path / "table", label=only)
    job = TreesJob(tmp_path / "run", table, "trees.rounds=3").run(group, 2)
    assert np.abs(job.predictions() - label).max() < 0.1


def test_a_label_of_one_class_on_one_rank_is_learnt(group: WorkerGroup, tmp_path: Path) -> None:
    def sorted_by_block(values: pa.Array, split: str) -> pa.Array:
        return pa.array((np.arange(len(values)) // 16 % 2).astype(float)) if split == "train" else values

    table = write_homes(tmp_path / "table", label=sorted_by_block)
    assert TreesJob(tmp_path / "run", table, "data.lanes=2").run(group, 2).result.finished


def test_more_ranks_than_rows(group: WorkerGroup, tmp_path: Path) -> None:
    table = write_homes(tmp_path / "table", sizes={"train": 2, "valid": 1, "test": 2})
    job = TreesJob(tmp_path / "run", table, "trees.rounds=3", "data.lanes=4").run(group, 3)
    assert job.result.finished and len(job.predictions()) == 2


def test_a_split_without_rows_is_refused(group: WorkerGroup, tmp_path: Path) -> None:
    table = write_homes(tmp_path / "table", sizes={"train": 100, "valid": 0, "test": 20})
    with pytest.raises(WorkerFailed, match="the split has no rows, so there is no batch to read"):
        TreesJob(tmp_path / "run", table).run(group, 2)


def test_infinite_values_are_refused_by_column(group: WorkerGroup, tmp_path: Path) -> None:
    def one_infinite(values: pa.Array, split: str) -> pa.Array:
        return pa.array([float("inf"), *values.to_pylist()[1:]])

    table = write_homes(tmp_path / "table", price=one_infinite)
    with pytest.raises(WorkerFailed, match=r"\['price'\]: 1 infinite value in .* rows; null or clip them"):
        TreesJob(tmp_path / "run", table).run(group, 2)


def test_a_label_that_is_no_number_is_refused(group: WorkerGroup, tmp_path: Path) -> None:
    def one_nan(values: pa.Array, split: str) -> pa.Array:
        return pa.array([float("nan"), *values.to_pylist()[1:]])

    table = write_homes(tmp_path / "table", kind="regression", label=one_nan)
    with pytest.raises(WorkerFailed, match=r"label \['label'\]: 1 infinite or NaN value in .* row"):
        TreesJob(tmp_path / "run", table, "model.task=regression").run(group, 2)
