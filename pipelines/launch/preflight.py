"""Check before anything waits, and before the stage exists: room for every rank, Spark's settings, and its Python."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyspark
from pyspark.errors import PySparkException
from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from sparkring.conf.blocks.launch import HOSTS_WAIT_S
from sparkring.conf.errors import first_line, problems_text
from sparkring.conf.plain_text import count_of
from sparkring.etl.spark_platform.application import (
    has_ended,
    in_process,
    master_of,
    settings_of,
    workers_python,
)
from sparkring.etl.spark_platform.executors import task_slots
from sparkring.etl.spark_platform.jvm import JavaThrew
from sparkring.etl.spark_platform.versions import takes_profiles
from sparkring.pipelines.launch.slots import slots_ceiling, too_few_slots
from sparkring.pipelines.run.package import ship_code
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import LaunchError, PreflightError
from sparkring.training.launch.host.info import HostInfo, collect_host_info, host_info_json, problems

log = logging.getLogger(__name__)
POLL_S = 0.2


def slots(spark: SparkSession, profile: ResourceProfile | None = None) -> int:
    """Count the tasks this application could run at the same time now.

    Executors on their way are not counted. LaunchError where Spark refuses the profile, which is as in SlotRequest.
    """
    try:
        return task_slots(spark, profile)
    except JavaThrew as error:
        raise LaunchError(
            f"launch.cpus_per_rank, launch.gpus_per_rank: {error.java_exception.getMessage()}; leave them at their "
            "defaults, so that ranks are given what spark.task.cpus and spark.task.resource.gpu.amount say"
        ) from error


@dataclass(frozen=True)
class SlotRequest:
    """The slots a launch needs."""

    world: int  # ranks
    least: int | None = None  # launch.min_world: fewer ranks are enough to begin; None: all of `world`
    profile: ResourceProfile | None = None  # of each rank's task; None: the application's own tasks'
    wait_s: float = HOSTS_WAIT_S  # launch.hosts_wait_s: for executors to come


def check_slots(spark: SparkSession, request: SlotRequest, control: Control | None = None) -> None:
    """Wait for executors to come, which may take minutes where a cluster grows by itself.

    LaunchError at once where the application can never run that many ranks together, else where they have not come in
    time. Cancelled where an end is asked for meanwhile.
    """
    key, least = ("launch.world", request.world)
    if request.least is not None:
        key, least = "launch.min_world", request.least
    master, conf = master_of(spark), dict(settings_of(spark))
    if settings := wanted_settings(master, conf, request):
        raise LaunchError(elastic(settings))
    if request.profile is not None:
        if not takes_profiles():
            raise LaunchError(
                f"launch.cpus_per_rank, launch.gpus_per_rank: Spark {pyspark.__version__} gives the ranks' stage no "
                "resources of its own, as Spark 4.0 does; leave them at their defaults, and set spark.task.cpus and "
                "spark.task.resource.gpu.amount"
            )
        conf["spark.task.cpus"] = str(int(request.profile.taskResources["cpus"].amount))
    ceiling = slots_ceiling(master, conf)
    if ceiling is not None and least > ceiling:
        raise LaunchError(too_few_slots(least, ceiling, master, key))
    free, deadline = slots(spark, request.profile), time.monotonic() + request.wait_s
    if free < least:
        words = "%s = %d: %s has %s now; waiting launch.hosts_wait_s = %g s for more"
        log.info(words, key, least, master, count_of(free, "task slot"), request.wait_s)
    while free < least:
        if time.monotonic() > deadline:
            raise LaunchError(too_few_slots(least, free, master, key, request.wait_s))
        if has_ended(spark):
            raise LaunchError(f"{master}: Spark's application has ended, as where its executors failed; see its log")
        if control is not None:
            control.raise_if_ending("slots were waited for")
        time.sleep(POLL_S)
        free = slots(spark, request.profile)


def check_workers(spark: SparkSession) -> None:
    """Compare the Python of one executor with the driver's before a dataset is built, which may take hours.

    PreflightError with a line for each package that is missing or another. The other hosts are compared when ranks
    start (check_hosts).
    """
    python, is_here = workers_python(spark), in_process(spark)
    if is_here and python == sys.executable:
        return
    code = None if is_here else ship_code(spark)
    report = udf(host_info_json, "string", useArrow=False)  # with Arrow its lack would hide that of the others
    try:
        (row,) = spark.range(0, 1, 1, 1).select(report("id")).collect()
    except (PySparkException, JavaThrew) as error:
        raise PreflightError(spark_reason(error, python)) from error
    host = HostInfo(**json.loads(row[0]))
    name = f"{host.hostname}, {host.executable}"
    if found := problems(replace(collect_host_info(), code=code), {name: host}, {name: 0.0}):
        raise PreflightError(problems_text("the Python of Spark's workers", found))


def spark_reason(error: BaseException, python: str) -> str:
    """Find the sentence of a Spark failure that says why, without the scheduler's stack. `python`: the executors'."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    remedy = "have PYSPARK_PYTHON name an interpreter with the same packages on every host"
    if missing := re.search(r"^(?:.*\()?((?:ModuleNotFoundError|ImportError): [^\n)]+)", text, re.M):
        return f"{missing[1]}, in the executors' Python ({python}); {remedy}"
    if found := re.search(r"(?:Cannot run program|\[PYTHON_VERSION_MISMATCH\]).*?(?=\.?$)", text, re.M):
        return f"{found[0]}; {remedy}"
    if found := re.search(r"ExecutorLostFailure.*", text):
        return found[0][:1000]
    for line in lines:
        if found := re.search(r"(Job aborted.*|Job \d+ cancelled.*|SparkContext was shut down.*)", line):
            return found[1][:1000]
    return first_line(error)[:1000]


def fixed_settings(spark: SparkSession, request: SlotRequest) -> dict[str, str]:
    """Choose settings for an application that can train in place of this elastic one; {} where this one can."""
    return wanted_settings(master_of(spark), settings_of(spark), request)


def wanted_settings(master: str, conf: Mapping[str, str], request: SlotRequest) -> dict[str, str]:
    """Choose as `fixed_settings` does, by an application's master and settings."""
    if conf.get("spark.dynamicAllocation.enabled", "false") != "true" or is_local(master):
        return {}
    return fixed_allocation(master, conf, request)


def is_local(master: str) -> bool:
    """Return whether tasks run in the driver, where Spark allows a barrier stage for any allocation."""
    return re.fullmatch(r"local(\[.*])?", master) is not None


def fixed_allocation(master: str, conf: Mapping[str, str], request: SlotRequest) -> dict[str, str]:
    """Choose the settings that give an application executors for all ranks from its start."""
    settings = {"spark.dynamicAllocation.enabled": "false"}
    if not master.startswith("spark://"):  # which gives an application all its cores, or spark.cores.max of them
        profile = request.profile
        cpus = int(profile.taskResources["cpus"].amount if profile else conf.get("spark.task.cpus", "1"))
        slots_each = max(1, int(conf.get("spark.executor.cores", "1")) // cpus)
        settings["spark.executor.instances"] = str(math.ceil(request.world / slots_each))
    return settings


def elastic(settings: Mapping[str, str]) -> str:
    """Explain what to set where an application's executors come and go."""
    words = " ".join(f"--conf {key}={value}" for key, value in settings.items())
    return (
        "spark.dynamicAllocation.enabled = true: Spark runs no barrier stage in such an application (SPARK-24942); "
        f"set {words} (or the same under `spark.conf` of the recipe); or keep it for `sparkring etl`, and run "
        "`sparkring train` on the dataset in a second application with these settings"
    )
