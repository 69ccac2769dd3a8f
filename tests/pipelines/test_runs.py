"""Run folders: which run a command goes on with, and what run.json says after every kind of end."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import Resolved, load_config
from pipelines import batch, etl_job, train_job
from pipelines.runs import RunRecord, Runs, RunTaken, is_held
from training.failure import LaunchError
from training.tracking_rules import Owner

ROOT = Path(__file__).resolve().parents[2]
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
    monkeypatch.setattr(batch, "check_slots", lambda *_, **__: None)


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
    def check_slots(spark: Any, world: int, least: int | None, **_: Any) -> None:
        raise LaunchError(f"{world} {least}")

    monkeypatch.setattr(batch, "check_slots", check_slots)
    with pytest.raises(LaunchError, match="4 2"):
        batch.run_job(resolved(tmp_path, "launch.world=4", "launch.min_world=2"), etl=False, train=True)


def record(**changes: Any) -> RunRecord:
    return replace(RunRecord("r", "running", "t", "f", None, host="h/boot1", pid=20, pid_started=100.0), **changes)


@pytest.mark.parametrize(
    ("changes", "started", "held"),
    [
        ({}, 100.0, True),
        ({}, None, False),  # it has ended
        ({}, 900.0, False),  # another process has its pid now
        ({"host": "h/boot0"}, 100.0, False),  # before a reboot, or another container of this name
        ({"host": "elsewhere/boot1"}, 100.0, False),  # cannot be asked
        ({"pid": 10}, 100.0, False),  # this process itself, as in a notebook
        ({"pid_started": 0.0}, 100.0, False),  # written before start times were
    ],
)
def test_whose_process_holds_a_run(changes: dict[str, Any], started: float | None, held: bool) -> None:
    assert is_held(record(**changes), Owner("h/boot1", 10, 50.0), started) is held


BEGIN = """
import sys
from conf.load import load_config
from pipelines.runs import Runs, RunTaken
config = load_config(sys.argv[1]).config
runs = Runs(config.storage.runs, "runs")
sys.stdout.write("ready\\n"), sys.stdout.flush(), sys.stdin.readline()
try:
    print(runs.begin(config, "f")[0].folder, flush=True)
except RunTaken:
    print("taken", flush=True)
sys.stdin.readline()
"""


def test_of_commands_started_in_the_same_moment_one_takes_the_run(tmp_path: Path) -> None:
    job = resolved(tmp_path)
    runs = Runs(job.config.storage.runs, "runs")
    begun, _ = runs.begin(job.config, "f")
    runs.update(begun.folder, status="interrupted")
    command = [sys.executable, "-c", BEGIN, str(tmp_path / "runs.yaml")]
    several = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) for _ in range(3)]
    try:
        for process in several:
            assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]
        for process in several:
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        said = [process.stdout.readline().strip() for process in several]  # type: ignore[union-attr]
        assert sorted(said) == sorted([begun.folder, "taken", "taken"])
        with pytest.raises(RunTaken, match="is being trained by process"):
            runs.begin(job.config, "f")
    finally:
        for process in several:
            process.communicate("end\n")
    assert runs.begin(job.config, "f") == (runs.read(begun.folder), True)
