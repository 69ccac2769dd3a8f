"""The Spark session of a job: made here where there is none, taken as it is under spark-submit or in a notebook."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkContext
from pyspark.sql import SparkSession

from conf.schema import RunConfig

# What every job of ours needs, and a user may still override in spark.conf or by spark-submit --conf.
DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
}


def submitted() -> bool:
    """Whether spark-submit (or a notebook) started this Python and has decided the master already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ or SparkContext._active_spark_context is not None


def session_settings(config: RunConfig, is_submitted: bool) -> dict[str, str]:
    """Spark settings to ask for. Under spark-submit only those that decide meaning, never where or how big."""
    settings = {"spark.app.name": config.spark.app_name or f"sparkring-{config.name}"}
    if is_submitted:
        return settings | {"spark.sql.session.timeZone": "UTC"} | config.spark.conf
    master = config.spark.master or f"local[{max(config.launch.world, 1)}]"
    settings |= DEFAULTS | {"spark.master": master}
    if master.startswith("local"):
        # A laptop or a build machine: nothing listens beyond this host.
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        settings |= {"spark.sql.shuffle.partitions": "8"}
    return settings | config.spark.conf


@contextmanager
def spark_session(config: RunConfig) -> Iterator[SparkSession]:
    """The job's session; stopped at the end only where it was made here."""
    # PySpark 4.3 warns of pandas 3 at every session; what we use of it is tested with this pandas.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    borrowed = SparkContext._active_spark_context is not None
    if not submitted():
        # Spark would start the first `python3` of the PATH on its workers, which need not be this one.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder
    for key, value in session_settings(config, submitted()).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        if not borrowed:
            with contextlib.suppress(Exception):  # the JVM may have ended first, and that is another error's to say
                spark.stop()
