"""What MLflow's lists and pages show of jobs: names, who and what, why one failed, models with scores and a card."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines.tracking.describe import CARD_BEGINS, VERSION, experiment_note
from sparkring.pipelines.tracking.ops import DatasetInfo, ModelInfo
from sparkring.pipelines.tracking.tags import COMMIT, ERROR, HEARTBEAT, JOB, PROCESS, RECIPE
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.pipelines.tracking.ui import pages
from sparkring.pipelines.tracking.views import NOTE, VIEW

SCORES = {"test/auc": 0.75, "test/majority_rate/auc": 0.5}
DATA = DatasetInfo(name="shop.test", uri="/data/shop", fingerprint="ab" * 32, profile={"rows": 4}, schema=[])


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrackingConfig:
    root = str(tmp_path_factory.mktemp("mlflow"))
    return TrackingConfig(root=root, flush_every_s=0.05, system_metrics=False).named("shop")


def client_of(settings: TrackingConfig) -> MlflowClient:
    return MlflowClient(settings.store_uri, registry_uri=settings.store_uri)


def started(settings: TrackingConfig, job: str, recipe: str = "shop", **more: Any) -> Tracker:
    tags = {RECIPE: recipe, COMMIT: "c0ffee+changes"}
    return Tracker(settings, job, recipe, tags, label="2024-03-01 10:00", **more)


def run_of(settings: TrackingConfig, tracker: Tracker, key: str = JOB) -> Run:
    return client_of(settings).get_run(tracker.run_id(key) or "")


def model_of(folder: Path) -> ModelInfo:
    (folder / "model").mkdir()
    (folder / "model" / "model.json").write_text('{"factor": 2}')
    return ModelInfo(
        name="shop-model", step=7, sha256="7" * 64, loader_module="tiny_loader", registered_model="shop",
        alias="champion", params={"optim.lr": "0.1"}, scores=SCORES, dataset=DATA.name, fingerprint=DATA.fingerprint,
        card=f"{CARD_BEGINS}four rows; load models:/shop/{VERSION}", about="Models of the shop.",
    )  # fmt: skip


def test_names_say_what_differs_from_the_recipes_last_job(settings: TrackingConfig) -> None:
    names = []
    for number, (recipe, lr, epochs) in enumerate([("a", 1, 1), ("b", 5, 5), ("a", 2, 1), ("a", 2, 1), ("a", 1, 3)]):
        with started(settings, f"n{number}", recipe) as tracker:
            tracker.params(JOB, {"optim": {"lr": lr}, "train": {"epochs": epochs}})
            with tracker.part("train"):
                tracker.params("train", {"optim": {"lr": 9}})
        runs = [run_of(settings, tracker, key) for key in (JOB, "train")]
        with started(settings, f"o{number}", "odd"):
            pass  # failed before it had any parameters
        names.append(runs[0].info.run_name)
        assert runs[1].info.run_name == "train 2024-03-01 10:00"
    with started(settings, "odd", "odd") as tracker:
        tracker.params(JOB, {"optim": {"lr": 1}})
    assert run_of(settings, tracker).info.run_name == "odd 2024-03-01 10:00"
    assert names == [
        "a 2024-03-01 10:00", "b 2024-03-01 10:00", "a 2024-03-01 10:00 lr=2", "a 2024-03-01 10:00",
        "a 2024-03-01 10:00 lr=1 epochs=3",
    ]  # fmt: skip


def test_a_continued_job_keeps_its_name_and_its_failure_is_gone(settings: TrackingConfig) -> None:
    with started(settings, "c0", "goes-on") as tracker:
        tracker.params(JOB, {"optim": {"lr": 1}})
    with pytest.raises(RuntimeError), started(settings, "c1", "goes-on") as tracker:
        tracker.params(JOB, {"optim": {"lr": 2}})
        tracker.tags(JOB, {NOTE: "Late flights"})
        with tracker.part("train"):
            raise RuntimeError("no room on /data\nand many more lines")
    for key in (JOB, "train"):
        tags = run_of(settings, tracker, key).data.tags
        assert tags[ERROR] == "no room on /data" and tags[NOTE].splitlines()[0] == "**failed**: no room on /data"
    failed = run_of(settings, tracker)
    assert failed.info.status == "FAILED" and failed.data.tags[NOTE].endswith("\n\nLate flights")
    with started(settings, "c1", "goes-on", resume=True) as tracker:
        tracker.params(JOB, {"optim": {"lr": 3}})
        with tracker.part("train"):
            pass
    after = run_of(settings, tracker)
    assert after.info.run_id == failed.info.run_id and after.info.run_name == "goes-on 2024-03-01 10:00 lr=2"
    assert after.data.tags[NOTE] == "Late flights" and ERROR not in after.data.tags
    assert ERROR not in run_of(settings, tracker, "train").data.tags


def test_a_job_shows_its_scores_version_card_and_who_ran_it(
    settings: TrackingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    info = model_of(tmp_path)
    with started(settings, "m1") as tracker:
        tracker.tags(JOB, {NOTE: "Late flights"})
        tracker.dataset(JOB, DATA, "testing")
        tracker.model(JOB, tmp_path / "model", info)
        time.sleep(0.01)  # the journal's clock counts milliseconds
        tracker.model(JOB, tmp_path / "model", replace(info, about="Others."))  # the end of the job, a second time
        assert tracker.settled()
        tracker.metrics(JOB, 0, SCORES | {"test/champion/auc": 0.25, "cost/core_hours_etl": 1.0})
        assert tracker.version(JOB) == "1"
    client, run = client_of(settings), run_of(settings, tracker)
    assert run.data.metrics == SCORES | {"test/champion/auc": 0.25, "system/cost/core_hours_etl": 1.0}
    points = client.get_metric_history(run.info.run_id, "test/auc")
    assert [(point.step, point.value) for point in points] == [(7, 0.75)], "one point, so no chart of a line"
    assert run.data.tags["mlflow.user"] == "ann" and run.data.tags["mlflow.source.git.commit"] == "c0ffee"
    link = "[shop version 1](#/models/shop/versions/1?workflowType=machine_learning)"
    card = f"{CARD_BEGINS}four rows; load models:/shop/1"
    assert run.data.tags[NOTE] == f"{link}: auc 0.7500\n\nLate flights\n\n{card}"
    assert PROCESS in run.data.tags and HEARTBEAT not in run.data.tags, "it has ended"
    version = client.get_model_version("shop", "1")
    assert (version.run_id, version.description) == (run.info.run_id, card)
    assert client.get_registered_model("shop").description == "Models of the shop."
    (found,) = client.search_logged_models([run.info.experiment_id], datasets=[{"dataset_name": "shop.test"}])
    scored = {(m.key, m.value, m.dataset_name, m.dataset_digest) for m in found.metrics or []}
    assert scored == {(name, value, "shop.test", ("ab" * 32)[:36]) for name, value in SCORES.items()}
    linked = pages(settings, "shop")
    assert linked["model versions"].startswith("#/models/shop?")
    note = client.get_experiment_by_name("shop").tags[NOTE]
    assert (
        f"**shop**: [runs]({linked['runs']}) · [model versions]" in note
        and f"{VIEW}shop-runs" in client.get_experiment("1").tags
    )
    assert linked["runs"].endswith("viewStateShareKey=shop-runs")
    assert found.params == {"optim.lr": "0.1"} and found.source_run_id == run.info.run_id


def test_an_experiment_says_what_it_holds_with_links_per_recipe(settings: TrackingConfig) -> None:
    for recipe in ("x", "y", "x"):
        with started(settings, f"e-{recipe}", recipe) as tracker:
            assert tracker.flush()
    tags = client_of(settings).get_experiment_by_name("shop").tags
    assert tags[NOTE].startswith(experiment_note())
    for recipe in ("x", "y"):
        (line,) = [line for line in tags[NOTE].splitlines() if line.startswith(f"**{recipe}**: ")]
        assert "[runs](#/experiments/1/runs?" in line
