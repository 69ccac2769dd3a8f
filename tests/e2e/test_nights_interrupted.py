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
DOUBLE_STARTS, KILLS = 20, 30
DAYS = [f"2024-03-{day:02}" for day in range(1, 3 + DOUBLE_STARTS)]

HOST = """
import json, sys
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


def read_code(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("CODE"):
            return int(line.split()[1])
    raise AssertionError("the host ended")


def test_of_two_hosts_that_start_a_date_at_once_one_trains(tmp_path: Path, s3: str) -> None:
    recipe = write_recipe(tmp_path, DAYS, storage={"datasets": str(tmp_path / "datasets"), "runs": s3})
    hosts = [start(tmp_path, name, "-c", HOST, str(recipe)) for name in ("a", "b")]
    try:
        codes = []
        for ds in DAYS[2:]:
            for host in hosts:
                assert host.stdin is not None
                host.stdin.write(f"{ds}\n")
                host.stdin.flush()
            codes.append(sorted(read_code(host) for host in hosts))
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
            out, _ = second.communicate(timeout=400)
        finally:
            end(second)
        assert second.returncode == 0, (tmp_path / "b/log").read_text()
        published = json.loads(out.splitlines()[-1])
        before = snapshot(tmp_path / "runs")
        os.killpg(first.pid, signal.SIGCONT)
        assert first.wait(timeout=60) == 75, (tmp_path / "a/log").read_text()
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
    """Give the command of a date until it ends with 0, killing its driver alone after these times; how often it was."""
    kills = 0
    while True:
        job = start(folder, "home", "-m", "sparkring.pipelines.cli", "run", str(recipe), "--date", ds)
        try:
            job.wait(timeout=kill_after_s[kills] if kills < len(kill_after_s) else 400)
        except subprocess.TimeoutExpired:
            job.kill()
            kills += 1
        finally:
            end(job)
        assert job.returncode in (0, -signal.SIGKILL), (folder / "home/log").read_text()[-3000:]
        if job.returncode == 0:
            return kills


def test_dates_whose_driver_is_killed_at_any_moment_end_with_the_same_models(tmp_path: Path) -> None:
    """Dates are begun until 30 drivers have been killed, at most ten of one date."""
    draw, days = random.Random(14), DAYS[2:]
    changed: dict[str, Any] = {"train": {"epochs": 20, "global_batch": 64}, "checkpoint": {"every_steps": 10}}
    found, kills, done = dict[str, list[str]](), 0, 0
    for name in ("killed", "undisturbed"):
        (folder := tmp_path / name).mkdir()
        recipe = write_recipe(folder, DAYS, **changed)
        if name == "killed":
            while kills < KILLS:
                moments = [draw.uniform(1, 25) for _ in range(min(10, KILLS - kills))]
                kills, done = kills + do_date(folder, recipe, days[done], moments), done + 1
        else:
            assert not any(do_date(folder, recipe, ds) for ds in days[:done])
        records = Ledger(str(folder / "runs"), "sales").records()
        assert [record.status for record in records] == ["succeeded"] * done
        found[name] = [weights(folder / "runs", record) for record in records]
    assert len({*found["killed"]}) == done
    assert found["killed"] == found["undisturbed"]
