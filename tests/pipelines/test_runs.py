"""Run folders: which run a command goes on with, and what run.json says after every kind of end."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import Resolved, load_config
from pipelines import batch, etl_job, train_job
from pipelines.runs import Runs
from training.failure import LaunchError

RECIPE = """
name: runs
dataset: {folder}/dataset
model: {{factory: training.models.tabular:Tabular}}
train: {{epochs: 1, global_batch: 10}}
storage: {{runs: {folder}/runs}}
tracking: {{enabled: false}}
"""


def resolved(folder: Path, *words: str) -> Resolved:
    recipe = folder / "runs.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    return load_config(str(recipe), words)


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_job` with its parts that need Spark or a dataset left out."""
    monkeypatch.setattr(etl_job, "wanted_fingerprint", lambda config: "f")
    monkeypatch.setattr(etl_job, "require", lambda config, fingerprint: SimpleNamespace())
    monkeypatch.setattr(batch, "spark_session", lambda config: nullcontext())
    for name in ("check_against", "describe_job", "log_dataset"):
        monkeypatch.setattr(batch, name, lambda *_, **__: None)
    monkeypatch.setattr(batch, "layout_problems_of", lambda *_: [])
    monkeypatch.setattr(batch, "check_slots", lambda spark, world, least: None)


@pytest.mark.parametrize(
    ("end", "status"),
    [(KeyboardInterrupt(), "interrupted"), (SystemExit(143), "interrupted"), (LaunchError("no room"), "failed")],
)
def test_attempt_numbers_survive_an_orderly_end(
    without_spark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: BaseException, status: str
) -> None:
    """Used again they would overwrite the audit, and MLflow would take the new attempt's points for a replay."""
    job, begun = resolved(tmp_path), []

    def train(*given: Any) -> None:
        *_, first_attempt, on_attempt = given
        begun.append(first_attempt)
        on_attempt(first_attempt)
        on_attempt(first_attempt + 1)
        raise end

    monkeypatch.setattr(train_job, "train", train)
    for attempts in (2, 4):
        with pytest.raises(type(end)):
            batch.run_job(job, etl=False, train=True)
        (record,) = Runs(job.config.storage.runs, "runs").records()
        assert (record.status, record.attempts) == (status, attempts)
    assert begun == [1, 3]


def test_a_job_begins_on_as_few_slots_as_it_may_go_on_with(
    without_spark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check_slots(spark: Any, world: int, least: int | None) -> None:
        raise LaunchError(f"{world} {least}")

    monkeypatch.setattr(batch, "check_slots", check_slots)
    with pytest.raises(LaunchError, match="4 2"):
        batch.run_job(resolved(tmp_path, "launch.world=4", "launch.min_world=2"), etl=False, train=True)
