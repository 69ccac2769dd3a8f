"""A connection: messages in order, its end with the reason; and the thread of a loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from sparkring.training.launch.channel.connection import Connection, LoopThread
from sparkring.training.launch.channel.frames import MAX_HELLO_BYTES, ProtocolError, encode
from sparkring.training.launch.messages import ChildForked, KillChildren, LogLines, Message, StopTraining
from sparkring.training.launch.topology import Child


async def connected(on_message: Any) -> tuple[Connection, socket.socket]:
    listening = socket.create_server(("127.0.0.1", 0))
    theirs = socket.create_connection(listening.getsockname())
    ours, _ = listening.accept()
    listening.close()
    loop = asyncio.get_running_loop()
    _, connection = await loop.connect_accepted_socket(lambda: Connection(on_message, Message), ours)
    return connection, theirs


def test_messages_arrive_in_order_and_the_end_has_its_reason() -> None:
    received: list[Any] = []

    async def run() -> Exception:
        connection, theirs = await connected(lambda _, message, number: received.append((message, number)))
        theirs.sendall(
            encode(KillChildren("rank")) + encode(ChildForked(Child("rank", 0), 7), 3) + encode(StopTraining())[:-2]
        )
        theirs.close()
        return await connection.ended

    assert isinstance(asyncio.run(run()), EOFError)
    assert received == [(KillChildren("rank"), 0), (ChildForked(Child("rank", 0), 7), 3)]


def test_before_trust_a_frame_is_small() -> None:
    async def run() -> Exception:
        connection, theirs = await connected(lambda *_: None)
        theirs.sendall(encode(LogLines(Child("rank", 0), 1, ("x" * MAX_HELLO_BYTES,))))
        reason = await connection.ended
        theirs.close()
        with pytest.raises(ProtocolError):
            await connection.authenticated
        return reason

    assert isinstance(asyncio.run(run()), ProtocolError)


def test_a_loop_thread_cancels_its_tasks_and_ends() -> None:
    thread, cancelled = LoopThread("loop"), threading.Event()

    async def forever() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def start() -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(forever())

    task = thread.call(start())

    async def begin() -> None:
        await asyncio.sleep(0)

    thread.call(begin())
    thread.close()
    thread.close()
    assert cancelled.is_set() and task.cancelled()
