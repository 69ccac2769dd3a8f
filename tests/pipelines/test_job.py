"""What a job refuses before anything is launched for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, load_config
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.job.etl_job import run_etl
from sparkring.pipelines.job.job import conclude, known_run_id, nightly_values, note_end
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.runs import RunRecord, Runs
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.pipelines.validate.recipe import check_against, metric_problems_of
from sparkring.training.tasks import Task
from sparkring.training.worker.result import DriftFinding, Promotion
from tests.helpers.datasets import manifest_of, unread_file
from tests.pipelines.results import train_result

SPLITS = ("train", "valid", "test")
COLUMNS = (
    Column(name="carrier", dtype="int32", cardinality=4),
    Column(name="late", dtype="bool", role="label"),
    Column(name="photo", dtype="float32", layout="vector", shape=(3,), role="meta"),
)


class OwnTask(Task):
    """A user's task: made of a dataset's columns, so its metrics are known once there is one."""

    def __init__(self, features: list[str], label: str, inputs: list[str] | None):
        assert features == ["carrier"] and label == "late"

    def metric_names(self) -> tuple[str, ...]:
        return ("gini",)

    def _not_trained_here(self, *_: Any) -> Any:
        raise AssertionError("a check of names computes nothing")

    inputs = loss = metric_sums = _not_trained_here


def config(**blocks: Any) -> RunConfig:
    small = {"args": {"width": 4, "blocks": 1}}
    blocks["model"] = small | blocks.get("model", {})
    return RunConfig.model_validate({"name": "b", "dataset": "somewhere"} | blocks)


def manifest() -> DatasetManifest:
    return manifest_of(
        columns=COLUMNS,
        files=tuple(unread_file(name, 5000) for name in SPLITS),
        name="b",
    )


def refusal(config: RunConfig, folder: Path) -> str:
    try:
        check_against(config, Dataset(manifest(), open_storage(str(folder))))
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ({"report": {"share_by": ["carier"]}},
         "report.share_by = 'carier': the dataset has no such column, the report groups by scalar ones; "
         "did you mean 'carrier'?"),
        ({"report": {"groups": ["photo"]}}, "report.groups = 'photo': the dataset has it as a vector column"),
        ({"report": {"share_by": ["photo"]}}, "report.share_by = 'photo': the dataset has it as a vector column"),
        ({"train": {"best_metric": "acuracy"}},
         "train.best_metric = 'acuracy': no validation metric of model.task = 'binary'; did you mean 'accuracy'?"),
        ({"train": {"early_stopping": {"metric": "foo"}}},
         "train.early_stopping.metric = 'foo': no validation metric of model.task = 'binary'; there are ['accuracy', "),
        ({"model": {"inputs": ["carier"]}}, "model.inputs"),
        ({"model": {"task": f"{__name__}:OwnTask"}, "train": {"best_metric": "ginny"}}, "did you mean 'gini'?"),
    ],
)  # fmt: skip
def test_a_name_there_is_not_is_refused_before_a_process_is_started(
    blocks: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refusal(config(**blocks), tmp_path)


def test_names_there_are_pass(tmp_path: Path) -> None:
    early = {"best_metric": "accuracy", "early_stopping": {"metric": "positive_share"}}
    assert refusal(config(report={"share_by": ["carrier", "late"]}, train=early), tmp_path) == ""
    assert refusal(config(model={"task": f"{__name__}:OwnTask"}, train={"best_metric": "gini"}), tmp_path) == ""


def test_a_dataset_that_is_there_is_found_without_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A session of Spark takes ten seconds and a JVM."""
    (tmp_path / "_manifest.json").write_bytes(manifest().to_json().encode())
    resolved = load_config("flights", ["etl=null", f"dataset={tmp_path}", "tracking.enabled=false"])
    monkeypatch.setattr("sparkring.pipelines.run.spark.spark_session", None)
    with caplog.at_level("INFO"):
        assert run_etl(resolved) == Exit.OK
    assert f"dataset: {tmp_path} is there already" in caplog.text


def test_metrics_of_a_built_in_task_are_checked_before_a_dataset_is_built() -> None:
    (said,) = metric_problems_of(config(train={"best_metric": "macro_f1"}))
    assert said.startswith("train.best_metric = 'macro_f1': no validation metric")
    assert metric_problems_of(config(train={"best_metric": "auc", "early_stopping": {"metric": "f1"}})) == []
    assert metric_problems_of(config(model={"task": f"{__name__}:OwnTask"}, train={"best_metric": "auc"})) == []
    assert metric_problems_of(config(model={"task": "language_model"}, train={"best_metric": "loss"})) == []


def test_a_night_adds_scores_the_champions_drift_seconds_and_cost_to_the_history() -> None:
    found = DriftFinding(column="dep delay", measure="psi", value=0.25, max=0.2, action="warn", exceeded=True)
    unknown = DriftFinding(column="b", measure="psi", value=None, max=0.2, action="warn", exceeded=False)
    promotion = Promotion(
        decision="held", reasons=[], alias="champion", champion_scores={"loss": 0.75}, drift=[found, unknown]
    )
    result = train_result(promotion=promotion, cost={"core_hours_etl": 0.5}, timings={"launch_s": 1.0, "total_s": 9.0})
    assert nightly_values(result) == {
        "test/loss": 0.5, "test/champion/loss": 0.75, "drift/dep_delay/psi": 0.25, "cost/core_hours_etl": 0.5,
        "time/total_s": 9.0, "steps": 10,
    }  # fmt: skip
    assert "drift/dep_delay/psi" not in nightly_values(train_result(timings={"launch_s": 1.0, "total_s": 9.0}))


def test_a_model_that_is_not_promoted_says_why(caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig.model_validate({"name": "again", "dataset": "/d"})
    job: Any = SimpleNamespace(config=config, tracker=Tracker(TrackingConfig(enabled=False), job="j", name="again"))
    assert conclude(job, train_result(), ["loss 0.5000 does not beat 0.4000 of trees"]) == Exit.QUALITY
    assert "not promoted: loss 0.5000 does not beat 0.4000 of trees; 'champion' stays where it was" in caplog.text


def test_a_status_that_cannot_be_written_does_not_hide_why_the_job_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk: here the run's folder is gone, and a file is where it would be made again."""
    runs = Runs(str(tmp_path / "runs"), "b")
    with runs.begin(config(), "f" * 64) as (record, _):
        folder = tmp_path / "runs/b" / record.folder
        shutil.rmtree(folder)
        folder.write_text("")
        note_end(runs, record, "failed")
    assert "run.json still says 'running', not 'failed'" in caplog.text


def test_a_store_that_is_slow_does_not_take_the_known_run_from_a_continued_job(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(TrackingConfig(enabled=False), job="j", name="n")
    record = RunRecord("n/1", "running", "0" * 64, "f", "known", "h", 1, 1)
    assert known_run_id(tracker, record) == "known"
    monkeypatch.setattr(tracker, "run_id", lambda timeout_s: "new")
    assert known_run_id(tracker, record) == "new"
