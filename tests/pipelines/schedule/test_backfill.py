from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.load import ConfigError, Resolved, load_config
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schedule.dated import DateRequest
from sparkring.etl.errors import EtlError
from sparkring.pipelines.cli.exits import exit_code
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.schedule import run_date as run_date_module
from sparkring.pipelines.schedule.backfill import BackfillRequest, backfill, dates_of, plan_backfill, plan_date
from sparkring.pipelines.schedule.date_job import DateJob
from sparkring.pipelines.schedule.errors import DateTaken
from sparkring.pipelines.schedule.ledger import DateRecord, Ledger
from sparkring.pipelines.schedule.run_date import LEASE, Shared, hold_lease
from sparkring.training.launch.failure import LaunchError
from tests.pipelines.schedule.recipe import write_recipe

NOW = dt.datetime(2024, 12, 1, 12, tzinfo=dt.UTC)
DAYS = ScheduleConfig(begin="2024-03-01")
DATES = ["2024-03-01", "2024-03-02", "2024-03-03", "2024-03-04", "2024-03-05"]
RECORDS = {
    ds: DateRecord(ds=ds, status=status)  # type: ignore[arg-type]
    for ds, status in zip(DATES[1:], ["succeeded", "failed", "built", "interrupted"], strict=True)
}
REQUEST = BackfillRequest("2024-03-01", "2024-03-05")


def does(request: BackfillRequest) -> list[tuple[str, bool]]:
    return [(step.does, step.rerun) for step in plan_backfill(DATES, RECORDS, request)]


def test_a_backfill_does_what_was_never_done_and_goes_on_with_what_was_begun() -> None:
    train, skip = ("train", False), ("skip", False)
    assert does(REQUEST) == [train, skip, skip, train, train]


def test_failed_and_completed_dates_are_done_again_where_that_is_asked_for() -> None:
    train, again = ("train", False), ("train", True)
    assert does(replace(REQUEST, reprocess="failed")) == [train, ("skip", False), train, train, train]
    assert does(replace(REQUEST, reprocess="completed")) == [train, again, train, train, train]


def test_a_plan_says_how_a_date_ended_where_it_has() -> None:
    begun = DateRecord(ds="2024-03-01", status="running")
    records = begun, replace(begun, status="failed", exit_code=3)
    said = [plan_date("2024-03-01", record, REQUEST, is_newest=False).why for record in records]
    assert said == ["running", "failed, exit code 3"]


def test_datasets_are_built_where_no_training_is_asked_for() -> None:
    build, skip = ("build", False), ("skip", False)
    assert does(replace(REQUEST, train="none")) == [build, skip, skip, skip, build]
    assert does(replace(REQUEST, train="last")) == [build, skip, skip, skip, ("train", False)]
    again = replace(REQUEST, train="none", reprocess="completed")
    assert does(again) == [build, ("build", True), build, ("build", True), build]


def test_backwards_the_last_date_is_still_the_newest() -> None:
    steps = plan_backfill(DATES, {}, replace(REQUEST, train="last", backwards=True))
    assert [step.ds for step in steps] == DATES[::-1]
    assert [step.does for step in steps] == ["train", "build", "build", "build", "build"]


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        ("2024-02-01", "2024-03-05", "--from-date 2024-02-01: is before schedule.begin"),
        ("2024-03-01", "2024-12-01", "--to-date 2024-12-01: its interval ends 2024-12-02.* in the future"),
        ("2024-03-05", "2024-03-01", "--from-date 2024-03-05 is after --to-date 2024-03-01"),
        ("2024-03-01T05", "2024-03-05", "is not the start of its day in UTC"),
    ],
)
def test_dates_that_there_are_not_are_refused(first: str, last: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dates_of(DAYS, BackfillRequest(first, last), NOW)


@dataclass
class Jobs:
    """In place of jobs that start Spark: `jobs` by date, the others succeed; `ran`: (ds, trained, may promote)."""

    jobs: dict[str, Callable[[], int]] = field(default_factory=dict)
    ran: list[tuple[str, bool, bool]] = field(default_factory=list)

    def start(self, job: DateJob, _: Shared) -> int:
        code = self.jobs.get(job.record.ds, lambda: Exit.OK)()
        self.ran.append((job.record.ds, job.options.train, job.options.promote))
        return code


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    jobs = Jobs()
    monkeypatch.setattr(run_date_module, "start_job", jobs.start)
    monkeypatch.setattr(run_date_module, "scored", lambda job: {})
    return jobs


def run(recipe: str, request: BackfillRequest) -> tuple[int, dict[str, Any], list[str]]:
    said = list[str]()

    def load(ds: str) -> Resolved:
        return load_config(recipe, [], DateRequest(ds))

    code = backfill(load_config(recipe), load, request, exit_code, said.append)
    return code, json.loads(said[-1]) if said[-1].startswith("{") else {}, said


def test_a_backfill_runs_its_dates_in_order_and_does_not_promote(tmp_path: Path, started: Jobs) -> None:
    recipe = write_recipe(tmp_path)
    code, outcome, _ = run(recipe, replace(REQUEST, last="2024-03-03", train="last"))
    assert (code, outcome["dates"]) == (0, dict.fromkeys(DATES[:3], 0))
    assert started.ran == [(DATES[0], False, False), (DATES[1], False, False), (DATES[2], True, False)]
    code, outcome, _ = run(recipe, replace(REQUEST, last="2024-03-03", promote=True, backwards=True))
    assert [*outcome["dates"]] == [DATES[1], DATES[0]] and outcome["skipped"] == [DATES[2]]
    assert started.ran[-1] == (DATES[0], True, True)


def test_a_dry_run_starts_nothing(tmp_path: Path, started: Jobs) -> None:
    code, _, said = run(write_recipe(tmp_path), replace(REQUEST, dry_run=True))
    assert code == 0 and started.ran == [] and len(said) == 5
    assert said[0] == "2024-03-01  train  has no entry"


def test_a_date_that_fails_does_not_keep_the_others_from_running(tmp_path: Path, started: Jobs) -> None:
    def fails() -> int:
        raise EtlError("no file")

    started.jobs[DATES[1]] = fails
    code, outcome, _ = run(write_recipe(tmp_path), REQUEST)
    assert code == Exit.DATA and [*outcome["dates"].values()] == [0, Exit.DATA, 0, 0, 0]
    record = Ledger(str(tmp_path / "runs"), "sales").read(DATES[1])
    assert record is not None and (record.status, record.error) == ("failed", "no file")


def test_a_date_that_no_other_would_do_better_than_ends_the_backfill(tmp_path: Path, started: Jobs) -> None:
    def no_room() -> int:
        raise OSError(28, "No space left on device")

    started.jobs[DATES[1]] = no_room
    code, outcome, _ = run(write_recipe(tmp_path), REQUEST)
    assert code == Exit.RESOURCES and outcome["not_begun"] == DATES[2:]


def test_where_runs_cannot_be_stored_nothing_is_begun(tmp_path: Path, started: Jobs) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    recipe = write_recipe(tmp_path)
    with pytest.raises(LaunchError, match=r"storage.runs = .*: cannot be made or written: .* is a file") as error:
        run(recipe, REQUEST)
    assert exit_code(error.value) == Exit.RESOURCES and started.ran == []


def test_of_two_backfills_that_overlap_the_second_is_refused(tmp_path: Path, started: Jobs) -> None:
    recipe = write_recipe(tmp_path)
    refused = list[BaseException]()

    def second() -> int:
        with pytest.raises(DateTaken, match=r"backfill 2024-03-01 to 2024-03-02, process \d+ .* holds it") as error:
            run(recipe, replace(REQUEST, first="2024-03-02"))
        refused.append(error.value)
        return Exit.OK

    started.jobs[DATES[0]] = second
    code, _, _ = run(recipe, replace(REQUEST, last="2024-03-02"))
    assert (code, len(refused), exit_code(refused[0])) == (0, 1, Exit.TRY_LATER)
    assert [ds for ds, *_ in started.ran] == DATES[:2]


def test_where_dates_may_run_side_by_side_the_date_that_is_taken_is_refused(tmp_path: Path, started: Jobs) -> None:
    recipe = write_recipe(tmp_path, schedule={"concurrency": "allow"})
    ledger = Ledger(str(tmp_path / "runs"), "sales")
    with hold_lease(ledger.storage, f"{DATES[1]}/{LEASE}", DAYS, "another job", lambda why: None):
        code, outcome, _ = run(recipe, replace(REQUEST, last="2024-03-03"))
    assert (code, outcome["dates"]) == (Exit.TRY_LATER, {DATES[0]: 0, DATES[1]: 75})
