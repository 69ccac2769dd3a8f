"""The job of `sparkring etl`: build the dataset, or find that it exists.

Imports neither torch nor MLflow: a dataset that exists is found in seconds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import sparkring
from sparkring.conf.digest import digest
from sparkring.conf.load import Resolved
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.context import PERSONAL, Publication
from sparkring.pipelines.housekeeping.cost import etl_cost
from sparkring.pipelines.lineage import record as lineage
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.tracking.checkout import shown_command
from sparkring.pipelines.tracking.describe import job_note
from sparkring.pipelines.tracking.openlineage.driver import send_events_left_behind
from sparkring.pipelines.tracking.params import run_params
from sparkring.pipelines.tracking.tags import COMMIT, DATE, FINGERPRINT, RECIPE
from sparkring.pipelines.tracking.tracker import JOB, Tracker, git_commit, run_label, send_left_behind
from sparkring.pipelines.tracking.views import NOTE
from sparkring.pipelines.validate.folders import DATASETS, check_folders
from sparkring.pipelines.validate.labels import warn_of_labels
from sparkring.pipelines.validate.tables import check_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("sparkring")


def run_etl(
    resolved: Resolved, publication: Publication = PERSONAL, session: Callable[[], SparkSession] | None = None
) -> int:
    """Build the dataset unless it exists, and return the exit code. Raises what the ETL raises.

    `session`: of several jobs; None: one of this job's own, opened when it is needed.
    """
    from sparkring.pipelines.run.jvm_options import data_bytes
    from sparkring.pipelines.run.spark import session_on_demand

    config = resolved.config
    check_tables(config, ["tracking.root"])
    tracking = config.tracking.named(config.name)
    own = (
        session_on_demand(config.name, config.spark, config.launch, partial(data_bytes, config))
        if session is None
        else nullcontext(session)
    )
    with own as session:
        sources = publication.pin(config, session)
        fingerprint = etl_step.wanted_fingerprint(config, sources)
        found = etl_step.find(config, fingerprint)
        if found is not None:
            log.info("dataset: %s is there already", found.folder.uri)
            warn_of_labels(config, found.manifest, found.folder)
            publication.on_dataset(found)
            send_left_behind(tracking)
            send_events_left_behind(tracking)
            return Exit.OK
        check_folders(config, [DATASETS])
        etl_step.foresee(session(), config, sources)
        job_id, commit = digest([resolved.digest, fingerprint])[:16], git_commit(Path(__file__).parent) or ""
        tags = job_tags(config.name, commit, publication.ds)
        with Tracker(tracking, job_id, config.name, tags, label=run_label(publication.ds)) as tracker:
            lineage.begin(tracker, f"{config.name}.etl", resolved, sources.snapshots)
            spark = session()
            describe_job(tracker, resolved, spark, fingerprint)
            built = etl_step.build(spark, resolved, sources, commit, tracker, publication.check)
            warn_of_labels(config, built.manifest, built.folder)
            lineage.record_dataset(tracker, config, built)
            tracker.metrics(JOB, 0, etl_cost(spark, built.seconds.get("total_s", 0.0)))
            publication.on_dataset(built)
    return Exit.OK


def job_tags(recipe: str, commit: str, ds: str | None) -> dict[str, str]:
    """Return tags of a job's run, by which its recipe's runs are listed. `ds`: date of the job."""
    return {COMMIT: commit, RECIPE: recipe} | ({DATE: ds} if ds else {})


def describe_job(tracker: Tracker, resolved: Resolved, spark: SparkSession | None, fingerprint: str) -> None:
    """Record the configuration, and what identifies the dataset, the application and the code.

    `spark`: None of a job without Spark.
    """
    config = resolved.config
    tracker.tags(
        JOB,
        {
            "sparkring.config_digest": resolved.digest,
            FINGERPRINT: fingerprint,
            "sparkring.world": config.launch.world,
            "sparkring.code_path": str(Path(sparkring.__file__).parent),
            NOTE: job_note(config.description, shown_command(sys.argv)),
        },
    )
    if spark is not None:
        from sparkring.etl.spark_platform.application import application_id  # a job without Spark need not have it

        tracker.tags(JOB, {"sparkring.application_id": application_id(spark)})
    tracker.params(JOB, run_params(resolved, fingerprint))
    tracker.artifact_json(JOB, resolved.as_dict(), "config.json")
