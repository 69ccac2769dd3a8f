"""Strangers at every port of a running job: what they do must not change what it computes."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from training.launch.attempt import Control
from training.launch.connection import LoopThread
from training.launch.job import JobSpec
from training.launch.local import local_crew
from training.launch.rendezvous import Shim

pytestmark = pytest.mark.ranks


def summing(ctx: Any) -> float:
    import horovod.torch as hvd
    import torch
    import torch.distributed as dist

    ctx.event("ports", {k: os.environ[k] for k in ("MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT")})
    hvd.init()
    dist.init_process_group("gloo")
    total = 0.0
    for step in range(60):
        ctx.heartbeat(step, "step")
        x = torch.ones(1, dtype=torch.float64)
        dist.all_reduce(x)
        total += float(hvd.allreduce(x, op=hvd.Sum))
        time.sleep(0.02)
    dist.destroy_process_group()
    return total


def bother(port: int, over: threading.Event) -> int:
    """Connect, flood, send garbage and half a greeting until told to stop; how many connections were made."""
    payloads = [b"", os.urandom(300), b"GET /global/0 HTTP/1.0\r\n\r\n", b"\x00\x00\x00\x20" + b"{" * 32, b"\xff" * 8]
    made, idle = 0, []
    while not over.is_set():
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=1)
            sock.sendall(payloads[made % len(payloads)])
        except OSError:
            continue
        made += 1
        if made % 3:
            sock.close()
        else:
            idle.append(sock)
        time.sleep(0.005)
    for sock in idle:
        sock.close()
    return made


@pytest.mark.horovod
def test_a_running_job_does_not_notice_strangers_on_its_ports() -> None:
    over, threads, made = threading.Event(), [], []

    def attack(port: int) -> None:
        thread = threading.Thread(target=lambda: made.append(bother(port, over)))
        thread.start()
        threads.append(thread)

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "heartbeat" and event["step"] >= 5 and not threads:
            for port in ports:
                attack(port)
        if event["kind"] == "event":
            ports.add(int(event["data"]["HOROVOD_GLOO_RENDEZVOUS_PORT"]))

    with local_crew(2, ("torch", "horovod.torch")) as crew:
        ports = {crew.endpoint.port}
        try:
            result = crew.run(JobSpec(summing), 2, on_event)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        refused = crew.refused
    assert result.results == [240.0, 240.0]
    assert len(made) == 3 and all(count > 20 for count in made), made
    assert refused > 20


def test_the_secret_is_in_no_command_line_and_no_environment() -> None:
    def entry(ctx: Any) -> list[str]:
        import psutil

        family = [psutil.Process(), *psutil.Process().parents()[:2]]
        return [" ".join(p.cmdline()) + str(p.environ()) for p in family] + [str(ctx.payload)]

    with local_crew(1, ()) as crew:
        texts = crew.run(JobSpec(entry, preload=()), 1, lambda event: None).result
        secret = crew.endpoint.secret
    assert len(texts) == 4
    assert not [text for text in texts if secret in text]


def test_what_a_ring_opens_is_on_the_chosen_interface_alone() -> None:
    """torch's store and Gloo would listen on all of them if they were not told."""

    def entry(ctx: Any) -> list[str]:
        import psutil
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        family = [psutil.Process(), *psutil.Process().parents()[:1]]  # the helper holds the store's port too
        listening = {c.laddr.ip for p in family for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        dist.destroy_process_group()
        return sorted(listening)

    with local_crew(2, ("torch",)) as crew:
        found = crew.run(JobSpec(entry, preload=("torch",)), 2, lambda event: None).results
    assert found[0] == ["127.0.0.1"], "rank 0 serves the store"
    assert set(found[1]) <= {"127.0.0.1"}


@pytest.fixture
def shim() -> Iterator[tuple[Shim, list[str]]]:
    """An open shim and the keys it was asked for."""
    asked: list[str] = []
    values = {"/s/k": b"v", "/s/empty": b""}

    async def ask(method: str, key: str, value: bytes) -> bytes | None:
        asked.append(key)
        if key == "/s/gone":
            raise TimeoutError
        return values.get(key) if method == "GET" else values.setdefault(key, value)

    thread = LoopThread("shim")
    shim = thread.call(Shim(ask).open())
    yield shim, asked
    thread.call(shim.close())
    thread.close()


def request(shim: Shim, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, bytes]:
    """(HTTP status, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", shim.port, timeout=10)
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, response.read()


def test_the_shim_speaks_what_horovods_client_speaks(shim: tuple[Shim, list[str]]) -> None:
    served, _ = shim
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
def test_who_does_not_know_the_token_is_refused(shim: tuple[Shim, list[str]], sent: bytes) -> None:
    served, asked = shim
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock, contextlib.suppress(OSError):
        sock.sendall(sent)
        assert sock.recv(100).startswith((b"HTTP/1.0 403 ", b"HTTP/1.0 400 "))
    assert asked == []


def test_a_request_that_never_ends_does(shim: tuple[Shim, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.launch.rendezvous.REQUEST_S", 1.0)
    served, asked = shim
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock, contextlib.suppress(OSError):
        for _ in range(100):
            sock.sendall(b"x")
            time.sleep(0.1)
    assert time.monotonic() - began < 6 and asked == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_can_neither_ask_the_shim_nor_read_its_token() -> None:
    """A closed socket counted as root's, so where the agent was root a client that left at once was let in."""

    def entry(ctx: Any) -> None:
        names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
        ctx.event("shim", {"pid": str(os.getpid()), **{name: os.environ[name] for name in names}})
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

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "event":
            told = event["data"]
            assert told["HOROVOD_GLOO_RENDEZVOUS_PORT"] + "/" in told["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
            command = [sys.executable, "-c", nobody, told["HOROVOD_GLOO_RENDEZVOUS_PORT"], told["pid"]]
            answers.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
            (store,) = crew._stores.values()
            kept.extend(store._values.values())
            control.stop()

    with local_crew(1, ()) as crew:
        crew.run(JobSpec(entry, {}, preload=()), 1, on_event, control=control)
    assert answers == ["refused"] and kept == []
