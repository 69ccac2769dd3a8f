"""The barrier stage on a real Spark: rings, failures, cancellation, and what cannot work said before anything waits."""

from __future__ import annotations

import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sparkring.etl.spark_platform.application import start_python, workers_python
from sparkring.pipelines.launch import preflight
from sparkring.pipelines.launch.barrier import (
    LaunchOptions,
    barrier_group,
    run_barrier,
)
from sparkring.pipelines.launch.preflight import (
    SlotRequest,
    check_slots,
    check_workers,
    slots_ceiling,
    spark_reason,
    too_few_slots,
)
from sparkring.pipelines.run.package import code_archive, ship_code, write_archive
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import Cancelled, LaunchError, PreflightError, WorkerFailed
from sparkring.training.launch.host.info import collect_host_info
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.messages import AttemptStarted, ChildEvent, Event, RankReplaced

BARE: tuple[str, ...] = ()


def quiet(event: Event) -> None:
    """Events are of no interest to a test about something else."""


def ring_sum(ctx: Any) -> list[float]:
    """Horovod and torch.distributed in the same processes."""
    import horovod.torch as hvd
    import torch
    import torch.distributed as dist

    hvd.init()
    summed = hvd.allreduce(torch.ones(1) * (ctx.rank + 1), op=hvd.Sum)
    dist.init_process_group("gloo")
    dist.all_reduce(summed)
    dist.destroy_process_group()
    ctx.metrics(1, {"sum": float(summed[0])})
    return summed.tolist()


def servers_of_rank(ctx: Any) -> list[int]:
    """This rank's fork server, and the process that has imported for it."""
    server = psutil.Process(os.getppid())
    return [server.pid, server.ppid()]


@pytest.mark.spark
@pytest.mark.ranks
@pytest.mark.horovod
def test_rings_of_both_engines_and_a_warm_second_launch(spark: Any) -> None:
    with barrier_group(spark, 2, ("torch", "horovod.torch"), LaunchOptions()) as group:
        first = group.run(JobSpec(ring_sum), 2, quiet, attempt=1)
        second = group.run(JobSpec(ring_sum), 2, quiet, attempt=2)
        parents = [group.run(JobSpec(servers_of_rank), 2, quiet, attempt=n).results for n in (3, 4)]
        assert len(group.agents) == 2
    with barrier_group(spark, 2, ("torch",), LaunchOptions()) as group:
        later = group.run(JobSpec(servers_of_rank), 2, quiet).results
    assert first.results == second.results == [[6.0], [6.0]]
    assert first.metrics[0].values == {"sum": 6.0}
    assert parents[0] == parents[1], "what was imported once is not imported again"
    assert len({imports for _, imports in [*parents[0], *later]}) == 1, "nor by another rank or stage"
    assert len({server for server, _ in [*parents[0], *later]}) == 4


OF_A_NOTEBOOK = """
import sys
from pyspark.sql import SparkSession
from sparkring.etl.spark_platform.application import start_python, workers_python
from sparkring.pipelines.launch import preflight
from sparkring.pipelines.launch.barrier import run_barrier
from sparkring.training.launch.job import JobSpec
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
print(run_barrier(spark, JobSpec(lambda ctx: sys.executable, preload=()), 1).results == [sys.executable])
print(spark.sparkContext.pythonExec)
"""


@pytest.mark.slow  # ranks of a session that a notebook made: tests/pipelines/test_notebook.py
@pytest.mark.spark
@pytest.mark.ranks
def test_ranks_of_a_session_made_elsewhere_run_this_python(tmp_path: Path) -> None:
    """As in a notebook: the session is the user's, and the first `python3` of the PATH is another."""
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "python3").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", OF_A_NOTEBOOK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == ["True", "python3"], done.stderr


@pytest.mark.spark
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: sys.exit(7), "exited with code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: int("x"), "raised ValueError: invalid literal for int() with base 10: 'x'"),
    ],
)
def test_a_failing_rank_is_the_drivers_exception(spark: Any, how: Any, words: str) -> None:
    def entry(ctx: Any) -> None:
        print("last words")
        if ctx.rank == 1:
            how()
        time.sleep(600)

    with pytest.raises(WorkerFailed) as caught:
        run_barrier(spark, JobSpec(entry, preload=BARE), 2, quiet)
    assert (caught.value.child.index, caught.value.failure.words) == (1, words)
    assert "last words" in caught.value.failure.last_lines
    assert "127.0.0.1" in caught.value.host
    assert spark.range(10).count() == 10  # the application goes on


@pytest.mark.spark
def test_three_ranks_on_two_slots_says_so_before_waiting(spark: Any) -> None:
    with pytest.raises(LaunchError, match=r"launch.world = 3: local\[2\] has 2 task slots"):
        run_barrier(spark, JobSpec(ring_sum), 3, quiet)


def with_servers(**payload: Any) -> JobSpec:
    toy = "tests.training.launch.toy_servers"
    return JobSpec(
        f"{toy}:work", payload, preload=BARE, servers_per_host=2, server_entry=f"{toy}:serve", replaceable_ranks=True
    )


@pytest.mark.spark
@pytest.mark.ranks
def test_a_killed_rank_is_replaced_in_its_task_and_a_killed_server_ends_the_attempt(spark: Any) -> None:
    events: list[Event] = []
    job = with_servers(steps=200, faults=[[1, 10, 0, "SIGKILL"]])
    ranks = run_barrier(spark, job, 2, events.append).results
    (replaced,) = [event for event in events if isinstance(event, RankReplaced)]
    assert replaced.rank == 1
    assert [rank["replacement"] for rank in ranks] == [0, 1] and max(r["totals"] for r in ranks) == [400, 400]
    pids = list[int]()

    def kill(event: Event) -> None:
        if isinstance(event, ChildEvent) and event.child.role == "server":
            pids.append(event.data["pid"])
        elif isinstance(event, ChildEvent) and event.name == "fault":
            os.kill(pids[-1], signal.SIGKILL)

    job = with_servers(steps=100_000, faults=[[0, 10, 0, "SIGCONT"]])
    with barrier_group(spark, 2, BARE, LaunchOptions()) as group:
        with pytest.raises(WorkerFailed, match=r"server . on .* killed by SIGKILL") as caught:
            group.run(job, 2, kill)
        assert caught.value.failure.cause == "server"
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


@pytest.mark.spark
@pytest.mark.ranks
def test_cancel_ends_the_ranks_and_the_stage(spark: Any, tmp_path: Path) -> None:
    def entry(ctx: Any) -> None:
        ctx.heartbeat(0, "waiting")
        time.sleep(600)

    control = Control()
    with pytest.raises(Cancelled):
        run_barrier(spark, JobSpec(entry, preload=BARE), 2, lambda e: control.cancel(), control=control)
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()


@pytest.mark.spark
@pytest.mark.ranks
def test_a_job_cancelled_in_spark_ends_the_attempt(spark: Any) -> None:
    """As the button in Spark's own page does it."""

    def entry(ctx: Any) -> None:
        time.sleep(600)

    def cancel(event: Event) -> None:
        if isinstance(event, AttemptStarted):
            threading.Timer(0.2, spark.sparkContext.cancelAllJobs).start()

    with pytest.raises((WorkerFailed, LaunchError), match="was lost with its agent"):
        run_barrier(spark, JobSpec(entry, preload=BARE), 2, cancel)


@pytest.mark.parametrize(
    ("master", "conf", "expected"),
    [
        ("local[2]", {}, 2),
        ("local[4,3]", {"spark.task.cpus": "2"}, 2),
        ("local", {}, 1),
        ("local[*]", {}, None),
        ("local-cluster[2,1,1024]", {}, 2),
        ("local-cluster[2, 3, 1024]", {"spark.task.cpus": "2"}, 2),
        ("spark://h:7077", {}, None),
        ("spark://h:7077", {"spark.cores.max": "5", "spark.task.cpus": "2"}, 2),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "4"}, 12),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "4", "spark.cores.max": "8"}, 8),
    ],
)
def test_the_most_slots_that_settings_allow(master: str, conf: dict[str, str], expected: int | None) -> None:
    assert slots_ceiling(master, conf) == expected


def test_dynamic_allocation_is_refused_by_saying_what_to_set() -> None:
    class Context:
        master = "yarn"

        def getConf(self) -> Any:
            class Conf:
                def getAll(self) -> list[tuple[str, str]]:
                    return [("spark.dynamicAllocation.enabled", "true")]

            return Conf()

    class Session:
        sparkContext = Context()

    with pytest.raises(LaunchError, match=r"dynamicAllocation\.enabled=false --conf spark\.executor\.instances"):
        check_slots(Session(), SlotRequest(2))  # type: ignore[arg-type]


def test_words_for_too_few_slots() -> None:
    assert "has 1 task slot, and" in too_few_slots(3, 1, "local")


def test_the_reason_in_a_stack_of_the_scheduler() -> None:
    text = "An error occurred while calling o1.collect.\n: org.apache.spark.SparkException: "
    text += "Job 4 cancelled as part\n\tat x"
    assert spark_reason(Exception(text), "python3") == "Job 4 cancelled as part"
    ended = ": org.apache.spark.SparkException: Job 11 cancelled because SparkContext was shut down"
    assert spark_reason(Exception(ended), "python3") == "Job 11 cancelled because SparkContext was shut down"
    missing = Exception("x\nModuleNotFoundError: No module named 'psutil'\n at")
    assert "in the executors' Python (/a/python); have PYSPARK_PYTHON" in spark_reason(missing, "/a/python")
    gone = 'x): java.io.IOException: Cannot run program "/no/python": error=2, No such file or directory\n\tat x'
    assert spark_reason(Exception(gone), "/no/python").startswith(
        'Cannot run program "/no/python": error=2, No such file or directory; have PYSPARK_PYTHON name an interpreter'
    )


@pytest.mark.spark
def test_a_workers_python_without_our_packages_is_named_before_a_dataset_is_built(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lack was found when ranks started, after the ETL, and tried three times."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    before = workers_python(spark)
    try:
        for python, problem in (
            (bare, "No module named 'sparkring', in the executors'"),
            (tmp_path / "no", "Cannot run"),
        ):
            start_python(spark, str(python))
            with pytest.raises(PreflightError, match=problem):
                check_workers(spark)
    finally:
        start_python(spark, before)
    check_workers(spark)
    ours = collect_host_info()
    monkeypatch.setattr(preflight, "collect_host_info", lambda: replace(ours, packages={"torch": "9.9", "numpy": None}))
    monkeypatch.setattr(preflight, "in_process", lambda _: False)  # a cluster's Python is compared, whatever its path
    with pytest.raises(
        PreflightError, match=r"workers: 1 problem\n.*: torch \S+, the driver has 9\.9; install the same"
    ):
        check_workers(spark)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder that is another user's")
def test_the_code_archive_is_where_no_other_user_can_put_his_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that another user had made under the expected name was taken as it was."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nobody = pwd.getpwnam("nobody").pw_uid
    planted = tmp_path / f"sparkring-code-{os.getuid()}"
    planted.mkdir(mode=0o777)
    os.chown(planted, nobody, -1)
    shipped: list[Path] = []
    context = SimpleNamespace(_python_includes=[], addPyFile=lambda path: shipped.append(Path(path)))
    digest = ship_code(SimpleNamespace(sparkContext=context))  # type: ignore[arg-type]
    (path,) = shipped
    assert path.name == f"sparkring-{digest}.zip" and path.read_bytes() == code_archive()
    found = path.parent.lstat()
    assert stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700


def test_the_code_archive_is_reproducible_and_importable(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "dist" / "sparkring.zip")
    assert path.read_bytes() == code_archive()
    names = zipfile.ZipFile(path).namelist()
    assert "sparkring/training/launch/host/rank.py" in names
    import subprocess

    command = [
        sys.executable,
        "-P",
        "-c",
        f"import sys; sys.path.insert(0, {str(path)!r}); import sparkring.training.launch.host.agent as a; "
        "print(a.__file__)",
    ]
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert str(path) in out


def test_what_is_no_spark_session_is_said() -> None:
    with pytest.raises(TypeError, match="spark = None: must be the SparkSession"):
        run_barrier(None, JobSpec("os:getpid"), 2)  # type: ignore[arg-type]
