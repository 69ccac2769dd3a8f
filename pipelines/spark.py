"""The Spark session of a job: created here, or taken over under spark-submit and in a notebook."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig

log = logging.getLogger(__name__)

# What every job needs. A user may override it in spark.conf or by spark-submit --conf.
DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "1g",
}

# During ETL only Spark notices a host that is gone. Its default limit is two minutes (10 s between heartbeats).
DEAD_HOSTS = {"spark.network.timeout": "60s", "spark.executor.heartbeatInterval": "5s"}
AFTER_GRACE_S = 30.0  # for killed ranks to end, and for MLflow's last operations
BEFORE_SPARKS_OWN = 1000  # Hadoop runs shutdown hooks by falling priority; Spark's is below 100


def submitted() -> bool:
    """Whether spark-submit or a notebook started this Python, and has set the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ or SparkContext._active_spark_context is not None


def session_settings(name: str, spark: SparkConfig, world: int, is_submitted: bool) -> dict[str, str]:
    """Spark settings of the session; under spark-submit none that decide where it runs or how large it is."""
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
    return settings | spark.settings()


@contextmanager
def spark_session(name: str, config: SparkConfig, launch: LaunchConfig) -> Iterator[SparkSession]:
    """Open the job's session; stop it at the end if it was created here."""
    # PySpark 4.3 warns of pandas 3 at every session; what we use of it is tested with this pandas.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    borrowed = SparkContext._active_spark_context is not None
    if not submitted():
        # Spark would start the first `python3` of the PATH on its workers, which need not be this one.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = session_settings(name, config, launch.world, submitted())
    if not submitted() and config.log == "file":
        start_jvm(settings)
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if borrowed:
        yield spark
        return
    with jvm_held(spark, launch.grace_s + AFTER_GRACE_S):
        try:
            yield spark
        finally:
            with contextlib.suppress(Exception):  # the JVM may have ended first; another error reports that
                spark.stop()


def start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM that the session will run in, with its output and Spark's log in a file, which is named.

    A JVM says a dozen lines before any setting of Spark's is heard, and native libraries say more.
    """
    descriptor, name = tempfile.mkstemp(prefix="sparkring-spark-", suffix=".log")
    log.info("Spark starts, %s; its own log: %s", settings["spark.master"], name)
    conf = SparkConf(loadDefaults=True).setAll([*settings.items()])
    with os.fdopen(descriptor, "w") as out:
        gateway = launch_gateway(conf, popen_kwargs={"stdout": out, "stderr": out})
    SparkContext._ensure_initialized(gateway=gateway, conf=conf)


@contextmanager
def session_on_demand(name: str, config: SparkConfig, launch: LaunchConfig) -> Iterator[Callable[[], SparkSession]]:
    """Give a function that opens the job's session when it is first called, and returns it ever after."""
    with contextlib.ExitStack() as opened:
        yield functools.cache(lambda: opened.enter_context(spark_session(name, config, launch)))


@contextmanager
def jvm_held(spark: SparkSession, limit_s: float) -> Iterator[None]:
    """Keep the JVM alive after a SIGTERM until this process has ended, for `limit_s` at most.

    `timeout`, systemd and batch systems send SIGTERM to the whole process group. The JVM would take the executors away
    while the ranks write their last checkpoint.
    """
    jvm: Any = spark.sparkContext._jvm
    lang, hooks = jvm.java.lang, jvm.org.apache.hadoop.util.ShutdownHookManager.get()
    ended = lang.ProcessHandle.of(os.getpid()).get().onExit()
    wait = lang.invoke.MethodHandles.publicLookup().bind(
        ended, "join", lang.invoke.MethodType.methodType(lang.Class.forName("java.lang.Object"))
    )
    hook = lang.invoke.MethodHandleProxies.asInterfaceInstance(lang.Class.forName("java.lang.Runnable"), wait)
    hooks.addShutdownHook(hook, BEFORE_SPARKS_OWN, int(limit_s), jvm.java.util.concurrent.TimeUnit.SECONDS)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # the JVM has ended, or is waiting for us to end
            hooks.removeShutdownHook(hook)
