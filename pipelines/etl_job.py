"""The job of `sparkring etl`: build the dataset, or find that it exists.

Imports neither torch nor MLflow: a dataset that exists is found in seconds.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pyspark.sql import SparkSession

from sparkring.conf.load import Resolved
from sparkring.conf.manifest import digest
from sparkring.pipelines import etl_step
from sparkring.pipelines.exit_codes import Exit
from sparkring.pipelines.spark import session_on_demand
from sparkring.pipelines.tracking.tracker import JOB, Tracker, git_commit, send_left_behind

log = logging.getLogger("sparkring")


def run_etl(resolved: Resolved) -> int:
    """Build the dataset unless it exists, and return the exit code. Raises what the ETL raises."""
    config = resolved.config
    tracking = config.tracking.named(config.name)
    with session_on_demand(config.name, config.spark, config.launch) as session:
        sources = etl_step.pin(config, session)
        fingerprint = etl_step.wanted_fingerprint(config, sources)
        found = etl_step.find(config, fingerprint)
        if found is not None:
            log.info("dataset: %s is there already", found.folder.uri)
            send_left_behind(tracking)
            return Exit.OK
        job_id, commit = digest([resolved.digest, fingerprint])[:16], git_commit(Path(__file__).parent) or ""
        with Tracker(tracking, job_id, config.name, {"sparkring.commit": commit}) as tracker:
            spark = session()
            describe_job(tracker, resolved, spark, fingerprint)
            etl_step.build(spark, resolved, sources, commit, tracker)
    return Exit.OK


def describe_job(tracker: Tracker, resolved: Resolved, spark: SparkSession, fingerprint: str) -> None:
    """Record the configuration, and what identifies the dataset, the application and the code."""
    config = resolved.config
    tracker.tags(
        JOB,
        {
            "sparkring.config_digest": resolved.digest,
            "sparkring.fingerprint": fingerprint,
            "sparkring.application_id": spark.sparkContext.applicationId,
            "sparkring.world": config.launch.world,
            "sparkring.code_path": str(Path(__file__).parent.parent),
        },
    )
    tracker.params(JOB, resolved.as_dict())
    tracker.artifact_json(JOB, resolved.as_dict(), "config.json")
