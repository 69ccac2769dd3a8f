"""The driver's end of the control channel: one port for all agents."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import queue
import socket
import ssl
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from sparkring.training.launch.channel.connection import Connection, LoopThread, listen
from sparkring.training.launch.channel.frames import ProtocolError, encode, new_secret
from sparkring.training.launch.channel.tls import OTHER_SECRET, new_certificate, shared_certificate
from sparkring.training.launch.messages import (
    Heartbeat,
    Hello,
    KeepAlive,
    Received,
    StoreReply,
    StoreRequest,
    ToAgent,
    ToDriver,
    Welcome,
)

log = logging.getLogger(__name__)
MAX_UNAUTHENTICATED = 256  # connections without a finished handshake; the next ones wait in the kernel's queue
HELLO_S = 10.0  # for TLS and hello together
ACKNOWLEDGE_S = 0.05
LARGE_BYTES = 1 << 16  # a frame above this is waited for, so that a thousand of them are not held at a time
SEND_TIMEOUT_S = 20.0

# Names that the client of this task's connection asks for in its TLS hello; the handshake's callbacks share the list.
CLAIM: ContextVar[list[str]] = ContextVar("CLAIM")
Answer = Callable[[StoreRequest], Awaitable[StoreReply]]


def note_claim(tls: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
    """Record the name of a server that a client asks for."""
    if name:
        CLAIM.get([]).append(name)


class _Agent:
    """What the server knows of one agent, over all its connections. Times are the event loop's."""

    def __init__(self, name: str):
        self.name = name
        self.received = 0  # number of its last message that has arrived
        self.connection: Connection | None = None
        self.last_bytes_at = 0.0  # of connections before this one
        self.left_at = math.inf  # end of its connection


class ControlServer:
    """Accepts agents that know the launch's secret, on (host, port).

    Their messages are read by `take`, the newest heartbeat of each by `heartbeats`.

    A message counts against its agent's window (control_client.py) until it is taken, so the inbox is bounded, while
    reading never stops: however slow the driver is, no agent looks silent. `answer` replies to the rendezvous at once.
    """

    def __init__(self, host: str, answer: Answer | None = None, port: int = 0, shared_secret: str | None = None):
        """Listen for agents.

        Args:
            host: address of the interface.
            answer: replies to the rendezvous.
            port: port to listen on; 0 for any free one.
            shared_secret: secret that agents know; None makes one, sent with the certificate.
        """
        self._answer = answer
        if shared_secret is None:
            self.secret = new_secret()
            self._tls, self.certificate = new_certificate()
        else:
            self._tls, self.certificate, self.secret = shared_certificate(shared_secret)
        self._agents: dict[str, _Agent] = {}
        self._authenticated: dict[Connection, _Agent] = {}
        self._unauthenticated = asyncio.Semaphore(MAX_UNAUTHENTICATED)
        self._tasks: set[asyncio.Task[None]] = set()
        # No SimpleQueue: where a signal's handler outlasts its timeout, that waits for good (CPython 3.11 and 3.12)
        self._inbox: queue.Queue[tuple[str, Any, int]] = queue.Queue()
        self._taken: deque[tuple[str, int]] = deque()
        self._heartbeats: dict[str, Heartbeat] = {}
        self._heartbeats_lock = threading.Lock()
        self._tls.sni_callback = note_claim
        self.refused = 0  # connections that did not prove themselves
        self.other_secret: dict[str, str] = {}  # agent that says it has another -> its address; neither is proved
        self._socket = listen(host, 4096, port)
        self._socket.setblocking(False)
        self.host, self.port = self._socket.getsockname()[:2]
        self._thread = LoopThread("sparkring-control")
        self._loop = self._thread.loop
        self._all_read_at = self._loop.time()
        for work in (self._accept(), self._acknowledge()):
            asyncio.run_coroutine_threadsafe(work, self._loop)

    # ---- for the driver's threads

    def take(self, timeout_s: float) -> tuple[str, ToDriver | None] | None:
        """Take the next (agent, message); None where none comes in time. Message None: the agent has disconnected."""
        try:
            agent, message, number = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if number:
            self._taken.append((agent, number))
        return agent, message

    def heartbeats(self) -> dict[str, Heartbeat]:
        """Take the newest heartbeat of each agent that has sent one since it was last taken."""
        with self._heartbeats_lock:
            newest, self._heartbeats = self._heartbeats, {}
        return newest

    def heartbeat_of(self, agent: str) -> Heartbeat | None:
        """Take the newest heartbeat of one agent."""
        with self._heartbeats_lock:
            return self._heartbeats.pop(agent, None)

    def send(self, agent: str, message: ToAgent) -> bool:
        """Send to an agent; False where it is not connected now. A large message waits until it has mostly left."""
        frame = encode(message)
        known = self._agents.get(agent)
        connection = known.connection if known is not None else None
        if connection is None:
            return False
        try:
            self._loop.call_soon_threadsafe(connection.write, frame)
        except RuntimeError:  # the loop has ended
            return False
        if len(frame) > LARGE_BYTES:
            with contextlib.suppress(TimeoutError):  # its silence will be noticed
                self._thread.call(connection.drain(), SEND_TIMEOUT_S)
        return True

    def is_connected(self, agent: str) -> bool:
        known = self._agents.get(agent)
        return known is not None and known.connection is not None

    def left_at(self, agent: str) -> float:
        """Return the monotonic time at which the agent's connection ended; infinite while connected."""
        known = self._agents.get(agent)
        return math.inf if known is None else known.left_at

    def silent_s(self, agent: str) -> float:
        """Return the seconds without bytes from an agent, as of the last time all input was read.

        So neither a delayed driver nor a jumping clock makes an agent silent.
        """
        known = self._agents.get(agent)
        if known is None:
            return 0.0
        at = known.connection.last_bytes_at if known.connection is not None else known.last_bytes_at
        return max(0.0, self._all_read_at - at)

    def close(self) -> None:
        self._thread.close()
        self._socket.close()

    # ---- in the loop

    async def _acknowledge(self) -> None:
        """Tell agents what has been taken. Timers run after all that was readable has been read."""
        while True:
            await asyncio.sleep(ACKNOWLEDGE_S)
            self._all_read_at = self._loop.time()
            newest: dict[str, int] = {}
            while self._taken:
                agent, number = self._taken.popleft()
                newest[agent] = max(number, newest.get(agent, 0))
            for agent, number in newest.items():
                self._write(self._agents[agent], Received(number))

    def _write(self, known: _Agent, message: ToAgent) -> None:
        if known.connection is not None:
            known.connection.write(encode(message))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            try:
                sock, address = await self._loop.sock_accept(self._socket)
            except OSError:  # out of file descriptors; WorkerGroup.gather raises the limit, or says so
                await asyncio.sleep(ACKNOWLEDGE_S)
                continue
            await self._unauthenticated.acquire()
            self._start(self._serve(sock, address))

    async def _serve(self, sock: socket.socket, address: object) -> None:
        """Serve one connection, from its handshake to its end, or that of the server."""
        connection = Connection(self._on_message, ToDriver)
        try:
            await self._follow(connection, sock, address)
        finally:
            connection.abort()

    async def _follow(self, connection: Connection, sock: socket.socket, address: object) -> None:
        claim = list[str]()
        CLAIM.set(claim)
        try:
            async with asyncio.timeout(HELLO_S):
                await self._loop.connect_accepted_socket(lambda: connection, sock, ssl=self._tls)
                await connection.authenticated
        except OSError as error:  # ProtocolError and TimeoutError are OSErrors
            connection.abort()
            if connection not in self._authenticated:
                return self._log_refused(address, error, claim)
        finally:
            self._unauthenticated.release()
        reason = await connection.ended
        known = self._authenticated.pop(connection)
        if isinstance(reason, ProtocolError):
            log.warning("agent %s: %s", known.name, reason)
        if known.connection is connection:  # else it has connected again since
            known.connection, known.last_bytes_at, known.left_at = None, connection.last_bytes_at, self._loop.time()
            self._inbox.put((known.name, None, 0))

    def _log_refused(self, address: object, error: OSError, claim: list[str]) -> None:
        self.refused += 1
        names = [name.removesuffix(OTHER_SECRET) for name in claim if name.endswith(OTHER_SECRET)]
        if len(self.other_secret) < MAX_UNAUTHENTICATED:
            self.other_secret |= dict.fromkeys(names, str(address[0] if isinstance(address, tuple) else address))
        if self.refused <= 3 or self.refused & (self.refused - 1) == 0:  # powers of two: a flood must not fill the log
            why = (
                f"no hello within {HELLO_S:g} s"
                if isinstance(error, TimeoutError)
                else str(error) or type(error).__name__
            )
            log.warning("refused connection %d, from %s: %s", self.refused, address, why)

    def _authenticate(self, connection: Connection, hello: ToDriver) -> None:
        if not isinstance(hello, Hello):
            raise ProtocolError("no hello")
        if not hmac.compare_digest(hello.secret.encode(), self.secret.encode()):
            raise ProtocolError("it does not know this launch's secret")
        known = self._agents.setdefault(hello.agent, _Agent(hello.agent))
        old, known.connection, known.left_at = known.connection, connection, math.inf
        self._authenticated[connection] = known
        connection.trust()
        connection.write(encode(Welcome(known.received)))
        if old is not None:
            old.abort()

    def _on_message(self, connection: Connection, message: ToDriver, number: int) -> None:
        known = self._authenticated.get(connection)
        if known is None:
            return self._authenticate(connection, message)
        if isinstance(message, Heartbeat):
            with self._heartbeats_lock:
                self._heartbeats[known.name] = message
        elif isinstance(message, KeepAlive) or number <= known.received:
            pass  # the second: what a reconnection sends again
        else:
            known.received = number
            if isinstance(message, StoreRequest) and self._answer is not None:
                self._taken.append((known.name, number))
                self._start(self._reply(known, self._answer(message)))
            else:
                self._inbox.put((known.name, message, number))
        return None

    async def _reply(self, known: _Agent, answer: Awaitable[StoreReply]) -> None:
        self._write(known, await answer)
