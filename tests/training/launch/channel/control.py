"""A control server, clients of it in their own event loop, and how to wait for their messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from sparkring.training.launch.channel.connection import LoopThread
from sparkring.training.launch.channel.control_client import ControlClient, Endpoint
from sparkring.training.launch.channel.control_server import ControlServer


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    """The loop of all clients of a test, so that they do not share the server's."""
    thread = LoopThread("clients")
    yield thread
    thread.close()


def endpoint_of(server: ControlServer) -> Endpoint:
    return Endpoint(("127.0.0.1",), server.port, server.secret, server.certificate)


async def opened(
    endpoint: Endpoint, name: str, on_message: Any = lambda m: None, patience_s: float = 10.0
) -> ControlClient:
    client = ControlClient(endpoint, name, on_message, patience_s)
    await client.open()
    return client


def taken(server: ControlServer, timeout_s: float = 60.0) -> tuple[str, Any]:
    """The next message; ends of connections are passed over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        agent, message = server.take(0.5) or ("", None)
        if message is not None:
            return agent, message
    raise AssertionError("no message")
