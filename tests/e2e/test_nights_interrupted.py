"""Dates whose jobs are started twice, stopped and killed: real jobs, runs on a server that speaks S3 (slow)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto.server import ThreadedMotoServer

from sparkring.pipelines.schedule.ledger import DateRecord, Ledger
from sparkring.training.checkpoint.weights import FILE
from tests.e2e.test_nights import RECIPE, write_day

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent.parent
DOUBLE_STARTS = 6  # eight that ask for one lease at the same moment: tests/pipelines/schedule/test_lease.py
KILLS, MOST_OF_ONE = 12, 5
DAYS = [f"2024-03-{day:02}" for day in range(1, 3 + KILLS)]  # of the first two, no date is made
LIMIT_S = 400  # of a command that nothing ends

HOST = """
import sys
from sparkring.pipelines.cli import main

print("READY", flush=True)
for ds in sys.stdin:
    code = main(["run", sys.argv[1], "--date", ds.strip()])
    print("CODE", int(code), flush=True)
"""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of an empty bucket."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = ThreadedMotoServer(port=0, ip_address="127.0.0.1")
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    yield f"s3://bucket/runs?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    server.stop()


def write_recipe(folder: Path, days: list[str], **changed: Any) -> Path:
    """The recipe of the fast test with its tables in `folder`."""
    for day in days:
        write_day(folder, day)
    recipe = RECIPE | {"storage": {"datasets": str(folder / "datasets"), "runs": str(folder / "runs")}} | changed
    (path := folder / "sales.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def start(folder: Path, home: str, *words: str) -> subprocess.Popen[str]:
    """A host: a process group with a home of its own."""
    (folder / home).mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(folder / home), "MLFLOW_DISABLE_TELEMETRY": "true"}
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / home / "log").open("a"),
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_word(process: subprocess.Popen[str], kind: str) -> str:
    """The last word of the next line of a host that begins with `kind`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(kind):
            return line.split()[-1]
    raise AssertionError("the host ended")


def test_of_two_hosts_that_start_a_date_at_once_one_trains(tmp_path: Path, s3: str) -> None:
    recipe = write_recipe(tmp_path, DAYS, storage={"datasets": str(tmp_path / "datasets"), "runs": s3})
    hosts = [start(tmp_path, name, "-c", HOST, str(recipe)) for name in ("a", "b")]
    try:
        codes, days = [], DAYS[2 : 2 + DOUBLE_STARTS]
        for host in hosts:
            read_word(host, "READY")  # or the second could start when the first has finished a date
        for ds in days:
            for host in hosts:
                assert host.stdin is not None
                host.stdin.write(f"{ds}\n")
                host.stdin.flush()
            codes.append(sorted(int(read_word(host, "CODE")) for host in hosts))
    finally:
        for host in hosts:
            end(host)
    assert codes == [[0, 75]] * DOUBLE_STARTS
    ledger = Ledger(s3, "sales")
    records = ledger.records()
    assert [(record.status, record.attempts) for record in records] == [("succeeded", 1)] * DOUBLE_STARTS
    runs = ledger.storage.parent
    folders = [name for name in runs.list_folders() if name != "dates"]
    assert sorted(folders) == sorted(str(record.run) for record in records)
    attempts = [json.loads(runs.read_bytes(f"{name}/run.json"))["attempts"] for name in folders]
    assert attempts == [1] * DOUBLE_STARTS


def await_file(folder: Path, pattern: str, limit_s: float = 240) -> None:
    until = time.monotonic() + limit_s
    while not list(folder.glob(pattern)):
        assert time.monotonic() < until, f"no {pattern} after {limit_s} s"
        time.sleep(0.1)


def test_a_job_that_is_stopped_past_its_lease_and_goes_on_publishes_nothing(tmp_path: Path) -> None:
    """The whole first job is stopped while it trains, and goes on when the second has finished the date."""
    ds = DAYS[2]
    recipe = write_recipe(
        tmp_path,
        DAYS[:3],
        schedule=RECIPE["schedule"] | {"lease": "6s"},
        train={"epochs": 60, "global_batch": 64},
        checkpoint={"every_steps": 20},
    )
    command = ["-m", "sparkring.pipelines.cli", "run", str(recipe), "--date", ds]
    first = start(tmp_path, "a", *command)
    try:
        await_file(tmp_path, "runs/sales/2*/checkpoints/step-*/*")
        os.killpg(first.pid, signal.SIGSTOP)
        time.sleep(8)
        second = start(tmp_path, "b", *command)
        try:
            out, _ = second.communicate(timeout=LIMIT_S)
        finally:
            end(second)
        assert second.returncode == 0, (tmp_path / "b/log").read_text()
        published = json.loads(out.splitlines()[-1])
        before = snapshot(tmp_path / "runs")
        os.killpg(first.pid, signal.SIGCONT)
        assert first.wait(timeout=LIMIT_S) == 75, (tmp_path / "a/log").read_text()
        time.sleep(2)
    finally:
        end(first)
    assert "lost its lease" in (tmp_path / "a/log").read_text()
    entry = Ledger(str(tmp_path / "runs"), "sales").read(ds)
    assert entry is not None and (entry.run, entry.attempts, entry.epoch) == (published["run"], 2, 2)
    after = snapshot(tmp_path / "runs")
    of_second = {path for path in after if f"/{entry.run}/" in path or "/dates/" in path}
    assert {path: after[path] for path in of_second} == {path: before[path] for path in of_second}
    assert len(list(tmp_path.glob("runs/sales/2*/summary.json"))) == 1


def snapshot(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def weights(runs: Path, record: DateRecord) -> str:
    (file,) = (runs / "sales" / str(record.run)).rglob(FILE)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def do_date(folder: Path, recipe: Path, ds: str, kill_after_s: Sequence[float] = ()) -> int:
    """Repeat the command of a date until it ends with 0; return how often its driver was killed.

    Each of the first commands is killed after a time of `kill_after_s`. Its driver alone: its JVM and ranks end by
    themselves, while the next command runs.
    """
    for kills, limit_s in enumerate([*kill_after_s, LIMIT_S]):
        job = start(folder, "home", "-m", "sparkring.pipelines.cli", "run", str(recipe), "--date", ds)
        try:
            job.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            assert kills < len(kill_after_s), f"no end after {limit_s} s: {(folder / 'home/log').read_text()[-3000:]}"
            job.kill()
            job.wait()
        finally:
            end(job)
        assert job.returncode in (0, -signal.SIGKILL), (folder / "home/log").read_text()[-3000:]
        if job.returncode == 0:
            return kills
    raise AssertionError(f"{ds} was killed by something else")


def test_dates_whose_driver_is_killed_at_any_moment_end_with_the_same_models(tmp_path: Path) -> None:
    """Dates are begun until twelve drivers have been killed, at most five of one date."""
    draw, days = random.Random(14), DAYS[2:]
    changed: dict[str, Any] = {"train": {"epochs": 20, "global_batch": 64}, "checkpoint": {"every_steps": 10}}
    recipes = {}
    for name in ("killed", "undisturbed"):
        (folder := tmp_path / name).mkdir()
        recipes[folder] = write_recipe(folder, DAYS, **changed)
    (killed, undisturbed), began = recipes, time.monotonic()
    assert do_date(undisturbed, recipes[undisturbed], days[0]) == 0
    whole_s = time.monotonic() - began
    kills = done = 0
    while kills < KILLS:
        moments = [draw.uniform(1, whole_s) for _ in range(min(MOST_OF_ONE, KILLS - kills))]
        kills, done = kills + do_date(killed, recipes[killed], days[done], moments), done + 1
    assert not any(do_date(undisturbed, recipes[undisturbed], ds) for ds in days[1:done])
    found = {}
    for folder in recipes:
        records = Ledger(str(folder / "runs"), "sales").records()
        assert [record.status for record in records] == ["succeeded"] * done
        found[folder] = [weights(folder / "runs", record) for record in records]
    assert len({*found[killed]}) == done
    assert found[killed] == found[undisturbed]
