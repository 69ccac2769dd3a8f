"""Before anything waits: room for every rank, settings a barrier stage can live with, hosts alike and in reach.

Slots are checked before the stage exists. The hosts are checked when their agents have reported, in the same stage,
while the helpers are importing torch anyway: it costs no time of its own.
"""

from __future__ import annotations

import re
import time

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from training.launch.attempt import Control
from training.launch.crew import Crew
from training.launch.facts import collect_facts, problems, unfit_for_horovod, unreachable
from training.launch.failure import LaunchError, PreflightError
from training.launch.worker_env import Seat


def slots(sc: SparkContext, profile: ResourceProfile | None = None) -> int:
    """Tasks this application could run at the same time now, each with the cores and GPUs of `profile` (None: what the
    application's own tasks have). Executors on their way are not counted. LaunchError where Spark refuses the profile.
    """
    jvm = sc._jsc.sc()
    manager = jvm.resourceProfileManager()
    if profile is None:
        return int(jvm.maxNumConcurrentTasks(manager.defaultResourceProfile()))
    try:
        manager.addResourceProfile(profile._java_resource_profile)  # it counts none it has not heard of
    except Py4JJavaError as error:
        raise LaunchError(
            f"launch.cpus_per_rank, launch.gpus_per_rank: {error.java_exception.getMessage()}; leave them at their "
            "defaults, so that ranks are given what spark.task.cpus and spark.task.resource.gpu.amount say"
        ) from error
    return int(jvm.maxNumConcurrentTasks(profile._java_resource_profile))


def slots_ceiling(master: str, conf: dict[str, str]) -> int | None:
    """The most tasks the settings can ever allow at a time; None where only the cluster's manager knows."""
    cpus = int(conf.get("spark.task.cpus", "1"))
    if found := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*]", master):
        return int(found[1]) * (int(found[2]) // cpus)
    if found := re.fullmatch(r"local\[(\d+)(,\d+)?]", master):
        return int(found[1]) // cpus
    if master == "local":
        return 1 // cpus
    cores, instances = conf.get("spark.executor.cores"), conf.get("spark.executor.instances")
    limits = [int(conf["spark.cores.max"]) // cpus] if "spark.cores.max" in conf else []
    if cores and instances:
        limits.append(int(instances) * (int(cores) // cpus))
    return min(limits, default=None)


def check_slots(
    spark: SparkSession,
    world: int,
    least: int | None = None,
    wait_s: float = 20.0,
    control: Control | None = None,
    profile: ResourceProfile | None = None,
) -> None:
    """LaunchError at once where the application can never run `least` ranks together (launch.min_world; None: all of
    `world`); else waits for executors to come. Cancelled where an end is asked for meanwhile."""
    key, least = ("launch.world", world) if least is None else ("launch.min_world", least)
    sc = spark.sparkContext
    master = str(sc.master)
    conf = dict(sc.getConf().getAll())
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise LaunchError(
            "spark.dynamicAllocation.enabled = true: a barrier stage needs its executors from the start "
            "(SPARK-24942); set --conf spark.dynamicAllocation.enabled=false --conf spark.executor.instances=<n>"
        )
    if profile is not None:
        conf["spark.task.cpus"] = str(int(profile.taskResources["cpus"].amount))
    ceiling = slots_ceiling(master, conf)
    if ceiling is not None and least > ceiling:
        raise LaunchError(too_few_slots(least, ceiling, master, key))
    deadline = time.monotonic() + wait_s
    while (free := slots(sc, profile)) < least:
        if time.monotonic() > deadline:
            raise LaunchError(too_few_slots(least, free, master, key))
        if control is not None:
            control.heed("slots were waited for")
        time.sleep(0.1)


def too_few_slots(ranks: int, count: int, master: str, key: str = "launch.world") -> str:
    return (
        f"{key} = {ranks}: {master} has {count} task slot{'' if count == 1 else 's'}, and each rank needs one; "
        f"set {key} to {count} or less, or give Spark more cores (or GPUs) for as many tasks"
    )


def check_hosts(crew: Crew, seats: list[Seat], code: str | None, horovod: bool = False) -> None:
    """PreflightError with every reason why ranks would fail later; `code` is the digest they should have, if any, and
    `horovod` whether the ring may be Horovod's."""
    first = {seat.host: seat for seat in reversed(seats)}  # one agent speaks for its host
    facts = {crew.name_of(seat): crew.facts_of(seat) for seat in seats}
    found = problems({**collect_facts(), "code": code}, facts)
    if len(first) > 1:
        names = {seat.agent: crew.name_of(seat) for seat in first.values()}
        found += unreachable(names, crew.reach(list(first.values())))
        if horovod:
            found += unfit_for_horovod({crew.name_of(seat): crew.facts_of(seat) for seat in first.values()})
    if found:
        raise PreflightError(
            f"preflight: {len(found)} problem{'s' if len(found) > 1 else ''}\n" + "\n".join(f"  - {p}" for p in found)
        )
