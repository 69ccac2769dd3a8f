"""Sweeps of a small table: trials below one run in MLflow, failed and pruned ones among them; killed and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run

from sparkring.conf.load import load_config
from sparkring.conf.storage import open_storage
from sparkring.pipelines.cli import main
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.sweep import study
from sparkring.pipelines.tracking.tags import ERROR
from sparkring.pipelines.tracking.views import NOTE
from sparkring.training.checkpoint.catalog import committed
from tests import waits

pytestmark = pytest.mark.spark
ROWS = 4000
PARENT = "mlflow.parentRunId"


def write(folder: Path, space: dict[str, Any], train: dict[str, Any], **settings: Any) -> list[str]:
    """A recipe of a curve in x, and the file of a sweep; the words of the command."""
    random = np.random.default_rng(0)
    x = random.normal(size=ROWS)
    late = random.random(ROWS) < 1 / (1 + np.exp(-2 * np.sin(3 * x)))
    pq.write_table(pa.table({"id": np.arange(ROWS), "x": x, "late": late.astype(int)}), folder / "rows.parquet")
    types = {"id": "bigint", "x": "double", "late": "bigint"}
    recipe = {
        "name": "shop",
        "etl": {
            "sources": {"rows": {"path": "rows.parquet", "format": "parquet", "columns": types}},
            "rows": "rows", "key": ["id"], "label": "late", "features": {"x": {"kind": "numeric"}},
        },
        "model": {"args": {"width": 16, "blocks": 1}},
        "train": {"global_batch": 200, "threads_per_rank": 1} | train,
        "report": {"must_beat": ["auc"]},
        "launch": {"world": 1},
        "parallel": {"engine": "torch"},
        "checkpoint": {"allow_other_order": True},  # no trial goes on from another, which would be a mix of the two
        "tracking": {"system_metrics": False, "flush_every_s": 0.2},
    }  # fmt: skip
    (folder / "shop.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    (folder / "space.yaml").write_text(yaml.safe_dump({"space": space} | settings, sort_keys=False))
    return ["sweep", "shop.yaml", "space.yaml"]


def runs_below(folder: Path) -> tuple[MlflowClient, dict[str, list[Run]]]:
    """The runs of the experiment by the id of their parent, oldest first; '' has those without one."""
    client = MlflowClient(f"sqlite:///{folder}/data/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("shop")
    assert experiment is not None
    found: dict[str, list[Run]] = {}
    for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]):
        found.setdefault(run.data.tags.get(PARENT, ""), []).append(run)
    return client, found


def test_a_sweep_keeps_complete_pruned_and_failed_trials_and_writes_the_best_recipe(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    space = {"optim.lr": {"low": 1e-3, "high": 0.1, "log": True}, "train.global_batch": {"choices": [200, 3900]}}
    words = write(tmp_path, space, {"epochs": 60}, metric="auc", trials=3, seed=2, sampler="random")
    ends_early = study.Trial.falls_behind

    def falls_behind(trial: study.Trial, step: int, value: float) -> bool:
        ends_early(trial, step, value)
        return trial.number == 2 and step == 16

    monkeypatch.setattr(study.Trial, "falls_behind", falls_behind)
    assert main(words) == Exit.OK, capsys.readouterr().err
    *_, last = capsys.readouterr().out.splitlines()
    said = json.loads(last)
    client, runs = runs_below(tmp_path)
    (parent,) = runs[""]
    trials = runs[parent.info.run_id]
    etl = [run.info.run_name for run in trials if run.info.run_name.startswith("etl ")]
    trials = [run for run in trials if run.info.run_name not in etl]
    assert said["trials"] == {"complete": 1, "pruned": 1, "failed": 1} and said["exit_code"] == 0
    assert said["mlflow_run_id"] == parent.info.run_id and len(etl) == 1, "one dataset for all"
    assert all(set(run.data.params) == set(space) for run in trials) and len(trials) == 3
    assert len(list(tmp_path.glob("data/runs/shop-sweep/*/run.json"))) == 3, "each trial has a run of its own"
    (failed,) = [run for run in trials if run.info.status == "FAILED"]
    assert ": 1 problem: train.global_batch = 3900: larger than the training split" in failed.data.tags[ERROR]
    assert failed.data.params["train.global_batch"] == "3900"
    (pruned,) = [run for run in trials if "sparkring.pruned" in run.data.tags]
    assert pruned.info.run_name.startswith("trial 2 lr=")
    scored = {run.info.run_name: run.data.metrics["valid/auc"] for run in trials if run not in (failed, pruned)}
    best = said["best"]
    assert best["value"] == pytest.approx(max(scored.values())) and len(scored) == 1
    assert parent.data.params["space.optim.lr"] == "0.001 to 0.1, log" and parent.data.params["mode"] == "max"
    points = client.get_metric_history(parent.info.run_id, "valid/auc")
    assert sorted(point.value for point in points) == pytest.approx(sorted(scored.values()))
    table = parent.data.tags[NOTE]
    assert (
        f"| {best['number']} | {best['value']:.6g} | lr=" in table and "| pruned |" in table and "| failed: " in table
    )
    recipe = load_config(best["recipe"]).config
    assert recipe.optim.lr == best["values"]["optim.lr"] and recipe.report.must_beat == ["auc"]
    assert (recipe.name, recipe.train.best_metric, recipe.train.best_mode) == ("shop", "auc", "max")
    assert recipe.train.test_split == "test" and not client.search_registered_models()
    assert main(words) == Exit.OK, "all is done"
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["best"] == best


@pytest.mark.slow
def test_a_killed_sweep_goes_on_in_the_trial_it_was_in(tmp_path: Path) -> None:
    train = {"steps": 3000, "eval_every_steps": 500}
    words = write(tmp_path, {"optim.lr": {"low": 1e-3, "high": 1e-2}}, train, trials=3)
    command = [sys.executable, "-m", "sparkring.pipelines.cli", *words, "checkpoint.every_steps=500"]

    def start(log: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=tmp_path, text=True, start_new_session=True, stdout=subprocess.PIPE,
            stderr=(tmp_path / log).open("w"),
        )  # fmt: skip

    process = start("first")
    folder = tmp_path / "data/runs/shop-sweep"

    def is_in_second_trial() -> bool:
        assert process.poll() is None, (tmp_path / "first").read_text()[-3000:]
        begun = sorted(folder.glob("2*-*/run.json"))
        return len(begun) == 2 and bool(committed(open_storage(str(begun[1].parent / "checkpoints")))[0])

    waits.wait_for(is_in_second_trial)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    second = start("second")
    out, _ = second.communicate(timeout=600)
    log = (tmp_path / "second").read_text()
    assert second.returncode == 0, log
    said = json.loads(out.splitlines()[-1])
    assert said["trials"] == {"complete": 3, "pruned": 0, "failed": 0}
    assert "trial 2, which continues trial 1: lr=" in log and "the dataset" not in log
    assert len(list(folder.glob("2*-*/run.json"))) == 3, "the half-done run went on in its folder"
    _, runs = runs_below(tmp_path)
    (parent,) = runs[""]
    assert parent.info.status == "FINISHED" and parent.info.run_id == said["mlflow_run_id"]
    trials = [run for run in runs[parent.info.run_id] if run.info.run_name.startswith("trial ")]
    assert [run.info.status for run in trials] == ["FINISHED"] * 3
    (train_of,) = runs[trials[1].info.run_id]
    assert int(train_of.data.tags["sparkring.resumed_from_step"]) >= 500
