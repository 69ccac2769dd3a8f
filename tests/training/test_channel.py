"""The channel: frames, proofs, and what happens to everyone who does not have the secret."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.channel import (
    MAX_FRAME_BYTES,
    Plain,
    ProtocolError,
    Wire,
    decode,
    encode,
    greet_as_agent,
    greet_as_driver,
    new_secret,
    read_body,
    write_body,
)
from training.hub import MAX_STRANGERS, Hub
from training.link import Endpoint, Link, Unreachable, connect

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def wires(secret: str = "s" * 64) -> tuple[Wire, Wire]:
    """(driver's, agent's) ends of one connection."""
    ours, theirs = socket.socketpair()
    out: queue.SimpleQueue[Wire] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: out.put(greet_as_driver(ours, secret, lambda a: 7, 5.0)[0]))
    thread.start()
    wire, seen = greet_as_agent(theirs, secret, "a-0", 5.0)
    thread.join()
    assert seen == 7
    return out.get(), wire


@given(st.dictionaries(st.text().filter(lambda k: k != "kind"), json_values))
def test_a_message_comes_back_as_it_was(fields: dict) -> None:
    message = {**fields, "kind": "x"}
    assert decode(encode(message)) == message


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


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_length_out_of_bounds_is_refused_before_it_is_read(length: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack(">I", length))
        ours.settimeout(2)
        with pytest.raises(ProtocolError, match="frame of"):
            read_body(ours, MAX_FRAME_BYTES)


def test_both_sides_prove_themselves_and_talk() -> None:
    driver, agent = wires()
    agent.send({"kind": "up", "x": 1})
    driver.send({"kind": "down", "y": [1, 2]})
    assert driver.receive() == {"kind": "up", "x": 1}
    assert agent.receive() == {"kind": "down", "y": [1, 2]}
    agent.close()
    with pytest.raises(EOFError):
        driver.receive()
    driver.close()


def test_a_wrong_secret_is_refused_on_either_side() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        errors: list[BaseException] = []

        def drive() -> None:
            try:
                greet_as_driver(ours, "right", lambda a: 0, 5.0)
            except ProtocolError as error:
                errors.append(error)
                ours.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=drive)
        thread.start()
        with pytest.raises((EOFError, OSError)):
            greet_as_agent(theirs, "wrong", "a", 5.0)
        thread.join()
    assert "does not know this run's secret" in str(errors[0])


def test_an_impostor_driver_is_refused() -> None:
    ours, theirs = socket.socketpair()

    def impostor() -> None:
        write_body(ours, encode({"kind": "challenge", "nonce": "00"}))
        read_body(ours, 4096)
        write_body(ours, encode({"kind": "welcome", "mac": "0" * 64, "seen": 0}))

    thread = threading.Thread(target=impostor)
    thread.start()
    with ours, theirs, pytest.raises(ProtocolError, match="not this run's driver"):
        greet_as_agent(theirs, "secret", "a", 5.0)
    thread.join()


@pytest.mark.parametrize("spoil", ["flip", "replay", "drop"])
def test_a_frame_changed_repeated_or_left_out_is_noticed(spoil: str) -> None:
    driver, agent = wires()
    record, to = socket.socketpair()
    real, agent.sock = agent.sock, to
    frames = []
    for i in range(2):
        agent.send({"kind": "m", "i": i})
        frames.append(read_body(record, MAX_FRAME_BYTES))
    if spoil == "flip":
        frames[0] = frames[0][:-3] + bytes([frames[0][-3] ^ 1]) + frames[0][-2:]
    sent = {"flip": frames, "replay": [frames[0], frames[0]], "drop": frames[1:]}[spoil]
    for frame in sent:
        write_body(real, frame)
    with pytest.raises(ProtocolError, match="wrong MAC"):
        driver.receive()
        driver.receive()
    for sock in (record, to, real, driver.sock):
        sock.close()


def test_too_large_a_message_names_its_kind() -> None:
    with pytest.raises(ValueError, match="'result' message of"):
        encode({"kind": "result", "value": "x" * MAX_FRAME_BYTES})


def test_plain_frames_over_a_pair() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Plain(ours).send({"kind": "a"})
        assert Plain(theirs).receive() == {"kind": "a"}


class Received:
    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[str, dict | None]] = queue.Queue()

    def __call__(self, agent: str, message: dict | None) -> None:
        self.queue.put((agent, message))

    def next(self) -> tuple[str, dict | None]:
        return self.queue.get(timeout=10)


@pytest.fixture
def hub() -> Iterator[tuple[Hub, Received]]:
    received = Received()
    hub = Hub("127.0.0.1", received)
    yield hub, received
    hub.close()


def cut(link: Link) -> None:
    """The network cuts it; nobody asked. Tried again while the link is between two connections."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        time.sleep(0.01)
        with contextlib.suppress(OSError):
            link._wire.sock.shutdown(socket.SHUT_RDWR)
            return
    raise AssertionError("the link did not come back")


def test_links_deliver_in_order_and_survive_a_cut(hub: tuple[Hub, Received]) -> None:
    server, received = hub
    link = Link(Endpoint(("127.0.0.1",), server.port, server.secret), "a", lambda m: None, 5.0)
    numbers = []
    for i in range(300):
        link.send({"kind": "m", "i": i})
        if i in (50, 51, 200):
            cut(link)
    while len(numbers) < 300:
        _, message = received.next()
        if message is not None:
            numbers.append(message["i"])
    assert numbers == list(range(300))
    assert link.flush(5)
    link.close()


def test_a_link_gives_up_when_the_driver_is_gone_for_good(hub: tuple[Hub, Received]) -> None:
    server, _ = hub
    gone: queue.Queue[object] = queue.Queue()
    link = Link(Endpoint(("127.0.0.1",), server.port, server.secret), "a", gone.put, 0.5)
    began = time.monotonic()
    server.close()
    assert gone.get(timeout=10) is None
    assert time.monotonic() - began < 5
    link.close()


def test_a_closed_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
        connect(Endpoint(("127.0.0.1",), port, "s"), "a", patience_s=0.3)


def test_the_secret_is_not_in_an_endpoints_repr() -> None:
    secret = new_secret()
    assert secret not in repr(Endpoint(("h",), 1, secret))


def test_strangers_floods_and_garbage_disturb_nobody(hub: tuple[Hub, Received]) -> None:
    server, received = hub
    endpoint = Endpoint(("127.0.0.1",), server.port, server.secret)
    link = Link(endpoint, "honest", lambda m: None, 5.0)
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_STRANGERS + 40)]
    for i in range(60):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(os.urandom(200) if i % 2 else b"GET / HTTP/1.1\r\n\r\n")
        link.send({"kind": "m", "i": i})
    late = Link(endpoint, "late", lambda m: None, 10.0)  # an honest agent gets in through the crowd
    late.send({"kind": "m", "i": -1})
    got: dict[str, list[int]] = {"honest": [], "late": []}
    while len(got["honest"]) < 60 or not got["late"]:
        agent, message = received.next()
        assert message is not None
        got[agent].append(message["i"])
    assert got["honest"] == list(range(60))
    for sock in idle:
        sock.close()
    link.close()
    late.close()
    assert server.refused > 0


def test_unauthenticated_pickles_and_large_greetings_are_not_read(hub: tuple[Hub, Received]) -> None:
    server, received = hub
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        read_body(sock, 4096)
        sock.sendall(struct.pack(">I", 1 << 20) + b"x" * 10_000)
        with pytest.raises((EOFError, OSError)):
            read_body(sock, 4096)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        read_body(sock, 4096)
        write_body(sock, json.dumps({"kind": "result", "value": 1}).encode())
        with pytest.raises((EOFError, OSError)):
            read_body(sock, 4096)
    assert received.queue.empty()
