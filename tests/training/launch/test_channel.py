"""The channel: frames, proofs, and what happens to everyone who does not have the secret."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.launch import hub as hub_module
from training.launch import link as link_module
from training.launch.channel import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    Frames,
    Message,
    Plain,
    ProtocolError,
    decode,
    encode,
    new_secret,
    text_of,
)
from training.launch.connection import LoopThread
from training.launch.hub import MAX_STRANGERS, Hub
from training.launch.link import BEAT_S, WINDOW_BYTES, Endpoint, Link, Unreachable
from training.launch.tls import new_certificate, trusting

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


# ---- frames


@settings(max_examples=40)
@given(st.dictionaries(st.text().filter(lambda k: k != "kind"), json_values, max_size=5), st.integers(1, 64))
def test_messages_come_back_as_they_were_however_the_stream_is_cut(fields: dict, step: int) -> None:
    messages = [{**fields, "kind": "x"}, {"kind": "y"}]
    stream, frames = b"".join(map(encode, messages)), Frames(MAX_FRAME_BYTES)
    pieces = [stream[i : i + step] for i in range(0, len(stream), step)]
    assert [decode(body) for piece in pieces for body in frames.feed(piece)] == messages


@settings(max_examples=500)
@given(st.binary(max_size=300))
def test_the_parser_takes_any_bytes_and_raises_only_its_own_error(body: bytes) -> None:
    try:
        message = decode(body)
    except ProtocolError:
        return
    assert isinstance(message["kind"], str)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b"1" * 10_000, b"{}", b'{"kind":1}', b"null", b"\xff\xfe", b'{"kind":"a"']
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


@pytest.mark.parametrize("value", ['"\\ud800"', '"a\\u0000"', '"a\\nb"', '""', '"' + "x" * 513 + '"', "1", "null"])
def test_a_text_of_a_greeting_can_be_printed_and_compared(value: str) -> None:
    with pytest.raises(ProtocolError):
        text_of(decode(b'{"kind": "hello", "agent": %s}' % value.encode()), "agent")


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_length_out_of_bounds_is_refused_before_it_is_read(length: int) -> None:
    with pytest.raises(ProtocolError, match="frame of"):
        list(Frames(MAX_FRAME_BYTES).feed(struct.pack(">I", length)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack(">I", length))
        with pytest.raises(ProtocolError, match="frame of"):
            Plain(ours).receive()


def test_too_large_a_message_names_its_kind() -> None:
    with pytest.raises(ValueError, match="'result' message of"):
        encode({"kind": "result", "value": "x" * MAX_FRAME_BYTES})


def test_plain_frames_over_a_pair() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Plain(ours).send({"kind": "a"})
        assert Plain(theirs).receive() == {"kind": "a"}


def test_the_secret_is_not_in_an_endpoints_repr() -> None:
    secret = new_secret()
    assert secret not in repr(Endpoint(("h",), 1, secret, ""))


# ---- hub and links


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("127.0.0.1")
    yield hub
    hub.close()


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    """The loop of all links of a test, so that they do not share the hub's."""
    thread = LoopThread("links")
    yield thread
    thread.close()


def endpoint_of(hub: Hub) -> Endpoint:
    return Endpoint(("127.0.0.1",), hub.port, hub.secret, hub.certificate)


async def opened(endpoint: Endpoint, name: str, on_message: Any = lambda m: None, patience_s: float = 10.0) -> Link:
    link = Link(endpoint, name, on_message, patience_s)
    await link.open()
    return link


def taken(hub: Hub, timeout_s: float = 20.0) -> tuple[str, Message]:
    """The next message; ends of connections are passed over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        agent, message = hub.take(0.5) or ("", None)
        if message is not None:
            return agent, message
    raise AssertionError("no message")


def wait_for(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def cut(thread: LoopThread, link: Link) -> None:
    """The network cuts it; nobody asked."""
    wait_for(lambda: link._connection is not None)
    thread.loop.call_soon_threadsafe(link._connection.abort)


def test_links_deliver_in_order_and_survive_a_cut(hub: Hub, thread: LoopThread) -> None:
    link = thread.call(opened(endpoint_of(hub), "a"))
    for i in range(300):
        link.send({"kind": "m", "i": i})
        if i in (50, 51, 200):
            cut(thread, link)
    assert [taken(hub)[1]["i"] for _ in range(300)] == list(range(300))
    wait_for(lambda: not link._queue)  # all is acknowledged, so nothing would be sent again
    thread.call(link.close())
    wait_for(lambda: not hub.is_connected("a"))
    assert hub.left_at("a") <= time.monotonic()


def test_both_directions_carry_what_is_larger_than_all_buffers(hub: Hub, thread: LoopThread) -> None:
    got: queue.Queue[Message | None] = queue.Queue()
    link = thread.call(opened(endpoint_of(hub), "a", got.put))
    for n in range(3):
        assert hub.send("a", {"kind": "down", "text": "x" * (5 << 20), "n": n})
        link.send({"kind": "up", "text": "y" * (5 << 20), "number": n})
    assert [got.get(timeout=30)["n"] for _ in range(3)] == [0, 1, 2]  # type: ignore[index]
    assert [taken(hub, 30)[1]["number"] for _ in range(3)] == [0, 1, 2]
    assert not hub.send("nobody", {"kind": "down"})
    thread.call(link.close())


def test_what_nobody_takes_stays_with_its_agent_and_no_agent_looks_silent(hub: Hub, thread: LoopThread) -> None:
    """A full inbox had blocked the threads that read, and healthy ranks were named lost."""
    link = thread.call(opened(endpoint_of(hub), "a"))
    for i in range(20_000):
        link.send({"kind": "metrics", "step": i, "text": "x" * 100})
    link.send({"kind": "heartbeat", "step": 7, "phase": "step"})
    time.sleep(1.0)
    in_driver = sum(len(encode(message or {})) for _, message, _ in iter(lambda: _peek(hub), None))
    assert in_driver < WINDOW_BYTES + 1000
    assert hub.silent_s("a") < 4 * BEAT_S
    assert hub.beats()["a"]["step"] == 7, "a heartbeat passes what waits"
    thread.call(link.close())


def _peek(hub: Hub) -> Any:
    with contextlib.suppress(queue.Empty):
        return hub._inbox.get_nowait()
    return None


def test_heartbeats_are_merged_and_the_last_one_is_ahead_of_an_end(hub: Hub, thread: LoopThread) -> None:
    link = thread.call(opened(endpoint_of(hub), "a"))
    wait_for(lambda: hub.is_connected("a"))
    heard = []
    frames = hub._hear

    def count(connection: Any, message: Message) -> None:
        heard.append(message.get("step"))
        frames(connection, message)

    for known in hub._agents.values():
        assert known.connection is not None
        known.connection._on_message = count
    began = time.monotonic()
    for step in range(500):
        link.send({"kind": "heartbeat", "step": step, "phase": "step"})
        time.sleep(0.002)
    most = (time.monotonic() - began) / BEAT_S + 3
    link.send({"kind": "ended"})
    assert taken(hub)[1]["kind"] == "ended"
    assert hub.beat_of("a") == {"kind": "beat", "step": 499, "phase": "step"}
    assert hub.beat_of("a") is None
    assert len(heard) <= most
    thread.call(link.close())


def test_a_driver_that_was_held_up_takes_nobody_for_silent(
    hub: Hub, thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = thread.call(opened(endpoint_of(hub), "a"))
    wait_for(lambda: hub.is_connected("a"))
    hub._loop.call_soon_threadsafe(time.sleep, 1.5)  # its thread gets no time: beats wait in the kernel
    most, until = 0.0, time.monotonic() + 2.0
    while time.monotonic() < until:
        most = max(most, hub.silent_s("a"))
    assert most < 1.2
    thread.call(link.close())


def test_silence_is_seen_and_counted_from_the_last_byte(hub: Hub, thread: LoopThread) -> None:
    link = thread.call(opened(endpoint_of(hub), "a"))
    thread.loop.call_soon_threadsafe(time.sleep, 1.5)
    time.sleep(1.0)
    assert 0.5 < hub.silent_s("a") < 1.6
    thread.call(link.close())


def test_a_link_gives_up_when_the_driver_is_gone_for_good(hub: Hub, thread: LoopThread) -> None:
    gone: queue.Queue[object] = queue.Queue()
    thread.call(opened(endpoint_of(hub), "a", gone.put, 0.5))
    began = time.monotonic()
    hub.close()
    assert gone.get(timeout=10) is None
    assert time.monotonic() - began < 5


def test_a_closed_port_is_named(hub: Hub, thread: LoopThread) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
        thread.call(opened(replace(endpoint_of(hub), port=port), "a", patience_s=0.3))


# ---- who is let in


def test_an_agent_sends_its_secret_to_the_driver_with_the_key_alone(hub: Hub, thread: LoopThread) -> None:
    other = new_certificate()[1]
    with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
        thread.call(opened(replace(endpoint_of(hub), certificate=other), "a", patience_s=0))
    with pytest.raises(Unreachable):
        thread.call(opened(replace(endpoint_of(hub), secret="0" * 64), "a", patience_s=0))
    with socket.create_server(("127.0.0.1", 0)) as impostor:  # any server, with any certificate but the driver's
        endpoint = replace(endpoint_of(hub), port=impostor.getsockname()[1])
        context, _ = new_certificate()

        async def serve() -> bytes:
            read: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

            async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                read.set_result(await reader.read(100))
                writer.close()

            server = await asyncio.start_server(greet, sock=impostor, ssl=context)
            with pytest.raises(Unreachable):
                await opened(endpoint, "a", patience_s=0)
            server.close()
            return read.result() if read.done() else b""

        assert thread.call(serve()) == b""


def speak(hub: Hub) -> ssl.SSLSocket:
    """A stranger who has even the certificate."""
    sock = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
    return trusting(hub.certificate).wrap_socket(sock)


def hello(secret: str, name: str = "a") -> bytes:
    return encode({"kind": "hello", "agent": name, "secret": secret})


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">I", 1 << 20) + b"x" * 10_000,
        struct.pack(">I", MAX_GREETING_BYTES + 1),
        encode({"kind": "result", "value": 1}),
        encode({"kind": "beat", "step": 1, "phase": ""}),
        hello("0" * 64),
        hello("\ud800"),
        hello("\ud800", "\udfff"),
        hello("x", "a\nb"),
        encode({"kind": "hello"}),
        encode({"kind": "hello", "agent": [], "secret": {}}),
        b"\x80\x04\x95" + b"pickle" * 20,
    ],
)
def test_who_does_not_prove_himself_is_sent_away_in_one_line(
    hub: Hub, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    with speak(hub) as sock, caplog.at_level(logging.INFO):
        sock.sendall(sent)
        with contextlib.suppress(OSError):
            assert sock.recv(100) == b""
        wait_for(lambda: hub.refused == 1)
    assert hub.take(0.1) is None and not hub.beats() and not hub._agents
    (record,) = caplog.records
    assert record.exc_info is None and len(record.getMessage()) < 200


def test_a_recorded_hello_opens_nothing(hub: Hub, thread: LoopThread) -> None:
    """All that crossed the network, sent again by who listened."""
    heard = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, there = await asyncio.open_connection("127.0.0.1", hub.port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, kept: bytearray) -> None:
            while data := await source.read(1 << 16):
                kept += data
                target.write(data)
            target.close()

        await asyncio.gather(pump(reader, there, heard), pump(theirs, writer, bytearray()))

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(relay, "127.0.0.1", 0)

    server = thread.call(listen())
    port = server.sockets[0].getsockname()[1]
    link = thread.call(opened(replace(endpoint_of(hub), port=port), "a"))
    link.send({"kind": "m", "text": "a line nobody else should read"})
    assert taken(hub)[0] == "a"
    assert len(heard) > 300 and b"nobody else" not in heard and hub.secret.encode() not in heard
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as sock:
            sock.sendall(heard)
            with contextlib.suppress(OSError):
                while sock.recv(4096):
                    pass
    wait_for(lambda: hub.refused == 5)
    assert hub.take(0.2) is None and hub.is_connected("a")
    thread.loop.call_soon_threadsafe(server.close)
    thread.call(link.close())


def test_a_greeting_has_ten_seconds_in_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly it comes: each byte had seconds of its own."""
    monkeypatch.setattr(hub_module, "GREETING_S", 1.0)
    began = time.monotonic()
    with speak(hub) as sock, pytest.raises(OSError):
        for byte in hello(hub.secret) * 50:
            sock.sendall(bytes([byte]))
            time.sleep(0.1)
    assert time.monotonic() - began < 6
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as sock:  # within TLS's own handshake too
        assert sock.recv(1) == b""
    assert hub.refused == 2


def test_strangers_floods_and_garbage_disturb_nobody(
    hub: Hub, thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "GREETING_S", 3.0)
    link = thread.call(opened(endpoint_of(hub), "honest"))
    idle = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(MAX_STRANGERS + 20)]
    for i in range(60):
        with socket.create_connection(("127.0.0.1", hub.port)) as sock:
            sock.sendall(os.urandom(200) if i % 2 else b"GET / HTTP/1.1\r\n\r\n")
        link.send({"kind": "m", "i": i})
    wait_for(hub._places.locked)  # no more strangers than there are places
    late = thread.call(opened(endpoint_of(hub), "late", patience_s=30.0))  # an agent gets in through the crowd
    late.send({"kind": "m", "i": -1})
    got: dict[str, list[int]] = {"honest": [], "late": []}
    while len(got["honest"]) < 60 or not got["late"]:
        agent, message = taken(hub)
        got[agent].append(message["i"])
    assert got["honest"] == list(range(60))
    for sock in idle:
        sock.close()
    assert hub.refused > 0
    thread.call(link.close())
    thread.call(late.close())


def test_more_agents_at_once_than_there_are_places_all_get_in_and_none_is_refused(
    hub: Hub, thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest had been thrown out for the next."""
    count = MAX_STRANGERS + 44
    monkeypatch.setattr(hub_module, "GREETING_S", 60.0)  # of this machine's speed nothing is said
    monkeypatch.setattr(link_module, "CONNECT_TIMEOUT_S", 60.0)

    async def storm() -> list[Link]:
        return await asyncio.gather(*(opened(endpoint_of(hub), f"a-{i}", patience_s=30.0) for i in range(count)))

    links = thread.call(storm())
    assert hub.refused == 0
    assert all(hub.is_connected(f"a-{i}") for i in range(count))

    async def end() -> None:
        await asyncio.gather(*(link.close() for link in links))

    thread.call(end())


def limited(soft: int, hard: int, agents: int) -> str:
    code = (
        "import resource; from training.launch.crew import allow_descriptors\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"allow_descriptors({agents})\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return out.stdout + out.stderr


def test_the_limit_of_open_files_is_raised_or_named() -> None:
    assert int(limited(256, 4096, 1000)) >= 1000 + MAX_STRANGERS
    assert int(limited(2048, 4096, 2)) == 2048, "what suffices is left alone"
    said = limited(256, 1000, 1000)
    assert "LaunchError: 1000 agents need about 1" in said and "its hard limit is 1000 (`ulimit -Hn`)" in said


def test_messages_are_json_on_the_wire() -> None:
    assert json.loads(encode({"kind": "a"})[4:]) == {"kind": "a"}
