"""Whole training jobs with hashed ids: worlds, kills and resumption leave the same tables behind, and they serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import MANIFEST_NAME, Column, DatasetManifest, read_manifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.serving import make_predictor
from sparkring.training.data.features.xxhash64 import hash_whole
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.model.folder import TABLES, copy_model_files, describe_model
from tests.training.test_worker import Job, kill_one_rank, write_table

pytestmark = pytest.mark.ranks
TABLE = "hashed.column_who"
SETTINGS = ("model.args.dropout=0", "tables.optimizer=adam", "tables.lr=0.02", "train.export=last", "data.audit=false")


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table of test_worker.py whose `code` a model sees as a hashed id only."""
    folder = write_table(tmp_path_factory.mktemp("hashed"))
    plain = read_manifest(open_storage(str(folder)))
    code = Column(name="code", dtype="int32", role="input", logical="int", nulls="keep")
    state = {"version": 1, "inputs": {"code": "int"}, "features": [{"name": "who", "kind": "hashed", "column": "code"}]}
    parts = {"columns": (code, *plain.columns[1:]), "features": state}
    (folder / MANIFEST_NAME).write_text(DatasetManifest.model_validate(dict(plain) | parts).to_json())
    return folder


@pytest.fixture(scope="module")
def alone(group: WorkerGroup, hashed: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("alone") / "run", hashed, *SETTINGS).run(group, 1)


@pytest.fixture(scope="module")
def pair(group: WorkerGroup, hashed: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("pair") / "run", hashed, *SETTINGS).run(group, 2)


def rows_of(job: Job, tmp: Path) -> np.ndarray:
    """The rows of the seven ids, as the finished model has them; and of one that no row has."""
    return predictor(job, tmp).model.hashed["column_who"](torch.from_numpy(hash_whole(np.arange(8)))).numpy()


def predictor(job: Job, tmp: Path) -> Any:
    model = open_storage(str(job.folder / "model"))
    describe_model(model, RunConfig.model_validate(job.config), read_manifest(open_storage(str(job.table))))
    copy_model_files(model, open_storage(str(tmp)))
    return make_predictor(open_storage(str(tmp)))


def test_hashed_ids_are_learned_and_the_model_serves_what_was_scored(alone: Job, tmp_path: Path) -> None:
    """The label depends on `code` more than on x: a model without it would not come so far."""
    assert alone.losses[30] < 0.85 * alone.losses[1] and alone.result.tables == {
        TABLE: {"rows": 7, "admitted": 7, "evicted": 0, "bytes": alone.result.tables[TABLE]["bytes"]}
    }
    served = predictor(alone, tmp_path / "model")
    rows = pq.read_table(alone.table / "data/test-00000.parquet").to_pandas()
    scored = pq.read_table(alone.folder / alone.result.predictions).to_pandas().sort_values("id")
    got = served.predict(rows[["code", "x", "y"]])["prediction"]
    assert np.abs(got.to_numpy() - scored["prediction"].to_numpy()).max() < 1e-12
    size = sum(path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file())
    unknown = served.predict(pd.DataFrame({"code": [10**6], "x": [0.0], "y": [0.0]}))
    assert np.isfinite(unknown["prediction"][0])
    assert size == sum(path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file())


def test_two_ranks_leave_the_tables_of_one(alone: Job, pair: Job, tmp_path: Path) -> None:
    assert (pair.folder / "model" / TABLES).exists()
    assert len([*(pair.folder / "model/tables" / TABLE).iterdir()]) == 2
    one, two = rows_of(alone, tmp_path / "one"), rows_of(pair, tmp_path / "two")
    assert np.abs(one - two).max() < 1e-9 and (one[7] == two[7]).all()
    for name, weight in alone.weights().items():
        torch.testing.assert_close(pair.weights()[name], weight, rtol=1e-8, atol=1e-10)
    assert pair.result.valid == pytest.approx(alone.result.valid, rel=1e-9)
    totals = {name: count for name, count in pair.result.tables[TABLE].items() if name != "bytes"}
    assert totals == {"rows": 7, "admitted": 7, "evicted": 0}
    hot = pair.result.hot_ids[TABLE]
    assert hot == alone.result.hot_ids[TABLE] and (hot.total, hot.missed) == (pair.result.consumed_samples, 0)
    assert {id_ for id_, _ in hot.top} == set(hash_whole(np.arange(7)).tolist())


def test_a_killed_rank_changes_no_bit_of_a_table(group: WorkerGroup, hashed: Path, pair: Job, tmp_path: Path) -> None:
    job, killed = Job(tmp_path / "run", hashed, *SETTINGS), list[int]()
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        job.run(group, 2, on_step=lambda step: kill_one_rank(step, 12, killed))
    job.run(group, 2, attempt=2)
    assert job.from_step >= 5 and job.result.finished
    assert (rows_of(job, tmp_path / "again") == rows_of(pair, tmp_path / "before")).all()
    for name, weight in pair.weights().items():
        assert torch.equal(job.weights()[name], weight), name
    assert job.result.tables == pair.result.tables and job.result.hot_ids == pair.result.hot_ids


def test_a_lagged_run_is_the_same_in_bits_with_a_kill_and_wherever_checkpoints_are(
    group: WorkerGroup, hashed: Path, pair: Job, tmp_path: Path
) -> None:
    """Rows pulled ahead are in checkpoints: pulled anew after one, they would have gradients that they lack here."""
    settings = (*SETTINGS, "tables.lag=2", "optim.clip_norm=null")
    whole = Job(tmp_path / "whole", hashed, *settings, "checkpoint.every_steps=1000").run(group, 2)
    job, killed = Job(tmp_path / "run", hashed, *settings), list[int]()
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        job.run(group, 2, on_step=lambda step: kill_one_rank(step, 12, killed))
    job.run(group, 2, attempt=2)
    assert job.from_step >= 5 and job.result.finished
    rows = rows_of(whole, tmp_path / "before")
    assert np.abs(rows - rows_of(pair, tmp_path / "none")).max() > 1e-6, "a lag changes what is learned"
    assert (rows_of(job, tmp_path / "again") == rows).all()
    for name, weight in whole.weights().items():
        assert torch.equal(job.weights()[name], weight), name
    for step in job.folder.glob("checkpoints/step-*"):
        if int(step.name.removeprefix("step-")) > 15:
            (step / "COMMIT.json").unlink()
    job.run(group, 1, attempt=3)
    assert job.from_step == 15 and np.abs(rows_of(job, tmp_path / "one") - rows).max() < 1e-9


def test_a_warm_start_begins_with_the_rows_of_the_model_before(
    group: WorkerGroup, hashed: Path, alone: Job, tmp_path: Path
) -> None:
    """With a rate of about 0 the model that is started from is what is scored; without its rows it would not be."""
    before = rows_of(alone, tmp_path / "before")
    words = (f"warm_start.model={alone.folder}/model", "optim.lr=1e-12", "tables.lr=1e-12", "optim.warmup_steps=0")
    job = Job(tmp_path / "run", hashed, *SETTINGS, *words, "train.epochs=1").run(group, 2)
    assert np.abs(rows_of(job, tmp_path / "after") - before).max() < 1e-6
    assert job.result.test["loss"] == pytest.approx(alone.result.test["loss"], rel=1e-6)
    for file in job.folder.glob("checkpoints/step-*/*/rank-00000.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])  # with no good checkpoint, dense part and tables begin so again
    job.run(group, 2, attempt=2)
    assert job.from_step == 0 and np.abs(rows_of(job, tmp_path / "again") - before).max() < 1e-6
    assert job.result.test["loss"] == pytest.approx(alone.result.test["loss"], rel=1e-6)


def test_a_run_of_two_ranks_is_finished_by_one(group: WorkerGroup, hashed: Path, alone: Job, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", hashed, *SETTINGS, "parallel.zero=1").run(group, 2)
    for step in job.folder.glob("checkpoints/step-*"):
        if int(step.name.removeprefix("step-")) > 15:
            (step / "COMMIT.json").unlink()
    job.run(group, 1, attempt=2)
    assert job.from_step == 15 and job.result.finished
    assert np.abs(rows_of(job, tmp_path / "one") - rows_of(alone, tmp_path / "two")).max() < 1e-9
