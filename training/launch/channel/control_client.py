"""An agent's end of the control channel: sending never blocks, and a broken connection is made again."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sparkring.training.launch.channel.connection import Connection
from sparkring.training.launch.channel.frames import ProtocolError, encode
from sparkring.training.launch.channel.tls import OTHER_SECRET, trusting, trusting_all
from sparkring.training.launch.messages import (
    Heartbeat,
    Hello,
    KeepAlive,
    LogLines,
    RankMetrics,
    Received,
    ToAgent,
    ToDriver,
    Welcome,
)

MAX_WAITING_BYTES = 32 << 20
WINDOW_BYTES = 256 << 10  # sent and not yet taken by the driver; one message may be larger
HEARTBEAT_S = 0.5  # a rank's heartbeats in this time are one
SHORTEST_ATTEMPT_S, CONNECT_TIMEOUT_S = 2.0, 20.0  # a handshake takes a second where many agents come at once
REFUSED_S = 3.0  # of refused connections alone, after which a driver has ended: while it lives it listens


@dataclass(frozen=True)
class Endpoint:
    """Where the driver listens, and the secret an agent proves itself by."""

    addresses: tuple[str, ...]  # tried in order; the first whose driver has the certificate's key is taken
    port: int
    secret: str
    certificate: str  # PEM

    def __repr__(self) -> str:
        return f"Endpoint({self.addresses}, {self.port})"  # never the secret


class DriverUnreachable(ConnectionError):
    """No address of the driver answered."""


class DriverEnded(DriverUnreachable):
    """A driver that was there listens no longer."""


def all_refused(problems: Iterable[OSError]) -> bool:
    """Return whether every address answered that nobody listens at the port."""
    return all(isinstance(problem, ConnectionRefusedError) for problem in problems)


def why_unreachable(agent: str, port: int, problems: Mapping[str, OSError], wait_s: float | None) -> str:
    """Explain why an agent finds no driver, the most likely reason first.

    Args:
        agent: name of the agent.
        port: port of the driver.
        problems: last error by address.
        wait_s: seconds that a self-started agent waited; None if the driver started the agent.
    """
    tried = "; ".join(f"{address}:{port}: {type(why).__name__}: {why}" for address, why in problems.items())
    if wait_s is None:
        return f"agent {agent} cannot reach the driver ({tried}); set launch.interface, or open the port"
    return (
        f"no driver within launch.hosts_wait_s = {wait_s:g} s ({tried}): host 0 has not started, or has ended; look at "
        "its log. If it runs, set MASTER_ADDR and MASTER_PORT to where it listens, and open that port to this host"
    )


class ControlClient:
    """Numbered messages to the driver, sent again over the next connection until the driver has them.

    Create and open it in an event loop; `send` is safe from any thread. Heartbeats are not queued: the newest is sent
    every HEARTBEAT_S at most, and ahead of what follows it. Lines of log are dropped before anything else is.
    """

    def __init__(self, endpoint: Endpoint, agent: str, on_message: Callable[[ToAgent | None], None], patience_s: float):
        """Connect to the driver. `on_message` runs in the loop; None: the driver is gone (see `why_gone`).

        It is gone after `patience_s` seconds without an answer, or REFUSED_S seconds of refused connections.
        """
        self._endpoint, self._agent, self._patience_s = endpoint, agent, patience_s
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, bytes]] = deque()  # numbered, not yet known to have arrived
        self._bytes = self._number = 0
        self._sent = self._in_flight = 0  # messages and bytes at the queue's head that this connection was given
        self._heartbeat: Heartbeat | None = None
        self._connection: Connection | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._is_closed = False
        self.local_address = self.why_gone = ""

    async def open(self, wait_s: float | None = None) -> None:
        """Connect, and stay connected. Raises DriverUnreachable.

        `wait_s`: seconds for a driver to come that all find by a shared secret, where another certificate means another
        secret, and the driver learns whose it is; None: it is there.
        """
        await self._connect(wait_s)
        self._reconnecting = self._loop.create_task(self._reconnect())
        self._send_heartbeats()

    def send(self, message: ToDriver) -> None:
        """Queue for the driver. Raises only where the message itself cannot be sent."""
        if isinstance(message, Heartbeat):
            encode(message)
            with self._lock:
                self._heartbeat = message
            return
        with self._lock:
            frame = encode(message, self._number + 1)
            if self._bytes + len(frame) > MAX_WAITING_BYTES and isinstance(message, LogLines):
                return
            if self._heartbeat is not None and not isinstance(message, LogLines | RankMetrics):
                # What follows may be this rank's end: its last step must be known.
                frame = self._take_heartbeat() + frame
            self._number += 1
            self._queue.append((self._number, frame))
            self._bytes += len(frame)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the agent with it
            self._loop.call_soon_threadsafe(self._flush)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of messages that the driver has not taken."""
        return self._bytes

    async def close(self) -> None:
        """Send what was queued, as far as the driver's window is open, and end."""
        self._is_closed = True
        self._flush()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._connection is not None:
            self._connection.close()
            await asyncio.wait([self._connection.ended], timeout=1.0)
            self._connection.abort()

    def _take_heartbeat(self) -> bytes:
        """Return the frame of the newest heartbeat, else a keep-alive. Requires the lock."""
        newest, self._heartbeat = self._heartbeat or KeepAlive(), None
        return encode(newest)

    def _send_heartbeats(self) -> None:
        if self._is_closed:
            return
        with self._lock:
            if self._connection is not None:
                self._connection.write(self._take_heartbeat())
        self._loop.call_later(HEARTBEAT_S, self._send_heartbeats)

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

    def _receive(self, connection: Connection, message: ToAgent, number: int) -> None:
        if not connection.authenticated.done():
            if not isinstance(message, Welcome):
                raise ProtocolError("no welcome")
            connection.trust()
            with self._lock:
                self._sent = self._in_flight = 0
                self._connection = connection
            self._acknowledge(message.received)
        elif isinstance(message, Received):
            self._acknowledge(message.number)
        else:
            self._on_message(message)

    async def _reconnect(self) -> None:
        while True:
            assert self._connection is not None
            await self._connection.ended
            with self._lock:
                self._connection = None
            try:
                await self._connect(refused_s=REFUSED_S)
            except DriverUnreachable as error:
                has_ended = isinstance(error, DriverEnded)
                self.why_gone = str(error) if has_ended else f"the driver has not answered for {self._patience_s:g} s"
                return self._on_message(None)

    async def _connect(self, wait_s: float | None = None, refused_s: float = math.inf) -> None:
        """Make an authenticated connection; DriverUnreachable lists what was tried within the patience.

        `refused_s`: seconds after which nothing but refused connections mean that no driver will come.
        """
        problems: dict[str, OSError] = {}
        answered_at = self._loop.time()  # else than by a refusal
        deadline = answered_at + (wait_s or self._patience_s)
        endpoint, context = self._endpoint, trusting(self._endpoint.certificate)
        attempt_s = min(max(self._patience_s, SHORTEST_ATTEMPT_S), CONNECT_TIMEOUT_S)
        while True:
            for address in endpoint.addresses:
                connection = None
                try:
                    async with asyncio.timeout(attempt_s):
                        _, connection = await self._loop.create_connection(
                            lambda: Connection(self._receive, ToAgent),
                            address,
                            endpoint.port,
                            ssl=context,
                            server_hostname="",
                        )
                        connection.write(encode(Hello(self._agent, endpoint.secret)))
                        await connection.authenticated
                        self.local_address = connection.local_address
                        return
                except OSError as error:  # ProtocolError and TimeoutError are; somebody else's port
                    if connection is not None:
                        connection.abort()
                    problems[address] = error
                    if wait_s is not None and isinstance(error, ssl.SSLCertVerificationError):
                        await self._report_other_secret(address)
                        raise DriverUnreachable(
                            f"{address}:{endpoint.port}: a driver with another SPARKRING_SECRET listens there; give "
                            "every host of a job the same secret, and every job a MASTER_PORT of its own"
                        ) from error
            now = self._loop.time()
            answered_at = answered_at if all_refused(problems.values()) else now
            if now - answered_at >= refused_s:
                raise DriverEnded("the driver has ended: nobody listens at its port any more")
            if now >= deadline:
                raise DriverUnreachable(why_unreachable(self._agent, endpoint.port, problems, wait_s))
            await asyncio.sleep(0.2)

    async def _report_other_secret(self, address: str) -> None:
        """Report to that driver, in the TLS hello of a second connection, that this agent will not come."""
        name = f"{self._agent}{OTHER_SECRET}"
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                transport, _ = await self._loop.create_connection(
                    asyncio.Protocol, address, self._endpoint.port, ssl=trusting_all(), server_hostname=name
                )
            transport.close()
