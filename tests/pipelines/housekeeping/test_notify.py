"""What targets get, from real servers and programs; and that none of them can hold or change a job."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import socket
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkring.conf.load import load_config
from sparkring.pipelines import cli
from sparkring.pipelines.housekeeping.events import Event
from sparkring.pipelines.housekeeping.notify import OUTCOME, announce, announce_late, describe_end, run_command, send
from sparkring.pipelines.job import job
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.runs import Runs
from sparkring.training.launch.failure import LaunchError
from sparkring.training.worker.result import MODEL
from tests.helpers.servers import answering
from tests.pipelines.results import train_result

COMMAND = ["sparkring", "run", "nights.yaml"]


@dataclass
class Server:
    """What a local HTTP server got."""

    port: int
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    waited_for: list[bool] = field(default_factory=list)  # by answer: whether the job was there for all of its delay

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for method, _, _, body in self.requests if method == "POST"]

    def paths(self, method: str) -> list[str]:
        return [path for each, path, _, _ in self.requests if each == method]


@contextmanager
def serving(status: int = 200, location: str = "", delay_s: float = 0.0) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server.requests.append((self.command, self.path, dict(self.headers), body))
            server.waited_for.append(not released.wait(delay_s))
            try:
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.end_headers()
            except OSError:  # who asked has gone
                pass

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    released = threading.Event()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(http.server_address[1])
    with answering(http):
        try:
            yield server
        finally:
            released.set()


def recipe(folder: Path, *targets: dict[str, Any], **notify: Any) -> Path:
    path = folder / "nights.yaml"
    blocks = {
        "name": "nights",
        "dataset": str(folder / "dataset"),
        "model": {"factory": "sparkring.training.models.tabular:Tabular"},
        "storage": {"runs": str(folder / "runs")},
        "tracking": {"enabled": False},
        "notify": {"targets": list(targets), "http_hosts": ["127.0.0.1"], "timeout_s": 1.0} | notify,
    }
    path.write_text(yaml.safe_dump(blocks))
    return path


def config_of(folder: Path, *targets: dict[str, Any], **notify: Any) -> Any:
    return load_config(str(recipe(folder, *targets, **notify))).config


def failed() -> Event:
    return Event(
        event="failed", recipe="nights", ds=None, exit_code=4, at="2026-02-01T03:00:00+00:00", reasons=[],
        scores={}, champion_scores={}, links={}, error="boom", next="sparkring run nights",
    )  # fmt: skip


def run_cli(monkeypatch: pytest.MonkeyPatch, path: Path, end: int | BaseException) -> int:
    """`sparkring run` whose job ends in the given way."""

    def run_job(*_: Any, **__: Any) -> int:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(job, "run_job", run_job)
    monkeypatch.setattr(sys, "argv", ["sparkring", "run", str(path)])
    return cli.main(["run", str(path)])


def test_a_failed_job_is_told_and_so_is_the_next_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        path = recipe(tmp_path, {"kind": "webhook", "url": server.url}, {"kind": "ping", "url": f"{server.url}/p/"})
        ends: list[int | BaseException] = [0, LaunchError("rank 1 ran out of memory"), KeyboardInterrupt(), 0, 0]
        codes = [run_cli(monkeypatch, path, end) for end in ends]
    assert codes == [0, 5, 130, 0, 0]
    assert [(e["event"], e["exit_code"], e["error"], e["next"]) for e in server.events()] == [
        ("failed", 5, "rank 1 ran out of memory", f"sparkring run {path}"),
        ("recovered", 0, "", ""),
    ]
    assert server.paths("GET") == ["/p", "/p/fail", "/p", "/p"]


def test_a_rejected_model_is_told_once_with_both_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promotion = {"decision": "rejected", "reasons": ["auc"], "champion_scores": {"auc": 0.7}, "alias": "champion"}

    def run_job(*_: Any, **__: Any) -> int:
        runs = Runs(config.storage.runs, "nights")
        for fingerprint, auc in (("a", 0.9), ("b", 0.6)):
            with runs.begin(config, fingerprint) as (record, _):
                result = train_result(scores={MODEL: {"auc": auc}}, tracking_url="https://mlflow.example/#/1")
                summary = json.loads(result.to_json()) | {"promotion": promotion}
                runs.at(record).put_atomic("summary.json", json.dumps(summary).encode())
                runs.update(record.folder, status="finished")
        return 6

    with serving() as server:
        path = recipe(tmp_path, {"kind": "webhook", "url": server.url})
        config = load_config(str(path)).config
        monkeypatch.setattr(job, "run_job", run_job)
        assert cli.main(["run", str(path)]) == 6
    (event,) = server.events()
    assert (event["event"], event["scores"], event["champion_scores"]) == ("rejected", {"auc": 0.6}, {"auc": 0.7})
    assert event["links"]["mlflow"] == "https://mlflow.example/#/1" and event["reasons"] == ["auc"]
    assert event["links"]["report"] == f"{event['links']['run']}/report.html"


def test_a_run_of_an_earlier_command_gives_no_scores(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"kind": "command", "command": ["true"]})
    runs = Runs(config.storage.runs, "nights")
    with runs.begin(config, "a") as (record, _):
        runs.at(record).put_atomic("summary.json", train_result().to_json())
    runs.update(record.folder, status="finished")
    assert describe_end(config, 0, None, None).scores == {"loss": 0.5}
    runs.update(record.folder, pid=1)
    assert describe_end(config, 0, None, None).scores == {}


def test_only_the_named_events_are_sent(tmp_path: Path) -> None:
    with serving() as server:
        config = config_of(tmp_path, {"kind": "webhook", "url": server.url}, events=["late"])
        announce(config, 4, COMMAND, LaunchError("boom"))
        announce_late(config, COMMAND, ds="2026-02-01")
    assert [(e["event"], e["ds"], e["next"]) for e in server.events()] == [
        ("late", "2026-02-01", "sparkring run nights.yaml")
    ]


def test_a_receiver_can_verify_the_signature_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/housekeeping.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(example, names)
    monkeypatch.setenv("HOOK", "unused")
    monkeypatch.setenv("HOOK_KEY", "key")
    with serving() as server:
        monkeypatch.setenv("HOOK", server.url)
        config = config_of(tmp_path, {"kind": "webhook", "url_env": "HOOK", "hmac_env": "HOOK_KEY"})
        send(config.notify, failed(), None)
    ((_, _, headers, body),) = server.requests
    assert names["is_genuine"](headers, body, "key")
    assert not names["is_genuine"](headers, body + b" ", "key")
    assert not names["is_genuine"](headers, body, "other")
    assert not names["is_genuine"](headers | {"X-Sparkring-Timestamp": "1700000000"}, body, "key")
    signed = f"{headers['X-Sparkring-Delivery-Id']}.{headers['X-Sparkring-Timestamp']}.".encode() + body
    by_hand = base64.b64encode(hmac.new(b"key", signed, hashlib.sha256).digest()).decode()
    assert headers["X-Sparkring-Signature"] == f"v1,{by_hand}"


def test_a_webhook_that_hangs_holds_no_job_and_not_the_other_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(delay_s=120) as hanging, serving() as server:
        path = recipe(tmp_path, {"kind": "webhook", "url": hanging.url}, {"kind": "webhook", "url": server.url})
        assert run_cli(monkeypatch, path, Exit.DATA) == Exit.DATA
        assert not any(hanging.waited_for), "the job has gone on without its answer"
    assert len(hanging.events()) == len(server.events()) == 1
    assert "notify.targets.0 (webhook)" in caplog.text and "notify.targets.1" not in errors(caplog)


def test_a_server_that_answers_byte_by_byte_holds_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit of each read would never end it."""
    stop = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            while not stop.wait(0.1):
                try:
                    connection.sendall(b"H")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip)
        thread.start()
        config = config_of(tmp_path, {"kind": "webhook", "url": f"http://127.0.0.1:{listener.getsockname()[1]}"})
        send(config.notify, failed(), None)
        assert "no answer within 1 s" in errors(caplog)
        stop.set()
        thread.join()


def errors(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('no pager here')"], "exit code 1: no pager here"),
        (["/no/such/program"], "/no/such/program"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "took longer than 1 s and was killed"),
    ],
)
def test_a_command_that_fails_is_logged_and_changes_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, command: list[str], words: str
) -> None:
    path = recipe(tmp_path, {"kind": "command", "command": command})
    assert run_cli(monkeypatch, path, Exit.QUALITY) == Exit.QUALITY
    assert words in errors(caplog)


def test_a_command_gets_the_event_as_its_input(tmp_path: Path) -> None:
    program = f"import sys; open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read())"
    config = config_of(tmp_path, {"kind": "command", "command": [sys.executable, "-c", program]})
    announce(config, Exit.TRAINING, COMMAND, LaunchError("boom"))
    got = json.loads((tmp_path / "got").read_text())
    assert (got["event"], got["recipe"], got["error"], got["format"]) == ("failed", "nights", "boom", 1)


def test_a_program_that_does_not_read_its_input_is_no_failure(tmp_path: Path) -> None:
    program = f"open({str(tmp_path / 'ran')!r}, 'w')"
    run_command([sys.executable, "-c", program], b"x" * (1 << 20), 10.0)  # more than a pipe holds
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("status", [302, 307, 404, 500])
def test_an_answer_other_than_2xx_is_an_error_and_no_redirect_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    with serving() as elsewhere, serving(status, location=elsewhere.url if status < 400 else "") as server:
        config = config_of(tmp_path, {"kind": "webhook", "url": server.url}, {"kind": "ping", "url": server.url})
        send(config.notify, failed(), 0)
    assert elsewhere.requests == [] and errors(caplog).count(str(status)) == 2


@pytest.mark.parametrize("kind", ["webhook", "ping"])
@pytest.mark.parametrize(("login", "pair"), [("user:pa%40ss", "user:pa@ss"), ("token", "token:"), ("u:a:b", "u:a:b")])
def test_user_and_password_of_a_url_are_sent_as_basic_authorization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, login: str, pair: str
) -> None:
    with serving() as server:
        monkeypatch.setenv("HOOK", server.url.replace("://", f"://{login}@") + "/x")
        send(config_of(tmp_path, {"kind": kind, "url_env": "HOOK"}).notify, failed(), 0)
    ((_, path, headers, _),) = server.requests
    assert path == "/x" and base64.b64decode(headers["Authorization"].removeprefix("Basic ")).decode() == pair
    assert headers["Host"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("rest", [":hunter2/x", "/hunter2 x", "/hunter2\x01", "/x?a=hunter2\n", "/hunter2?x"])
def test_no_error_of_a_target_shows_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rest: str
) -> None:
    """The URL is checked before the job; another library's error may hold it all the same."""
    config = config_of(tmp_path, *({"kind": kind, "url_env": "HOOK"} for kind in ("webhook", "ping")))
    with serving(404) as server:
        monkeypatch.setenv("HOOK", server.url + rest)
        send(config.notify, failed(), 0)
    assert errors(caplog).count("notify.targets.") == 2 and "hunter2" not in errors(caplog)


def test_a_job_whose_alerts_cannot_work_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, {"kind": "webhook", "url_env": "NO_SUCH_HOOK"})
    assert run_cli(monkeypatch, path, 0) == Exit.USAGE
    assert "notify.targets.0.url_env = 'NO_SUCH_HOOK': is not set" in capsys.readouterr().err


def test_a_recovery_is_of_the_same_command_and_of_no_earlier_date(tmp_path: Path) -> None:
    run, predict = ["sparkring", "run", "nights"], ["sparkring", "predict", "nights"]
    with serving() as server:
        config = config_of(tmp_path, {"kind": "webhook", "url": server.url})
        announce(config, 3, run, ds="2026-02-02")
        announce(config, 0, predict, ds="2026-02-02")
        announce(config, 0, run, ds="2026-02-01")
        assert [event["event"] for event in server.events()] == ["failed"]
        announce(config, 0, run, ds="2026-02-03")
        announce(config, 0, run, ds="2026-02-04")
    assert [(event["event"], event["ds"]) for event in server.events()][1:] == [("recovered", "2026-02-03")]


def test_a_date_that_was_rejected_before_is_told_once(tmp_path: Path) -> None:
    with serving() as server:
        targets = [{"kind": kind, "url": server.url} for kind in ("webhook", "ping")]
        config = config_of(tmp_path, *targets)
        announce(config, Exit.DATA, ["sparkring", "run", "nights"], ds="2026-02-02")
        before = (tmp_path / "runs/nights" / OUTCOME).read_bytes()
        announce(config, Exit.QUALITY, ["sparkring", "run", "nights"], ds="2026-02-02")  # makes no run
    assert [event["event"] for event in server.events()] == ["failed"] and len(server.paths("GET")) == 2
    assert (tmp_path / "runs/nights" / OUTCOME).read_bytes() == before


def test_an_outcome_that_cannot_be_read_or_stored_ends_nothing(tmp_path: Path) -> None:
    with serving() as server:
        config = config_of(tmp_path, {"kind": "webhook", "url": server.url})
        (tmp_path / "runs/nights").mkdir(parents=True)
        (tmp_path / "runs/nights" / OUTCOME).write_text(textwrap.dedent("{broken"))
        announce(config, 3, COMMAND)
        (tmp_path / "runs/nights" / OUTCOME).unlink()
        (tmp_path / "runs/nights" / OUTCOME).mkdir()
        announce(config, 3, COMMAND)
    assert [event["event"] for event in server.events()] == ["failed", "failed"]
