"""Where ranks find each other: a key-value store in the driver, reached by Horovod's unchanged client.

Horovod's client speaks plain HTTP without any secret, so it never leaves the host: each agent opens a shim on its
loopback that forwards `GET|PUT|DELETE /scope/key` over the agent's authenticated channel, and only for processes of
the agent's own user.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from training.owner import owner_of_connection

MAX_VALUE_BYTES = 1 << 20
MAX_STORE_BYTES = 256 << 20

Ask = Callable[[str, str, bytes | None], bytes | None]
"""(method, key, value) -> value; GET of an absent key is None."""


class Store:
    """Keys of one attempt. `get` waits for a key a little, so that clients which poll do not have to poll fast."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._changed = threading.Condition()

    def handle(self, method: str, key: str, value: bytes | None) -> bytes | None:
        if method == "GET":
            return self.get(key, wait_s=0.2)
        if method == "PUT":
            self.put(key, value or b"")
        elif method == "DELETE":
            self.delete(key)
        return b""

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            grown = self._bytes + len(value) - len(self._values.get(key, b""))
            if len(value) > MAX_VALUE_BYTES or grown > MAX_STORE_BYTES:
                raise ValueError(f"rendezvous: {key!r} of {len(value)} bytes does not fit")
            self._values[key], self._bytes = value, grown
            self._changed.notify_all()

    def get(self, key: str, wait_s: float = 0.0) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, wait_s)
            return self._values.get(key)

    def delete(self, key: str) -> None:
        with self._changed:
            self._bytes -= len(self._values.pop(key, b""))


class _Handler(BaseHTTPRequestHandler):
    timeout = 5
    protocol_version = "HTTP/1.0"
    server: Shim

    def _allowed(self) -> bool:
        return owner_of_connection(self.client_address[1], self.server.port) == os.getuid()

    def _serve(self) -> None:
        parts = self.path.split("/")
        length = int(self.headers.get("Content-Length") or 0)
        if not self._allowed():
            return self._reply(403, b"")
        if len(parts) != 3 or not 0 <= length <= MAX_VALUE_BYTES:
            return self._reply(400, b"")
        body = self.rfile.read(length) if length else b""
        try:
            value = self.server.ask(self.command, self.path, body)
        except Exception:
            return self._reply(503, b"")
        return self._reply(404, b"") if value is None else self._reply(200, value)

    do_GET = do_PUT = do_DELETE = _serve

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


class Shim(ThreadingHTTPServer):
    """The loopback HTTP server a rank's Horovod client talks to. `close()` ends it."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, ask: Ask):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ask = ask
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(0.05,), name="rendezvous-shim", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # a stranger's broken request is not an event

    def close(self) -> None:
        self.shutdown()
        self.server_close()
