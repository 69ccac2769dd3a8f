"""Where Horovod's ranks find each other: a key-value store in the driver.

Horovod's client is unchanged. It speaks plain HTTP without any secret, so it never leaves the host: each agent opens a
proxy on its loopback that forwards `GET|PUT|DELETE /scope/key` over the agent's authenticated channel. The proxy
answers those who know its token, which is in the rank's environment, where only the rank's user can read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import get_args

from sparkring.conf.plain_text import count_of
from sparkring.training.launch.messages import StoreMethod

MAX_VALUE_BYTES = 1 << 20
MAX_STORE_BYTES = 256 << 20
MAX_HEAD_BYTES = 8192
MAX_CLIENTS = 256  # at a time; one more is closed
REQUEST_S = 5.0  # for a request to have arrived, whole
POLL_S = 0.2

METHODS: dict[str, StoreMethod] = {method: method for method in get_args(StoreMethod)}

Ask = Callable[[StoreMethod, str, bytes], Awaitable[bytes | None]]
"""(method, key, value) -> value; GET of an absent key is None."""


class Store:
    """Keys of one attempt, in one event loop. A GET waits for its key a little, so that pollers do not poll fast."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._wanted: dict[str, asyncio.Event] = {}

    async def handle(self, method: str, key: str, value: bytes) -> bytes | None:
        if method == "GET":
            return await self.get(key, POLL_S)
        if method == "PUT":
            self.put(key, value)
        elif method == "DELETE":
            self._bytes -= len(self._values.pop(key, b""))
        return b""

    def put(self, key: str, value: bytes) -> None:
        """Store a value. ValueError if it does not fit."""
        grown = self._bytes + len(value) - len(self._values.get(key, b""))
        if len(value) > MAX_VALUE_BYTES or grown > MAX_STORE_BYTES:
            raise ValueError(f"rendezvous: {key!r} of {count_of(len(value), 'byte')} does not fit")
        self._values[key], self._bytes = value, grown
        if key in self._wanted:
            self._wanted.pop(key).set()

    async def get(self, key: str, wait_s: float = 0.0) -> bytes | None:
        if key not in self._values and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.setdefault(key, asyncio.Event()).wait(), wait_s)
        return self._values.get(key)


class RendezvousProxy:
    """The loopback HTTP server a rank's Horovod client talks to. Create, open and close it in one event loop."""

    def __init__(self, ask: Ask):
        self._ask, self._token = ask, secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def address(self) -> str:
        """The server's address for Horovod, as HOROVOD_GLOO_RENDEZVOUS_ADDR."""
        # TRICK: Horovod makes "http://<address>:<port>/<scope>/<key>" of it, so a path in the address comes back in
        # every request: "/<token>:<port>/<scope>/<key>". Horovod 0.28.1, http_store.h; rings in test_local.py hold it.
        return f"127.0.0.1:{self.port}/{self._token}"

    async def open(self) -> RendezvousProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=64, limit=MAX_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._clients) < MAX_CLIENTS:
                self._clients.add(task)
                status, body = await self._reply(reader)
                writer.write(f"HTTP/1.0 {status} -\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                await asyncio.wait_for(writer.drain(), REQUEST_S)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._clients.discard(task)
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        """Return (HTTP status, body) for a request."""
        try:
            async with asyncio.timeout(REQUEST_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                verb, path, length = parse_head(head)
                _, proof, *key = path.split("/")
                if not hmac.compare_digest(proof.encode(), f"{self._token}:{self.port}".encode()):
                    return 403, b""
                method = METHODS.get(verb)
                if len(key) != 2 or method is None or length > MAX_VALUE_BYTES:
                    return 400, b""
                body = await reader.readexactly(length)
        except (ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return 400, b""
        try:
            value = await self._ask(method, f"/{key[0]}/{key[1]}", body)
        except (OSError, ValueError):  # the driver is gone, or it does not fit
            return 503, b""
        return (404, b"") if value is None else (200, value)


def parse_head(head: str) -> tuple[str, str, int]:
    """Parse an HTTP request's head into (method, path, bytes of the body); ValueError where it is none."""
    request, *fields = head.split("\r\n")
    method, path, _ = request.split(" ")
    headers = dict(field.lower().split(":", 1) for field in fields if ":" in field)
    length = int(headers.get("content-length", 0))
    if not path.startswith("/") or path.count("/") < 2 or length < 0:
        raise ValueError("no request")
    return method, path, length
