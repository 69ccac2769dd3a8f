"""How a date's job publishes, and which day partitions of its window it does not look at again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pyspark.sql import SparkSession

from sparkring.conf.config import RunConfig
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schedule.dates import dates_since_begin, moved
from sparkring.etl.build import PinnedDataset
from sparkring.etl.windows.window import NONE_KNOWN, KnownParts
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.context import Publication
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.run.runs import RunRecord
from sparkring.pipelines.schedule.date_job import DateJob
from sparkring.pipelines.schedule.ledger import DateRecord

log = logging.getLogger(__name__)


class DatePublication(Publication):
    """A date's job, which publishes under its lease and tells the ledger what it reads and makes."""

    leased = True

    def __init__(self, job: DateJob) -> None:
        self.job, self.ds, self.may_promote = job, job.record.ds, job.options.promote

    def pin(self, config: RunConfig, session: Callable[[], SparkSession]) -> PinnedDataset:
        job = self.job
        earlier = known_before(job.ledger.records(), job.schedule, job.record.ds)
        sources, deciding = pin_anew(config, session, earlier, job.schedule, job.record.ds)
        if parts := sources.part_fingerprints:
            job.update(parts=parts, parts_digest=deciding)
        return sources

    def check(self, what: str) -> None:
        self.job.check(what)

    def on_dataset(self, dataset: Dataset) -> None:
        self.job.update(dataset=dataset.folder.uri, fingerprint=dataset.manifest.fingerprint)

    def on_run(self, record: RunRecord) -> None:
        self.job.update(run=record.folder, mlflow_run_id=record.mlflow_run_id)


def pin_anew(
    config: RunConfig,
    session: Callable[[], SparkSession],
    earlier: DateRecord | None,
    schedule: ScheduleConfig,
    ds: str,
) -> tuple[PinnedDataset, str]:
    """Pin a date's sources, except day partitions checked by an earlier date's job.

    Returns (sources, digest of what partitions share). If a source that is read whole, the recipe or the code changed
    since, every partition is checked.

    Args:
        config: configuration of the date.
        session: opens Spark, for sources that need it.
        earlier: entry whose partitions need no check; None checks all.
        schedule: defines how many of the last intervals are always checked.
        ds: date of the job.
    """
    known = NONE_KNOWN
    if earlier is not None and config.etl is not None and config.etl.interval is not None:
        known = known_parts(config, earlier, looked_at_from=moved(schedule, ds, -schedule.lookback))
    sources = etl_step.pin(config, session, known)
    deciding = sources.shared_digest
    if known is not NONE_KNOWN and earlier is not None and deciding != earlier.parts_digest:
        log.info("a source that is read whole, the recipe or the code has changed: all parts are looked at")
        sources = etl_step.pin(config, session)
    return sources, deciding


def known_before(records: Sequence[DateRecord], schedule: ScheduleConfig, ds: str) -> DateRecord | None:
    """Return the last entry before `ds` with known partitions; None if all must be checked."""
    if dates_since_begin(schedule, ds) % schedule.full_check == 0:
        return None
    return next((record for record in reversed(records) if record.ds < ds and record.parts), None)


def known_parts(config: RunConfig, earlier: DateRecord, looked_at_from: str) -> KnownParts:
    """Return an earlier date's partitions of intervals before `looked_at_from`."""
    fingerprints = {label: found for label, found in earlier.parts.items() if label < looked_at_from}
    return KnownParts(config.storage.datasets, config.name, fingerprints)
