"""What the steps of one job share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pyspark.sql import SparkSession

from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.storage import Storage
from sparkring.etl.build import PinnedDataset
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.run.runs import RunRecord, Runs
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.training.worker.result import WorkerResult


class Publication:
    """For whom a job works: what it reads, what it may publish, and who hears of it. This one: a person's command."""

    ds: str | None = None  # start of the data interval as ISO text (`2013-03-01`); None: a job without a date
    may_promote = True  # False: the alias stays where it is
    leased = False  # a lease keeps others away: a run that a process still holds has lost it, and is passed over

    def pin(self, config: RunConfig, session: Callable[[], SparkSession]) -> PinnedDataset:
        """Pin the sources of the dataset. `session`: opens Spark, for sources that need it."""
        return etl_step.pin(config, session)

    def check(self, what: str) -> None:
        """Called before anything is published, with what it is; does not return where it must not be."""

    def on_dataset(self, dataset: Dataset) -> None:
        """Called when the dataset is there."""

    def on_run(self, record: RunRecord) -> None:
        """Called when the run is known, and its MLflow run, unless the store is away."""


class TrialPublication(Publication):
    """A person's trial: its model never gets the alias."""

    may_promote = False


PERSONAL = Publication()


class StartPoint(Protocol):
    """The trained weights that a training starts from."""

    @property
    def text(self) -> str: ...
    def describe(self, train: WorkerResult) -> str:
        """In a line, as it turned out."""
        ...


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
    publication: Publication = PERSONAL

    @property
    def ds(self) -> str | None:
        """The date that the job is for; see Publication."""
        return self.publication.ds

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
