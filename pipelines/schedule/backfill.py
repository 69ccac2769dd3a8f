"""Many dates, one after another in one Spark application: `sparkring backfill`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Literal

from sparkring.conf.load import ConfigError, Resolved
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schedule.dates import between, check_known, interval_of, parse_date
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.schedule.date_job import DateOptions, stop_at_once
from sparkring.pipelines.schedule.ledger import DateRecord, Ledger
from sparkring.pipelines.schedule.run_date import LEASE, Shared, do_date, hold_lease
from sparkring.pipelines.validate.folders import check_folders

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("sparkring")
Reprocess = Literal["none", "failed", "completed"]
Train = Literal["each", "last", "none"]


@dataclass(frozen=True)
class BackfillRequest:
    """What a backfill was asked for; the words are those of its options."""

    first: str
    last: str
    reprocess: Reprocess = "none"
    train: Train = "each"
    backwards: bool = False
    dry_run: bool = False
    promote: bool = False


@dataclass(frozen=True)
class Step:
    """What a backfill does with a date. `rerun`: although it is done."""

    ds: str
    does: Literal["skip", "build", "train"]
    why: str
    rerun: bool = False


def plan_backfill(dates: Sequence[str], records: Mapping[str, DateRecord], request: BackfillRequest) -> list[Step]:
    """Decide what is done with each of the dates, which are in rising order; the steps are in the order of doing."""
    newest = dates[-1]
    steps = [plan_date(ds, records.get(ds), request, is_newest=ds == newest) for ds in dates]
    return steps[::-1] if request.backwards else steps


def plan_date(ds: str, record: DateRecord | None, request: BackfillRequest, is_newest: bool) -> Step:
    """Decide what is done with one date."""
    trains = request.train == "each" or (request.train == "last" and is_newest)
    does: Literal["build", "train"] = "train" if trains else "build"
    if record is None:
        return Step(ds, does, "has no entry")
    if record.status in ("running", "failed", "interrupted"):
        # Its lease shows, when the date is started, whether it still runs or was killed.
        redo = request.reprocess != "none" or record.status != "failed"
        ended = "" if record.exit_code is None else f", exit code {record.exit_code}"
        return Step(ds, does if redo else "skip", record.status + ended)
    if record.status == "built" and trains:
        return Step(ds, "train", "built, not trained on")
    again = request.reprocess == "completed"
    return Step(ds, does if again else "skip", record.status, rerun=again)


def dates_of(schedule: ScheduleConfig, request: BackfillRequest, now: datetime) -> list[str]:
    """List the dates of a backfill, oldest first. ConfigError for dates outside the schedule or not over."""
    problems, ends = list[str](), list[str]()
    for option, text in (("--from-date", request.first), ("--to-date", request.last)):
        try:
            ds = check_known(schedule, parse_date(schedule, text), now)
            if (end := interval_of(schedule, ds).end) > now:
                raise ValueError(f"its interval ends {end.isoformat()}, which is in the future")
            ends.append(ds)
        except ValueError as error:
            problems.append(f"{option} {text}: {error}")
    if not problems and ends[0] > ends[1]:
        problems.append(f"--from-date {ends[0]} is after --to-date {ends[1]}; swap them, or see --run-backwards")
    if problems:
        raise ConfigError("backfill", problems)
    return between(schedule, *ends)


def backfill(
    base: Resolved,
    load: Callable[[str], Resolved],
    request: BackfillRequest,
    exit_of: Callable[[BaseException], Exit],
    say: Callable[[str], None],
) -> int:
    """Run the dates of a backfill; returns the exit code of the first that failed. The last line of output is JSON.

    Args:
        base: resolved configuration of the recipe.
        load: returns the recipe for a date.
        request: dates and options of the backfill.
        exit_of: returns the exit code of an error.
        say: called with lines for stdout.
    """
    config, schedule = base.config, base.config.schedule
    assert schedule is not None, "checked by the command line"
    ledger = Ledger(config.storage.runs, config.name)
    dates = dates_of(schedule, request, datetime.now(UTC))
    steps = plan_backfill(dates, {record.ds: record for record in ledger.records()}, request)
    for step in steps:
        say(f"{step.ds}  {step.does:<5}  {step.why}")
    if request.dry_run:
        return Exit.OK
    check_folders(config, ["storage.runs"])  # before the lease, which is kept there
    codes = dict[str, int]()
    with ExitStack() as stack:
        shared = Shared()
        if schedule.concurrency != "allow":  # no other job of the recipe begins between two dates
            what = f"backfill {dates[0]} to {dates[-1]}"
            on_lost = _on_lost(dates[0])
            shared = Shared((stack.enter_context(hold_lease(ledger.storage, LEASE, schedule, what, on_lost)),))
        if any(step.does != "skip" for step in steps):
            shared = Shared(shared.leases, _session(stack, base))
        for step in steps:
            if step.does == "skip":
                continue
            codes[step.ds] = run_step(load(step.ds), step, request, shared, exit_of)
            if not Exit(codes[step.ds]).lets_next_date_run:
                log.error("%s ended with exit code %d: the dates after it are not started", step.ds, codes[step.ds])
                break
    code, line = summarize(steps, codes)
    say(line)
    return code


def run_step(
    resolved: Resolved,
    step: Step,
    request: BackfillRequest,
    shared: Shared,
    exit_of: Callable[[BaseException], Exit],
) -> int:
    """Run one date; returns its exit code. An error is logged; Ctrl-C and SIGTERM are raised.

    Args:
        resolved: configuration for the date.
        step: what to do.
        request: options of the backfill.
        shared: leases that its dates share.
        exit_of: returns the exit code of an error.
    """
    options = DateOptions(exit_of, rerun=step.rerun, train=step.does == "train", promote=request.promote, in_time=False)
    try:
        record = do_date(resolved, options, shared)
    except Exception as error:
        log.error("%s: %s", step.ds, error)
        return exit_of(error)
    assert record.exit_code is not None
    return record.exit_code


def summarize(steps: Sequence[Step], codes: Mapping[str, int]) -> tuple[int, str]:
    """Return the exit code of a backfill, and one JSON object that describes it."""
    wrong = {ds: code for ds, code in codes.items() if code != Exit.OK}
    code = next(iter(wrong.values()), Exit.OK)
    not_begun = [step.ds for step in steps if step.does != "skip" and step.ds not in codes]
    skipped = [step.ds for step in steps if step.does == "skip"]
    return code, json.dumps({"exit_code": int(code), "dates": codes, "skipped": skipped, "not_begun": not_begun})


def _on_lost(ds: str) -> Callable[[str], None]:
    return lambda why: stop_at_once(why, DateRecord(ds=ds, status="failed"))


def _session(stack: ExitStack, base: Resolved) -> Callable[[], SparkSession]:
    from sparkring.pipelines.run.jvm_options import data_bytes
    from sparkring.pipelines.run.spark import session_on_demand

    config = base.config
    known = partial(data_bytes, config)
    return stack.enter_context(session_on_demand(config.name, config.spark, config.launch, known))
