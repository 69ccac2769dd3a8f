"""The Spark session of a build: the recipe's settings decide the rows, the cluster's only how fast a query runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from sparkring.etl.spark_platform.application import GONE, fresh_session
from sparkring.etl.spark_platform.capabilities import all_settings, is_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

BY_FIELD_ID = "spark.sql.parquet.fieldId.read.enabled"
BATCH_ROWS, BATCH_BYTES = (f"spark.sql.execution.arrow.max{what}PerBatch" for what in ("Records", "Bytes"))
MOST_BATCH_BYTES, UNLIMITED = 32 << 20, (1 << 31) - 1
# Settings that decide rows have one value on every cluster.
FIXED = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    BY_FIELD_ID: "true",  # only of columns that say their id, as those of lake tables do
    # Sources come as lists of files: listing each again in a task of its own would take longer than reading it.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # Rows of images or whole documents go to Python in batches of bounded size.
    BATCH_BYTES: str(MOST_BATCH_BYTES),
}
# By Connect Spark believes that files which we read ourselves are tiny: what is small shows only once it has been read.
SIZES_UNKNOWN = {"spark.sql.autoBroadcastJoinThreshold": "-1", "spark.sql.adaptive.autoBroadcastJoinThreshold": "10MB"}
# Settings, or prefixes of them, that decide how fast a query runs, where, or what is shown of it:
# taken from the cluster. Every other setting of Spark SQL comes from the recipe and is part of the fingerprint.
CLUSTER_DECIDES = (
    "spark.sql.adaptive.",
    "spark.sql.artifact.",
    "spark.sql.autoBroadcastJoinThreshold",
    "spark.sql.broadcastTimeout",
    "spark.sql.catalog.",  # where a table is; what is in it, its source pins
    "spark.sql.catalogImplementation",
    "spark.sql.cbo.",
    "spark.sql.codegen.",
    "spark.sql.debug.",
    "spark.sql.execution.arrow.",
    "spark.sql.files.maxPartition",
    "spark.sql.files.minPartitionNum",
    "spark.sql.files.openCostInBytes",
    "spark.sql.inMemoryColumnarStorage.",
    "spark.sql.join.preferSortMergeJoin",
    "spark.sql.maxPlanStringLength",
    "spark.sql.shuffle.partitions",
    "spark.sql.sources.parallelPartitionDiscovery.",
    "spark.sql.statistics.",
    "spark.sql.thriftServer.",
    "spark.sql.ui.",
    "spark.sql.warehouse.dir",
)


def decides_rows(key: str) -> bool:
    """Return whether a Spark setting may change a query's rows: Spark SQL's, but for the two groups above."""
    return key.startswith("spark.sql.") and key not in FIXED and not key.startswith(CLUSTER_DECIDES)


def build_session(spark: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """Make a session with its own views, where the recipe's `settings` decide rows, not the cluster's or caller's."""
    session = fresh_session(spark)
    for key in all_settings(session):
        if decides_rows(key) and key not in settings and session.conf.isModifiable(key):
            log.warning("%s is set on this cluster and not in the recipe's spark.conf: left out of the build", key)
            session.conf.unset(key)
    if (partitions := spark.conf.get("spark.sql.shuffle.partitions", None)) is not None:
        session.conf.set("spark.sql.shuffle.partitions", partitions)
    of_recipe = {key: value for key, value in settings.items() if key.startswith("spark.sql.")}
    joins = {} if is_classic(session) else SIZES_UNKNOWN
    for key, value in {**joins, **of_recipe, **FIXED}.items():
        if session.conf.isModifiable(key):
            session.conf.set(key, value)
    return session


@contextmanager
def batches_to_python(session: SparkSession, row_bytes: int | None) -> Iterator[None]:
    """Keep Spark from summing the bytes of a batch where its rows bound them.

    Spark 4.3 adds up a batch's buffers before every row: of nine columns, a third of what shuffling and writing them
    costs. Spark 3.5 has no such limit. `row_bytes`: of the widest row; None where that is not known.
    """
    rows, limit = int(session.conf.get(BATCH_ROWS) or 0), session.conf.get(BATCH_BYTES, None)
    if row_bytes is None or limit is None or not 0 < rows * row_bytes <= MOST_BATCH_BYTES:
        yield
        return
    session.conf.set(BATCH_BYTES, str(UNLIMITED))
    try:
        yield
    finally:
        with suppress(*GONE):
            session.conf.set(BATCH_BYTES, limit)
