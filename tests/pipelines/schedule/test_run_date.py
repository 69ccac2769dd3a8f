from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.load import ConfigError, Resolved, load_config
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schedule.dated import DateRequest
from sparkring.conf.schedule.dates import interval_of
from sparkring.conf.stored import StoredError
from sparkring.etl.errors import EtlError
from sparkring.pipelines.cli import main
from sparkring.pipelines.cli.exits import exit_code
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.schedule import run_date as module
from sparkring.pipelines.schedule.date_job import DateJob, DateOptions
from sparkring.pipelines.schedule.errors import DateTaken, LeaseLost, NotReady
from sparkring.pipelines.schedule.ledger import DateRecord, Ledger
from sparkring.pipelines.schedule.publication import DatePublication
from sparkring.pipelines.schedule.run_date import (
    LEASE,
    begun,
    check_ended,
    do_date,
    hold_lease,
    is_done,
    is_late,
    lease_paths,
    run_date,
)
from sparkring.training.launch.failure import LaunchError
from tests.pipelines.schedule.recipe import write_recipe

DS = "2024-03-05"
DAYS = ScheduleConfig(begin="2024-03-01", deadline="6h")
OPTIONS = DateOptions(exit_code)
ROOT = Path(__file__).resolve().parents[3]
FINISHED = {"scores": {"this model": {"auc": 0.7}}, "promotion": {"decision": "promoted", "version": 3}}


def resolved(folder: Path, ds: str = DS, **schedule: Any) -> Resolved:
    return load_config(write_recipe(folder, schedule), [], DateRequest(ds))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[DateJob], int]], list[DateJob]]:
    """Sets what is done in place of a job, which gets a run folder with a summary; returns the jobs that began."""

    def start(work: Callable[[DateJob], int]) -> list[DateJob]:
        began: list[DateJob] = []

        def start_job(job: DateJob, _: Any) -> int:
            began.append(job)
            folder = job.ledger.storage.parent.at("20240306-020000-abcdef12")
            folder.put_atomic("summary.json", json.dumps(FINISHED | {"tracking_url": None}).encode())
            job.update(run="20240306-020000-abcdef12", dataset="datasets/x", fingerprint="ab")
            return work(job)

        monkeypatch.setattr(module, "start_job", start_job)
        return began

    return start


def succeed(_: DateJob) -> int:
    return Exit.OK


def test_today_is_for_later_and_has_no_entry(tmp_path: Path, job: Any) -> None:
    began, said, today = job(succeed), list[str](), dt.datetime.now(dt.UTC).date().isoformat()
    with pytest.raises(NotReady, match=f"--date {today}: its interval ends"):
        run_date(resolved(tmp_path, today), OPTIONS, said.append)
    assert (json.loads(said[0])["status"], json.loads(said[0])["exit_code"]) == ("try_later", 75)
    assert not began and Ledger(str(tmp_path / "runs"), "sales").dates() == []


def test_a_date_is_run_once_and_its_entry_says_what_it_made(tmp_path: Path, job: Any) -> None:
    began, said = job(succeed), list[str]()
    assert run_date(resolved(tmp_path), OPTIONS, said.append) == Exit.OK
    assert run_date(resolved(tmp_path), OPTIONS, said.append) == Exit.OK
    assert len(began) == 1 and said[0] == said[1]
    line = json.loads(said[0])
    assert (line["ds"], line["status"], line["exit_code"], line["attempts"]) == (DS, "succeeded", 0, 1)
    assert (line["run"], line["dataset"], line["scores"]) == (
        "20240306-020000-abcdef12",
        "datasets/x",
        {"this model": {"auc": 0.7}},
    )
    assert (line["promotion"]["decision"], line["model_version"]) == ("promoted", "3")
    record = Ledger(str(tmp_path / "runs"), "sales").read(DS)
    assert record is not None and record.finished_at and record.epoch == 1
    assert run_date(resolved(tmp_path), replace(OPTIONS, rerun=True), said.append) == Exit.OK
    assert len(began) == 2 and json.loads(said[2])["attempts"] == 2


def test_a_mistyped_key_leaves_no_entry_and_is_found_before_the_job(tmp_path: Path, job: Any) -> None:
    """Found after the ETL, the date was `failed`, though nothing was wrong with its data."""
    began = job(succeed)
    rules = "promote={rules: [{metric: auc, min_absolute_change: 0.1}], slices: [amunt]}"
    for word, said, code in (
        (rules, "promote.slices = 'amunt'", Exit.USAGE),
        ("storage.runs=/dev/null/x", "storage.runs", Exit.RESOURCES),
    ):
        wrong = load_config(write_recipe(tmp_path), [word], DateRequest(DS))
        with pytest.raises((ConfigError, LaunchError), match=said) as caught:
            run_date(wrong, OPTIONS, lambda _: None)
        assert exit_code(caught.value) == code
    assert not began and Ledger(str(tmp_path / "runs"), "sales").read(DS) is None


MISTYPED = {
    "a label": "etl.label=amunt",
    "a type": "etl.sources.sales.columns.amount=integr",
    "a feature": "etl.features={amunt: {kind: numeric}}",
    "a rows function": "etl.rows=no_such_module:rows",
}


@pytest.mark.parametrize("word", MISTYPED.values(), ids=MISTYPED.keys())
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("status", [None, "failed", "interrupted"])
def test_a_recipe_that_is_wrong_leaves_the_entry_of_a_date_as_it_was(
    tmp_path: Path, word: str, train: bool, status: Any
) -> None:
    """The date was marked failed, and backfill passed over it when the recipe was right again."""
    ledger, said = Ledger(str(tmp_path / "runs"), "sales"), list[str]()
    before = None if status is None else ledger.write(DateRecord(ds=DS, status=status, attempts=2, exit_code=3))
    wrong = load_config(write_recipe(tmp_path), [word], DateRequest(DS))
    with pytest.raises(ConfigError):
        run_date(wrong, replace(OPTIONS, train=train), said.append)
    assert json.loads(said[0])["exit_code"] == Exit.USAGE
    assert ledger.read(DS) == before and not (tmp_path / f"runs/sales/dates/{DS}/lease.json").exists()


@pytest.mark.parametrize("status", [None, "failed", "interrupted"])
def test_what_a_job_finds_wrong_with_the_recipe_leaves_the_entry_as_it_was(
    tmp_path: Path, job: Any, status: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: DateJob, _: Any = None) -> int:
        job.update(parts={"2024-03-05": "ab"}, parts_digest="cd")
        raise ConfigError("sales", ["report.groups = 'amunt': the dataset has no such column"])

    def refuse_later(job: DateJob, _: Any = None) -> int:
        job.update(dataset="datasets/x", fingerprint="ab")
        raise ConfigError("sales", ["the dataset is there, and named in the entry"])

    ledger = Ledger(str(tmp_path / "runs"), "sales")
    before = None if status is None else ledger.write(DateRecord(ds=DS, status=status, attempts=2, exit_code=3))
    monkeypatch.setattr(module, "start_job", refuse)
    with pytest.raises(ConfigError, match="amunt"):
        do_date(resolved(tmp_path), OPTIONS)
    assert ledger.read(DS) == before and ledger.dates() == ([DS] if before else [])
    monkeypatch.setattr(module, "start_job", refuse_later)
    with pytest.raises(ConfigError, match="is there"):
        do_date(resolved(tmp_path), OPTIONS)
    assert (entry := ledger.read(DS)) is not None and (entry.status, entry.dataset) == ("failed", "datasets/x")


def test_a_table_that_is_not_there_is_the_dates(tmp_path: Path) -> None:
    said = list[str]()
    with pytest.raises(EtlError, match="sales"):
        run_date(resolved(tmp_path), replace(OPTIONS, train=False), said.append)
    assert json.loads(said[0])["exit_code"] == Exit.DATA
    entry = Ledger(str(tmp_path / "runs"), "sales").read(DS)
    assert entry is not None and (entry.status, entry.exit_code) == ("failed", Exit.DATA)


def test_a_date_whose_model_was_rejected_is_done_and_ends_as_it_did(tmp_path: Path, job: Any) -> None:
    began = job(lambda _: Exit.QUALITY)
    assert [run_date(resolved(tmp_path), OPTIONS, lambda _: None) for _ in range(2)] == [Exit.QUALITY] * 2
    assert len(began) == 1


def test_a_date_that_failed_is_run_again_and_keeps_its_run(tmp_path: Path, job: Any) -> None:
    def fail(_: DateJob) -> int:
        raise EtlError("no file of day=2024-03-05")

    job(fail)
    said = list[str]()
    with pytest.raises(EtlError):
        run_date(resolved(tmp_path), OPTIONS, said.append)
    line = json.loads(said[0])
    assert (line["status"], line["exit_code"], line["error"]) == ("failed", Exit.DATA, "no file of day=2024-03-05")
    runs = list[str | None]()
    job(lambda job: runs.append(job.record.run) or Exit.OK)
    assert run_date(resolved(tmp_path), OPTIONS, said.append) == Exit.OK
    assert json.loads(said[1])["attempts"] == 2 and runs == ["20240306-020000-abcdef12"]


def test_a_disk_that_is_full_does_not_hide_what_ended_a_job(
    tmp_path: Path, job: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: DateJob) -> int:
        monkeypatch.setattr(Ledger, "write", no_room)
        raise EtlError("no file of day=2024-03-05")

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    job(fail)
    with pytest.raises(EtlError, match="no file"):
        do_date(resolved(tmp_path), OPTIONS)
    assert "its entry still says 'running': [Errno 28]" in caplog.text


def test_a_stopped_date_is_interrupted(tmp_path: Path, job: Any) -> None:
    def stop(_: DateJob) -> int:
        raise SystemExit(143)

    job(stop)
    said = list[str]()
    with pytest.raises(SystemExit):
        run_date(resolved(tmp_path), OPTIONS, said.append)
    assert (json.loads(said[0])["status"], json.loads(said[0])["exit_code"]) == ("interrupted", 143)


def test_another_date_of_the_recipe_waits_its_turn_unless_both_may_run(tmp_path: Path, job: Any) -> None:
    job(succeed)
    ledger = Ledger(str(tmp_path / "runs"), "sales")
    with hold_lease(ledger.storage, LEASE, DAYS, "2024-03-04", lambda why: None):
        said = list[str]()
        with pytest.raises(DateTaken):
            run_date(resolved(tmp_path), OPTIONS, said.append)
        assert json.loads(said[0])["status"] == "try_later" and json.loads(said[0])["exit_code"] == 75
        assert ledger.read(DS) is None
        assert run_date(resolved(tmp_path, concurrency="allow"), OPTIONS, said.append) == Exit.OK


def test_one_date_is_never_run_by_two(tmp_path: Path, job: Any) -> None:
    def start_again(_: DateJob) -> int:
        with pytest.raises(DateTaken):
            do_date(resolved(tmp_path, concurrency="allow"), OPTIONS)
        return Exit.OK

    assert len(job(start_again)) == 0
    assert run_date(resolved(tmp_path, concurrency="allow"), OPTIONS, lambda _: None) == Exit.OK


def test_a_date_that_another_finished_meanwhile_is_found_done(
    tmp_path: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = job(succeed)
    done = DateRecord(ds=DS, status="succeeded", exit_code=0)
    ledger = Ledger(str(tmp_path / "runs"), "sales")
    monkeypatch.setattr(module, "wait_for", lambda *_: ledger.write(done))
    assert do_date(resolved(tmp_path), OPTIONS) == done and began == []


def test_a_date_whose_upstream_is_missing_takes_no_lease(tmp_path: Path, job: Any) -> None:
    began = job(succeed)
    with pytest.raises(NotReady, match=r"day=2024-03-05/_SUCCESS is not there, after 0 s \(schedule.wait_timeout\)"):
        do_date(resolved(tmp_path, wait_for=[str(tmp_path / "day={ds}/_SUCCESS")]), OPTIONS)
    assert began == [] and not (tmp_path / "runs/sales/dates").exists()


def test_a_damaged_entry_is_an_error_and_not_a_new_training(tmp_path: Path, job: Any) -> None:
    began, said = job(succeed), list[str]()
    (entry := tmp_path / f"runs/sales/dates/{DS}/state.json").parent.mkdir(parents=True)
    entry.write_text("{")
    with pytest.raises(StoredError, match=r"state\.json"):
        run_date(resolved(tmp_path), OPTIONS, said.append)
    assert began == [] and json.loads(said[0])["exit_code"] == Exit.DATA


@pytest.mark.parametrize(
    ("status", "train", "done"),
    [("succeeded", True, True), ("succeeded", False, True), ("built", True, False), ("built", False, True),
     ("failed", True, False), ("running", True, False), ("interrupted", False, False)],
)  # fmt: skip
def test_a_date_is_done_when_what_is_asked_for_was_made(status: Any, train: bool, done: bool) -> None:
    record = DateRecord(ds=DS, status=status)
    assert is_done(record, replace(OPTIONS, train=train)) == done
    assert not is_done(record, replace(OPTIONS, train=train, rerun=True))


def test_a_date_that_is_run_again_begins_a_run_of_its_own() -> None:
    before = DateRecord(ds=DS, status="interrupted", attempts=3, run="r", scores={"m": {}})
    assert (begun(DS, before, 7).run, begun(DS, before, 7).attempts, begun(DS, before, 7).scores) == ("r", 4, {})
    assert begun(DS, replace(before, status="succeeded"), 7).run is None
    assert (begun(DS, None, 7).attempts, begun(DS, None, 7).epoch) == (1, 7)


def test_an_interval_that_has_not_ended_is_tried_again_later() -> None:
    interval = interval_of(DAYS, DS)
    check_ended(interval, interval.end)
    with pytest.raises(NotReady, match="its interval ends 2024-03-06T00:00:00"):
        check_ended(interval, interval.end - dt.timedelta(seconds=1))


def test_a_date_is_late_after_its_deadline() -> None:
    interval = interval_of(DAYS, DS)
    six = interval.end + dt.timedelta(hours=6)
    assert not is_late(DAYS, interval, six) and is_late(DAYS, interval, six + dt.timedelta(seconds=1))
    assert not is_late(DAYS.model_copy(update={"deadline": None}), interval, six + dt.timedelta(days=9))


def test_a_late_date_is_marked_unless_it_is_backfilled(tmp_path: Path, job: Any) -> None:
    job(succeed)
    assert do_date(resolved(tmp_path, deadline="6h"), OPTIONS).late
    assert not do_date(resolved(tmp_path, deadline="6h"), replace(OPTIONS, rerun=True, in_time=False)).late


def test_every_date_has_a_lease_of_its_own() -> None:
    assert lease_paths(DAYS, DS) == ["lease.json", "2024-03-05/lease.json"]
    assert lease_paths(DAYS.model_copy(update={"concurrency": "allow"}), DS) == ["2024-03-05/lease.json"]


def test_nothing_is_published_under_a_lease_that_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def check(self, what: str) -> None:
            raise LeaseLost(f"another has it; {what} is not published")

    def end(why: str, _: DateRecord) -> None:
        raise SystemExit(why)

    monkeypatch.setattr("sparkring.pipelines.schedule.date_job.stop_at_once", end)
    ledger = Ledger(str(tmp_path / "runs"), "sales")
    before = ledger.write(DateRecord(ds=DS, status="running"))
    job = DateJob(resolved(tmp_path), OPTIONS, ledger, before, leases=(Lost(),))  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="another has it; the entry of the date is not published"):
        job.update(status="succeeded")
    with pytest.raises(SystemExit, match="another has it; the dataset is not published"):
        DatePublication(job).check("the dataset")
    assert ledger.read(DS) == before


HOLDER = """
import sys, time
from sparkring.conf.load import load_config
from sparkring.conf.schedule.dated import DateRequest
from sparkring.pipelines.cli.exits import exit_code
from sparkring.pipelines.schedule import run_date as module

def start_job(job, shared):
    print("began", flush=True)
    sys.stdin.readline()
    job.check("the model")
    print("published", flush=True)
    return 0

module.start_job = start_job
module.run_date(load_config(sys.argv[1], [], DateRequest(sys.argv[2])), module.DateOptions(exit_code), print)
"""


def test_a_holder_that_is_stopped_past_its_lease_publishes_nothing(tmp_path: Path, job: Any) -> None:
    recipe, ledger = write_recipe(tmp_path, {"lease": "2s"}), Ledger(str(tmp_path / "runs"), "sales")
    command = [sys.executable, "-c", HOLDER, recipe, DS]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "began\n"
        taker = load_config(recipe, [], DateRequest(DS))
        with pytest.raises(DateTaken):
            do_date(taker, OPTIONS)
        holder.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        job(succeed)
        assert do_date(taker, OPTIONS).status == "succeeded"
        entry = ledger.read(DS)
        holder.send_signal(signal.SIGCONT)
        out, err = holder.communicate("\n", timeout=600)
    finally:
        holder.kill()
        holder.wait()
    assert holder.returncode == Exit.TRY_LATER and "lost its lease to" in err
    assert "published" not in out.splitlines() and json.loads(out.splitlines()[-1])["status"] == "try_later"
    assert ledger.read(DS) == entry and entry is not None and entry.epoch == 2


def test_a_date_that_is_done_imports_no_torch_and_starts_no_java(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    Ledger(str(tmp_path / "runs"), "sales").write(DateRecord(ds=DS, status="succeeded", exit_code=0))
    script = (
        "import sys; from pyspark import SparkContext; from sparkring.pipelines.cli import main\n"
        f"code = main(['run', {recipe!r}, '--date', {DS!r}])\n"
        "print({'torch', 'mlflow'} & sys.modules.keys(), SparkContext._gateway, code)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "set() None 0", done.stderr


@pytest.mark.parametrize("which", [LEASE, f"{DS}/{LEASE}"])
def test_that_another_has_the_lease_is_said_before_torch_and_java(tmp_path: Path, which: str) -> None:
    """It was said after all imports and checks, seconds later; a wrong recipe was looked at first."""
    recipe, ledger = write_recipe(tmp_path), Ledger(str(tmp_path / "runs"), "sales")
    script = (
        "import sys; from pyspark import SparkContext; from sparkring.pipelines.cli import main\n"
        f"code = main(['run', {recipe!r}, '--date', {DS!r}, 'etl.label=amunt'])\n"
        "print({'torch', 'mlflow'} & sys.modules.keys(), SparkContext._gateway, code)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with hold_lease(ledger.storage, which, DAYS, "2024-03-04", lambda why: None) as lease:
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        lease.check("the lease, which was only looked at")
    assert done.stdout.splitlines()[-1] == "set() None 75", done.stderr
    assert f"{which}: 2024-03-04, process {os.getpid()}" in done.stderr and ledger.dates() == []


def test_the_command_line_runs_a_date(tmp_path: Path, job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job(succeed)
    recipe = write_recipe(tmp_path)
    assert main(["run", recipe, "--date", DS]) == Exit.OK
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["status"] == "succeeded"
    assert main(["run", recipe, "--data-interval-start", f"{DS}T00:00:00+00:00"]) == Exit.OK
    assert main(["status", recipe, "--max-age", "1h"]) == Exit.OK
    assert main(["backfill", recipe, "--from-date", DS, "--to-date", DS, "--dry-run"]) == Exit.OK
    assert "2024-03-05  skip   succeeded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "this recipe has dates; give one"),
        (["etl"], "this recipe has dates; give one"),
        (["train"], "this recipe has dates; give one"),
        (["predict"], "give one: sparkring predict "),
        (["run", "--rerun"], "--date: say which date"),
        (["run", "--date", "2024-02-01"], "is before schedule.begin"),
        (["run", "--date", "2199-01-01"], "is in the future"),
        (["run", "--date", "2024-03-05T07"], "is not the start of its day in UTC"),
    ],
)
def test_a_date_that_cannot_be_run_is_a_usage_error(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([words[0], write_recipe(tmp_path), *words[1:]]) == Exit.USAGE
    assert message in capsys.readouterr().err


def test_dates_need_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run", "flights", "--date", DS], ["status", "flights"],
                  ["backfill", "flights", "--from-date", DS, "--to-date", DS]):  # fmt: skip
        assert main(words) == Exit.USAGE
        assert "schedule: this recipe has none" in capsys.readouterr().err
