"""What the steps of one job share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.storage import Storage
from sparkring.conf.tasks import Family
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.run.runs import RunRecord, Runs
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.training.worker.plan_record import PlanRecord
from sparkring.training.worker.result import WorkerResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkring.etl.build import PinnedDataset
    from sparkring.pipelines.launch.recover import Platform

TRAIN = "train"  # key of a training's run in MLflow


class Publication:
    """For whom a job works: what it reads, what it may publish, and who is notified. This one: a person's command."""

    ds: str | None = None  # start of the data interval as ISO text (`2013-03-01`); None: a job without a date
    may_promote = True  # False: the alias stays where it is
    leased = False  # a lease keeps others away: a run that a process still holds has lost it, and is passed over

    def pin(self, config: RunConfig, session: Callable[[], SparkSession]) -> PinnedDataset:
        """Pin the sources of the dataset. `session`: opens Spark, for sources that need it."""
        return etl_step.pin(config, session)

    def check(self, what: str) -> None:
        """Allow a publication of `what`, or do not return."""

    def on_dataset(self, dataset: Dataset) -> None:
        """Handle the finished dataset."""

    def on_run(self, record: RunRecord) -> None:
        """Handle the started run, with its MLflow run unless the store is away."""


class TrialPublication(Publication):
    """A person's trial: its model never gets the alias."""

    may_promote = False


PERSONAL = Publication()


class PlannedLayouts(Protocol):
    """The layouts of a job that are planned for the number of its ranks (pipelines/model/launch_plan.py)."""

    def resolved_at(self, resolved: Resolved, world: int) -> Resolved:
        """Return the configuration for this number of ranks."""
        ...

    def lines_at(self, world: int) -> list[str]:
        """List what was chosen for this number of ranks, and why; [] if nothing was."""
        ...

    def record_at(self, world: int) -> PlanRecord | None:
        """Return the prediction for this number of ranks; None if nothing can be planned."""
        ...


class StartPoint(Protocol):
    """The trained weights that a training starts from."""

    @property
    def text(self) -> str: ...
    def describe(self, train: WorkerResult) -> str:
        """Describe the result in a line."""
        ...


@dataclass(frozen=True)
class JobContext:
    """A job from its dataset on."""

    resolved: Resolved
    commit: str  # of the code that runs; empty outside of a checkout
    spark: SparkSession | None  # None: a job without Spark
    tracker: Tracker
    runs: Runs
    record: RunRecord  # as run.json was when this command took the run
    dataset: Dataset
    publication: Publication = PERSONAL
    family: Family | None = None  # of a job that trains several: whose training this is; None: there is one
    platform: Platform | None = None  # where ranks run; None: in barrier stages of `spark`
    plan: PlannedLayouts | None = None  # None: the layout is the recipe's, and its steps are not predicted

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

    @property
    def training_folder(self) -> Storage:
        """Where the ranks write: the run folder, or of several families the one of this family in it."""
        return self.folder if self.family is None else self.folder.at(self.family)

    @property
    def training_key(self) -> str:
        """The key of its training's run in MLflow."""
        return TRAIN if self.family is None else f"{TRAIN}-{self.family}"

    def of_family(self, family: Family) -> JobContext:
        """Return this job restricted to one family, with the launches counted so far."""
        record = self.runs.read(self.record.folder)
        plan = self.plan if family == "net" else None
        return replace(self, resolved=self.resolved.of_family(family), record=record, family=family, plan=plan)

    def on_ranks(self, world: int) -> JobContext:
        """Return the job for this number of ranks."""
        return self if self.plan is None else replace(self, resolved=self.plan.resolved_at(self.resolved, world))

    def count_attempt(self, number: int) -> None:
        """Store the number of a launch before it begins, so that it is never used again."""
        self.runs.update(self.record.folder, attempts=number)
