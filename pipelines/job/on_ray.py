"""`sparkring train` on a running Ray cluster, without Spark (launch.on: ray)."""

from __future__ import annotations

from sparkring.conf.load import Resolved
from sparkring.pipelines.job.job import check_without_spark, run_on_platform


def train_on_ray(resolved: Resolved) -> int:
    """Train where Ray has room, and return the job's exit code; this process is the driver."""
    found = check_without_spark(resolved.config)
    from sparkring.pipelines.launch.ray_agents import ray_cluster  # ray is installed, says the check

    with ray_cluster(resolved.config.launch) as cluster:
        cluster.wait_for_room()
        return run_on_platform(resolved, found, cluster.platform)
