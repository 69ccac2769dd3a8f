"""The agent's end of the control channel: order, buffers, cuts, heartbeats, and a driver that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from sparkring.training.launch.channel import control_client
from sparkring.training.launch.channel.connection import LoopThread
from sparkring.training.launch.channel.control_client import (
    HEARTBEAT_S,
    WINDOW_BYTES,
    ControlClient,
    DriverUnreachable,
    Endpoint,
)
from sparkring.training.launch.channel.control_server import ControlServer
from sparkring.training.launch.channel.frames import encode, new_secret
from sparkring.training.launch.channel.tls import new_certificate
from sparkring.training.launch.messages import (
    ChildEnded,
    Entry,
    Heartbeat,
    KeepAlive,
    RankMetrics,
    RankResult,
    StartChild,
    ToAgent,
)
from sparkring.training.launch.topology import Child
from tests.training.launch.channel.control import endpoint_of, opened, server, taken, thread
from tests.waits import wait_for

__all__ = ["server", "thread"]  # fixtures


def test_the_secret_is_not_in_an_endpoints_repr() -> None:
    secret = new_secret()
    assert secret not in repr(Endpoint(("h",), 1, secret, ""))


def cut(thread: LoopThread, client: ControlClient) -> None:
    """The network cuts it; nobody asked."""
    wait_for(lambda: client._connection is not None)
    thread.loop.call_soon_threadsafe(client._connection.abort)


def test_clients_deliver_in_order_and_survive_a_cut(server: ControlServer, thread: LoopThread) -> None:
    client = thread.call(opened(endpoint_of(server), "a"))
    for i in range(300):
        client.send(RankMetrics(0, 1, i, {}, None))
        if i in (50, 51, 200):
            cut(thread, client)
    assert [taken(server)[1].step for _ in range(300)] == list(range(300))
    wait_for(lambda: not client._queue)  # all is acknowledged, so nothing would be sent again
    thread.call(client.close())
    wait_for(lambda: not server.is_connected("a"))
    assert server.left_at("a") <= time.monotonic()


def test_both_directions_carry_what_is_larger_than_all_buffers(server: ControlServer, thread: LoopThread) -> None:
    got: queue.Queue[ToAgent | None] = queue.Queue()
    client = thread.call(opened(endpoint_of(server), "a", got.put))
    for n in range(3):
        assert server.send("a", StartChild(Child("rank", 0), n, Entry("name", "a:b"), {"text": "x" * (5 << 20)}, {}))
        client.send(RankResult(0, n, "json", "y" * (5 << 20)))
    assert [got.get(timeout=30).attempt for _ in range(3)] == [0, 1, 2]  # type: ignore[union-attr]
    assert [taken(server, 30)[1].attempt for _ in range(3)] == [0, 1, 2]
    assert not server.send("nobody", KeepAlive())  # type: ignore[arg-type]
    thread.call(client.close())


def test_what_nobody_takes_stays_with_its_agent_and_no_agent_looks_silent(
    server: ControlServer, thread: LoopThread
) -> None:
    """A full inbox had blocked the threads that read, and healthy ranks were named lost."""
    client = thread.call(opened(endpoint_of(server), "a"))
    for i in range(20_000):
        client.send(RankMetrics(0, 1, i, {"x" * 100: 0.0}, None))
    client.send(Heartbeat(0, 1, 7, "step"))
    wait_for(lambda: server._inbox.qsize() > 0 and server.silent_s("a") < 4 * HEARTBEAT_S)
    time.sleep(0.4)
    in_driver = sum(len(encode(message)) for _, message, _ in iter(lambda: _peek(server), None))
    assert in_driver < WINDOW_BYTES + 1000
    wait_for(lambda: server.silent_s("a") < 4 * HEARTBEAT_S)
    assert server.heartbeats()["a"].step == 7, "a heartbeat passes what waits"
    thread.call(client.close())


def _peek(server: ControlServer) -> Any:
    with contextlib.suppress(queue.Empty):
        return server._inbox.get_nowait()
    return None


def test_heartbeats_are_merged_and_the_last_one_is_ahead_of_an_end(server: ControlServer, thread: LoopThread) -> None:
    client = thread.call(opened(endpoint_of(server), "a"))
    wait_for(lambda: server.is_connected("a"))
    received = []
    on_message = server._on_message

    def count(connection: Any, message: Any, number: int) -> None:
        received.append(message)
        on_message(connection, message, number)

    for known in server._agents.values():
        assert known.connection is not None
        known.connection._on_message = count
    for step in range(500):
        client.send(Heartbeat(0, 1, step, "step"))
        time.sleep(0.002)
    client.send(ChildEnded(Child("rank", 0), 1, 0, "exited with code 0"))
    assert isinstance(taken(server)[1], ChildEnded)
    assert server.heartbeat_of("a") == Heartbeat(0, 1, 499, "step")
    assert server.heartbeat_of("a") is None
    assert len(received) < 250, "most of them are merged"
    thread.call(client.close())


def test_a_client_gives_up_when_the_driver_is_gone_for_good(server: ControlServer, thread: LoopThread) -> None:
    gone: queue.Queue[object] = queue.Queue()
    client = thread.call(opened(endpoint_of(server), "a", gone.put, 0.5))
    server.close()
    assert gone.get(timeout=120) is None
    assert client.why_gone == "the driver has not answered for 0.5 s"


def test_a_client_knows_at_once_that_a_driver_has_ended_whose_port_is_closed(
    server: ControlServer, thread: LoopThread
) -> None:
    """It tried for as long as its patience, and so let ranks run on for nobody."""
    gone: queue.Queue[object] = queue.Queue()
    client = thread.call(opened(endpoint_of(server), "a", gone.put, patience_s=3600.0))
    server.close()
    assert gone.get(timeout=120) is None
    assert client.why_gone == "the driver has ended: nobody listens at its port any more"


def test_a_driver_that_refuses_now_and_then_has_not_ended(
    server: ControlServer, thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: queue.Queue[object] = queue.Queue()
    client = thread.call(opened(endpoint_of(server), "a", gone.put, patience_s=2.0))
    errors = itertools.cycle([ConnectionRefusedError("no"), TimeoutError("late")])

    async def connect(*_: object, **__: object) -> object:
        raise next(errors)

    monkeypatch.setattr(control_client, "REFUSED_S", 0.3)  # two refusals, if none but them counted
    monkeypatch.setattr(thread.loop, "create_connection", connect)
    cut(thread, client)
    assert gone.get(timeout=120) is None
    assert client.why_gone == "the driver has not answered for 2 s"


def test_a_port_that_never_answers_is_given_up_in_time(
    server: ControlServer, thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a driver that ends while an agent connects: the system takes the connection, and nobody reads it."""
    monkeypatch.setattr(control_client, "CONNECT_TIMEOUT_S", 600.0)  # its own patience ends it
    monkeypatch.setattr(control_client, "SHORTEST_ATTEMPT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = replace(endpoint_of(server), port=silent.getsockname()[1])
        with pytest.raises(DriverUnreachable, match="TimeoutError"):
            thread.call(opened(endpoint, "a", patience_s=0.3))


def test_a_closed_port_is_named(server: ControlServer, thread: LoopThread) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    endpoint = replace(endpoint_of(server), port=port)
    with pytest.raises(DriverUnreachable, match=f"127.0.0.1:{port}: ConnectionRefusedError: .*set launch.interface"):
        thread.call(opened(endpoint, "a", patience_s=0.3))

    async def wait() -> None:
        await ControlClient(endpoint, "a", lambda message: None, 10.0).open(0.5)

    with pytest.raises(DriverUnreachable) as error:  # it was told to open a port, though nobody listened there
        thread.call(wait())
    said = str(error.value)
    assert said.startswith(f"no driver within launch.hosts_wait_s = 0.5 s (127.0.0.1:{port}: ConnectionRefusedError: ")
    assert said.index("host 0 has not started, or has ended; look at its log") < said.index("MASTER_PORT")


def test_an_agent_sends_its_secret_to_the_driver_with_the_key_alone(server: ControlServer, thread: LoopThread) -> None:
    other = new_certificate()[1]
    with pytest.raises(DriverUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
        thread.call(opened(replace(endpoint_of(server), certificate=other), "a", patience_s=0))
    with pytest.raises(DriverUnreachable):
        thread.call(opened(replace(endpoint_of(server), secret="0" * 64), "a", patience_s=0))
    with socket.create_server(("127.0.0.1", 0)) as impostor:  # any server, with any certificate but the driver's
        endpoint = replace(endpoint_of(server), port=impostor.getsockname()[1])
        context, _ = new_certificate()

        async def serve() -> bytes:
            read: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

            async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                read.set_result(await reader.read(100))
                writer.close()

            listening = await asyncio.start_server(greet, sock=impostor, ssl=context)
            with pytest.raises(DriverUnreachable):
                await opened(endpoint, "a", patience_s=0)
            listening.close()
            return read.result() if read.done() else b""

        assert thread.call(serve()) == b""
