"""An agent's connection to the driver: never blocks who sends, heals itself, gives up only when the driver is gone
for good."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from training.launch.channel import Message, ProtocolError, encode
from training.launch.connection import Connection
from training.launch.tls import trusting

MAX_WAITING_BYTES = 32 << 20
WINDOW_BYTES = 256 << 10  # sent and not yet taken by the driver; one message may be larger
BEAT_S = 0.5  # a rank's heartbeats in this time are one
CONNECT_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Endpoint:
    """Where the driver listens, and what it takes to be let in."""

    addresses: tuple[str, ...]  # tried in order; the first whose driver has the certificate's key is taken
    port: int
    secret: str
    certificate: str  # PEM

    def __repr__(self) -> str:
        return f"Endpoint({self.addresses}, {self.port})"  # never the secret, whoever prints it


class Unreachable(ConnectionError):
    """No address of the driver answered."""


class Link:
    """Numbered messages to the driver, sent again over the next connection until the driver has them.

    Create and open it in an event loop; `send` is safe from any thread. `on_message` runs in the loop; None means that
    the driver is gone. Heartbeats are not queued: the newest is sent twice a second at most, and ahead of what
    follows it. Lines of log are dropped before anything else is.
    """

    def __init__(self, endpoint: Endpoint, agent: str, on_message: Callable[[Message | None], None], patience_s: float):
        self._endpoint, self._agent, self._patience_s = endpoint, agent, patience_s
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, bytes]] = deque()  # numbered, not yet known to have arrived
        self._bytes = self._number = 0
        self._sent = self._in_flight = 0  # messages and bytes at the queue's head that this connection was given
        self._beat: Message | None = None
        self._connection: Connection | None = None
        self._healer: asyncio.Task[None] | None = None
        self._is_closed = False
        self.local_address = ""

    async def open(self) -> None:
        """Raises Unreachable."""
        await self._connect()
        self._healer = self._loop.create_task(self._heal())
        self._tick()

    def send(self, message: Message) -> None:
        """Queue for the driver. Raises only where the message itself cannot be sent."""
        if message["kind"] == "heartbeat":
            encode(message)
            with self._lock:
                self._beat = {**message, "kind": "beat"}
            return
        with self._lock:
            frame = encode({**message, "n": self._number + 1})
            if self._bytes + len(frame) > MAX_WAITING_BYTES and message["kind"] == "log":
                return
            if self._beat is not None and message["kind"] not in ("log", "metrics"):
                frame = self._take_beat() + frame  # what follows may be this rank's end: its last step must be known
            self._number += 1
            self._queue.append((self._number, frame))
            self._bytes += len(frame)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the agent with it
            self._loop.call_soon_threadsafe(self._flush)

    @property
    def waiting_bytes(self) -> int:
        """Of messages that the driver has not taken."""
        return self._bytes

    async def close(self) -> None:
        """Send what was queued, as far as the driver's window is open, and end."""
        self._is_closed = True
        self._flush()
        if self._healer is not None:
            self._healer.cancel()
        if self._connection is not None:
            self._connection.close()
            await asyncio.wait([self._connection.ended], timeout=1.0)
            self._connection.abort()

    def _take_beat(self) -> bytes:
        """With the lock. An empty beat says no more than that we are here."""
        beat, self._beat = self._beat or {"kind": "beat"}, None
        return encode(beat)

    def _tick(self) -> None:
        if self._is_closed:
            return
        with self._lock:
            if self._connection is not None:
                self._connection.write(self._take_beat())
        self._loop.call_later(BEAT_S, self._tick)

    def _flush(self) -> None:
        with self._lock:
            while self._connection is not None and self._sent < len(self._queue):
                frame = self._queue[self._sent][1]
                if self._in_flight and self._in_flight + len(frame) > WINDOW_BYTES:
                    return
                self._sent += 1
                self._in_flight += len(frame)
                self._connection.write(frame)

    def _acknowledge(self, number: int) -> None:
        with self._lock:
            while self._queue and self._queue[0][0] <= number:
                size = len(self._queue.popleft()[1])
                self._bytes -= size
                if self._sent:
                    self._sent -= 1
                    self._in_flight -= size
        self._flush()

    def _hear(self, connection: Connection, message: Message) -> None:
        if not connection.greeted.done():
            if message["kind"] != "welcome" or not isinstance(message.get("seen"), int):
                raise ProtocolError("no welcome")
            connection.trust()
            with self._lock:
                self._sent = self._in_flight = 0
                self._connection = connection
            self._acknowledge(message["seen"])
        elif message["kind"] == "seen":
            self._acknowledge(message["n"])
        else:
            self._on_message(message)

    async def _heal(self) -> None:
        while True:
            assert self._connection is not None
            await self._connection.ended
            with self._lock:
                self._connection = None
            try:
                await self._connect()
            except Unreachable:
                return self._on_message(None)

    async def _connect(self) -> None:
        """An authenticated connection; Unreachable says what was tried for as long as we are patient."""
        deadline, problems = self._loop.time() + self._patience_s, {}
        endpoint, context = self._endpoint, trusting(self._endpoint.certificate)
        while True:
            for address in endpoint.addresses:
                connection = None
                try:
                    async with asyncio.timeout(CONNECT_TIMEOUT_S):
                        _, connection = await self._loop.create_connection(
                            lambda: Connection(self._hear), address, endpoint.port, ssl=context, server_hostname=""
                        )
                        hello = {"kind": "hello", "agent": self._agent, "secret": endpoint.secret}
                        connection.write(encode(hello))
                        await connection.greeted
                        self.local_address = connection.local_address
                        return
                except OSError as error:  # ProtocolError and TimeoutError are; somebody else's port
                    if connection is not None:
                        connection.abort()
                    problems[address] = f"{type(error).__name__}: {error}"
            if self._loop.time() >= deadline:
                tried = "; ".join(f"{a}:{endpoint.port}: {why}" for a, why in problems.items())
                raise Unreachable(
                    f"agent {self._agent} cannot reach the driver ({tried}); set launch.interface, or open the port"
                )
            await asyncio.sleep(0.2)
