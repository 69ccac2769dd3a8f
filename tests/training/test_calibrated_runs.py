"""Trainings of both families whose probabilities are calibrated: the model folder, serving and champion agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.calibrate import calibrate, read_scored
from sparkring.pipelines.evaluation.evaluate import HeldOut, prediction_values, read_predictions
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.pipelines.promotion.champion import predict_test_rows, read_champion
from sparkring.pipelines.serving import Predictor, make_predictor
from sparkring.pipelines.tracking.alias import Version
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.model.calibration import FILE, read_calibration
from sparkring.training.model.folder import describe_model, model_files, weights_sha256
from sparkring.training.worker.result import Trained
from tests.pipelines.results import train_result
from tests.training.test_worker import Job, fifths, write_table
from tests.training.test_worker_trees import TreesJob
from tests.training.trees.tables import write_homes

pytestmark = pytest.mark.ranks
# With few rows, long training and no brake, both families become far too certain.
NET = ["train.epochs=40", "optim.lr=0.03", "train.export=last", "model.args={width: 64, blocks: 2, bumps: 8}"]
TREES = ["trees.early_stopping_rounds=null", "trees.learning_rate=0.5", "trees.rounds=60", "train.export=last"]


def trained_of(job: Job) -> Trained:
    scored = [r["exported_valid"] for r in job.results if r["exported_valid"]]
    files = [[r["predictions"] for r in each if r["predictions"]] for each in (job.results, scored)]
    return Trained(
        train=job.result, attempts=1, failed_attempts=[], history={}, per_step_s={}, once_s={},
        predictions=files[0], valid_predictions=files[1],
    )  # fmt: skip


def table_of(kind: str, folder: Path) -> Path:
    if kind == "net":
        return write_table(folder)
    return write_homes(folder, kind="multiclass" if kind == "classes" else "binary")


def train(kind: str, group: WorkerGroup, table: Path, folder: Path, *words: str, world: int = 2) -> Job:
    if kind == "net":
        return Job(folder / "run", table, *NET, *words).run(group, world)
    more = ["model.task=multiclass"] if kind == "classes" else []
    return TreesJob(folder / "run", table, *TREES, *more, *words).run(group, world)


@pytest.mark.parametrize("kind", ["net", "trees", "classes"])
def test_every_consumer_of_a_calibrated_model_sees_the_same_probabilities(
    kind: str, group: WorkerGroup, tmp_path: Path
) -> None:
    table = table_of(kind, tmp_path / "table")
    job = train(kind, group, table, tmp_path)
    config, run = RunConfig.model_validate(job.config), open_storage(str(job.folder))
    dataset = Dataset(read_manifest(open_storage(str(table))), open_storage(str(table)))
    model, trained = run.at("model"), trained_of(job)
    describe_model(model, config, dataset.manifest)
    before = weights_sha256(model)
    valid = read_scored(config.model.kind, run, trained.valid_predictions)
    assert valid.loss == pytest.approx(job.result.valid["loss"], rel=1e-6), "all validation rows, by the exported model"

    fit = calibrate(config, run, trained, {})
    assert fit is not None and fit.kept is not None and fit.loss_after < fit.loss_before
    assert fit.kept.scale < 0.9, "it was too certain"
    assert read_calibration(model) == fit.kept and FILE in model_files(model)
    assert weights_sha256(model) == before, "the weights are as they were"

    rows = split_rows(dataset, "test", config.data, [])
    labels, own = read_predictions(run, trained.predictions, rows)
    held_out = HeldOut(labels, own).calibrated(fit)
    assert np.abs(held_out.scores - own).max() > 0.01
    result = train_result(run=run.uri, predictions=trained.predictions, calibration=fit)
    assert prediction_values(result).tobytes() == held_out.scores.tobytes()
    predictor = make_predictor(model)
    assert isinstance(predictor, Predictor)
    stored = pq.read_table(table / "data/test-00000.parquet" if kind == "net" else table / "test.parquet")
    served = predictor.scores_of_stored(stored.select(predictor.stored_columns))
    np.testing.assert_allclose(served, held_out.scores, atol=1e-5)
    champion = read_champion(Version("homes", "1", at_ms=1, date=None), model, config)
    np.testing.assert_allclose(predict_test_rows(champion, config, dataset, rows), held_out.scores, atol=1e-5)

    model.delete(FILE)  # as an older sparkring left it
    older = make_predictor(model)
    assert isinstance(older, Predictor)
    np.testing.assert_allclose(older.scores_of_stored(stored.select(older.stored_columns)), own, atol=1e-5)


@pytest.mark.parametrize("kind", ["net", "trees"])
def test_any_world_gives_the_same_validation_rows(kind: str, group: WorkerGroup, tmp_path: Path) -> None:
    """Of weighted rows: each with its weight, in the dataset's order."""
    table = write_table(tmp_path / "table", weigh=fifths) if kind == "net" else write_homes(tmp_path / "table")
    found = []
    for world in (1, 3):
        job = train(kind, group, table, tmp_path / str(world), "train.epochs=1", world=world)
        config, run = RunConfig.model_validate(job.config), open_storage(str(job.folder))
        found.append(read_scored(config.model.kind, run, trained_of(job).valid_predictions))
    np.testing.assert_array_equal(found[0].labels, found[1].labels)
    np.testing.assert_array_equal(found[0].weights, found[1].weights)
    assert found[0].weights.mean() == pytest.approx(1) and (kind == "trees" or np.ptp(found[0].weights) > 1)


def test_no_calibration_is_fitted_where_none_is_wanted_or_its_rows_train_the_model(
    group: WorkerGroup, tmp_path: Path, caplog: Any
) -> None:
    table = write_table(tmp_path / "table")
    caplog.set_level("INFO")
    of_training = "validation rows are training rows"
    for words, said in [(["model.calibrate=none"], ""), (["train.valid_split=train"], of_training)]:
        job = train("net", group, table, tmp_path / words[0], *words, "train.epochs=1", world=1)
        model = open_storage(str(job.folder / "model"))
        model.put_atomic(FILE, b"of an attempt before")
        config, trained = RunConfig.model_validate(job.config), trained_of(job)
        assert trained.valid_predictions == []
        assert calibrate(config, open_storage(str(job.folder)), trained, {}) is None and not model.exists(FILE)
        assert said in caplog.text
