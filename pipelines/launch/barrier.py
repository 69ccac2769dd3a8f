"""The barrier stage: one Spark task per rank, each the agent of a process.

Spark gives the slots, all at once or not at all, and takes them back. It is asked nothing while ranks start (its
barrier and allGather answer once a second). Agents connect to the driver, which numbers and starts the ranks; the
stage ends when the driver says bye. The secret travels in the task's closure, Spark's own channel (encrypt it by
spark.network.crypto.enabled).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import DataFrame, SparkSession

from sparkring.conf.blocks.launch import HOSTS_WAIT_S, LaunchConfig
from sparkring.conf.code import code_digest
from sparkring.etl.spark_platform.application import (
    application_id,
    cancel,
    check_session,
    described,
    driver_address,
    in_process,
    tagged,
    this_python,
    workers_python,
)
from sparkring.etl.spark_platform.versions import barrier_tasks
from sparkring.pipelines.launch.check_hosts import check_hosts
from sparkring.pipelines.launch.preflight import SlotRequest, check_slots, spark_reason
from sparkring.pipelines.run.package import ship_code
from sparkring.pipelines.run.spark import user_variables
from sparkring.training.launch.attempt import Limits
from sparkring.training.launch.control import Control
from sparkring.training.launch.events import OnEvent
from sparkring.training.launch.group import WorkerGroup, log_event
from sparkring.training.launch.host.agent import Agent, AgentOptions, DriverGone
from sparkring.training.launch.host.rank import FILES
from sparkring.training.launch.job import JobResult, JobSpec
from sparkring.training.launch.topology import check_world

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchOptions:
    """How ranks are started in Spark, and how long they may take. Seconds end in `_s`."""

    limits: Limits = field(default_factory=Limits)
    interface: str | None = None  # of the ring on every host; None: the one that reaches the driver
    lines_per_s: float | None = 200.0
    silence_timeout_s: float = 20.0
    patience_s: float = 20.0  # how long an agent continues without the driver
    room_wait_s: float = HOSTS_WAIT_S  # for executors to come (launch.hosts_wait_s)
    profile: ResourceProfile | None = None  # of the training stage, see training_profile; None: the application's


def training_profile(cpus_per_rank: int, gpus_per_rank: int = 0) -> ResourceProfile:
    """Make the resources of each rank's task, apart from those of ETL's. Spark refuses profiles on `local[n]`."""
    requests = TaskResourceRequests().cpus(cpus_per_rank)
    if gpus_per_rank:
        requests = requests.resource("gpu", gpus_per_rank)
    return ResourceProfileBuilder().require(requests).build


def launch_options(launch: LaunchConfig, by_output: bool = False) -> LaunchOptions:
    """Read the options of a recipe's `launch` block. `by_output` as in Limits."""
    has_profile = launch.cpus_per_rank is not None or launch.gpus_per_rank > 0
    return LaunchOptions(
        limits=Limits(launch.start_timeout_s, launch.hang_timeout_s, by_output),
        interface=launch.interface,
        lines_per_s=launch.log_lines_per_s,
        silence_timeout_s=launch.silence_timeout_s,
        room_wait_s=launch.hosts_wait_s,
        profile=training_profile(launch.cpus_per_rank or 1, launch.gpus_per_rank) if has_profile else None,
    )


def run_barrier(
    spark: SparkSession,
    job: JobSpec,
    world: int,
    on_event: OnEvent = log_event,
    *,
    control: Control | None = None,
    options: LaunchOptions = LaunchOptions(),
) -> JobResult:
    """Run `job` on `world` slots of Spark.

    Raises WorkerFailed, LaunchError or Cancelled; no process is left by then.

    Args:
        spark: session whose executors run the ranks.
        job: what every rank runs.
        world: number of ranks.
        on_event: called with every Event.
        control: requests to the ranks, from other threads.
        options: interface, output, resources, limits.
    """
    check_session(spark)
    check_world(world)
    job.check()  # before anything starts
    check_slots(spark, SlotRequest(world, None, options.profile, options.room_wait_s), control)
    with this_python(spark), barrier_group(spark, world, job.preload, options) as group:
        return group.run(job, world, on_event, control=control, limits=options.limits)


@contextmanager
def barrier_group(
    spark: SparkSession, world: int, preload: tuple[str, ...], options: LaunchOptions
) -> Iterator[WorkerGroup]:
    """Make a group whose agents are the tasks of one barrier stage. For as many attempts as the stage lives."""
    check_world(world)
    # Hadoop, by which Spark serves files, refuses a user id without a name; workers here import what the driver does.
    is_nameless = bool(user_variables(os.environ))
    code = code_digest()[:12] if is_nameless and in_process(spark) else ship_code(spark)
    bind, host = driver_address(spark)
    stage = BarrierStage(spark)
    check = partial(check_hosts, code=None if in_process(spark) else code, horovod="horovod.torch" in preload)
    with WorkerGroup(bind, (host,), application_id(spark), options.silence_timeout_s, stage.trouble, check) as group:
        agent = AgentOptions(group.endpoint, {}, preload, options.interface, options.patience_s, options.lines_per_s)
        stage.start(agent, world, options.profile)
        try:
            yield group
        finally:
            group.close()
            stage.end(0.0 if group.lost_hosts else 10.0)  # the task of a host that fell silent never returns


class BarrierStage:
    """The Spark job that runs the agents, in a thread of the driver."""

    def __init__(self, spark: SparkSession):
        self._spark, self._name = spark, f"sparkring-{uuid.uuid4().hex[:8]}"
        self._error = ""
        self._thread: threading.Thread | None = None

    def start(self, options: AgentOptions, world: int, profile: ResourceProfile | None) -> None:
        """Start `world` agents, whose environment is their executor's."""
        indices = self._spark.range(0, world, 1, world)
        agents = barrier_tasks(indices, partial(_run_agent, options, self._name), "index long", profile)
        self._thread = threading.Thread(target=self._run, args=(agents,), name="sparkring-stage", daemon=True)
        self._thread.start()

    def _run(self, agents: DataFrame) -> None:
        try:
            with tagged(self._spark, self._name), described(self._spark, "agents of the training ranks"):
                agents.collect()
            self._error = "the barrier stage has ended"
        except Exception as error:
            self._error = spark_reason(error, workers_python(self._spark))

    def trouble(self) -> str | None:
        """Explain why the stage is over; None while it runs."""
        return None if self._thread is None or self._thread.is_alive() else self._error

    def end(self, patience_s: float) -> None:
        """Wait for the tasks to return, which they do on bye; cancel those that do not."""
        assert self._thread is not None
        self._thread.join(timeout=patience_s)
        if self._thread.is_alive():
            cancel(self._spark, self._name)
            self._thread.join(timeout=10.0)


def _run_agent(options: AgentOptions, stage: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run as an agent in a Spark task until the driver says bye; the batches hold its index."""
    from pyspark import SparkFiles  # of a worker: a client of Spark Connect alone has none

    (index,) = (index for batch in batches for index in batch.column(0).to_pylist())
    resources = BarrierTaskContext.get().resources()
    gpus = tuple(resources["gpu"].addresses) if "gpu" in resources else ()
    options = replace(options, environment={**os.environ, FILES: SparkFiles.getRootDirectory()})
    with contextlib.suppress(DriverGone):  # Spark reports it, or the driver is gone too
        Agent(options, index, f"{stage}-{index}", gpus).run()
    yield pa.RecordBatch.from_pydict({"index": [index]})
