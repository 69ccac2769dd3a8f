"""The executors of an application: their free slots, which of them leave, and which Spark should replace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sparkring.etl.spark_platform.application import default_parallelism, settings_of
from sparkring.etl.spark_platform.capabilities import (
    DECOMMISSION_NOTICES,
    EXECUTOR_REPLACEMENT,
    TASK_SLOTS,
    can,
    is_classic,
)
from sparkring.etl.spark_platform.jvm import java_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def task_slots(spark: SparkSession, profile: Any = None) -> int:
    """Count the tasks this application could run at once now, without executors yet to come.

    Raises JavaThrew if Spark refuses the profile.
    """
    if not can(spark, TASK_SLOTS):
        cpus = settings_of(spark).get("spark.task.cpus") or "1"
        if profile is not None:
            cpus = str(int(profile.taskResources["cpus"].amount))
        return default_parallelism(spark) // int(cpus)
    context = java_context(spark)
    manager = context.resourceProfileManager()
    if profile is None:
        return int(context.maxNumConcurrentTasks(manager.defaultResourceProfile()))
    manager.addResourceProfile(profile._java_resource_profile)  # it counts none it does not know
    return int(context.maxNumConcurrentTasks(profile._java_resource_profile))


def lacks_slots(spark: SparkSession) -> bool:
    """Return whether no task can run now, as before any executor; False with Connect (unknown)."""
    return is_classic(spark) and task_slots(spark) == 0


def decommissioning(spark: SparkSession) -> frozenset[str]:
    """List this application's executors that Spark has started to take away (spot instance, node drain)."""
    if not can(spark, DECOMMISSION_NOTICES):
        return frozenset()
    leaving = java_context(spark).taskScheduler().executorsPendingDecommission()
    return frozenset(str(leaving.keysIterator().mkString(" ")).split())  # one call, however many executors there are


def executors(spark: SparkSession) -> dict[str, str]:
    """List the hosts, as Spark calls them, of this application's executors by their ids."""
    if not can(spark, EXECUTOR_REPLACEMENT):
        return {}
    found = java_context(spark).statusStore().executorList(True)
    every = [found.apply(i) for i in range(found.size())]
    return {str(one.id()): str(one.hostPort()).rpartition(":")[0] for one in every if one.id() != "driver"}


def replace_executors(spark: SparkSession, hosts: frozenset[str]) -> None:
    """Release Spark's executors on these hosts now.

    The cluster's manager starts others where it can. By itself Spark continues counting their slots for up to
    spark.network.timeout.
    """
    for name, host in executors(spark).items() if hosts else ():
        if host in hosts:
            log.warning("executor %s: %s has fallen silent, so Spark is asked for another", name, host)
            java_context(spark).killAndReplaceExecutor(name)
