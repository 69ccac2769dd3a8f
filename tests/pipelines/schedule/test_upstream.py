from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sparkring.conf.storage import Storage, open_storage
from sparkring.pipelines.schedule import upstream
from sparkring.pipelines.schedule.errors import NotReady, UpstreamUnreadable
from sparkring.pipelines.schedule.upstream import LOOK_EVERY_S, wait_for
from tests.helpers.servers import answering


def test_nothing_is_waited_for_where_everything_is_there(folder: Storage) -> None:
    folder.put_atomic("day=1/_SUCCESS", b"x")
    slept = list[float]()
    wait_for([folder.at("day=1/_SUCCESS").uri, folder.at("day=1").uri], 7200.0, sleep=slept.append)
    wait_for([], 7200.0, sleep=slept.append)
    assert slept == []


def test_a_date_begins_as_soon_as_its_upstream_is_there(folder: Storage) -> None:
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            folder.put_atomic("_SUCCESS", b"x")

    wait_for([folder.at("_SUCCESS").uri], 7200.0, monotonic=lambda: sum(slept), sleep=sleep)
    assert slept == [LOOK_EVERY_S] * 3


def test_an_upstream_that_does_not_come_in_time_is_named(tmp_path: Path) -> None:
    slept = list[float]()
    with pytest.raises(NotReady, match=r"schedule\.wait_for: .*/b is not there, nor are 1 more, after 20 s"):
        (tmp_path / "a").touch()
        uris = [str(tmp_path / name) for name in "abc"]
        wait_for(uris, 20.0, monotonic=lambda: sum(slept), sleep=slept.append)
    assert slept == [LOOK_EVERY_S, 20.0 - LOOK_EVERY_S]


@pytest.fixture
def forbidding() -> Iterator[str]:
    """host:port of a server that lets nobody in, as S3 does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with answering(server):
        yield f"127.0.0.1:{server.server_port}"


def test_a_path_without_rights_ends_the_wait_at_once(forbidding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    uri = f"s3://lake/day=1/_SUCCESS?endpoint_override={forbidding}&scheme=http&region=us-east-1"
    with pytest.raises(UpstreamUnreadable, match=r"s3://lake/day=1/_SUCCESS.* cannot be looked for: .*ACCESS_DENIED"):
        wait_for([uri], 7200.0, sleep=never)


@pytest.mark.parametrize(
    "error",
    [
        OSError("When getting information for key 'x': AWS Error NETWORK_CONNECTION during HeadObject operation: curl"),
        OSError("AWS Error SLOW_DOWN during HeadObject operation: Please reduce your request rate."),
        ConnectionRefusedError(111, "Connection refused"),
        TimeoutError("timed out"),
    ],
)
def test_a_storage_that_does_not_answer_is_asked_again(error: OSError, tmp_path: Path, monkeypatch) -> None:
    answers = iter([error, None])
    found = open_storage(str(tmp_path))

    def answer(uri: str) -> Storage:
        if (problem := next(answers)) is not None:
            raise problem
        return found

    monkeypatch.setattr(upstream, "open_storage", answer)
    slept = list[float]()
    wait_for(["s3://lake/x"], 60.0, monotonic=lambda: sum(slept), sleep=slept.append)
    assert slept == [LOOK_EVERY_S]


def never(_: float) -> None:
    pytest.fail("it waited")
