"""`sparkring` as a user runs it: processes, exit codes, MLflow, a user's own table and model (examples/own_table).

Commands whose process is not the claim run in this one: Java and the imports take longer than what they do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from mlflow.pyfunc import load_model

from sparkring.etl.raw import unpack_flights
from sparkring.pipelines.model.check import ask, data_folder, import_problem
from tests import waits
from tests.e2e.commands import run_here
from tests.helpers.modules import ship_module, write_module
from tests.helpers.signals import stopped_when

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "own_table"
LIMIT_S = 400
STOPPING = "stopping after a last checkpoint"


class Workplace:
    """A folder with raw tables where commands are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {"PYTHONPATH": f"{ROOT}:{EXAMPLE}:{folder}", "MLFLOW_DISABLE_TELEMETRY": "true"}
        self.pace = Pace(folder)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "sparkring.pipelines.cli", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=LIMIT_S
        )

    def run_here(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_here(self.folder, *words)

    def start(self, *words: str) -> subprocess.Popen[str]:
        log = (self.folder / "started.log").open("w")
        return subprocess.Popen(
            self.command(*words),
            cwd=self.folder,
            env=self.env,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def newest_checkpoint(self) -> int:
        """Step of the newest committed checkpoint of the newest run."""
        folders = (self.folder / "data/runs/weather" / self.record()["folder"]).glob("checkpoints/step-*/COMMIT.json")
        return max(int(path.parent.name.removeprefix("step-")) for path in folders)

    def mlflow(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.folder}/data/mlflow/mlflow.db")

    def mlflow_runs(self) -> list[Any]:
        client = self.mlflow()
        experiment = client.get_experiment_by_name("weather")
        assert experiment is not None
        return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]))

    def record(self) -> dict[str, Any]:
        (newest,) = sorted((self.folder / "data/runs/weather").glob("*/run.json"))[-1:]
        found: dict[str, Any] = json.loads(newest.read_text())
        return found


class Pace:
    """How fast ranks make steps: `hold` stops them before step 15, `slow` lets a signal come long before the end.

    They are slow from step 11 on: a stop is half a second of steps ahead, counted at the pace of the last ones.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "pace"
        self.module = write_module(
            folder,
            f"""
import time
from pathlib import Path

from sparkring.training.hooks import Hook

PACE = Path({str(self.file)!r})


class Paced(Hook):
    def on_step(self, seen):
        while seen.step == 14 and PACE.exists() and PACE.read_text() == "hold":
            PACE.with_name("held").touch()
            time.sleep(0.02)
        if seen.step > 10 and PACE.exists():
            time.sleep(0.1)
""",
        )

    @property
    def is_held(self) -> bool:
        """Whether ranks have waited at their step since `set`."""
        return self.file.with_name("held").exists()

    def set(self, pace: str) -> None:
        self.file.with_name("held").unlink(missing_ok=True)
        part = self.file.with_suffix(".part")
        part.write_text(pace)
        part.rename(self.file)


@pytest.fixture(scope="module")
def workplace(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("workplace")
    unpack_flights(folder / "data/raw/flights")
    workplace = Workplace(folder)
    for module in (EXAMPLE / "my_model.py", workplace.pace.module):
        ship_module(spark, module)
    with pytest.MonkeyPatch.context() as patched:
        for path in (EXAMPLE, folder):
            patched.syspath_prepend(str(path))
        yield workplace


RECIPE = str(EXAMPLE / "weather.yaml")


@pytest.fixture(scope="module")
def finished(workplace: Workplace) -> subprocess.CompletedProcess[str]:
    """One whole job, which the tests below look at from all sides."""
    return workplace.run_here("run", RECIPE, "data.audit=true", "train.epochs=2")


def test_one_command_from_raw_table_to_registered_model(
    workplace: Workplace, finished: subprocess.CompletedProcess[str]
) -> None:
    assert finished.returncode == 0, finished.stderr
    runs = workplace.mlflow_runs()
    parent = next(r for r in runs if r.data.tags["sparkring.key"] == "job")
    children = {
        r.data.tags["sparkring.key"]: r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    }
    assert set(children) == {"etl", "train", "evaluate"}
    assert {r.info.status for r in runs} == {"FINISHED"}
    for tag in ("sparkring.fingerprint", "sparkring.application_id", "sparkring.world", "sparkring.config_digest"):
        assert parent.data.tags[tag]
    assert children["train"].data.tags["sparkring.engine"] in ("horovod", "torch-gloo")
    assert children["train"].data.metrics["train/loss"] > 0
    scores = children["evaluate"].data.metrics
    assert scores["test/loss"] < scores["test/majority_rate/loss"]
    assert scores["test/auc"] > 0.6


def test_the_report_links_and_shows_everything(
    workplace: Workplace, finished: subprocess.CompletedProcess[str]
) -> None:
    assert finished.returncode == 0
    folder = workplace.folder / "data/runs/weather" / workplace.record()["folder"]
    html = (folder / "report.html").read_text()
    for needed in ("majority rate", "logistic regression", "visibility_known", "ROC"):
        assert needed in html, needed
    assert "came after its end" not in finished.stderr, finished.stderr
    client = workplace.mlflow()
    stored = {
        a.path for folder in ("", "figures") for a in client.list_artifacts(workplace.record()["mlflow_run_id"], folder)
    }
    shown = {f"figures/{name}.png" for name in ("loss", "roc", "precision_recall", "calibration")}
    assert {"report.html", "config.json"} | shown <= stored


def test_the_registered_model_predicts_raw_rows(
    workplace: Workplace, finished: subprocess.CompletedProcess[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the registry, as a service would; that the user's module is in the model is shown by the next test."""
    assert finished.returncode == 0
    monkeypatch.setattr(sys, "path", [*sys.path])  # MLflow adds the model's folder of code
    registry, champion = workplace.mlflow(), workplace.mlflow().get_model_version_by_alias("weather", "champion")
    model = load_model(registry.get_model_version_download_uri("weather", champion.version))
    rows = pd.DataFrame({"origin": ["JFK", "JFK", None], "hour": [6, 18, 18], "humid": [99, 40.0, None]})
    rows["temp"], rows["wind_speed"] = [40, 70, 70], [3.0, 12.0, 12.0]
    foggy, clear, unknown = model.predict(rows)["prediction"].tolist()
    assert 0 <= clear < foggy <= 1 and 0 <= unknown <= 1


def test_the_registered_model_predicts_its_own_sample(
    workplace: Workplace, finished: subprocess.CompletedProcess[str]
) -> None:
    """Rows of the test split, predicted of raw values from pandas and JSON, with the bits of training's evaluation."""
    assert finished.returncode == 0
    (folder,) = (path.parent for path in (workplace.folder / "data/mlflow").rglob("MLmodel"))
    data = data_folder(folder, "weather")
    answer = ask(Path(sys.executable), folder, data, "weather")
    assert import_problem(answer, folder) is None
    expected = pq.read_table(data / "sample_predictions.parquet").to_pydict()
    assert answer.predictions == {"pandas": expected, "json": expected} and len(set(expected["prediction"])) > 8
    pinned = dict(line.split("==") for line in (folder / "requirements.txt").read_text().split())
    assert {"torch", "mlflow-skinny"} <= pinned.keys() and not {"pyspark", "mlflow", "sparkring"} & pinned.keys()


def test_every_row_was_consumed_once(workplace: Workplace, finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0
    folder = f"data/runs/weather/{workplace.record()['folder']}"
    proof = workplace.run_here("audit", folder)
    assert proof.returncode == 0 and proof.stdout.count("exactly once, 134 left out") == 2, proof.stdout + proof.stderr
    victim = sorted((workplace.folder / folder / "audit").rglob("*.ids"))[0]
    content = victim.read_bytes()
    victim.write_bytes(content[:-8] + (7).to_bytes(8, "little"))  # one row twice, another never
    spoiled = workplace.run_here("audit", folder)
    victim.write_bytes(content)
    assert spoiled.returncode == 3 and "more than once" in spoiled.stdout


def test_the_dataset_is_not_built_twice(workplace: Workplace, finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0
    before = sorted(p.stat().st_mtime_ns for p in (workplace.folder / "data/datasets").rglob("*.parquet"))
    again = workplace.run("etl", RECIPE)
    assert again.returncode == 0 and "is there already" in again.stderr and "Spark" not in again.stderr, again.stderr
    assert sorted(p.stat().st_mtime_ns for p in (workplace.folder / "data/datasets").rglob("*.parquet")) == before


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], what: str, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, f"ended before {what}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"never {what}:\n{log.read_text()[-3000:]}"
        time.sleep(0.05)


def stop_group(workplace: Workplace, pace: Pace, begin: Callable[[], subprocess.Popen[str]]) -> tuple[int, str]:
    """Start the command, and send SIGTERM to its whole group once its ranks wait, as `timeout` does."""
    process, log = begin(), workplace.folder / "started.log"
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM)
    wait_for(lambda: STOPPING in log.read_text(), process, "heard the signal", log)
    pace.set("slow")
    code = process.wait(timeout=LIMIT_S)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, "ranks or the JVM outlived the job"
    return code, log.read_text()


def stop_here(
    workplace: Workplace, pace: Pace, words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> tuple[int, str]:
    """Run the command in this process, which gets SIGTERM once its ranks wait."""
    pace.set("hold")

    def go_on() -> None:
        waits.wait_for(lambda: STOPPING in caplog.text)
        pace.set("slow")

    with pytest.raises(SystemExit) as ended, stopped_when(lambda: pace.is_held, go_on):
        workplace.run_here(*words)
    return int(ended.value.code or 0), caplog.text


# Of the second, the JVM gets the signal too, as in tests/pipelines/test_spark.py, and the ranks.
@pytest.mark.parametrize("by", ["a signal to the driver", pytest.param("a signal to all", marks=pytest.mark.slow)])
def test_a_job_that_is_killed_and_then_stopped_is_finished_by_the_same_command(
    workplace: Workplace, finished: subprocess.CompletedProcess[str], by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGKILL, another job, the same command and SIGTERM, the same once more.

    An attempt's number that is used twice would overwrite what an earlier attempt wrote of the audit.
    """
    assert finished.returncode == 0
    log, pace = workplace.folder / "started.log", workplace.pace
    words = ("train", RECIPE, "train.epochs=2", "checkpoint.every_steps=10", "train.log_every_steps=1")
    words += (
        f"train.seed={9 + len(by)}",
        "data.audit=true",
        "report.baselines=false",
        "report.must_beat_guess=false",
        f"train.hooks=[{pace.module.stem}:Paced]",
    )

    def begin() -> subprocess.Popen[str]:
        """Start the command; it is returned once its ranks wait behind the checkpoint of step 10."""
        pace.set("hold")
        process = workplace.start(*words)

        def waits() -> bool:
            record = workplace.record()
            folder = workplace.folder / "data/runs/weather" / record["folder"]
            found = (folder / name for name in ("checkpoints/step-10/COMMIT.json", "history.json"))
            return record["pid"] == process.pid and pace.is_held and all(map(Path.exists, found))

        wait_for(waits, process, "trained to a checkpoint", log)
        return process

    process = begin()
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    killed = workplace.record()
    assert killed["status"] == "running"
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, "ranks or the JVM outlived a driver that was killed"
    assert workplace.run_here("etl", RECIPE).returncode == 0
    assert {r.info.status for r in workplace.mlflow_runs()} == {"FINISHED", "KILLED"}

    here = by == "a signal to the driver"
    code, said = stop_here(workplace, pace, words, caplog) if here else stop_group(workplace, pace, begin)
    assert code == 143 and STOPPING in said, said[-3000:]
    pace.file.unlink()
    stopped = workplace.record()
    assert (stopped["status"], stopped["attempts"]) == ("interrupted", 2)
    assert stopped["folder"] == killed["folder"]
    runs = workplace.mlflow_runs()
    jobs = [r for r in runs if r.data.tags["sparkring.key"] == "job"]
    (parent,) = [r for r in jobs if r.data.tags["sparkring.job"] == f"weather/{killed['folder']}"]
    assert parent.info.status == "KILLED" and not [r for r in runs if r.info.status == "RUNNING"]
    trains = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {r.data.tags.get("sparkring.resumed_from_step") for r in trains} & {"10"}
    last = max(p.step for r in trains for p in workplace.mlflow().get_metric_history(r.info.run_id, "train/loss"))
    assert 14 <= last == workplace.newest_checkpoint(), "stopped without a checkpoint of its last step"

    done = workplace.run_here(*words)
    assert done.returncode == 0, done.stderr
    record = workplace.record()
    assert (record["folder"], record["status"], record["attempts"]) == (stopped["folder"], "finished", 3)
    run = workplace.folder / "data/runs/weather" / record["folder"]
    summary = json.loads((run / "summary.json").read_text())
    seen = [step for step, _ in summary["history"]["train/loss"]]
    assert summary["resumed_from"] and seen == list(range(1, summary["train"]["steps"] + 1)), "of all three commands"
    proof = workplace.run_here("audit", f"data/runs/weather/{record['folder']}")
    assert proof.returncode == 0 and proof.stdout.count("exactly once, 134 left out") == 2, proof.stdout + proof.stderr


def test_a_job_on_servers_is_made_again_from_its_logs_and_a_log_that_is_missing_is_noticed(
    workplace: Workplace, finished: subprocess.CompletedProcess[str]
) -> None:
    assert finished.returncode == 0
    servers = ("parallel.servers.per_host=1", "parallel.servers.bound=2", "train.epochs=2", "data.audit=true")
    done = workplace.run_here("train", RECIPE, *servers, "report.baselines=false", "report.must_beat_guess=false")
    assert done.returncode == 0, done.stderr
    run = f"data/runs/weather/{workplace.record()['folder']}"
    again = workplace.run_here("replay-log", run)
    assert again.returncode == 0 and "the same bits on 1 server:" in again.stdout, again.stdout + again.stderr
    assert workplace.run_here("audit", run).returncode == 0
    sorted((workplace.folder / run / "servers").rglob("*.events"))[-1].unlink()
    again, proof = workplace.run_here("replay-log", run), workplace.run_here("audit", run)
    assert again.returncode == 3 and "there are no logs of steps" in again.stderr, again.stdout + again.stderr
    assert proof.returncode == 3 and "servers logged nothing of" in proof.stdout, proof.stdout + proof.stderr


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["optim.lr=-1"], 2, "optim.lr = -1: input should be greater than 0"),
        (["optimm.lr=1"], 2, "did you mean 'optim'?"),
        (["train.global_batch=1000000"], 2, "train.global_batch = 1000000: larger than the training split"),
        (["train.test_split=nonsense"], 2, "train.test_split = 'nonsense': the dataset will have the splits"),
        (["etl.sources.weather.path=data/raw/flights/nothing.parquet"], 3, "nothing.parquet"),
        (["launch.world=3", "spark.master=local[2]"], 5, "launch.world = 3: local[2] has 2 task slots"),
        (["model.factory=my_model:Nothing"], 2, "model.factory = 'my_model:Nothing'"),
    ],
)
def test_bad_input_is_one_clear_error(
    workplace: Workplace,
    finished: subprocess.CompletedProcess[str],
    words: list[str],
    code: int,
    expected: str,
) -> None:
    assert finished.returncode == 0
    done = workplace.run_here("train", RECIPE, *words)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr, done.stderr


def test_a_truncated_shard_is_named_before_the_epoch(
    workplace: Workplace, finished: subprocess.CompletedProcess[str]
) -> None:
    assert finished.returncode == 0
    shard = sorted((workplace.folder / "data/datasets").rglob("train-*.parquet"))[0]
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # same size: only the hash can tell
        done = workplace.run_here("train", RECIPE, "train.steps=3")
        assert done.returncode == 4 and shard.name in done.stderr, done.stderr
        shard.write_bytes(content[:-1])
        done = workplace.run_here("train", RECIPE, "train.steps=3")
        assert done.returncode == 3, done.stderr  # not whole, so no dataset at all
    finally:
        shard.write_bytes(content)


def test_training_goes_on_without_the_tracking_server(
    workplace: Workplace, finished: subprocess.CompletedProcess[str]
) -> None:
    assert finished.returncode == 0
    away = ("tracking.uri=http://127.0.0.1:9", "tracking.request_timeout_s=1", "tracking.request_retries=0")
    done = workplace.run_here(
        "train", RECIPE, "train.steps=5", "report.baselines=false", "report.must_beat_guess=false", *away
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be reached" in done.stderr
    assert list((workplace.folder / "data/mlflow").rglob("*.jsonl")), "nothing was kept for later"


def test_a_model_that_loses_to_a_baseline_does_not_get_the_alias(
    workplace: Workplace, finished: subprocess.CompletedProcess[str]
) -> None:
    assert finished.returncode == 0
    champion = workplace.mlflow().get_model_version_by_alias("weather", "champion").version
    held_out = ("data.filters=[[humid, '>', 60]]", "report.share_by=[origin]")  # half of the rows, in every split
    done = workplace.run_here("train", RECIPE, "train.steps=1", "optim.lr=1e-9", "report.must_beat=[loss]", *held_out)
    assert done.returncode == 6, done.stderr
    assert "does not beat" in done.stderr and "logistic regression" in done.stderr
    client = workplace.mlflow()
    versions = [int(v.version) for v in client.search_model_versions("name = 'weather'")]
    assert client.get_model_version_by_alias("weather", "champion").version == champion
    assert max(versions) > int(champion)
    record = workplace.record()
    assert record["status"] == "finished"
    assert "does not beat" in client.get_run(record["mlflow_run_id"]).data.tags["sparkring.lost"]
    folder = workplace.folder / "data/runs/weather" / record["folder"]
    assert "not good enough" in (folder / "report.html").read_text()
    scored = pa.concat_tables(pq.read_table(p) for p in folder.glob("predictions/*/*.parquet"))
    stored = pa.concat_tables(
        pq.read_table(p) for p in (workplace.folder / "data/datasets").glob("*/data-*/test-*.parquet")
    )
    assert scored.num_rows == pc.sum(pc.greater(stored["humid"], 60)).as_py() < stored.num_rows
    (folder / "report.html").unlink()
    assert workplace.run_here("report", RECIPE).returncode == 0
    again = (folder / "report.html").read_text()
    assert "not good enough" in again and "1e-09" in again and "by origin" in again


def test_predictions_are_of_every_test_row(workplace: Workplace, finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0
    folders = sorted((workplace.folder / "data/runs/weather").glob("*/predictions"))
    parts = pd.concat(pq.read_table(p).to_pandas() for p in folders[0].glob("attempt-*/*.parquet"))
    assert sorted(parts["id"]) == list(range(len(parts)))
