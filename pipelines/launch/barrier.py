"""The barrier stage: one Spark task per rank, each the agent of a process. The driver is the rendezvous; Spark only
places.

Spark gives the slots, all at once or not at all, and takes them back. It is asked nothing while ranks start (its
barrier and allGather answer once a second). Agents connect to the driver, which seats and starts the ranks; the
stage ends when the driver says bye. The secret travels in the task's closure, Spark's own channel (encrypt it by
spark.network.crypto.enabled).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pyspark import RDD, BarrierTaskContext, SparkContext, SparkFiles
from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

from conf.schema_launch import LaunchConfig
from pipelines.launch.preflight import check_hosts, check_slots
from pipelines.package import code_archive
from training.launch.agent import Agent, AgentOptions, DriverGone
from training.launch.attempt import Control, Limits, OnEvent
from training.launch.crew import Crew, log_event
from training.launch.facts import code_digest
from training.launch.job import JobResult, JobSpec
from training.launch.link import Endpoint
from training.launch.rank import FILES
from training.launch.worker_env import check_world

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageOptions:
    """How the agents' stage is made. Seconds end in `_s`."""

    interface: str | None = None  # of the ring on every host; None: the one that reaches the driver
    lines_per_s: float | None = 200.0
    silence_timeout_s: float = 20.0
    patience_s: float = 20.0  # how long an agent goes on without the driver
    profile: ResourceProfile | None = None  # of the training stage, see training_profile; None: the application's


def training_profile(cpus_per_rank: int, gpus_per_rank: int = 0) -> ResourceProfile:
    """What each rank's task asks for, apart from what ETL's tasks do. Spark refuses profiles on `local[n]` masters."""
    requests = TaskResourceRequests().cpus(cpus_per_rank)
    if gpus_per_rank:
        requests = requests.resource("gpu", gpus_per_rank)
    return ResourceProfileBuilder().require(requests).build


def stage_options(launch: LaunchConfig) -> StageOptions:
    asks = launch.cpus_per_rank is not None or launch.gpus_per_rank > 0
    return StageOptions(
        interface=launch.interface,
        lines_per_s=launch.log_lines_per_s,
        silence_timeout_s=launch.silence_timeout_s,
        profile=training_profile(launch.cpus_per_rank or 1, launch.gpus_per_rank) if asks else None,
    )


def run_barrier(
    spark: SparkSession,
    job: JobSpec,
    world: int,
    on_event: OnEvent = log_event,
    *,
    attempt: int = 1,
    control: Control | None = None,
    start_timeout_s: float = 120.0,
    hang_timeout_s: float | None = None,
    options: StageOptions = StageOptions(),
) -> JobResult:
    """Run `job` on `world` slots of Spark. Raises WorkerFailed, LaunchError or Cancelled; no process is left by
    then."""
    if not isinstance(spark, SparkSession):
        raise TypeError(f"spark = {spark!r}: must be the SparkSession whose executors run the ranks")
    job.to_json()  # what cannot travel is said before anything starts
    check_slots(spark, world, control=control, profile=options.profile)
    with barrier_crew(spark, world, job.preload, options) as crew:
        return crew.run(job, world, on_event, attempt, control, Limits(start_timeout_s, hang_timeout_s))


@contextmanager
def barrier_crew(spark: SparkSession, world: int, preload: tuple[str, ...], options: StageOptions) -> Iterator[Crew]:
    """A crew whose agents are the tasks of one barrier stage, for as many attempts as the stage lives."""
    check_world(world)
    sc = spark.sparkContext
    code = ship_code(sc)
    conf = sc.getConf()
    host = conf.get("spark.driver.host") or "127.0.0.1"
    bind = conf.get("spark.driver.bindAddress") or host
    with Crew(bind, (host,), sc.applicationId, options.silence_timeout_s) as crew:
        stage = Stage(sc, crew, world, preload, options)
        crew.trouble = stage.trouble
        crew.check = partial(check_hosts, code=None if in_process(sc) else code, horovod="horovod.torch" in preload)
        try:
            yield crew
        finally:
            crew.close()
            stage.end(0.0 if crew.lost_hosts else 10.0)  # the task of a host that fell silent never returns


def in_process(sc: SparkContext) -> bool:
    """Whether executors are threads of the driver's JVM: their Python finds our code where the driver's does."""
    return re.fullmatch(r"local(\[.*])?", str(sc.master)) is not None


def ship_code(sc: SparkContext) -> str:
    """Put this driver's code on the executors' path, once per application; the digest of what they must import.

    Once, because Python processes of executors go on with the modules they have: later edits would not reach them.
    """
    for name in sc._python_includes or []:
        if shipped := re.fullmatch(r"sparkring-([0-9a-f]{12})\.zip", name):
            return shipped[1]
    digest = code_digest()
    try:
        archive = code_archive()
    except ValueError:
        return digest  # we run from an archive ourselves: it was given by --py-files
    # New and ours alone: executors import what is in it. Spark serves it for as long as the application lives.
    folder = tempfile.mkdtemp(prefix="sparkring-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / f"sparkring-{digest}.zip"
    path.write_bytes(archive)
    sc.addPyFile(str(path))
    return digest


class Stage:
    """The Spark job that carries the agents, in a thread of its own."""

    def __init__(self, sc: SparkContext, crew: Crew, world: int, preload: tuple[str, ...], options: StageOptions):
        self._sc, self._group, self._error = sc, f"sparkring-{uuid.uuid4().hex[:8]}", ""
        task = partial(_agent_task, crew.endpoint, preload, replace(options, profile=None), self._group)
        rdd = sc.parallelize(range(world), world).barrier().mapPartitions(task)
        if options.profile is not None:
            rdd = rdd.withResources(options.profile)
        self._thread = threading.Thread(target=self._carry, args=(rdd,), name="sparkring-stage", daemon=True)
        self._thread.start()

    def _carry(self, rdd: RDD[int]) -> None:
        try:
            self._sc.setJobGroup(self._group, "sparkring: agents of the training ranks", interruptOnCancel=True)
            rdd.collect()
            self._error = "the barrier stage has ended"
        except Exception as error:
            self._error = spark_reason(error)

    def trouble(self) -> str | None:
        """Why the agents' stage is over; None while it runs."""
        return None if self._thread.is_alive() else self._error

    def end(self, patience_s: float) -> None:
        """Wait for the tasks to return, which they do on bye; cancel those that do not."""
        self._thread.join(timeout=patience_s)
        if self._thread.is_alive():
            self._sc.cancelJobGroup(self._group)
            self._thread.join(timeout=10.0)


def spark_reason(error: BaseException) -> str:
    """The sentence of a Spark failure that says why, without the stack of the scheduler."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    missing = next((line for line in lines if line.startswith(("ModuleNotFoundError", "ImportError"))), None)
    if missing:
        python = os.environ.get("PYSPARK_PYTHON", "python3, as PYSPARK_PYTHON is unset")
        return (
            f"{missing}, in the executors' Python ({python}); "
            "have PYSPARK_PYTHON name an interpreter with the same packages on every host"
        )
    if found := re.search(r"ExecutorLostFailure.*", text):
        return found[0][:1000]
    for line in lines:
        if found := re.search(r"(Job aborted.*|Job \d+ cancelled.*|SparkContext was shut down.*)", line):
            return found[1][:1000]
    return lines[0][:1000] if lines else type(error).__name__


def _agent_task(
    endpoint: Endpoint, preload: tuple[str, ...], options: StageOptions, name: str, indices: Iterator[int]
) -> Iterator[int]:
    """What one Spark task does: be an agent until the driver says bye."""
    (index,) = indices
    context = BarrierTaskContext.get()
    resources = context.resources()
    gpus = tuple(resources["gpu"].addresses) if "gpu" in resources else ()
    agent = AgentOptions(
        endpoint=endpoint,
        environment={**os.environ, FILES: SparkFiles.getRootDirectory()},
        preload=preload,
        interface=options.interface,
        patience_s=options.patience_s,
        lines_per_s=options.lines_per_s,
    )
    with contextlib.suppress(DriverGone):  # Spark will say so, or nobody is left to be told
        Agent(agent, index, f"{name}-{index}", gpus).run()
    yield index
