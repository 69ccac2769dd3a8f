from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines import cli
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.process_id import this_process
from sparkring.pipelines.tracking.journal import Journal
from sparkring.pipelines.tracking.ops import Artifact, DatasetInfo, Metrics, ModelInfo, NamedType, StartRun
from sparkring.pipelines.tracking.run_owner import process_tags
from sparkring.pipelines.tracking.store.embedded import open_client
from sparkring.pipelines.tracking.store.mlflow_dataset import SparkringSource
from sparkring.pipelines.tracking.store.sink import MOST_FAILURES, MlflowSink, replay
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.pipelines.tracking.ui import pages
from sparkring.pipelines.tracking.views import NOTE, VIEW
from tests.helpers.ports import unused_port
from tests.helpers.servers import answering
from tests.pipelines.tracking import kill_program
from tests.waits import wait_for

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("tracking_program.py")
SCHEMA: list[NamedType] = [{"name": "x", "type": "double"}]
ENV = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "PATH": os.environ["PATH"], "MLFLOW_DISABLE_TELEMETRY": "true"}


def quick(root: Path, **changes: Any) -> TrackingConfig:
    values: dict[str, Any] = {"experiment": "tests", "root": str(root), "flush_every_s": 0.05, "system_metrics": False}
    return TrackingConfig(**(values | {"request_timeout_s": 2, "request_retries": 0} | changes))


def dataset_info() -> DatasetInfo:
    return DatasetInfo(name="flights", uri="/data/flights", fingerprint="ab" * 32, profile={"rows": 10}, schema=SCHEMA)


def tiny_model(registered: str, sha256: str = "7" * 64, **changes: Any) -> ModelInfo:
    """The model of tiny_loader.py, to be registered and to get the alias."""
    values: dict[str, Any] = {"name": "final", "step": 1, "sha256": sha256, "loader_module": "tiny_loader"}
    return ModelInfo(**(values | {"registered_model": registered, "alias": "champion"} | changes))


def begun(job: str) -> StartRun:
    return StartRun(key="job", at=time.time(), name=job, parent=None, resume=False, tags={"sparkring.job": job})


def client_of(settings: TrackingConfig) -> MlflowClient:
    return MlflowClient(settings.store_uri, registry_uri=settings.store_uri)


def history(client: MlflowClient, run: str, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run, name)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose sqlite store exists: making its tables takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


def test_everything_said_is_stored(store: Path, tmp_path: Path) -> None:
    settings = quick(store, tags={"team": "flights"})
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "loss.png").write_bytes(b"png")
    with Tracker(settings, job="j1", name="flights", tags={"sparkring.world": 2}) as tracker:
        tracker.params("job", {"optim": {"lr": 0.1}})
        tracker.artifact("job", "name: flights\n", "config.yaml", "configuration")
        with tracker.part("train", {"sparkring.attempt": 1}):
            for step in range(1, 1201):
                tracker.metrics("train", step, {"loss": 1 / step, "bad": float("inf")}, time_s=1_700_000_000 + step)
            tracker.dataset("train", dataset_info(), "training")
            tracker.checkpoint("train", 1200, "s3://b/checkpoints/step-1200", 4096, 2)
            tracker.artifact("train", tmp_path / "figures", "figures", "report")
        job, train = tracker.run_id(), tracker.run_id("train")
    assert job and train
    client = client_of(settings)
    parent, child = client.get_run(job), client.get_run(train)
    assert parent.info.status == child.info.status == "FINISHED"
    assert parent.data.params == {"optim.lr": "0.1"}
    assert parent.data.tags["team"] == "flights" and parent.data.tags["sparkring.world"] == "2"
    assert child.data.tags["mlflow.parentRunId"] == job and child.data.tags["sparkring.attempt"] == "1"
    assert history(client, train, "loss") == [(step, 1 / step) for step in range(1, 1201)]
    assert client.get_metric_history(train, "loss")[0].timestamp == 1_700_000_001_000
    assert "bad" not in child.data.metrics and child.data.tags["sparkring.not_finite.bad"] == "1200"
    dataset = child.inputs.dataset_inputs[0]
    assert dataset.dataset.digest == ("ab" * 32)[:36] and dataset.tags[0].value == "training"
    source = SparkringSource.from_json(dataset.dataset.source)
    assert source.fingerprint == "ab" * 32 and source.uri == "/data/flights"
    pointer = client.get_logged_model(child.outputs.model_outputs[0].model_id)
    assert pointer.params["uri"] == "s3://b/checkpoints/step-1200" and str(pointer.status) == "READY"
    assert [a.path for a in client.list_artifacts(job, "configuration")] == ["configuration/config.yaml"]
    assert [a.path for a in client.list_artifacts(train, "report/figures")] == ["report/figures/loss.png"]
    assert list((store / "buffer").iterdir()) == []


def test_runs_are_named_by_their_label_and_a_history_has_one_point_per_date(store: Path) -> None:
    """Dates come in any order, a replay adds nothing, and the last of two different values of a date counts."""
    settings = quick(store)
    for number, loss in ((2, 0.5), (1, 0.75), (2, 0.5), (2, 0.25)):
        with Tracker(settings, job=f"h{number}", name="shop", label=f"1970-01-0{number + 1}") as tracker:
            with tracker.part("train"):
                tracker.history("shop", number, number * 86400.0, {"test/loss": loss, "bad": math.nan})
            job, train = tracker.run_id(), tracker.run_id("train")
    client = client_of(settings)
    assert [client.get_run(run or "").info.run_name for run in (job, train)] == ["shop 1970-01-03", "train 1970-01-03"]
    (found,) = client.search_runs([client.get_run(job or "").info.experiment_id], "tags.`sparkring.history` = 'shop'")
    assert found.info.run_name == "shop history" and found.info.status == "FINISHED"
    points = client.get_metric_history(found.info.run_id, "test/loss")
    days = [(point.step, point.timestamp // 86_400_000, point.value) for point in points]
    assert sorted(days) == [(1, 1, 0.75), (2, 2, 0.25), (2, 2, 0.5)]
    assert found.data.metrics == {"test/loss": 0.25}
    assert "viewStateShareKey=shop-history" in found.data.tags[NOTE]


def test_views_of_the_dates_are_saved_with_links_and_what_a_user_changed_stays(store: Path) -> None:
    settings = quick(store, experiment="views")
    assert pages(settings.named("shop"), "shop") == {}
    client = client_of(settings)

    def night(number: int) -> dict[str, str]:
        with Tracker(settings, job=f"h{number}", name="shop") as tracker:
            tracker.history("shop", number, number * 86400.0, {"test/loss": 0.5, "test/champion/loss": 0.5})
        return dict(client.get_experiment_by_name("views").tags)

    with Tracker(settings, job="h0", name="shop"):
        pass
    assert list(pages(settings.named("shop"), "shop")) == ["runs"], "there is no date yet"
    client.set_experiment_tag(client.get_experiment_by_name("views").experiment_id, NOTE, "Ours.")
    first = night(1)
    nights, history = f"{VIEW}shop-nights", f"{VIEW}shop-history"
    assert {nights, history} <= first.keys()
    linked = pages(settings.named("shop"), "shop")
    assert list(linked) == ["nights", "history", "model versions"]
    assert first[NOTE].startswith("Ours.\n\n**shop**: ") and all(
        f"]({link})" in first[NOTE] for link in linked.values()
    )
    experiment = client.get_experiment_by_name("views").experiment_id
    client.set_experiment_tag(experiment, nights, "changed")
    client.delete_experiment_tag(experiment, history)
    assert night(2) == first | {nights: "changed"}


def test_pointers_to_deleted_checkpoints_go_and_those_of_other_runs_stay(store: Path) -> None:
    settings, uris = quick(store), [f"s3://b/keep/step-{step}" for step in (1, 2, 3)]
    runs = []
    for job in ("other", "keeps"):
        with Tracker(settings, job=job, name=job) as tracker:
            with tracker.part("train"):
                for step, uri in enumerate(uris, 1):
                    tracker.checkpoint("train", step, uri, 4096, 2)
                if job == "keeps":
                    tracker.keep_checkpoints("train", uris[1:])
            runs.append(tracker.run_id("train"))
    client, pointed = client_of(settings), dict[str, list[str]]()
    experiment = client.get_experiment_by_name("tests").experiment_id
    for model in client.search_logged_models([experiment], "tags.`sparkring.kind` = 'checkpoint'"):
        pointed.setdefault(model.source_run_id, []).append(model.tags["sparkring.uri"])
    assert {run: sorted(pointed[run]) for run in runs} == {runs[0]: uris, runs[1]: uris[1:]}


def test_every_open_run_shows_that_its_job_lives(tmp_path: Path) -> None:
    """A part may train for days, and the next job on another host looks at that part's own heartbeat."""
    state = {"runs": {"job": "1", "etl": "2", "train": "3"}, "ended": ["etl"]}
    sink, beaten = MlflowSink(quick(tmp_path), SimpleNamespace(state=state)), set()  # type: ignore[arg-type]
    sink._client = SimpleNamespace(set_tag=lambda run, name, value: beaten.add((run, name)))  # type: ignore[assignment]
    sink.heartbeat()
    assert beaten == {("1", "sparkring.heartbeat"), ("3", "sparkring.heartbeat")}


def test_resume_keeps_the_run_the_params_and_the_curve(store: Path) -> None:
    settings = quick(store)
    with pytest.raises(RuntimeError), Tracker(settings, job="j2", name="first") as tracker:
        first = (tracker.run_id(), None)
        tracker.params("job", {"lr": 0.1, "steps": 9})
        with tracker.part("train"):
            first = (tracker.run_id(), tracker.run_id("train"))
            for step in range(1, 8):
                tracker.metrics("train", step, {"loss": float(step)})
            raise RuntimeError("boom")
    client = client_of(settings)
    assert [client.get_run(run).info.status for run in first if run] == ["FAILED", "FAILED"]
    with Tracker(settings, job="j2", name="first", resume=True) as tracker:
        tracker.params("job", {"lr": 0.2, "steps": 9, "new": 1})
        with tracker.part("train"):
            assert (tracker.run_id(), tracker.run_id("train")) == first
            for step in range(5, 10):  # the checkpoint was at step 4
                tracker.metrics("train", step, {"loss": float(step)})
    assert first[0] and first[1]
    assert history(client, first[1], "loss") == [(step, float(step)) for step in range(1, 10)]
    run = client.get_run(first[0])
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1", "steps": "9", "new": "1"}
    assert run.data.tags["sparkring.params_changed_on_resume"] == "lr"
    with Tracker(settings, job="j2", name="again", resume=True) as tracker:
        assert tracker.run_id() != first[0]  # a finished job is not continued


@pytest.mark.parametrize("end", [RuntimeError("boom"), KeyboardInterrupt()], ids=["failed", "killed"])
def test_a_part_that_finished_before_its_job_ended_is_one_run_when_the_job_goes_on(
    store: Path, end: BaseException
) -> None:
    """A driver that died behind the training left two finished runs `train` below one job."""
    settings = quick(store)
    with pytest.raises(type(end)), Tracker(settings, job="behind", name="behind") as tracker:
        with tracker.part("train"):
            tracker.metrics("train", 3, {"loss": 0.5})
        first = (tracker.run_id(), tracker.run_id("train"))
        with tracker.part("evaluate"):
            raise end
    with Tracker(settings, job="behind", name="behind", resume=True) as tracker:
        with tracker.part("train"):
            tracker.metrics("train", 3, {"loss": 0.5})
            tracker.metrics("train", 4, {"loss": 0.25})
        with tracker.part("evaluate"):
            tracker.metrics("evaluate", 4, {"test/loss": 0.75})
        assert (tracker.run_id(), tracker.run_id("train")) == first
    client = client_of(settings)
    parts = client.search_runs(
        [client.get_run(first[0]).info.experiment_id], f"tags.`mlflow.parentRunId` = '{first[0]}'"
    )
    assert sorted((run.info.run_name, run.info.status) for run in parts) == [
        ("evaluate", "FINISHED"),
        ("train", "FINISHED"),
    ]
    assert history(client, str(first[1]), "loss") == [(3, 0.5), (4, 0.25)]
    with Tracker(settings, job="behind", name="behind", resume=True) as tracker, tracker.part("train"):
        assert tracker.run_id("train") != first[1]  # of another job: that one had finished


@pytest.mark.slow  # a job's model does: tests/e2e/test_job.py
def test_the_model_loads_in_a_fresh_process(store: Path, tmp_path: Path) -> None:
    settings = quick(store)
    (tmp_path / "model.json").write_text('{"factor": 3.0}')
    for job in ("m1", "m2"):
        with Tracker(settings, job=job, name="model") as tracker:
            info = tiny_model(
                "tripler",
                step=7,
                inputs=[{"name": "x", "type": "double", "required": True}],
                outputs=[{"name": "score", "type": "double", "required": True}],
                tags={"sparkring.fingerprint": "f"},
            )
            assert tracker.version("job", timeout_s=0.0) is None, "nothing is registered yet"
            tracker.model("job", tmp_path, info)
            assert tracker.version("job", timeout_s=60.0) == {"m1": "1", "m2": "2"}[job]
            run = tracker.run_id()
    assert run
    version = client_of(settings).get_model_version_by_alias("tripler", "champion")
    assert version.version in (2, "2") and version.run_id == run
    code = (
        "import mlflow, pandas, sys; mlflow.set_tracking_uri(sys.argv[1]);"
        "m = mlflow.pyfunc.load_model('models:/tripler@champion');"
        "print(m.metadata.get_input_schema().to_dict(), m.predict(pandas.DataFrame({'x': [1.0, 2.0]})).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, settings.store_uri], capture_output=True, text=True, timeout=600, env=ENV
    )
    assert done.returncode == 0, done.stderr
    assert "[3.0, 6.0]" in done.stdout and "'name': 'x'" in done.stdout


ONCE = [1, "READY", 1, 1, 1, 0]  # as kill_program.stored has it


@pytest.mark.parametrize("call", kill_program.CALLS)
def test_a_model_is_registered_once_whatever_call_its_job_ended_behind(
    store: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    settings, number = quick(store, experiment="kills"), kill_program.CALLS.index(call)
    (store / "data").mkdir(exist_ok=True)
    (store / "data/model.json").write_text('{"factor": 3.0}')
    made = getattr(MlflowClient, call)

    def ends(*args: Any, **kwargs: Any) -> None:
        made(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MlflowClient, call, ends)
        kill_program.register(settings, number)
    replay(settings)
    kill_program.register(settings, number)
    client = client_of(settings)
    assert kill_program.stored(client, client.get_experiment_by_name("kills").experiment_id, number) == ONCE


@pytest.mark.slow
def test_a_model_is_registered_once_whenever_its_job_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("kill_program.py")), str(tmp_path)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4 + 1, "a job for each of the calls, and one that is not killed"
    assert found == [ONCE] * len(found)


def test_an_alias_stays_on_the_later_model_when_the_journal_of_an_earlier_one_is_sent(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, name = quick(store), "forward-only"
    (tmp_path / "model.json").write_text('{"factor": 3.0}')

    def register(journal: Journal, job: str) -> None:
        journal.append(begun(job))
        tracker = Tracker(settings.model_copy(update={"enabled": False}), job, job)
        tracker._journal, tracker._open = journal, ["job"]
        tracker.model("job", tmp_path, tiny_model(name, sha256=job * 64))

    earlier, later = Journal.create(store, "earlier"), Journal.create(store, "later")
    register(earlier, "a")
    time.sleep(0.01)  # the journal's clock counts milliseconds
    register(later, "b")
    MlflowSink(settings, later).drain()
    later.close(delete=True)
    earlier.close(delete=False)  # its server was away
    assert replay(settings) == (1, 2)
    client = client_of(settings)
    versions = {
        version.tags["sparkring.at_ms"]: version for version in client.search_model_versions(f"name = '{name}'")
    }
    assert len(versions) == 2
    assert client.get_model_version_by_alias(name, "champion").version == versions[max(versions)].version
    assert "champion stays on version" in caplog.text
    run = client.get_run(versions[min(versions)].run_id)
    assert run.data.tags["sparkring.alias_not_moved"].startswith("champion stays on version")


def test_a_damaged_journal_is_named_and_set_aside_and_the_others_are_sent(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with it, and though it is the oldest."""
    damages: dict[str, tuple[str, str]] = {
        "cut state": ("state.json", '{"done": 0, "ru'), "empty state": ("state.json", ""),
        "no state": ("state.json", "[]"), "no runs": ("state.json", '{"done": 0}'),
        "odd position": ("state.json", '{"done": "x", "runs": {}}'), "before the start": ("state.json", '{"done": -9}'),
        "odd settings": ("state.json", '{"done": 0, "runs": {}, "settings": {"url": 1}}'),
        "no json": ("ops.jsonl", "?\n"), "no operation": ("ops.jsonl", "5\n"),
        "no key": ("ops.jsonl", '{"op": "tags"}\n'), "unknown": ("ops.jsonl", '{"op": "rm", "key": "job", "at": 1}\n'),
        "no time": ("ops.jsonl", '{"op": "tags", "key": "job", "tags": {}}\n'),
        "nan": ("ops.jsonl", '{"op": "tags", "key": "job", "tags": {}, "at": NaN}\n'),
        "absurd": ("ops.jsonl", '{"op": "tags", "key": "job", "tags": {}, "at": 1e300}\n'),
        "path": ("ops.jsonl", '{"op": "artifact", "key": "job", "at": 1, "file": "/etc/hostname", "folder": ""}\n'),
        "dots": ("ops.jsonl", '{"op": "artifact", "key": "job", "at": 1, "file": "a/../../b", "folder": ""}\n'),
        "place": ("state.json", '{"done": 0, "runs": {}, "settings": {"experiment": "../../x", "uri": null}}'),
        "not text": ("ops.jsonl", "\udcff\n"), "deep": ("ops.jsonl", "[" * 100_000 + "\n"),
    }  # fmt: skip
    for number, (name, (file, content)) in enumerate(damages.items()):
        journal = Journal.create(store, name.replace(" ", "-"))
        journal.append(begun("ok"))
        journal.close(delete=False)
        (journal.folder / file).write_bytes(content.encode(errors="surrogateescape"))
        os.utime(journal.folder, (number, number))
    good = Journal.create(store, "good")
    good.append(begun("ok"))
    good.close(delete=False)
    assert replay(quick(store)) == (1, 1)
    left = sorted(folder.name for folder in (store / "buffer").iterdir())
    assert len(left) == len(damages) and all(name.startswith("damaged~") for name in left)
    assert all(name in caplog.text for name in left), caplog.text
    assert "cannot be reached" not in caplog.text and "Traceback" not in caplog.text
    assert len(caplog.records) == len(damages) and all("\n" not in record.message for record in caplog.records)
    caplog.clear()
    assert replay(quick(store)) == (0, 0) and caplog.text == "", "said once, tried once"
    for name in left:
        shutil.rmtree(store / "buffer" / name)


@pytest.mark.parametrize("linked", ["files", "files/a", "files/a/b", "files/a/b/c"])
def test_no_link_leads_out_of_a_journal(
    linked: str, store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_text("private")
    within = linked.removeprefix("files").lstrip("/")
    journal = Journal.create(store, "linked")
    (journal.folder / "files").rmdir()
    (journal.folder / linked).parent.mkdir(parents=True, exist_ok=True)
    (journal.folder / linked).symlink_to(tmp_path / within)
    journal.append(begun(f"linked-{len(within)}"))
    journal.append(Artifact(key="job", at=time.time(), file="a/b", folder=""))
    journal.close(delete=False)
    replay(quick(store))
    (aside,) = (store / "buffer").iterdir()
    assert aside.name.startswith("damaged~linked") and "leads out of the journal" in caplog.text
    assert not [path for path in (store / "artifacts").rglob("c") if path.read_text() == "private"]
    shutil.rmtree(aside)


def test_a_link_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/ops.jsonl").touch()
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer/j").symlink_to(tmp_path / "elsewhere")
    assert replay(quick(tmp_path)) == (0, 0) and len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_journals_whose_stores_are_away_hold_up_no_other(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stores = ("http://127.0.0.1:9", None, "http://127.0.0.1:7")
    for number, uri in enumerate(stores):
        journal = Journal.create(store, "j")
        journal.state["settings"] = {"experiment": "tests", "uri": uri}
        journal.done(0)
        journal.append(begun("ok"))
        journal.close(delete=False)
        os.utime(journal.folder, (number, number))
    keys = [f"tracking.{key}" for key in (f"root={store}", "request_timeout_s=2", "request_retries=0")]
    assert cli.main(["replay", "flights", *keys]) == Exit.RESOURCES
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot be reached" in line]
    assert len(lines) == 2 and all(line.count(str(uri)) for line, uri in zip(lines, stores[::2], strict=True))
    left = list((store / "buffer").iterdir())
    uris = {json.loads((journal / "state.json").read_text())["settings"]["uri"] for journal in left}
    assert len(left) == 2 and uris == set(stores) - {None}
    for journal in left:
        shutil.rmtree(journal)


def test_a_full_disk_ends_no_job_and_loses_no_metric(tmp_path: Path, private_mounts: list[str]) -> None:
    """A tmpfs of 256 KiB for the journal, filled and emptied while a driver goes on; its server is away."""
    program = f"""
        import json, logging, os, subprocess, sys
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", "{tmp_path}"], check=True)
        from sparkring.conf.blocks.tracking import TrackingConfig
        from sparkring.pipelines.tracking.tracker import Tracker
        settings = TrackingConfig(experiment="t", uri="http://127.0.0.1:9", root="{tmp_path}", system_metrics=False)
        tracker = Tracker(settings, "j", "full")
        tracker.metrics("job", 0, {{"loss": 1.0}})
        filler = os.open("{tmp_path}/filler", os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(filler, bytes(100))
        except OSError as error:
            print(error)
        for step in range(1, 2000):
            tracker.metrics("job", step, {{"loss": 1.0}})
        tracker.artifact("job", bytes(9000), "big.bin")
        os.unlink("{tmp_path}/filler"), os.close(filler)
        tracker.metrics("job", 2000, {{"loss": 1.0}})
        lines = [json.loads(line) for line in open(tracker._journal.folder / "ops.jsonl")]
        print("steps", [op["points"][0][2] for op in lines if op["op"] == "metrics"] == list(range(2001)))
        print("lost", [op["what"] for op in lines if op["op"] == "lost"])
        print("files", os.listdir(tracker._journal.folder / "files"))
        tracker.close(timeout_s=30)
        print("mode", oct(os.stat("{tmp_path}/buffer").st_mode))
    """
    command = [*private_mounts, sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for said in ("No space left on device; training continues, and tracking in memory", "can be written again",
                 "steps True", "lost ['artifact big.bin']", "files []", "mode 0o40700"):  # fmt: skip
        assert said in done.stdout, done.stdout
    assert done.stdout.count("ERROR") == 2, "once for the journal and once for the artifact"


def test_a_refusal_is_said_and_holds_nothing_up(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = quick(store)
    with Tracker(settings, job="j3", name="odd") as tracker:
        tracker.metrics("job", 1, {"no such: sign?": 1.0})
        tracker.metrics("job", 2, {"loss": 1.0})
        tracker.metrics("job", 3, {"loss": 0.5})
        with pytest.raises(KeyError, match="no open run 'train'"):
            tracker.metrics("train", 1, {"loss": 1.0})
        tracker.params("job", {"a": 1})
        assert tracker.flush()
        run = tracker.run_id()
    assert run
    assert "MLflow refused metrics" in caplog.text
    stored = client_of(settings).get_run(run).data
    assert stored.params == {"a": "1"} and stored.tags["sparkring.not_recorded"].startswith("metrics: ")


class BucketAway(Exception):
    """Neither an MlflowException nor an OSError, as botocore's own errors are not."""


@pytest.mark.parametrize(("failures", "arrives"), [(3, True), (99, False)])
def test_an_unknown_error_is_tried_again_and_in_the_end_told_on_the_run(
    store: Path, monkeypatch: pytest.MonkeyPatch, failures: int, arrives: bool
) -> None:
    send, tries = MlflowClient.log_artifact, []

    def log_artifact(self: MlflowClient, *args: Any) -> None:
        tries.append(args)
        if len(tries) <= failures:
            raise BucketAway("Could not connect to the endpoint URL")
        send(self, *args)

    monkeypatch.setattr(MlflowClient, "log_artifact", log_artifact)
    with Tracker(quick(store, flush_every_s=0.01), job=f"away-{failures}", name="away") as tracker:
        tracker.artifact("job", "text", "a.txt")
        tracker.artifact("job", "text", "b.txt")
        assert tracker.flush()
        run = tracker.run_id()
    assert run
    client, why = client_of(quick(store)), "Could not connect to the endpoint URL"
    assert [a.path for a in client.list_artifacts(run)] == ["a.txt", "b.txt"] * arrives
    told = client.get_run(run).data.tags.get("sparkring.not_recorded")
    assert told == (None if arrives else f"artifact a.txt: {why}; artifact b.txt: {why}")
    assert len(tries) == (failures + 2 if arrives else MOST_FAILURES + 1), "the second is not waited for as long"


def test_a_project_that_was_moved_or_copied_writes_and_reads_where_it_is(tmp_path: Path) -> None:
    old = tmp_path / "old/mlflow"
    (tmp_path / "model").mkdir()
    (tmp_path / "model/w.txt").write_text("1")

    def track(root: Path, job: str) -> str:
        with Tracker(quick(root), job, job) as tracker:
            tracker.artifact("job", b"text", f"{job}.txt")
            with tracker.part("evaluate"):
                tracker.model("evaluate", tmp_path / "model", tiny_model("m", job[-1] * 64))
            run = tracker.run_id()
        assert run is not None and tracker.waiting == 0
        return run

    first = track(old, "j1")
    for name in ("a copy", "100%25 größe?#1", "moved"):
        new = tmp_path / name / "mlflow"
        if name == "moved":
            old.parent.rename(new.parent)
        else:
            shutil.copytree(old.parent, new.parent)
        before = sorted(old.rglob("*"))
        second = track(new, "j2")
        assert sorted(old.rglob("*")) == before, name
        client, here = open_client(quick(new)), new.resolve().as_uri()
        for run, file in ((first, "j1.txt"), (second, "j2.txt")):
            assert client.get_run(run).info.artifact_uri.startswith(f"{here}/artifacts/tests/"), name
            assert [item.path for item in client.list_artifacts(run)] == [file], name
        for version in ("1", "2"):
            place = client.get_model_version_download_uri("m", version)
            assert place.startswith(here) and list(Path(unquote(urlsplit(place).path)).iterdir()), name


@pytest.mark.parametrize("what", ["experiment before", "experiment meanwhile", "run meanwhile"])
def test_what_is_deleted_in_mlflow_is_named_with_its_remedy_and_nothing_is_dropped(
    store: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = quick(store, experiment=f"deleted {what}")
    client = client_of(settings)
    with Tracker(settings, "first", "first") as tracker:
        first = tracker.run_id()
    assert first is not None
    experiment = client.get_run(first).info.experiment_id
    if what == "experiment before":
        client.delete_experiment(experiment)
    tracker = Tracker(settings, "second", "second")
    if what != "experiment before":
        run = tracker.run_id()
        assert run is not None
        client.delete_run(run) if what == "run meanwhile" else client.delete_experiment(experiment)
    tracker.metrics("job", 1, {"loss": 0.5})
    tracker.artifact("job", b"text", "a.txt")
    wait_for(lambda: "restore" in caplog.text)
    tracker.close()
    assert tracker.waiting and "no job can send them until: the " in caplog.text
    if what == "run meanwhile":
        client.restore_run(run)
    else:
        client.restore_experiment(experiment)
        for deleted in client.search_runs([experiment], run_view_type=ViewType.DELETED_ONLY):
            client.restore_run(deleted.info.run_id)
    assert replay(settings)[0] == 1
    (found,) = client.search_runs([experiment], "tags.`sparkring.job` = 'second'")
    assert found.data.metrics["loss"] == 0.5 and found.info.status == "FINISHED"
    assert [item.path for item in client.list_artifacts(found.info.run_id)] == ["a.txt"]


@pytest.mark.parametrize("version", ["1.30.0", "0.9.1rc1"])
def test_a_server_of_mlflow_1_is_named_at_the_start_and_nothing_is_dropped(
    tmp_path: Path, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A stand-in that has its version: MLflow 1 cannot be installed beside 3."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/version" else 404)
            self.end_headers()
            self.wfile.write(version.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    with answering(server):
        uri = f"http://127.0.0.1:{server.server_address[1]}"
        with Tracker(quick(tmp_path, uri=uri), "j", "n") as tracker:
            wait_for(lambda: f"{uri} is MLflow {version[0]}, and 2 or newer is needed" in caplog.text)
        assert tracker.waiting == 2


def test_status_after_success_failure_and_signals(tmp_path: Path) -> None:
    """Five drivers at once on a store that does not exist yet; then the next job closes what SIGKILL left."""
    ends = {
        "ok": None,
        "raise": None,
        "wait-int": signal.SIGINT,
        "wait-term": signal.SIGTERM,
        "wait-kill": signal.SIGKILL,
    }
    log = tmp_path / "log"
    with log.open("w") as errors:
        drivers = subprocess.Popen([sys.executable, str(PROGRAM), str(tmp_path), *ends], env=ENV, stderr=errors,
                                   stdout=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    runs, codes, pids = dict[str, tuple[str, str]](), dict[str, int](), dict[str, int]()
    try:
        assert drivers.stdout is not None
        for line in drivers.stdout:
            word, how, *said = line.split()
            if word == "ready":
                runs[how], pids[how] = (said[1], said[2]), int(said[0])
                if runs.keys() == ends.keys():  # one that begins later would close what SIGKILL has left
                    for name, number in ends.items():
                        if number is not None:
                            os.kill(pids[name], number)
            else:
                codes[how] = int(said[0])
        assert drivers.wait(timeout=300) == 0 and codes.keys() == ends.keys(), log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(drivers.pid, signal.SIGKILL)
        drivers.wait()
        assert drivers.stdout is not None
        drivers.stdout.close()
    assert codes["ok"] == 0 and codes["raise"] == 1 and codes["wait-term"] == 143 and codes["wait-kill"] == -9
    settings = quick(tmp_path, experiment="exits")
    client = client_of(settings)

    def statuses(how: str) -> set[str]:
        return {client.get_run(run).info.status for run in runs[how]}

    assert statuses("ok") == {"FINISHED"} and statuses("raise") == {"FAILED"}
    assert statuses("wait-int") == {"KILLED"} and statuses("wait-term") == {"KILLED"}
    assert statuses("wait-kill") == {"RUNNING"}
    assert "system/cpu_utilization_percentage" in client.get_run(runs["ok"][0]).data.metrics
    with Tracker(settings, job="another", name="next") as tracker:
        assert tracker.flush()
        assert statuses("wait-kill") == {"KILLED"}
    with Tracker(settings, job="job-wait-kill", name="wait-kill", resume=True) as tracker, tracker.part("train"):
        assert (tracker.run_id(), tracker.run_id("train")) == runs["wait-kill"]
        assert statuses("wait-kill") == {"RUNNING"}
        for step in range(4, 8):
            tracker.metrics("train", step, {"loss": 1.0 / step})
    assert statuses("wait-kill") == {"FINISHED"}
    assert [step for step, _ in history(client, runs["wait-kill"][1], "loss")] == list(range(1, 8))


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[None]:
    """Answer as MLflow's server, from a thread: its command imports for seconds before it listens."""
    from mlflow import server
    from werkzeug.serving import make_server

    variables = {
        server.BACKEND_STORE_URI_ENV_VAR: f"sqlite:///{folder}/server.db",
        server.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
        server.ARTIFACTS_DESTINATION_ENV_VAR: f"{folder}/files",
        server.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        for opened in ("_tracking_store", "_model_registry_store", "_artifact_repo"):
            patched.setattr(server.handlers, opened, None)
        patched.setattr(server.handlers.utils, "set_tracking_uri", lambda uri: None)  # which are of the whole process
        patched.setattr(server.handlers.registry_utils, "set_registry_uri", lambda uri: None)
        with answering(make_server("127.0.0.1", port, server.app, threaded=True)):
            yield


def test_a_server_that_comes_and_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    port = unused_port()
    settings = quick(tmp_path / "local", uri=f"http://user:secret@127.0.0.1:{port}")
    tracker = Tracker(settings, job="s1", name="remote")
    for step in range(1, 101):
        tracker.metrics("job", step, {"loss": 1 / step})
    tracker.artifact("job", "hello", "note.txt")
    assert tracker.run_id(timeout_s=0.5) is None and not tracker.flush(0.5)
    assert "cannot be reached" in caplog.text and "secret" not in caplog.text
    with mlflow_server(tmp_path, port):
        assert tracker.flush(300)
        run = tracker.run_id()
        assert run
        client = client_of(settings)
        assert len(history(client, run, "loss")) == 100
        assert (
            tracker.url()
            == f"http://127.0.0.1:{port}/#/experiments/{client.get_run(run).info.experiment_id}/runs/{run}"
        )
        assert "answers again" in caplog.text
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model.json").write_text('{"factor": 3.0}')
        tracker.model("job", tmp_path / "model", tiny_model("remote"))
        assert tracker.flush(300)
        assert client.get_model_version_by_alias("remote", "champion").run_id == run
    tracker.metrics("job", 101, {"loss": 0.5})
    assert tracker.version("job") == "1" and tracker.version("other", timeout_s=0.5) is None
    tracker.close(ValueError("the job failed, too"), timeout_s=30)
    assert "tracking operations wait" in caplog.text
    assert len(list((tmp_path / "local" / "buffer").iterdir())) == 1
    with mlflow_server(tmp_path, port):
        assert replay(settings) == (1, 2)
        assert [step for step, _ in history(client, run, "loss")] == list(range(1, 102))
        assert client.get_run(run).info.status == "FAILED"
        assert [a.path for a in client.list_artifacts(run)] == ["note.txt"]
    assert list((tmp_path / "local" / "buffer").iterdir()) == []


def test_a_killed_driver_without_server_is_replayed_and_closed(store: Path, tmp_path: Path) -> None:
    settings = quick(store)
    journal = Journal.create(store, "dead")
    journal.append(begun("d"))
    journal.append(Metrics(key="job", at=time.time(), points=[("loss", 0.5, 1, 1_700_000_000_000)]))
    journal.close(delete=False)
    with Tracker(settings, job="alive", name="alive") as tracker:
        assert tracker.flush()
    (run,) = client_of(settings).search_runs(
        [client_of(settings).get_experiment_by_name("tests").experiment_id], "tags.`sparkring.job` = 'd'"
    )
    assert run.info.status == "KILLED" and run.data.metrics == {"loss": 0.5}


def test_runs_of_processes_that_are_gone_are_closed_without_their_journal(store: Path) -> None:
    settings = quick(store)
    with Tracker(settings, job="before", name="before") as tracker:
        assert tracker.flush(300)
    client = client_of(settings)
    experiment = client.get_experiment_by_name("tests").experiment_id
    here, now = this_process(), time.time()
    owners = {
        "dead": replace(here, pid=2**22 + 1),
        "alive": here,
        "elsewhere, silent": replace(here, host="far/1"),
        "elsewhere, alive": replace(here, host="far/1"),
    }
    beats = {"elsewhere, silent": now - 3600}
    runs = {
        how: client.create_run(experiment, tags=process_tags(owner, beats.get(how, now)))
        for how, owner in owners.items()
    }
    foreign = client.create_run(experiment)
    with Tracker(settings, job="next", name="next") as tracker:
        assert tracker.flush(300)
    after = {how: client.get_run(run.info.run_id) for how, run in runs.items()}
    assert {how: run.info.status for how, run in after.items()} == {
        "dead": "KILLED", "alive": "RUNNING", "elsewhere, silent": "KILLED", "elsewhere, alive": "RUNNING",
    }  # fmt: skip
    assert "its process was gone" in after["dead"].data.tags["sparkring.closed_by"]
    assert client.get_run(foreign.info.run_id).info.status == "RUNNING"
    for run in (after["alive"], after["elsewhere, alive"], foreign):
        client.set_terminated(run.info.run_id)


def test_a_store_in_a_folder_with_letters_of_a_url_makes_no_other(tmp_path: Path) -> None:
    odd = tmp_path / "a?b#c%25d"
    client = open_client(TrackingConfig(root=str(odd / "mlflow")))
    client.create_experiment("e")
    assert (odd / "mlflow/mlflow.db").exists() and [each.name for each in tmp_path.iterdir()] == [odd.name]
