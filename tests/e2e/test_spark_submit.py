"""The same job through spark-submit, its code shipped by `sparkring package`: local, local-cluster, standalone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyspark
import pytest
from mlflow import MlflowClient

from sparkring.etl.raw import unpack_flights
from sparkring.pipelines.run.jvm_options import found_archive, options_of
from tests.e2e.commands import run_here
from tests.helpers.ports import unused_port

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "own_table"
SPARK_HOME = Path(pyspark.__file__).parent
LIMIT_S = 500

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw tables and the shipped code, far from the checkout."""
    folder = tmp_path_factory.mktemp("submit")
    unpack_flights(folder / "data/raw/flights")
    packed = run_here(ROOT, "package", "--out", str(folder / "sparkring.zip"))
    assert packed.returncode == 0 and "spark-submit --py-files" in packed.stdout, packed.stderr
    return folder


def variables() -> dict[str, str]:
    """Environment of Spark's scripts: every JVM below them is one for short jobs, as that of `make demo` is.

    Its plans are compiled, as a user's.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_CONF_DIR")}
    short = options_of({"spark.master": "local[2]"}, 0, found_archive(os.environ))
    return environment | {
        "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(SPARK_HOME), "MLFLOW_DISABLE_TELEMETRY": "true",
        "JAVA_TOOL_OPTIONS": short,
    }  # fmt: skip


def submit(folder: Path, master: str, *words: str, conf: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    settings = ["spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1", "spark.ui.enabled=false", *conf]
    command = [str(SPARK_HOME / "bin/spark-submit"), "--master", master]
    command += [word for setting in settings for word in ("--conf", setting)]
    command += ["--py-files", f"sparkring.zip,{EXAMPLE / 'my_model.py'}", "sparkring_job.py", *words]
    return subprocess.run(command, cwd=folder, env=variables(), capture_output=True, text=True, timeout=LIMIT_S)


QUICK = (
    "etl.limit_rows=4000",
    "train.steps=20",
    "report.baselines=false",
    "report.must_beat_guess=false",
    "tracking.system_metrics=false",
)


def assert_finished(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """It finished, and it ran from the shipped archive, not from the checkout this test lies in."""
    assert done.returncode == 0, done.stderr[-1500:] + done.stdout[-4000:]
    client = MlflowClient(f"sqlite:///{folder}/data/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("weather")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.`sparkring.key` = 'job'", order_by=["start_time DESC"])
    assert runs[0].info.status == "FINISHED"
    assert "sparkring.zip" in runs[0].data.tags["sparkring.code_path"]
    assert runs[0].data.metrics["test/loss"] > 0


def test_local(folder: Path) -> None:
    assert_finished(folder, submit(folder, "local[2]", "run", str(EXAMPLE / "weather.yaml"), *QUICK))


@pytest.mark.slow  # that of a job that ends well is seen above; each command's own code in tests/pipelines/test_cli.py
def test_the_exit_code_is_the_jobs(folder: Path) -> None:
    done = submit(folder, "local[2]", "train", str(EXAMPLE / "weather.yaml"), "optim.lr=-1")
    assert done.returncode == 2 and "optim.lr" in done.stdout  # PythonRunner merges both streams


@pytest.mark.slow  # the archive is shipped to a local master above, and to real executors by tests/chaos
def test_local_cluster(folder: Path) -> None:
    done = submit(folder, "local-cluster[2,1,1024]", "run", str(EXAMPLE / "weather.yaml"), *QUICK)
    assert_finished(folder, done)


def wait_until(log: Path, words: str, times: int) -> None:
    deadline = time.monotonic() + 120
    while log.read_text().count(words) < times:
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


@contextlib.contextmanager
def growing(folder: Path, workers: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """A real master and real workers of one core each; gives its URL, and what starts another worker."""
    port = unused_port()
    url, log = f"spark://127.0.0.1:{port}", folder / "standalone.log"
    spark_class, deploy = str(SPARK_HOME / "bin/spark-class"), "org.apache.spark.deploy"
    environment = variables() | {"SPARK_LOCAL_IP": "127.0.0.1"}
    master = [f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    worker = [f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "1g"]
    processes: list[subprocess.Popen[bytes]] = []
    with log.open("w") as out:

        def start(*words: str) -> None:
            processes.append(subprocess.Popen([spark_class, *words], env=environment, stdout=out, stderr=out))

        def start_worker() -> None:
            start(*worker, "--work-dir", str(folder / f"worker-{len(processes)}"), url)

        try:
            start(*master)
            wait_until(log, "I have been elected leader", 1)  # a worker that comes earlier asks again after seconds
            for _ in range(workers):
                start_worker()
            wait_until(log, "Successfully registered with master", workers)
            yield url, start_worker
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(timeout=300)


@contextlib.contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """A real master and two real workers of one core each."""
    with growing(folder, 2) as (url, _):
        yield url


@pytest.mark.slow
def test_standalone_master_and_two_workers(folder: Path) -> None:
    with standalone(folder) as url:
        memory = ("spark.executor.memory=700m", "spark.executor.cores=1")
        assert_finished(folder, submit(folder, url, "run", str(EXAMPLE / "weather.yaml"), *QUICK, conf=memory))


@pytest.mark.slow  # in small: tests/pipelines/launch/test_preflight.py
def test_a_worker_that_joins_after_the_start_is_waited_for_and_one_that_never_does_is_an_error(folder: Path) -> None:
    """A cluster that grows by itself has slots for all ranks minutes after the job has asked for them."""
    here = {"spark.executorEnv.PYTHONPATH": str(EXAMPLE), "spark.driver.host": "127.0.0.1"}
    with growing(folder, 1) as (url, start_worker):
        conf = here | {"spark.executor.memory": "700m"}
        words = ["run", str(EXAMPLE / "weather.yaml"), *QUICK, f"spark.master={url}", f"spark.conf={json.dumps(conf)}"]
        command = [sys.executable, "-m", "sparkring.pipelines.cli", *words, "etl.shard.seed=3"]
        environment = variables() | {"PYTHONPATH": str(EXAMPLE)}
        few = subprocess.run(
            [*command, "launch.hosts_wait_s=1"], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=LIMIT_S,
        )  # fmt: skip
        assert few.returncode == 5, few.stderr[-4000:]
        assert "has 1 task slot after launch.hosts_wait_s = 1 s, and each rank needs one" in few.stderr
        assert "Traceback" not in few.stderr and "ETL" not in few.stderr
        log = folder / "late.log"
        with log.open("w") as out:
            job = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
        wait_until(log, "1 task slots now; waiting launch.hosts_wait_s = 300 s for more", 1)
        start_worker()
        assert job.wait(timeout=LIMIT_S) == 0, log.read_text()[-4000:]


ELASTIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.executor.memory": "700m",
    "spark.executor.cores": "1",
}


@pytest.mark.slow
@pytest.mark.parametrize("is_submitted", [True, False])
def test_an_elastic_application_builds_and_a_second_one_trains_in_the_same_run(
    folder: Path, is_submitted: bool
) -> None:
    with standalone(folder) as url:
        words = ["run", str(EXAMPLE / "weather.yaml"), *QUICK, f"etl.shard.seed={1 + is_submitted}"]  # not built yet
        if is_submitted:
            done = submit(folder, url, *words, conf=tuple(f"{key}={value}" for key, value in ELASTIC.items()))
        else:
            here = {"spark.executorEnv.PYTHONPATH": str(EXAMPLE), "spark.driver.host": "127.0.0.1"}
            words += [f"spark.master={url}", f"spark.conf={json.dumps(ELASTIC | here)}"]
            command = [sys.executable, "-m", "sparkring.pipelines.cli", *words]
            own = variables() | {"PYTHONPATH": str(EXAMPLE)}
            done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=LIMIT_S)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said[-4000:]
        assert (folder / "standalone.log").read_text().count("Registering app sparkring-weather") == 2
    assert "training runs in a second one, with --conf spark.dynamicAllocation.enabled=false" in said
    client = MlflowClient(f"sqlite:///{folder}/data/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("weather")
    runs = client.search_runs([experiment.experiment_id], "tags.`sparkring.key` = 'job'", order_by=["start_time DESC"])
    first, second = runs[0].data.tags["sparkring.application_id"].split(", ")
    assert first != second and runs[0].info.status == "FINISHED"
