"""What is shown of an exception: one line, never none."""

from __future__ import annotations

import http.server
import socket
from collections.abc import Iterator

import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from sparkring.conf.errors import error_line, first_line
from tests.helpers.servers import answering


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("a\nb"), "a"), (KeyError(), "KeyError"), (OSError("\n  x\ny"), "x"), ("text\nmore", "text")],
)
def test_the_first_line_of_an_error(error: object, line: str) -> None:
    assert first_line(error) == line


class Unavailable(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    """A server that answers 503, a socket that nobody answers, and a port where nobody listens."""
    server = http.server.HTTPServer(("127.0.0.1", 0), Unavailable)
    with (
        answering(server),
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.socket() as bound,
    ):
        bound.bind(("127.0.0.1", 0))
        yield {
            "unavailable": server.server_port,
            "silent": silent.getsockname()[1],
            "closed": bound.getsockname()[1],
        }


@pytest.mark.parametrize(
    ("url", "proxy", "line"),
    [
        (
            "http://127.0.0.1:{closed}/x?token=abc",
            "",
            "127.0.0.1:{closed}: Failed to establish a new connection: [Errno 111] Connection refused",
        ),
        (
            "http://127.0.0.1:1/x?token=abc",
            "http://127.0.0.1:{closed}",
            "127.0.0.1:{closed}: Unable to connect to proxy: Failed to establish a new connection: "
            "[Errno 111] Connection refused",
        ),
        ("http://127.0.0.1:{unavailable}/x", "", "127.0.0.1:{unavailable}: too many 503 error responses"),
        ("http://127.0.0.1:{silent}/x", "", "127.0.0.1:{silent}: Read timed out. (read timeout=0.2)"),
        ("https://127.0.0.1:{unavailable}/x", "", "127.0.0.1:{unavailable}: [SSL: WRONG_VERSION_NUMBER] "),
        ("http://no-such-host.invalid:5/x", "", "no-such-host.invalid:5: Failed to resolve 'no-such-host.invalid' ("),
    ],
)
def test_of_retries_the_host_and_the_cause_are_left(ports: dict[str, int], url: str, proxy: str, line: str) -> None:
    """The errors are those of the real library; neither its classes nor the path, which may hold a token, is shown."""
    with requests.Session() as session:
        session.trust_env = False
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=Retry(1, backoff_factor=0, status_forcelist=[503])))
        with pytest.raises(requests.RequestException) as raised:
            proxies = {"http": proxy.format(**ports)} if proxy else {}
            session.get(url.format(**ports), proxies=proxies, timeout=0.2 if "silent" in url else 60)
    for shown in (
        first_line(raised.value),
        error_line(f"call failed: {raised.value} again").removeprefix("call failed: "),
    ):
        assert shown.startswith(line.format(**ports)), shown
        assert "Connection(" not in shown and "Pool(" not in shown and "token" not in shown


def test_a_connect_timeout_is_left_without_the_object() -> None:
    said = (
        "HTTPConnectionPool(host='10.0.0.1', port=5): Max retries exceeded with url: /x (Caused by ConnectTimeoutError("
        "<HTTPConnection(host='10.0.0.1', port=5) at 0x7f1>, 'Connection to 10.0.0.1 timed out. (connect timeout=5)'))"
    )
    assert first_line(said) == "10.0.0.1:5: Connection to 10.0.0.1 timed out. (connect timeout=5)"
