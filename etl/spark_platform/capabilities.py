"""What a session of Spark may be unable to do, and what is done in its place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capability:
    """Something that needs Spark's JVM. `instead`: what a session without one does, or cannot know."""

    name: str
    instead: str


PLAN_INSPECTION = Capability(
    "plan inspection",
    "rows are kept on disk between two passes, and of what is random or reads the clock only Spark's own functions "
    "are known, by their names",
)
QUERY_FILES = Capability(
    "listing of a query's files",
    "SQL statements name them, one for each partition of a table; Hive's own file formats cannot be pinned",
)
JDBC_SNAPSHOTS = Capability(
    "snapshot of a database for several connections", "a table of a `consistency: snapshot` is read by one statement"
)
DECOMMISSION_NOTICES = Capability(
    "decommission notices", "an executor that is about to leave is noticed when it has left"
)
EXECUTOR_REPLACEMENT = Capability(
    "executor replacement", "Spark gives up a silent executor by itself, after spark.network.timeout"
)
TASK_SLOTS = Capability("count of free task slots", "all cores that Spark has are taken for free")
JOB_PROGRESS = Capability("job progress by stage", "only the tasks of a query are counted")
EVERY = (
    PLAN_INSPECTION,
    QUERY_FILES,
    JDBC_SNAPSHOTS,
    DECOMMISSION_NOTICES,
    EXECUTOR_REPLACEMENT,
    TASK_SLOTS,
    JOB_PROGRESS,
)


def is_classic(spark: Any) -> bool:
    """Return whether the session has its JVM here; a Spark Connect session talks to a server."""
    return not type(spark).__module__.startswith("pyspark.sql.connect")


def can(spark: Any, capability: Capability) -> bool:
    """Return whether the session has the capability; if not, log once what is done instead."""
    if is_classic(spark):
        return True
    _say_once(capability)
    return False


@functools.cache
def _say_once(capability: Capability) -> None:
    log.info("Spark Connect gives no %s: %s", capability.name, capability.instead)


def all_settings(spark: Any) -> Mapping[str, str]:
    """Return the settings that have a value in the session, including the application's."""
    if hasattr(type(spark.conf), "getAll"):  # from 4.0 on
        return dict(spark.conf.getAll)
    return settings_by_sql(spark)


def settings_by_sql(spark: Any) -> Mapping[str, str]:
    """Return `all_settings` by an SQL statement, which hides secrets."""
    return {row[0]: row[1] for row in spark.sql("SET").collect()}
