"""How many task slots settings allow, and what to do where they are too few. Needs no PySpark."""

from __future__ import annotations

import re

from sparkring.conf.plain_text import count_of


def slots_ceiling(master: str, conf: dict[str, str]) -> int | None:
    """Find the most tasks the settings can ever allow at a time. None where only the cluster's manager knows."""
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


def too_few_slots(ranks: int, count: int, master: str, key: str = "launch.world", waited_s: float | None = None) -> str:
    """Describe how many slots are available, and what to do.

    Args:
        ranks: number of ranks to run.
        count: number of slots.
        master: master URL of Spark.
        key: key that sets the number of ranks.
        waited_s: seconds waited for more slots; None if no more can come.
    """
    waited = "" if waited_s is None else f" after launch.hosts_wait_s = {waited_s:g} s"
    if count == 0:
        return (
            f"{key} = {ranks}: {master} has no task slot{waited}, and each rank needs one; see whether its workers are "
            "there, and have what spark.executor.cores, spark.executor.memory and spark.task.cpus ask for"
            + (", or raise launch.hosts_wait_s for those that come later" if waited else "")
        )
    return (
        f"{key} = {ranks}: {master} has {count_of(count, 'task slot')}{waited}, and each rank needs one; "
        f"set {key} to {count} or less, or give Spark more cores (or GPUs) for as many tasks"
        + (", or raise launch.hosts_wait_s where they come later" if waited else "")
    )
