"""The settings of a job's Spark session, and where it will run: decided before there is one, without PySpark."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.errors import ConfigError
from sparkring.etl.spark_platform.jvm import active_context

VARIABLE, PORT = "SPARK_REMOTE", 15002  # of servers of Spark Connect
LOCAL = re.compile(r"local(-cluster)?(\[[^]]+\])?")
CONNECT_MODE = "SPARK_CONNECT_MODE_ENABLED"  # PySpark sets it while there is a session of Connect

# What every job needs. A user may override it in spark.conf or by spark-submit --conf.
DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "1g",
}
WORKER_DAEMON = "sparkring.pipelines.run.worker_daemon"

# During ETL only Spark notices a host that is gone. Its default limit is two minutes (10 s between heartbeats).
DEAD_HOSTS = {"spark.network.timeout": "60s", "spark.executor.heartbeatInterval": "5s"}


def submitted() -> bool:
    """Return whether spark-submit or a notebook started this Python, and set the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ or active_context() is not None


def session_settings(name: str, spark: SparkConfig, world: int, is_submitted: bool) -> dict[str, str]:
    """Return Spark's session settings; under spark-submit without place and size."""
    settings = {"spark.app.name": spark.app_name or f"sparkring-{name}"}
    if is_submitted:
        return settings | {"spark.sql.session.timeZone": "UTC", "spark.log.level": "ERROR"} | spark.settings()
    master = spark.master or f"local[{max(world, 1)}]"
    settings |= DEFAULTS | {"spark.master": master}
    if master.startswith("local"):
        # A laptop or a build machine: nothing listens beyond this host.
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        settings |= {"spark.sql.shuffle.partitions": "8"}
    else:
        settings |= DEAD_HOSTS
    if is_one_jvm(master):
        settings["spark.python.daemon.module"] = WORKER_DAEMON
        # Spark SQL sets it for its workers alone, and workers of other variables come from another daemon.
        settings["spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK"] = "1"
        settings["spark.executorEnv.PYTHONSAFEPATH"] = "1"  # until the daemon has ordered its search path
    return settings | spark.settings()


def expected_master(name: str, spark: SparkConfig, world: int) -> str:
    """Return the master or Spark Connect server of the job's session, existing or to come.

    Empty if only spark-submit, or a session of Connect that the caller has opened, knows it. ConfigError for two
    different places.
    """
    is_submitted = submitted()  # before the context is looked for: another thread may be starting one
    if (remote := remote_of(name, spark, os.environ)) is not None:
        return remote
    if (context := active_context()) is not None:
        return str(context.master)
    if CONNECT_MODE in os.environ:
        return ""
    return session_settings(name, spark, world, is_submitted).get("spark.master", "")


def remote_of(name: str, config: SparkConfig, environment: Mapping[str, str]) -> str | None:
    """Find where the server of Spark Connect is; None for a classic session.

    ConfigError for two different places, and for what is no address.

    `name`: of the recipe. `local[n]` in SPARK_REMOTE means a server in this process.
    """
    variable = environment.get(VARIABLE)
    if variable is not None and not is_address(variable):
        remedy = f"set it to sc://host:{PORT}, or local[n] for a server in this process, or unset it"
        raise ConfigError(name, [f"{VARIABLE} = {variable!r}: is no address of Spark Connect; {remedy}"])
    if config.master is not None and variable is not None and config.master != variable:
        raise ConfigError(
            name,
            [
                f"spark.master = {config.master!r}, and the variable {VARIABLE} = {variable!r}: both say where Spark "
                f"runs; unset {VARIABLE}, or leave spark.master out"
            ],
        )
    if config.master is not None and config.master.startswith("sc://"):
        if not is_address(config.master):
            raise ConfigError(
                name,
                [f"spark.master = {config.master!r}: is no address of Spark Connect; set it to sc://host:{PORT}"],
            )
        return config.master
    return variable


def is_address(remote: str) -> bool:
    """Return whether it is `sc://host` with optional port and parameters, or a master in this process."""
    if LOCAL.fullmatch(remote):
        return True
    try:
        place = urlsplit(remote)
        return place.scheme == "sc" and bool(place.hostname) and place.port != 0
    except ValueError:  # a port that is no number
        return False


def is_one_jvm(master: str) -> bool:
    """Return whether the driver's JVM is the executor too: `local` or `local[n]`, not `local-cluster[...]`."""
    return re.fullmatch(r"local(\[.*])?", master) is not None
