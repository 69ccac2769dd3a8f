"""Check before anything waits: room for every rank, Spark's settings, hosts alike and in reach.

Slots are checked before the stage exists. The hosts are checked when their agents have reported, in the same stage,
while the fork servers are importing torch anyway: it costs no extra time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyspark
from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparkring.etl.spark_platform.application import master_of, settings_of
from sparkring.etl.spark_platform.executors import task_slots
from sparkring.etl.spark_platform.jvm import JavaThrew
from sparkring.etl.spark_platform.versions import takes_profiles
from sparkring.training.launch.attempt import Control
from sparkring.training.launch.failure import LaunchError, PreflightError
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.host.info import collect_host_info, problems, unfit_for_horovod
from sparkring.training.launch.messages import PeerFailure
from sparkring.training.launch.topology import AgentInfo


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


def slots_ceiling(master: str, conf: dict[str, str]) -> int | None:
    """Find the most tasks the settings can ever allow at a time.

    None where only the cluster's manager knows.
    """
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


@dataclass(frozen=True)
class SlotRequest:
    """The slots a launch needs."""

    world: int  # ranks
    least: int | None = None  # launch.min_world: fewer ranks are enough to begin; None: all of `world`
    profile: ResourceProfile | None = None  # of each rank's task; None: the application's own tasks'
    wait_s: float = 20.0  # for executors to come


def check_slots(spark: SparkSession, request: SlotRequest, control: Control | None = None) -> None:
    """Wait for executors to come.

    LaunchError at once where the application can never run that many ranks together. Cancelled where an end is asked
    for meanwhile.
    """
    key, least = ("launch.world", request.world)
    if request.least is not None:
        key, least = "launch.min_world", request.least
    master, conf = master_of(spark), dict(settings_of(spark))
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise LaunchError(
            "spark.dynamicAllocation.enabled = true: a barrier stage needs its executors from the start "
            "(SPARK-24942); set --conf spark.dynamicAllocation.enabled=false --conf spark.executor.instances=<n>"
        )
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
    deadline = time.monotonic() + request.wait_s
    while (free := slots(spark, request.profile)) < least:
        if time.monotonic() > deadline:
            raise LaunchError(too_few_slots(least, free, master, key))
        if control is not None:
            control.raise_if_ending("slots were waited for")
        time.sleep(0.1)


def too_few_slots(ranks: int, count: int, master: str, key: str = "launch.world") -> str:
    return (
        f"{key} = {ranks}: {master} has {count} task slot{'' if count == 1 else 's'}, and each rank needs one; "
        f"set {key} to {count} or less, or give Spark more cores (or GPUs) for as many tasks"
    )


def check_hosts(group: WorkerGroup, agents: list[AgentInfo], code: str | None, horovod: bool = False) -> None:
    """Raise PreflightError with every reason why ranks would fail later.

    Args:
        group: whose agents have reported their hosts.
        agents: that are about to run ranks.
        code: digest of the code they should have; None: not compared.
        horovod: whether the ring may be Horovod's.
    """
    first = {agent.host_key: agent for agent in reversed(agents)}  # one agent speaks for its host
    reported = {group.name_of(agent): group.host_of(agent) for agent in agents}
    hosts = {name: host for name, (host, _) in reported.items()}
    skews_s = {name: skew_s for name, (_, skew_s) in reported.items()}
    found = problems(replace(collect_host_info(), code=code), hosts, skews_s)
    if len(first) > 1:
        names = {agent.name: group.name_of(agent) for agent in first.values()}
        found += unreachable(names, group.reach(list(first.values())))
        if horovod:
            found += unfit_for_horovod({name: hosts[name] for name in names.values()})
    if found:
        raise PreflightError(
            f"preflight: {len(found)} problem{'s' if len(found) > 1 else ''}\n" + "\n".join(f"  - {p}" for p in found)
        )


def unreachable(names: Mapping[str, str], failed: Mapping[str, Sequence[PeerFailure]]) -> list[str]:
    """List what agents could not connect to. `names`: of the agents' hosts."""
    return [
        f"{names[agent]}: cannot reach {peer.address}:{peer.port} ({peer.reason}); "
        "open the ports between hosts or set launch.interface"
        for agent, peers in failed.items()
        for peer in peers
    ]
