"""A network and trees in one job: the better one is registered, and each training goes on where it was ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

from sparkring.conf.storage import open_storage
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.training.model.folder import weights_sha256
from tests import waits
from tests.e2e.commands import run_here
from tests.e2e.test_trees_job import write_recipe
from tests.helpers.modules import ship_module, write_module
from tests.helpers.signals import stopped_when

pytestmark = pytest.mark.spark
ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = ("run", "visits.yaml", "model.family=both", "model.blend=none", "train.epochs=2", "report.must_beat=[]")
BLEND = (*WORDS, "model.blend=auto", "trees.rounds=12", "trees.max_depth=2", "train.epochs=5", "optim.lr=0.02")
PACED = """
import math
import time
from pathlib import Path

from sparkring.training.hooks import Hook

FOLDER = Path({folder!r})


class Paced(Hook):
    def on_step(self, seen):
        family = "trees" if math.isnan(seen.grad_norm) else "net"
        while seen.step == 8 and (FOLDER / f"hold-{{family}}").exists():
            (FOLDER / f"held-{{family}}").touch()
            time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def folder(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("families")
    write_recipe(found)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(found))
        yield found


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The run folder of a job that nothing ended."""
    done = run_here(folder, *WORDS)
    assert done.returncode == Exit.OK, done.stderr
    assert "  family   trees by valid loss " in done.stderr
    return newest(folder)


def newest(folder: Path) -> Path:
    return sorted(folder.glob("data/runs/visits/*/run.json"))[-1].parent


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def digests(run: Path) -> dict[str, str]:
    return {family: weights_sha256(open_storage(str(run / family / "model"))) for family in ("net", "trees")}


def test_the_better_family_is_the_model_and_the_job_says_why(folder: Path, undisturbed: Path) -> None:
    found = summary(undisturbed)
    choice, trees = found["choice"], json.loads((undisturbed / "trees/trained.json").read_text())["trained"]
    assert choice["winner"] == "trees" and choice["values"]["trees"] == pytest.approx(trees["train"]["best_value"])
    assert choice["values"]["net"] - choice["values"]["trees"] > choice["half_width"] > 0
    assert found["train"]["engine"] == "xgboost" and found["train"]["weights"] == "trees/model"
    assert found["config"]["model"]["family"] == "trees"
    client = MlflowClient(f"sqlite:///{folder}/data/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("visits")
    assert experiment is not None
    runs = {run.data.tags["sparkring.key"]: run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {"job", "etl", "train-trees", "train-net", "evaluate"}
    job = runs["job"]
    assert {runs[key].data.tags["mlflow.parentRunId"] for key in runs if key != "job"} == {job.info.run_id}
    assert job.data.tags["sparkring.family"] == "trees" and job.data.params["model.family"] == "both"
    assert job.data.metrics["valid/net/loss"] == choice["values"]["net"]
    assert runs["train-net"].data.params["model.family"] == "net"
    version = client.get_model_version_by_alias("visits", "champion")
    assert version.tags["sparkring.weights_sha256"] == digests(undisturbed)["trees"]


@pytest.mark.slow
def test_the_better_family_is_applied_and_reproduced(folder: Path, undisturbed: Path) -> None:
    assert run_here(folder, "predict", "visits.yaml").returncode == Exit.OK
    again = run_here(folder, "reproduce", str(undisturbed))
    assert again.returncode == Exit.OK and "reproduced: bits are equal" in again.stdout, again.stderr


@pytest.mark.slow
def test_a_network_that_is_better_is_judged_against_a_champion_of_trees(folder: Path, undisturbed: Path) -> None:
    better = ("trees.rounds=1", "trees.learning_rate=0.01", "optim.lr=0.02", "train.epochs=8")
    done = run_here(folder, *WORDS, *better)
    assert done.returncode == Exit.QUALITY, done.stderr
    found = summary(newest(folder))
    assert found["choice"]["winner"] == "net" and found["config"]["model"]["family"] == "net"
    assert found["promotion"]["champion"] == "1" and found["promotion"]["decision"] == "rejected"
    assert found["train"]["weights"] == "net/model" and found["plan"]
    assert run_here(folder, "predict", "visits.yaml", "model=models:/visits/2").returncode == Exit.OK
    again = run_here(folder, "reproduce", str(newest(folder)))
    assert again.returncode == Exit.OK and "reproduced: bits are equal" in again.stdout, again.stderr


@pytest.mark.slow
def test_a_job_killed_in_one_family_and_stopped_in_the_other_gives_the_same(
    spark: Any, folder: Path, undisturbed: Path
) -> None:
    module = write_module(folder, PACED.format(folder=str(folder)))
    ship_module(spark, module)
    words = (*WORDS, f"train.hooks=[{module.stem}:Paced]", "checkpoint.every_steps=5")
    for family in ("trees", "net"):
        (folder / f"hold-{family}").touch()
    log = folder / "started.log"
    command = [sys.executable, "-m", "sparkring.pipelines.cli", *words]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True)

    def is_held() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        return (folder / "held-trees").exists() and any(newest(folder).glob("trees/checkpoints/*/COMMIT.json"))

    waits.wait_for(is_held)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    killed = newest(folder)
    assert killed != undisturbed and not (killed / "trees/trained.json").exists() and not (killed / "net").exists()
    (folder / "hold-trees").unlink()

    with pytest.raises(SystemExit) as ended, stopped_when((folder / "held-net").exists, (folder / "hold-net").unlink):
        run_here(folder, *words)
    assert ended.value.code == 143 and newest(folder) == killed
    assert (killed / "trees/trained.json").exists() and not (killed / "net/trained.json").exists()
    history = json.loads((killed / "trees/trained.json").read_text())["trained"]
    assert history["resumed_from"] == 5, "trees went on at their checkpoint"

    done = run_here(folder, *words)
    assert done.returncode == Exit.OK, done.stderr
    assert "trees: trained by an earlier command" in done.stderr and newest(folder) == killed
    assert json.loads((killed / "net/trained.json").read_text())["trained"]["resumed_from"] is not None
    assert digests(killed) == digests(undisturbed)
    before, after = summary(undisturbed), summary(killed)
    assert after["choice"]["values"] == before["choice"]["values"] and after["scores"] == before["scores"]
    assert after["choice"]["half_width"] == before["choice"]["half_width"]


@pytest.mark.slow
def test_a_blend_is_judged_registered_applied_and_reproduced(folder: Path, undisturbed: Path) -> None:
    """Of trees and a network that are both short of what they could learn; the champion is a model of trees."""
    client = MlflowClient(f"sqlite:///{folder}/data/mlflow/mlflow.db")
    champion = str(
        client.get_model_version_by_alias("visits", "champion").version
    )  # another test may have registered it
    done = run_here(folder, *BLEND)
    assert done.returncode in (Exit.OK, Exit.QUALITY), done.stderr
    run = newest(folder)
    found = summary(run)
    choice = found["choice"]
    assert choice["winner"] == "both" and 0 < choice["share"] < 1, choice
    assert choice["values"]["both"] < min(choice["values"][family] for family in ("net", "trees"))
    assert found["train"]["weights"] == "model" and found["config"]["model"]["family"] == "both"
    assert found["promotion"]["champion"] == champion and found["predictions"] == ["predictions/blend/test.parquet"]
    model = open_storage(str(run / "model"))
    assert {*model.list_files()} >= {"weights.safetensors", "trees.ubj", "blend.json"}
    assert weights_sha256(model) == json.loads((run / "reproduce.json").read_text())["weights_sha256"]
    assert found["importance"] and found["trees_gap"] is not None

    words = ("predict", "visits.yaml", f"model={run}/model", "predict.contributions=true", "predict.to=blended")
    assert run_here(folder, *words).returncode == Exit.OK
    scored = pq.read_table(folder / "blended").to_pandas()
    labels = pq.read_table(folder / "visits.parquet").to_pandas()
    assert len(scored) == len(labels) and scored["prediction"].between(0, 1).all()
    odds = np.log(scored["prediction"] / (1 - scored["prediction"]))
    sums = scored["contribution_base"] + [sum(dict(row).values()) for row in scored["contributions"]]
    np.testing.assert_allclose(sums, odds, rtol=1e-3, atol=1e-3)
    again = run_here(folder, "reproduce", str(run))
    assert again.returncode == Exit.OK and "reproduced: bits are equal" in again.stdout, again.stderr
