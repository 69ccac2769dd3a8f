"""One date of a recipe: `sparkring run RECIPE --date D`.

A date that is done is found in the ledger, and nothing is started. Else the date waits for its upstream, takes its
lease and runs the job, which publishes only under that lease and tells the ledger what it reads and makes.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Timer
from typing import TYPE_CHECKING, Any

from sparkring.conf.load import ConfigError, Resolved
from sparkring.conf.schedule.block import ScheduleConfig, seconds
from sparkring.conf.schedule.dates import DataInterval
from sparkring.conf.secrets import redact
from sparkring.conf.storage import Storage
from sparkring.pipelines.housekeeping.notify import announce_late
from sparkring.pipelines.run.runs import Runs
from sparkring.pipelines.schedule.conditional import conditional_file
from sparkring.pipelines.schedule.date_job import DateJob, DateOptions, outcome_line, stop_at_once
from sparkring.pipelines.schedule.errors import NotReady, TryLater
from sparkring.pipelines.schedule.lease import Lease, LeaseRequest, check_free, held
from sparkring.pipelines.schedule.ledger import DateRecord, DateStatus, Ledger
from sparkring.pipelines.schedule.upstream import wait_for
from sparkring.pipelines.validate.folders import check_folders
from sparkring.training.worker.result import SUMMARY

if TYPE_CHECKING:  # a date that is done imports neither Spark's session nor torch
    from pyspark.sql import SparkSession


log = logging.getLogger("sparkring")
LEASE = "lease.json"
DONE: dict[bool, set[DateStatus]] = {True: {"succeeded"}, False: {"succeeded", "built"}}  # by: the date is trained on


@dataclass(frozen=True)
class Shared:
    """What the dates of a backfill share: the recipe's lease, and a session of Spark that opens when it is needed."""

    leases: tuple[Lease, ...] = ()
    session: Callable[[], SparkSession] | None = None


ALONE = Shared()


def run_date(resolved: Resolved, options: DateOptions, say: Callable[[str], None]) -> int:
    """Run a date; returns its exit code. Raises what the job raises.

    `say` takes the last line of stdout: what became of the date, as one JSON object.
    """
    try:
        record = do_date(resolved, options)
    except BaseException as error:
        ds = interval_of(resolved).ds
        known = read_quietly(ledger_of(resolved), ds) or DateRecord(ds=ds, status="failed")
        say(outcome_line(known, ended_by(error), options.exit_of(error), error))
        raise
    assert record.exit_code is not None
    say(outcome_line(record, record.status, record.exit_code))
    return record.exit_code


def do_date(resolved: Resolved, options: DateOptions, shared: Shared = ALONE) -> DateRecord:
    """Run a date unless it is done; returns its entry. Raises TryLater, and what the job raises."""
    check_folders(resolved.config, ["storage.runs"])
    interval, ledger = interval_of(resolved), ledger_of(resolved)
    record = ledger.read(interval.ds)
    if record is not None and is_done(record, options):
        log.info("%s is done: %s", interval.ds, record.run or record.dataset)
        return record
    schedule = resolved.config.schedule
    assert schedule is not None
    check_ended(interval, datetime.now(UTC))
    wait_for(schedule.wait_for, seconds(schedule.wait_timeout))
    job = DateJob(resolved, options, ledger, DateRecord(ds=interval.ds, status="running"))
    check_leases(job, interval.ds, shared)
    check(resolved, options)
    with job_leases(job, interval.ds, shared) as job.leases:
        record = ledger.read(interval.ds)  # another may have finished it before we took its lease
        if record is not None and is_done(record, options):
            return record
        return work(job, interval, record, shared)


def check(resolved: Resolved, options: DateOptions) -> None:
    """Raise an error for a wrong recipe: the entry of a date says what became of its data, not of a mistyped key.

    No table is looked at: what is wrong with one is the date's.
    """
    from sparkring.pipelines.validate.tables import check_declared

    if options.train:
        from sparkring.pipelines.validate.recipe import check_recipe

        check_recipe(resolved.config)
    check_declared(resolved.config)


def work(job: DateJob, interval: DataInterval, before: DateRecord | None, shared: Shared) -> DateRecord:
    """Run the job of a date under its leases, and store how it ended.

    Where the recipe turns out to be wrong before the date has a dataset, its entry becomes what it was.
    """
    job.record = begun(interval.ds, before, epoch=job.leases[-1].epoch)
    job.update()
    try:
        with announced_when_late(job, interval):
            code = start_job(job, shared)
    except BaseException as error:
        if isinstance(error, ConfigError) and job.record.dataset is None:
            put_back(job, before)
            raise
        status: DateStatus = "interrupted" if ended_by(error) == "interrupted" else "failed"
        try:
            store_end(job, interval, status, job.options.exit_of(error), redact(str(error) or type(error).__name__))
        except OSError as other:  # a full disk, say, must not hide what ended the job
            log.error("%s: its entry still says %r: %s", interval.ds, job.record.status, other)
        raise
    store_end(job, interval, "succeeded" if job.options.train else "built", code)
    return job.record


def start_job(job: DateJob, shared: Shared) -> int:
    """Train, or build the dataset alone; returns the exit code."""
    from sparkring.pipelines.schedule.publication import DatePublication

    publication = DatePublication(job)
    if not job.options.train:
        from sparkring.pipelines.job.etl_job import run_etl

        return run_etl(job.resolved, publication, shared.session)
    from sparkring.pipelines.job.job import run_job

    return run_job(job.resolved, etl=True, publication=publication, session=shared.session)


def store_end(job: DateJob, interval: DataInterval, status: DateStatus, code: int, error: str = "") -> None:
    """Store how the job of a date ended, and the scores of its run.

    Args:
        job: job of the date.
        interval: data interval; the deadline counts from its end.
        status: status of the entry.
        code: exit code of the job.
        error: reason for the failure, or empty.
    """
    now = datetime.now(UTC)
    late = job.options.in_time and is_late(job.schedule, interval, now)
    if late:
        log.warning("%s ended after its deadline, %s after %s", interval.ds, job.schedule.deadline, interval.end)
    job.update(
        status=status,
        exit_code=int(code),
        finished_at=now.isoformat(timespec="seconds"),
        error=error,
        late=late,
        **(scored(job) if status == "succeeded" else {}),
    )


def put_back(job: DateJob, before: DateRecord | None) -> None:
    """Make the entry of a date what it was. An error of the storage must not hide what ended the job."""
    job.check("the entry of the date")
    try:
        job.ledger.restore(job.record.ds, before)
    except OSError as error:
        log.error("%s: its entry still says %r: %s", job.record.ds, job.record.status, error)


def scored(job: DateJob) -> dict[str, Any]:
    """Return the entry's fields from summary.json of its run."""
    assert job.record.run is not None, "a run that finished was taken"
    config = job.resolved.config
    folder = Runs(config.storage.runs, config.name).storage.at(job.record.run)
    summary = json.loads(folder.read_bytes(SUMMARY))
    promotion = summary.get("promotion")
    version = promotion.get("version") if isinstance(promotion, dict) else None
    return {
        "scores": summary["scores"],
        "mlflow_url": summary["tracking_url"],
        "promotion": promotion,
        "family": (summary.get("choice") or {}).get("winner", ""),
        "model_version": None if version is None else str(version),
    }


# --- decisions


def is_done(record: DateRecord, options: DateOptions) -> bool:
    """Return whether nothing is left to do for a date."""
    return not options.rerun and record.status in DONE[options.train]


def ended_by(error: BaseException) -> str:
    """Return the status of a date whose job ended by an error, for the scheduler."""
    if isinstance(error, TryLater):
        return "try_later"
    return "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"


def begun(ds: str, before: DateRecord | None, epoch: int) -> DateRecord:
    """Return the entry of a starting job; it keeps only attempts and run of the previous entry."""
    return DateRecord(
        ds=ds,
        status="running",
        attempts=(before.attempts if before else 0) + 1,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        epoch=epoch,
        run=before.run if before is not None and before.status != "succeeded" else None,
    )


def check_ended(interval: DataInterval, now: datetime) -> None:
    """Raise NotReady if the interval of a date has not ended: its data are not complete."""
    if interval.end > now:
        raise NotReady(
            f"--date {interval.ds}: its interval ends {interval.end.isoformat()}, and this host's clock shows "
            f"{now.isoformat(timespec='seconds')}; try again then"
        )


def is_late(schedule: ScheduleConfig, interval: DataInterval, now: datetime) -> bool:
    return schedule.deadline is not None and now > interval.end + timedelta(seconds=seconds(schedule.deadline))


def lease_paths(schedule: ScheduleConfig, ds: str) -> list[str]:
    """List a date's leases, relative to the ledger: the recipe's unless dates run in parallel, and its own."""
    return [*([] if schedule.concurrency == "allow" else [LEASE]), f"{ds}/{LEASE}"]


# --- edges


def interval_of(resolved: Resolved) -> DataInterval:
    assert resolved.interval is not None, "the recipe was loaded with a date"
    return resolved.interval


def ledger_of(resolved: Resolved) -> Ledger:
    return Ledger(resolved.config.storage.runs, resolved.config.name)


def read_quietly(ledger: Ledger, ds: str) -> DateRecord | None:
    """Read the entry of a date; None if missing or unreadable, which was reported already."""
    try:
        return ledger.read(ds)
    except (OSError, ValueError):
        return None


@contextmanager
def announced_when_late(job: DateJob, interval: DataInterval) -> Iterator[None]:
    """Tell the targets of `notify`, once the deadline has passed, that the block is not done."""
    if job.schedule.deadline is None or not job.options.in_time or not job.resolved.config.notify.targets:
        yield
        return
    left = interval.end + timedelta(seconds=seconds(job.schedule.deadline)) - datetime.now(UTC)
    command = ["sparkring", *sys.argv[1:]]
    tell = Timer(max(0.0, left.total_seconds()), announce_late, (job.resolved.config, command, interval.ds))
    tell.daemon = True
    tell.start()
    try:
        yield
    finally:
        tell.cancel()


def own_paths(job: DateJob, ds: str, shared: Shared) -> list[str]:
    """List the leases that the job of a date takes itself."""
    return lease_paths(job.schedule, ds)[len(shared.leases) :]


def check_leases(job: DateJob, ds: str, shared: Shared) -> None:
    """Raise DateTaken if another holds a lease of the date; takes none until after seconds of checks."""
    for path in own_paths(job, ds, shared):
        check_free(conditional_file(job.ledger.storage, path), lease_request(job.schedule, ds))


@contextmanager
def job_leases(job: DateJob, ds: str, shared: Shared) -> Iterator[tuple[Lease, ...]]:
    """Hold the leases of a date for the block; those that are shared are held already."""
    paths = own_paths(job, ds, shared)
    with ExitStack() as stack:
        own = [
            stack.enter_context(hold_lease(job.ledger.storage, path, job.schedule, ds, lambda why: stop(job, why)))
            for path in paths
        ]
        yield (*shared.leases, *own)


def stop(job: DateJob, why: str) -> None:
    stop_at_once(why, job.record)


@contextmanager
def hold_lease(
    storage: Storage, path: str, schedule: ScheduleConfig, what: str, on_lost: Callable[[str], None]
) -> Iterator[Lease]:
    """Hold one lease for the block. DateTaken where another holds it.

    Args:
        storage: folder of the ledger.
        path: path of the lease, relative to it.
        schedule: defines a lease's duration, and whether it may be taken from another.
        what: name of the work, for people.
        on_lost: called with the reason from another thread.
    """
    with held(conditional_file(storage, path), lease_request(schedule, what), on_lost) as lease:
        yield lease


def lease_request(schedule: ScheduleConfig, what: str) -> LeaseRequest:
    return LeaseRequest(what, seconds(schedule.lease), replace=schedule.concurrency == "replace")
