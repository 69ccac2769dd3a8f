"""The channel's frames over asyncio: one connection, and the thread of an event loop.

Not in channel.py, because fork servers and ranks use frames without importing asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sparkring.training.launch.channel.frames import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    FrameParser,
    ProtocolError,
    decode,
)

T = TypeVar("T")


class Connection(asyncio.Protocol):
    """Frames over one asyncio transport. Everything here belongs to the loop's thread.

    `on_message(connection, message, number)` gets every message, in order; messages are of the union `accepted`. A
    ProtocolError from it, or bytes that are no frame, end the connection. Until `trust()` a frame has at most
    MAX_HELLO_BYTES.
    """

    def __init__(self, on_message: Callable[[Connection, Any, int], None], accepted: Any):
        self._on_message, self._accepted = on_message, accepted
        self._loop = asyncio.get_running_loop()
        self._frames = FrameParser(MAX_HELLO_BYTES)
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self.last_bytes_at = self._loop.time()
        self.authenticated = self._loop.create_future()
        self.ended = self._loop.create_future()  # with the reason, never an exception

    def trust(self) -> None:
        """Accept the peer, which has proved the secret."""
        self._frames.limit = MAX_FRAME_BYTES
        self.authenticated.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._writable.set()
        keep_alive(transport.get_extra_info("socket"), dead_after_s=20)

    def data_received(self, data: bytes) -> None:
        self.last_bytes_at = self._loop.time()
        try:
            for body in self._frames.feed(data):
                self._on_message(self, *decode(body, self._accepted))
        except ProtocolError as error:
            self.abort(error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        self._end(error or EOFError("connection closed"))

    def _end(self, reason: Exception) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        if not self.authenticated.done():
            self.authenticated.set_exception(ProtocolError(str(reason)))
            self.authenticated.exception()  # retrieved: nobody may be waiting

    def write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    async def drain(self) -> None:
        """Wait until most of what was written has left this process."""
        await self._writable.wait()

    @property
    def local_address(self) -> str:
        assert self._transport is not None
        return str(self._transport.get_extra_info("sockname")[0])

    def close(self) -> None:
        """End it after what was written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: Exception | None = None) -> None:
        """End it at once."""
        self._end(reason or EOFError("connection closed"))
        if self._transport is not None:
            self._transport.abort()


def listen(host: str, backlog: int, port: int = 0) -> socket.socket:
    """Listen on a port of an address or name of this host; on IPv6 where it has no IPv4 address.

    Args:
        host: an address, in brackets too, as Spark writes those of IPv6.
        backlog: connections that may wait.
        port: 0: any free one.
    """
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return socket.create_server(address, family=family, backlog=backlog)


class LoopThread:
    """An event loop that runs in its own thread."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        """Cancel what runs in the loop and end the thread."""
        if not self.loop.is_closed():
            self.call(self._cancel_all())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # for transports that were closed to let go of their sockets


def keep_alive(sock: socket.socket, dead_after_s: int) -> None:
    """Let the kernel notice a peer that vanished without closing (host lost, cable cut)."""
    options = [(socket.SOL_SOCKET, "SO_KEEPALIVE", 1)]
    tcp = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": max(1, dead_after_s // 2)}
    tcp["TCP_USER_TIMEOUT"] = dead_after_s * 1000
    options += [(socket.IPPROTO_TCP, name, value) for name, value in tcp.items() if hasattr(socket, name)]
    for level, name, value in options:
        with contextlib.suppress(OSError):  # it has ended already
            sock.setsockopt(level, getattr(socket, name), value)
