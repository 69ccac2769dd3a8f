"""What a job took of a cluster: core hours and GPU hours by part, as metrics of every run.

    etl, evaluate   Spark's cores x seconds: the application holds its executors, busy or not
    train           ranks x threads of each x seconds from the launch to the last rank's end, and ranks x GPUs of each
                    x the same seconds; of a job that failed and went on, the ranks and threads of the last attempt

What other processes of the machines did meanwhile, and the driver's own core on a cluster, are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.etl.spark_platform.application import settings_of
from sparkring.etl.spark_platform.executors import task_slots
from sparkring.training.worker.result import WorkerResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_S = 3600.0


def spark_cores(spark: SparkSession) -> int:
    """Return the cores of the present executors: concurrent tasks times the cores of a task."""
    return task_slots(spark) * int(settings_of(spark).get("spark.task.cpus") or 1)


def core_hours(cores: int, seconds: float) -> float:
    return cores * seconds / HOUR_S


def etl_cost(spark: SparkSession, seconds: float) -> dict[str, float]:
    """Return the cost metric of a dataset's build, by its seconds."""
    return {"cost/core_hours_etl": core_hours(spark_cores(spark), seconds)}


def job_cost(cores: int, timings: Mapping[str, float], launch: LaunchConfig, rank_0: WorkerResult) -> dict[str, float]:
    """Compute core and GPU hours of a trained and evaluated job, by stage.

    Args:
        cores: number of Spark's cores.
        timings: stage of the job -> seconds; a dataset that was found has no `etl_s`.
        launch: for GPUs of a rank; without them there are no GPU hours.
        rank_0: for the number of ranks and their threads.
    """
    train_s = timings["launch_s"] + timings["train_s"]
    cost = {
        "core_hours_etl": core_hours(cores, timings.get("etl_s", 0.0)),
        "core_hours_train": core_hours(rank_0.world * rank_0.threads_per_rank, train_s),
        "core_hours_evaluate": core_hours(cores, timings["evaluate_s"]),
    }
    if launch.gpus_per_rank:
        cost["gpu_hours_train"] = core_hours(rank_0.world * launch.gpus_per_rank, train_s)
    return cost
