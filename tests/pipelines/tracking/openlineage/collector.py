"""An OpenLineage collector: a real HTTP server that keeps what it is sent, refuses it, or never answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.servers import answering

PATH = "/api/v1/lineage"


class Collector(ThreadingHTTPServer):
    """`status`: of its answers; None: it never answers. `events`: those it has taken; `asked`: requests."""

    daemon_threads = True

    def __init__(self, port: int = 0):
        self.status: int | None = 201
        self.events: list[dict[str, Any]] = []
        self.asked = 0
        self.released = threading.Event()
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kinds(self) -> list[str]:
        return [event["eventType"] for event in self.events]


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        if self.server.status is None:
            self.server.released.wait(60)
            return
        if self.server.status < 300 and self.path == PATH:
            self.server.events.append(json.loads(body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """A collector that runs inside the block. `port` 0: any free one."""
    server = Collector(port)
    with answering(server):
        try:
            yield server
        finally:
            server.released.set()
