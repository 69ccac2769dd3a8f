"""Events reach a real collector once, in order and with their own times, wherever the collector was meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from pydantic import ValidationError

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.load import ConfigError
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schedule.dates import interval_of
from sparkring.pipelines.cli import main
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.journal import Journal
from sparkring.pipelines.tracking.openlineage import driver
from sparkring.pipelines.tracking.openlineage.driver import PARENT, replay_events, send_events_left_behind
from sparkring.pipelines.tracking.openlineage.events import run_id
from sparkring.pipelines.tracking.ops import LineageDataset, LineageJob, ModelInfo, StartRun
from sparkring.pipelines.tracking.store.sink import replay
from sparkring.pipelines.tracking.tracker import Tracker
from tests.helpers.ports import unused_port
from tests.pipelines.tracking.openlineage.collector import Collector, collecting
from tests.waits import wait_for

ROOT = Path(__file__).parents[4]
PROGRAM = Path(__file__).with_name("lineage_program.py")
SOURCE = LineageDataset(namespace="file", name="/raw/flights", kind="TABLE", uri="/raw/flights", version="7")
MADE = LineageDataset(
    namespace="file", name="/datasets/flights", kind="FILE", uri="/datasets/flights-abc", version="abc",
    schema=[{"name": "delay", "type": "double"}], rows=10, files=2, bytes=300,
)  # fmt: skip


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose sqlite store exists: making its tables takes seconds."""
    root = tmp_path_factory.mktemp("mlflow")
    Tracker(settings_of(root, openlineage=None, experiment="another"), "first", "first").close()
    return root


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> Path:
    """A root of this test alone, so that what it leaves fails no other."""
    return Path(shutil.copytree(empty_store, tmp_path / "mlflow"))


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as server:
        use(server.port, monkeypatch)
        yield server


def use(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the client's own variables: this collector, and one quick retry."""
    for name, value in {"TYPE": "http", "URL": f"http://127.0.0.1:{port}", "TIMEOUT": "1"}.items():
        monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{name}", value)
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__RETRY", json.dumps({"total": 1, "connect": 1, "read": 0}))


def settings_of(root: Path, **changes: Any) -> TrackingConfig:
    values: dict[str, Any] = {"experiment": "tests", "root": str(root), "flush_every_s": 0.05, "system_metrics": False}
    return TrackingConfig(**(values | {"openlineage": "nights", "request_retries": 0} | changes))


def tracked(settings: TrackingConfig, job: str = "flights/1", error: Exception | None = None, **more: Any) -> str:
    """Track a job of one dataset; its MLflow run id."""
    tracker = Tracker(settings, job, "flights", {"sparkring.commit": "c0ffee"}, **more)
    tracker.begin_lineage("flights", None, [SOURCE])
    tracker.lineage(inputs=[SOURCE], outputs=[MADE])
    assert tracker.flush(300)
    found = tracker.run_id()
    tracker.close(error)
    assert found is not None
    return found


def buffered(root: Path) -> list[Path]:
    return [path for path in (root / "buffer").iterdir() if path.is_dir()]


def at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["eventTime"]).timestamp()


def test_a_job_begins_and_ends_in_the_collector_as_in_mlflow(store: Path, collector: Collector) -> None:
    began = time.time()
    run = tracked(settings_of(store))
    start, end = collector.events
    assert (start["eventType"], end["eventType"]) == ("START", "COMPLETE")
    assert start["run"]["runId"] == end["run"]["runId"] == run_id(run)
    assert run_id(run).replace("-", "") == run, "a run is found in MLflow by the id of its events"
    assert start["job"]["namespace"] == "nights" and end["job"]["name"] == "flights"
    client = MlflowClient(settings_of(store).store_uri)
    assert at(end) * 1000 == pytest.approx(client.get_run(run).info.end_time, abs=2)
    assert began - 1 < at(start) <= at(end)
    (found,) = end["inputs"]
    assert (found["namespace"], found["name"]) == ("file", "/raw/flights") and start["inputs"] == [found]
    assert found["facets"]["version"]["datasetVersion"] == "7"
    (made,) = end["outputs"]
    assert start["outputs"] == [] and made["facets"]["schema"]["fields"][0]["name"] == "delay"
    counts = made["outputFacets"]["outputStatistics"]
    assert (counts["rowCount"], counts["fileCount"], counts["size"]) == (10, 2, 300)
    assert end["job"]["facets"]["sourceCodeLocation"]["version"] == "c0ffee"
    assert end["job"]["facets"]["jobType"]["integration"] == "SPARKRING" and "parent" not in end["run"]["facets"]
    assert buffered(store) == []


def test_a_registered_version_is_an_output(store: Path, collector: Collector, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/w.txt").write_text("1")
    info = ModelInfo(name="m", step=1, sha256="7" * 64, loader_module="tiny_loader", registered_model="lineage")
    for version in ("1", "2"):
        with Tracker(settings_of(store), f"m/{version}", "m") as tracker:
            tracker.begin_lineage("m", None, [])
            with tracker.part("evaluate"):
                tracker.model("evaluate", tmp_path / "model", info)
        (made,) = collector.events[-1]["outputs"]
        assert (made["namespace"], made["name"]) == (f"mlflow://{store}", "lineage")
        assert made["facets"]["version"]["datasetVersion"] == version
        assert made["facets"]["datasetType"]["datasetType"] == "MODEL"


def test_a_date_and_the_run_that_started_it_are_named(
    store: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interval = interval_of(ScheduleConfig(begin="2013-01-01", timezone="Europe/Berlin"), "2013-03-01")
    parent = "0197b2c3-0000-7000-8000-000000000001"
    for text in (f"https://airflow/prod/dag.task/{parent}", "dag.task", f"//{parent}"):
        monkeypatch.setenv(PARENT, text)
        with Tracker(settings_of(store), "dated", "flights") as tracker:
            tracker.begin_lineage("flights", interval, [])
    first, odd, empty = (event["run"]["facets"] for event in collector.events[::2])
    assert first["nominalTime"]["nominalStartTime"] == "2013-02-28T23:00:00+00:00"
    assert first["nominalTime"]["nominalEndTime"] == "2013-03-01T23:00:00+00:00"
    started_by = first["parent"]["job"]
    assert (started_by["namespace"], started_by["name"]) == ("https://airflow/prod", "dag.task")
    assert first["parent"]["run"]["runId"] == parent
    assert "parent" not in odd and "parent" not in empty and "'dag.task': is not namespace/job/run id" in caplog.text


def test_a_failure_says_why_without_its_secrets(store: Path, collector: Collector) -> None:
    tracked(settings_of(store), error=RuntimeError("cannot read s3://key:s3cret@host/x, password=hunter2"))
    end = collector.events[-1]
    assert end["eventType"] == "FAIL"
    message = end["run"]["facets"]["errorMessage"]["message"]
    assert message.startswith("cannot read s3://") and "s3cret" not in message and "hunter2" not in message
    assert end["outputs"], "what it had made by then"


def test_a_collector_that_is_away_gets_the_same_events_later(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = unused_port()
    use(port, monkeypatch)
    settings = settings_of(store)
    run = tracked(settings)
    ended = time.time()
    assert MlflowClient(settings.store_uri).get_run(run).info.status == "FINISHED"
    assert len(buffered(store)) == 1
    with pytest.raises(StoreUnreachable, match="collector does not take events"):
        replay_events(settings)
    time.sleep(0.1)
    with collecting(port) as late:
        assert replay_events(settings) == 2 and replay_events(settings) == 0
    assert late.kinds() == ["START", "COMPLETE"] and buffered(store) == []
    assert all(at(event) <= ended for event in late.events), "times are of when it happened"
    assert "events wait in" in caplog.text


def test_replay_goes_on_behind_the_last_event_that_was_taken(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = unused_port()
    use(port, monkeypatch)
    with collecting(port) as first:
        tracker = Tracker(settings_of(store), "flights/2", "flights")
        tracker.begin_lineage("flights", None, [SOURCE])
        assert tracker.flush(300)
        deadline = time.monotonic() + 60
        while not first.events and time.monotonic() < deadline:
            time.sleep(0.02)
    tracker.close()
    words = ["replay", "flights", f"tracking.root={store}", "tracking.experiment=tests"]
    assert main(words) == Exit.RESOURCES
    with collecting(port) as second:
        assert main(words) == Exit.OK
        assert main(words) == Exit.OK
    assert (first.kinds(), second.kinds()) == (["START"], ["COMPLETE"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith(", and 1 OpenLineage events") and printed[1].endswith(f"left in {store}")


def test_the_next_job_sends_what_was_left_before_its_own(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = unused_port()
    use(port, monkeypatch)
    first = tracked(settings_of(store))
    with collecting(port) as late:
        second = tracked(settings_of(store))
        assert [event["run"]["runId"] for event in late.events] == [run_id(first)] * 2 + [run_id(second)] * 2
        assert late.kinds() == ["START", "COMPLETE"] * 2 and buffered(store) == []
    tracked(settings_of(store))
    with collecting(port) as later:
        send_events_left_behind(settings_of(store, openlineage=None))
        assert later.events == [], "of a job that sends no events"
        send_events_left_behind(settings_of(store))
    assert later.kinds() == ["START", "COMPLETE"]


def test_a_collector_that_hangs_holds_no_job_and_no_mlflow(
    store: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.status = None
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TIMEOUT", "600")
    monkeypatch.setattr("sparkring.pipelines.tracking.tracker.EVENTS_WAIT_S", 0.2)
    tracker = Tracker(settings_of(store), "flights/3", "flights")
    tracker.begin_lineage("flights", None, [])
    deadline = time.monotonic() + 120
    assert tracker.flush(300) and (run := tracker.run_id())
    while not collector.asked and time.monotonic() < deadline:
        time.sleep(0.02)
    tracker.metrics("job", 1, {"loss": 0.5})
    assert tracker.flush(300), "MLflow does not wait for the collector"
    tracker.close()
    assert MlflowClient(settings_of(store).store_uri).get_run(run).info.status == "FINISHED"
    assert collector.asked == 1 and len(buffered(store)) == 1
    collector.released.set()  # the sender gives up, and with it goes the lock
    tracker._events._thread.join(30)  # type: ignore[union-attr]
    assert not tracker._events.is_alive and collector.asked == 1  # type: ignore[union-attr]
    tracker._journal.close(delete=True)  # type: ignore[union-attr]


def test_an_event_that_is_refused_holds_up_none_behind_it(
    store: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 422
    tracked(settings_of(store))
    assert collector.asked == 2 and buffered(store) == [] and "refuses the event EventType.START" in caplog.text
    collector.status = 401
    tracked(settings_of(store))
    assert len(buffered(store)) == 1, "a key may be corrected"
    collector.status = 201
    assert replay_events(settings_of(store)) == 2


def test_stopped_jobs_are_aborted_and_go_on_under_the_same_run_ids(tmp_path: Path, collector: Collector) -> None:
    """Of two drivers one gets SIGTERM, the other SIGKILL."""
    ends = {"terminated": (signal.SIGTERM, 143), "killed": (signal.SIGKILL, -9)}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, str(PROGRAM), *(str(tmp_path / name) for name in ends)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as drivers:
        try:
            assert drivers.stdout is not None
            said = [drivers.stdout.readline().split() for _ in ends]
            runs = {Path(root).name: run for _, root, _, run in said}
            wait_for(lambda: {each["run"]["runId"] for each in collector.events} == {*map(run_id, runs.values())})
            for _, root, pid, _ in said:
                os.kill(int(pid), ends[Path(root).name][0])
            codes = {Path(root).name: int(code) for _, root, code in map(str.split, drivers.stdout)}
            ended = time.time()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(drivers.pid, signal.SIGKILL)
    assert codes == {name: code for name, (_, code) in ends.items()}
    for name, run in runs.items():
        assert tracked(settings_of(tmp_path / name), resume=True) == run
        events = [event for event in collector.events if event["run"]["runId"] == run_id(run)]
        begins = [place for place, event in enumerate(events) if event["eventType"] == "START"]
        twice = begins[:2] == [0, 1]  # a kill between the collector's answer and the note of it sends an event again
        events = events[twice:]
        assert [event["eventType"] for event in events] == ["START", "ABORT", "START", "COMPLETE"]
        assert (not twice or name == "killed") and at(events[1]) <= ended
        assert "errorMessage" not in events[1]["run"]["facets"]


def test_a_killed_jobs_run_is_closed_once_though_its_events_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = unused_port()
    use(port, monkeypatch)
    settings = settings_of(tmp_path)
    journal = Journal.create(tmp_path, "killed")
    journal.state["settings"] = {"experiment": "tests", "uri": None, "openlineage": "nights"}
    journal.done(0)
    tags = {"sparkring.job": "flights/1"}
    journal.append(StartRun(key="job", at=1.0, name="flights", parent=None, tags=tags, resume=False))
    job = LineageJob(
        key="job", at=1.0, namespace="nights", name="flights", nominal=None, parent=None, code_url=None, inputs=[]
    )
    journal.append(job)
    journal.close(delete=False)
    assert replay(settings) == (1, 2)
    run = tracked(settings, resume=True)
    assert replay(settings) == (0, 0), "its events alone wait"
    assert MlflowClient(settings.store_uri).get_run(run).info.status == "FINISHED"
    with collecting(port) as late:
        assert replay_events(settings) == 4
    assert sorted(late.kinds()) == ["ABORT", "COMPLETE", "START", "START"]
    assert {event["run"]["runId"] for event in late.events} == {run_id(run)}


def test_the_clients_own_settings_decide_where_events_go(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "events.jsonl"
    (tmp_path / "openlineage.yml").write_text(f"transport:\n  type: file\n  log_file_path: {file}\n  append: true\n")
    monkeypatch.setenv("OPENLINEAGE_CONFIG", "openlineage.yml")
    tracked(settings_of(store))
    assert [json.loads(line)["eventType"] for line in file.read_text().splitlines()] == ["START", "COMPLETE"]
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    tracked(settings_of(store))
    assert len(file.read_text().splitlines()) == 2 and buffered(store) == []
    monkeypatch.delenv("OPENLINEAGE_DISABLED")
    (tmp_path / "openlineage.yml").unlink()
    with collecting() as server:
        monkeypatch.setenv("OPENLINEAGE_URL", server.url)
        tracked(settings_of(store))
        assert server.kinds() == ["START", "COMPLETE"]
    assert not [name for name in os.environ if name.startswith("OPENLINEAGE__")], "the client's copies are removed"


def test_a_file_of_the_working_directory_chooses_no_class(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be another's, as that of an unpacked archive is: its transport is a class that would be imported."""
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home / ".openlineage"):
        folder.mkdir(parents=True)
    (here / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (here / "openlineage.yml").write_text("transport:\n  type: evil.Transport\n")
    (home / ".openlineage/openlineage.yml").write_text(f"transport: {{type: file, log_file_path: {tmp_path}/events}}\n")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setenv("HOME", str(home))
    tracked(settings_of(store))
    assert not (tmp_path / "ran").exists() and list(tmp_path.glob("events*")), "the user's own file is read"
    assert "openlineage.yml of the working directory is not read" in caplog.text


def test_a_journal_that_counts_more_events_than_it_has_is_not_deleted(store: Path, collector: Collector) -> None:
    collector.status = 401
    tracked(settings_of(store))
    (folder,) = buffered(store)
    (folder / "sent.json").write_text('{"events": 9}')
    collector.status = 201
    replay_events(settings_of(store))
    (aside,) = buffered(store)
    assert aside.name == f"damaged~{folder.name}"
    shutil.rmtree(aside)


def test_no_remote_of_the_checkout_around_the_job_is_sent_by_the_client(
    store: Path, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    url = "https://ann:s3cret@example.com/nights.git"
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", url], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENLINEAGE__FACETS__SOURCE_CODE_LOCATION__DISABLED", "false")
    with Tracker(settings_of(store), "flights/4", "flights") as tracker:
        tracker.begin_lineage("flights", None, [])
    assert collector.kinds() == ["START", "COMPLETE"] and "s3cret" not in json.dumps(collector.events)
    assert "sourceCodeLocation" not in collector.events[0]["job"]["facets"], "its commit is not known"


def test_without_the_setting_nothing_is_sent_or_kept(store: Path, collector: Collector) -> None:
    tracked(settings_of(store, openlineage=None))
    assert collector.asked == 0 and buffered(store) == []


def test_events_without_tracking_are_refused() -> None:
    with pytest.raises(ValidationError, match="openlineage = 'nights' and enabled = false: events are made of what is"):
        TrackingConfig(enabled=False, openlineage="nights")


def test_a_recipe_that_asks_where_the_package_is_missing_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "is_installed", lambda: False)
    words = ["flights", "tracking.openlineage=nights", f"tracking.root={tmp_path / 'mlflow'}"]
    for command in ("run", "train", "etl", "predict"):
        assert main([command, *words]) == Exit.USAGE
        assert "pip install openlineage-python" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="openlineage = 'nights'"):
        Tracker(settings_of(tmp_path / "mlflow"), "j", "n")
    assert not (tmp_path / "mlflow").exists()


def test_events_that_wait_where_the_package_is_missing_are_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = unused_port()
    use(port, monkeypatch)
    tracked(settings_of(store))
    with monkeypatch.context() as without:
        without.setattr(driver, "is_installed", lambda: False)
        with pytest.raises(StoreUnreachable, match="pip install openlineage-python"):
            replay_events(settings_of(store))
    with collecting(port):
        assert replay_events(settings_of(store)) == 2


def test_a_journal_whose_count_is_damaged_is_set_aside(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = unused_port()
    use(port, monkeypatch)
    tracked(settings_of(store))
    (left,) = buffered(store)
    (left / "sent.json").write_text('{"events": "many"}')
    with collecting(port) as server:
        assert replay_events(settings_of(store)) == 0 and server.asked == 0
    (aside,) = buffered(store)
    assert aside.name.startswith("damaged~") and "sent.json" in caplog.text
    for path in sorted(aside.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    aside.rmdir()


def test_what_is_not_in_mlflow_is_not_yet_in_the_collector(tmp_path: Path, collector: Collector) -> None:
    away = settings_of(tmp_path, uri=f"http://127.0.0.1:{unused_port()}", request_timeout_s=1)
    tracker = Tracker(away, "flights/5", "flights")
    tracker.begin_lineage("flights", None, [])
    tracker.close(timeout_s=30)
    assert replay_events(away) == 0
    assert collector.asked == 0 and len(buffered(tmp_path)) == 1
