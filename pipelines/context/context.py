"""What the steps of one job share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.storage import Storage
from sparkring.etl.build import PinnedDataset
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.run.runs import RunRecord, Runs
from sparkring.pipelines.tracking.tracker import Tracker


@dataclass(frozen=True)
class JobHooks:
    """What a job asks and tells the one that started it. The defaults are those of a job without a date."""

    ds: str | None = None  # as JobContext's
    may_promote: bool = True  # False: the alias stays where it is
    leased: bool = False  # a lease keeps others away: a run that a process still holds has lost it, and is passed over
    pin: Callable[[RunConfig, Callable[[], SparkSession]], PinnedDataset] = etl_step.pin
    before_publish: Callable[[str], None] = lambda what: None  # given what is to be published; does not return if not
    on_dataset: Callable[[Dataset], None] = lambda dataset: None
    # given the step of an evaluation and its metrics; True: training stops there
    falls_behind: Callable[[int, dict[str, float]], bool] = lambda step, metrics: False
    keeps_checkpoints: bool = True  # False: they are deleted when training ends, so MLflow points at none
    on_run: Callable[[RunRecord], None] = lambda record: None  # its MLflow run is known, or the store is away


NO_HOOKS = JobHooks()


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
    ds: str | None = None  # start of the data interval as ISO text (`2013-03-01`); None: a job without a date
    hooks: JobHooks = NO_HOOKS

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
