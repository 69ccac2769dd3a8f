"""summary.json holds the whole result, and gives it back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparkring.conf.manifest import ManifestError
from sparkring.conf.storage import open_storage
from sparkring.training.worker.result import MODEL, SUMMARY, FailedAttempt, read_result
from tests.pipelines.results import rank_result, train_result

FAILED = FailedAttempt(
    attempt=1, world=3, cause="lost", message="was lost", step=None, steps_lost=7, decision="shrink", next_world=2
)


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    result = train_result(
        train=rank_result(
            best_step=None, best_value=None, predictions="predictions/a.parquet", test={"loss": 0.1 + 0.2}
        ),
        failed_attempts=[FAILED, replace(FAILED, attempt=2, step=9, recover_s=1.5)],
        history={"train/loss": [(1, 0.5), (2, 0.25)]},
        predictions=["predictions/a.parquet"],
        missing={"logistic regression": "out of memory"},
        unseen={"shop": 3},
        tracking_url="http://tracking.example/#/runs/2",
    )
    (tmp_path / SUMMARY).write_bytes(result.to_json())
    assert read_result(open_storage(str(tmp_path))) == result


def test_a_summary_holds_no_secret_and_its_configuration_stays_as_resolved() -> None:
    config = {"name": "x", "etl": {"sources": {"t": {"columns": {"n_token": "int"}}}}}
    result = train_result(config=config, missing={"baseline": "https://user:hunter2@host/ refused"})
    summary = json.loads(result.to_json())
    assert "hunter2" not in json.dumps(summary) and summary["config"] == config


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("scores", {"logistic regression": {}}, "'this model' is missing"),
        ("timings", {}, "'launch_s' is missing"),
        ("attempts", -1, "attempts = -1"),
        ("predictions", ["../elsewhere"], "must stay below its folder"),
        ("surprise", 1, "surprise"),
        ("format", 2, "upgrade sparkring"),
    ],
)
def test_a_damaged_summary_is_named_with_the_key(tmp_path: Path, key: str, value: object, problem: str) -> None:
    summary = json.loads(train_result().to_json()) | {key: value}
    (tmp_path / SUMMARY).write_text(json.dumps(summary))
    with pytest.raises(ManifestError, match=f"summary.json: .*{problem}"):
        read_result(open_storage(str(tmp_path)))


def test_a_run_that_has_not_finished_is_said_to_be_that(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"has no summary\.json: the run has not finished"):
        read_result(open_storage(str(tmp_path)))


def test_test_metrics_are_named_by_model_and_baseline() -> None:
    result = train_result(scores={MODEL: {"auc": 0.8}, "logistic regression (scikit-learn)": {"auc": 0.7}})
    assert result.test_metrics() == {"test/auc": 0.8, "test/logistic_regression/auc": 0.7}


def test_a_configuration_of_another_version_is_an_error_that_names_the_run() -> None:
    with pytest.raises(ManifestError, match=r"/runs/again/1/summary.json: the run's configuration: gone = 1"):
        train_result(config={"name": "again", "dataset": "d", "gone": 1}).run_config()
