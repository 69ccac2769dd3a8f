"""Spark's daemon of Python workers, with what our workers use imported once, before it forks the first.

`spark.python.daemon.module` names it, in sessions on this machine. A worker that Spark's own daemon forks imports
pyarrow, pandas and our modules itself, which takes it seconds, and a job of a minute has four of them. Its workers
become the agents of the ranks too, whose fork servers import torch once.
"""

from __future__ import annotations

from pyspark.daemon import manager

from sparkring.training.launch.host.processes import import_before_forks
from sparkring.training.launch.host.shared_imports import share_with_forks

PRELOAD = (
    "pyarrow.parquet",
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "sparkring.etl.sources.files.task",
    "sparkring.etl.shards.quarantine",
    "sparkring.etl.shards.write",
    "pandas",  # whatever a worker returns to Spark SQL
    "sparkring.pipelines.launch.barrier",
)

if __name__ == "__main__":
    share_with_forks()
    import_before_forks(PRELOAD)
    manager()
