"""What the steps of one job share."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import SparkSession

from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.storage import Storage
from sparkring.pipelines.etl_step import Dataset
from sparkring.pipelines.runs import RunRecord, Runs
from sparkring.pipelines.tracking.tracker import Tracker


@dataclass(frozen=True)
class JobContext:
    """A job from its dataset on."""

    resolved: Resolved
    commit: str  # of the code that runs; empty outside of a checkout
    spark: SparkSession
    tracker: Tracker
    runs: Runs
    record: RunRecord  # as run.json was when this command took the run
    dataset: Dataset
    ds: str | None = None  # start of the job's data interval, as ISO text; None: a job without a date

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def folder(self) -> Storage:
        """The run folder."""
        return self.runs.at(self.record)

    def count_attempt(self, number: int) -> None:
        """Store the number of a launch before it begins, so that it is never used again."""
        self.runs.update(self.record.folder, attempts=number)
