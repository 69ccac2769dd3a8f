"""Rendezvous: the store in the driver, and the proxy that Horovod's client talks to."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sparkring.training.launch.channel.connection import LoopThread
from sparkring.training.launch.channel.rendezvous import RendezvousProxy, Store
from sparkring.training.launch.control import Control
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import local_group
from sparkring.training.launch.messages import ChildEvent, Event

pytestmark = pytest.mark.ranks


@pytest.fixture
def proxy() -> Iterator[tuple[RendezvousProxy, list[str]]]:
    """An open proxy and the keys it was asked for."""
    asked: list[str] = []
    values = {"/s/k": b"v", "/s/empty": b""}

    async def ask(method: str, key: str, value: bytes) -> bytes | None:
        asked.append(key)
        if key == "/s/gone":
            raise TimeoutError
        return values.get(key) if method == "GET" else values.setdefault(key, value)

    thread = LoopThread("proxy")
    proxy = thread.call(RendezvousProxy(ask).open())
    yield proxy, asked
    thread.call(proxy.close())
    thread.close()


def request(proxy: RendezvousProxy, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, bytes]:
    """(HTTP status, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, response.read()


def test_the_proxy_speaks_what_horovods_client_speaks(proxy: tuple[RendezvousProxy, list[str]]) -> None:
    served, _ = proxy
    base = served.address.removeprefix(f"127.0.0.1:{served.port}") + f":{served.port}"
    assert request(served, f"{base}/s/new", "PUT", bytes(range(256)) * 1000) == (200, bytes(range(256)) * 1000)
    assert request(served, f"{base}/s/k") == (200, b"v")
    assert request(served, f"{base}/s/empty") == (200, b"")
    assert request(served, f"{base}/s/absent") == (404, b"")
    assert request(served, f"{base}/s/gone") == (503, b"")
    assert request(served, f"{base}/too/many/parts")[0] == 400
    assert request(served, f"{base}/s/k", "PATCH")[0] == 400


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /s/k HTTP/1.1\r\n\r\n",
        b"PUT /s/k HTTP/1.1\r\nContent-Length: 1\r\n\r\nx",
        b"GET /" + b"0" * 32 + b":1/s/k HTTP/1.1\r\n\r\n",
        b"PUT / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"PUT //s/k HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET \xff\xfe/s/k/\xd8 HTTP/1.1\r\n\r\n",
        b"x" * 100_000,
        b"\r\n\r\n",
    ],
)
def test_a_request_without_the_token_is_refused(proxy: tuple[RendezvousProxy, list[str]], sent: bytes) -> None:
    served, asked = proxy
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock, contextlib.suppress(OSError):
        sock.sendall(sent)
        assert sock.recv(100).startswith((b"HTTP/1.0 403 ", b"HTTP/1.0 400 "))
    assert asked == []


def test_a_request_that_never_ends_does(
    proxy: tuple[RendezvousProxy, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkring.training.launch.channel.rendezvous.REQUEST_S", 0.4)
    served, asked = proxy
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock, pytest.raises(OSError):
        for _ in range(1200):
            sock.sendall(b"x")
            time.sleep(0.05)
    assert asked == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.usefixtures("no_torch")
def test_another_user_of_the_host_can_neither_ask_the_proxy_nor_read_its_token() -> None:
    """A closed socket counted as root's, so where the agent was root a client that left at once was let in."""

    def entry(ctx: Any) -> None:
        names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
        ctx.event("proxy", {"pid": str(os.getpid()), **{name: os.environ[name] for name in names}})
        while not ctx.should_stop():
            time.sleep(0.05)

    nobody = (
        "import encodings.idna, os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "for i in range(200):\n"
        "    sock = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "    path = '/global/1' if i % 2 else '/' + '0' * 32 + ':' + sys.argv[1] + '/global/1'\n"
        "    sock.sendall(('PUT %s HTTP/1.1\\r\\nContent-Length: 1\\r\\n\\r\\nx' % path).encode())\n"
        "    sock.close()\n"
        "try:\n"
        "    open('/proc/%s/environ' % sys.argv[2]).read()\n"
        "    print('read')\n"
        "except PermissionError:\n"
        "    print('refused')\n"
    )
    control, answers = Control(), list[str]()
    kept: list[bytes] = []

    def on_event(event: Event) -> None:
        if isinstance(event, ChildEvent):
            told = event.data
            assert told["HOROVOD_GLOO_RENDEZVOUS_PORT"] + "/" in told["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
            command = [sys.executable, "-c", nobody, told["HOROVOD_GLOO_RENDEZVOUS_PORT"], told["pid"]]
            answers.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
            (store,) = group._stores.values()
            kept.extend(store._values.values())
            control.stop()

    with local_group(1, ()) as group:
        group.run(JobSpec(entry, {}, preload=()), 1, on_event, control=control)
    assert answers == ["refused"] and kept == []


def test_the_store_bounds_what_it_keeps() -> None:
    async def use() -> None:
        store = Store()
        store.put("/s/a", b"1")
        assert await store.handle("GET", "/s/a", b"") == b"1"
        await store.handle("DELETE", "/s/a", b"")
        assert await store.get("/s/a") is None
        with pytest.raises(ValueError, match="does not fit"):
            store.put("/s/b", bytes((1 << 20) + 1))
        early = asyncio.create_task(store.get("/s/c", 10.0))
        await asyncio.sleep(0)
        store.put("/s/c", b"2")
        assert await early == b"2"

    asyncio.run(use())
