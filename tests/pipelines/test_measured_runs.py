"""`sparkring plan calibrate`: a cluster fitted to the steps of finished jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.load import load_config
from sparkring.pipelines.cli import main, measured_runs
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.tracking.store import measured_jobs as store
from sparkring.pipelines.tracking.tags import CLUSTER
from sparkring.training.planner.timing.step_time import step_time
from tests.pipelines.promotion.nights import write_dataset
from tests.pipelines.test_launch_plan import RECIPE, run_here

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cluster's file, and a job that was trained on it and tracked."""
    folder = tmp_path_factory.mktemp("measured")
    write_dataset(folder / "dataset", ["a", "b", "c"], 5.0)
    (folder / "mine.yaml").write_text("extends: cpu\nnetwork: {kind: roce}\n")
    recipe = RECIPE.replace("tracking: {enabled: false}", f"tracking: {{root: {folder}/mlflow}}")
    recipe = recipe.replace("parallel: auto", "parallel: {engine: torch}").replace("epochs: 4", "epochs: 1")
    recipe = recipe.replace("min_world: 1, ", f"cluster: {folder}/mine.yaml, ")
    (folder / "recipe.yaml").write_text(recipe + f"storage: {{runs: {folder}/runs}}\n")
    run_here(folder, lambda: 2)
    return folder


def words(folder: Path, *more: str) -> list[str]:
    files = ["--cluster", str(folder / "mine.yaml"), "--out", str(folder / "fitted.yaml")]
    return ["plan", "calibrate", *files, f"tracking.root={folder}/mlflow", *more]


def test_a_job_records_what_was_predicted_and_measured_once(folder: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db")
    ids = [each.experiment_id for each in client.search_experiments()]
    (job,) = client.search_runs(ids, "tags.`sparkring.key` = 'job'")
    names = {"predicted_step_s", "measured_step_s", "step_error", "predicted_peak_bytes", "measured_peak_bytes"}
    assert {f"plan/{name}" for name in names | {"peak_error"}} <= job.data.metrics.keys()
    assert len(client.get_metric_history(job.info.run_id, "plan/step_error")) == 1
    assert job.data.tags[CLUSTER] == f"{folder}/mine.yaml" == job.data.params["launch.cluster"]
    assert job.data.tags["sparkring.machines"] == "Xeon-8-cores, roce"
    others = client.search_runs(ids, "tags.`sparkring.key` = 'train'")
    assert not [name for run in others for name in run.data.metrics if name.startswith("plan/")]


def test_too_few_jobs_are_the_same_error_as_too_few_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(folder)) == Exit.USAGE
    shown = capsys.readouterr()
    assert "1 job" in shown.out and "1 measured step cannot determine" in shown.err and "MLflow" in shown.err
    assert main([*words(folder), "--experiment", "nothing"]) == Exit.DATA
    assert "--experiment nothing: no such experiment" in capsys.readouterr().err


def test_jobs_of_other_machines_are_counted_and_the_rest_is_fitted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps as a slower machine would have taken them are learned from, whatever the model."""
    (found,) = store.measured_jobs(load_config("text", [f"tracking.root={folder}/mlflow"]).config.tracking, None)
    cluster = load_cluster(str(folder / "mine.yaml"))
    reached = {"kernel_us": 60.0, "memory": 0.42, "matmul": 0.3}
    slow = cluster.model_copy(update={"reached": cluster.reached.model_copy(update=reached)})
    step = measured_runs.step_of(measured_runs.run_of(found.job).uri, 1.0, cluster)  # type: ignore[union-attr]
    same = replace(found, step_s=step_time(step.counts, slow).total)
    gone = replace(found, job=replace(found.job, job="planned/gone", run_id="0" * 32))
    jobs = [*[same] * 18, *[replace(found, machines="H100-SXM5-80GB, efa")] * 2, gone]
    monkeypatch.setattr(store, "measured_jobs", lambda *_: jobs)
    assert main(words(folder)) == Exit.OK
    shown = capsys.readouterr().out
    assert "18 jobs; left out: 2 of other machines; left out: 1 whose folder or dataset is gone" in shown
    assert "18 steps: mean error" in shown
    fitted = load_cluster(str(folder / "fitted.yaml"))
    assert fitted.fitted_on == "18 steps of MLflow"
    before, after = (step_time(step.counts, each).total / same.step_s - 1 for each in (cluster, fitted))
    assert abs(after) < 0.05 < abs(before)


def test_jobs_of_other_machines_alone_are_nothing_to_fit_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = store.measured_jobs(load_config("text", [f"tracking.root={folder}/mlflow"]).config.tracking, None)
    monkeypatch.setattr(store, "measured_jobs", lambda *_: [replace(found, machines="H100-SXM5-80GB, efa")])
    assert main(words(folder)) == Exit.USAGE
    shown = capsys.readouterr().err
    assert "nothing to fit to: 0 jobs; left out: 1 of other machines" in shown and "Xeon-8-cores, roce" in shown
