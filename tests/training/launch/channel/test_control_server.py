"""The driver's end of the control channel: silence, and what happens to everyone who does not have the secret."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import struct
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from sparkring.training.launch.channel import control_client, control_server
from sparkring.training.launch.channel.connection import LoopThread
from sparkring.training.launch.channel.control_client import ControlClient
from sparkring.training.launch.channel.control_server import MAX_UNAUTHENTICATED, ControlServer
from sparkring.training.launch.channel.frames import MAX_HELLO_BYTES, encode
from sparkring.training.launch.channel.tls import trusting
from sparkring.training.launch.messages import Heartbeat, Hello, KillChildren, LogLines, RankMetrics, RankResult
from sparkring.training.launch.topology import Child
from tests.training.launch.channel.control import endpoint_of, opened, server, taken, thread
from tests.waits import wait_for

__all__ = ["server", "thread"]  # fixtures


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


HELD_UP_S = 2.0


def test_a_driver_that_was_held_up_takes_no_agent_for_silent(
    server: ControlServer, thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = thread.call(opened(endpoint_of(server), "a"))
    wait_for(lambda: server.is_connected("a"))
    resumed = threading.Event()

    def held_up() -> None:
        time.sleep(HELD_UP_S)
        server._loop.call_later(0.5, resumed.set)

    server._loop.call_soon_threadsafe(held_up)  # its thread gets no time: beats wait in the kernel
    most = 0.0
    while not resumed.wait(0.05):
        most = max(most, server.silent_s("a"))
    assert most < HELD_UP_S / 2
    thread.call(client.close())


def test_silence_is_seen_and_counted_from_the_last_byte(server: ControlServer, thread: LoopThread) -> None:
    client = thread.call(opened(endpoint_of(server), "a"))
    thread.loop.call_soon_threadsafe(time.sleep, 1.0)
    wait_for(lambda: server.silent_s("a") > 0.5)
    wait_for(lambda: server.silent_s("a") < 0.5)  # it speaks again
    assert server.is_connected("a"), "a client that was silent for a while is still the same one"
    thread.call(client.close())


def test_a_driver_without_file_descriptors_accepts_agents_when_it_has_some(
    server: ControlServer, thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, lacking = server._loop.sock_accept, threading.Event()

    async def noted(listener: socket.socket) -> Any:
        try:
            return await accept(listener)
        except OSError:
            lacking.set()
            raise

    monkeypatch.setattr(server._loop, "sock_accept", noted)
    with socket.socket() as first, socket.socket() as waiting:
        first.connect(("127.0.0.1", server.port))  # the accept that waits already is not looked at
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # those that are open stay so
            waiting.connect(("127.0.0.1", server.port))
            assert lacking.wait(60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client = thread.call(opened(endpoint_of(server), "a"))
        wait_for(lambda: server.is_connected("a"))
        thread.call(client.close())


def speak(server: ControlServer) -> ssl.SSLSocket:
    """A connection of somebody who has the certificate, but not the secret."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    return trusting(server.certificate).wrap_socket(sock)


def hello(secret: str, name: str = "a") -> bytes:
    return encode(Hello(name, secret))


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">I", 1 << 20) + b"x" * 10_000,
        struct.pack(">I", MAX_HELLO_BYTES + 1),
        encode(RankResult(0, 1, "json", "1")),
        encode(Heartbeat(0, 1, 1, "")),
        hello("0" * 64),
        hello("\ud800"),
        hello("\ud800", "\udfff"),
        hello("x", "a\nb"),
        encode(KillChildren("rank")),
        frame(b'{"kind":"Hello"}'),
        frame(b'{"kind":"Hello","agent":[],"secret":{}}'),
        b"\x80\x04\x95" + b"pickle" * 20,
    ],
)
def test_a_connection_that_does_not_prove_itself_is_closed_with_one_line_of_log(
    server: ControlServer, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    with speak(server) as sock, caplog.at_level(logging.INFO):
        sock.sendall(sent)
        with contextlib.suppress(OSError):
            assert sock.recv(100) == b""
        wait_for(lambda: server.refused == 1)
    assert server.take(0.01) is None and not server.heartbeats() and not server._agents
    (record,) = caplog.records
    assert record.exc_info is None and len(record.getMessage()) < 200


def test_a_recorded_hello_opens_nothing(server: ControlServer, thread: LoopThread) -> None:
    """All that crossed the network, sent again by who listened."""
    heard = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, there = await asyncio.open_connection("127.0.0.1", server.port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, kept: bytearray) -> None:
            while data := await source.read(1 << 16):
                kept += data
                target.write(data)
            target.close()

        await asyncio.gather(pump(reader, there, heard), pump(theirs, writer, bytearray()))

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(relay, "127.0.0.1", 0)

    listening = thread.call(listen())
    port = listening.sockets[0].getsockname()[1]
    client = thread.call(opened(replace(endpoint_of(server), port=port), "a"))
    client.send(LogLines(Child("rank", 0), 1, ("a line nobody else should read",)))
    assert taken(server)[0] == "a"
    assert len(heard) > 300 and b"nobody else" not in heard and server.secret.encode() not in heard
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(heard)
            with contextlib.suppress(OSError):
                while sock.recv(4096):
                    pass
    wait_for(lambda: server.refused == 5)
    assert server.take(0.2) is None and server.is_connected("a")
    thread.loop.call_soon_threadsafe(listening.close)
    thread.call(client.close())


def test_a_hello_has_ten_seconds_in_all(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly it comes: each byte had seconds of its own."""
    monkeypatch.setattr(control_server, "HELLO_S", 0.6)
    with speak(server) as sock, pytest.raises(OSError):
        for byte in hello(server.secret) * 1000:
            sock.sendall(bytes([byte]))
            time.sleep(0.1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:  # within TLS's own handshake too
        assert sock.recv(1) == b""
    assert server.refused == 2


def test_idle_connections_floods_and_garbage_disturb_no_agent(
    server: ControlServer, thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "HELLO_S", 1.5)
    client = thread.call(opened(endpoint_of(server), "honest"))
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_UNAUTHENTICATED + 20)]
    for i in range(60):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(os.urandom(200) if i % 2 else b"GET / HTTP/1.1\r\n\r\n")
        client.send(RankMetrics(0, 1, i, {}, None))
    wait_for(server._unauthenticated.locked)  # as many unauthenticated connections as are allowed
    late = thread.call(opened(endpoint_of(server), "late", patience_s=30.0))  # an agent gets in through the crowd
    late.send(RankMetrics(0, 1, -1, {}, None))
    got: dict[str, list[int]] = {"honest": [], "late": []}
    while len(got["honest"]) < 60 or not got["late"]:
        agent, message = taken(server)
        got[agent].append(message.step)
    assert got["honest"] == list(range(60))
    for sock in idle:
        sock.close()
    assert server.refused > 0
    thread.call(client.close())
    thread.call(late.close())


def test_more_agents_at_once_than_may_be_unauthenticated_all_connect_and_none_is_refused(
    server: ControlServer, thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest had been thrown out for the next."""
    count = MAX_UNAUTHENTICATED + 44
    monkeypatch.setattr(control_server, "HELLO_S", 60.0)  # of this machine's speed nothing is said
    monkeypatch.setattr(control_client, "CONNECT_TIMEOUT_S", 60.0)

    async def storm() -> list[ControlClient]:
        return await asyncio.gather(*(opened(endpoint_of(server), f"a-{i}", patience_s=30.0) for i in range(count)))

    clients = thread.call(storm())
    assert server.refused == 0
    assert all(server.is_connected(f"a-{i}") for i in range(count))

    async def end() -> None:
        await asyncio.gather(*(client.close() for client in clients))

    thread.call(end())


def test_a_signal_whose_handler_takes_longer_does_not_make_the_driver_wait_for_the_next_message(
    server: ControlServer,
) -> None:
    """A script's ranks send nothing for minutes: SIGTERM was noted, and obeyed when they had ended by themselves."""
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.2))
    late = threading.Timer(5.0, server._inbox.put, [("late", None, 0)])
    late.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert server.take(0.1) is None
    finally:
        late.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_server_that_closes_leaves_no_connection_open(server: ControlServer, thread: LoopThread) -> None:
    """One that came while the others were ended stayed open for as long as the driver's process lived."""
    gone = threading.Event()
    client = thread.call(opened(endpoint_of(server), "a", lambda message: gone.set(), 0.3))
    known = server._agents.pop("a")  # as of one that is accepted too late to be known
    server.close()
    assert gone.wait(120) and client.why_gone
    assert known.connection is not None and known.connection.ended.done()
