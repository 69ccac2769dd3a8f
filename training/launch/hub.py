"""The driver's end of the channel: one port, where agents prove themselves and strangers are sent away."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import queue
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from training.launch.channel import Message, ProtocolError, encode, new_secret, text_of
from training.launch.connection import Connection, LoopThread
from training.launch.tls import new_certificate

log = logging.getLogger(__name__)
MAX_STRANGERS = 256  # connections that have not proved themselves yet; the next ones wait in the kernel's queue
GREETING_S = 10.0  # for TLS and hello together
ACK_S = 0.05
LARGE_BYTES = 1 << 16  # a frame above this is waited for, so that a thousand of them are not held at a time
SEND_TIMEOUT_S = 20.0

Answer = Callable[[Message], Awaitable[Message]]


class _Agent:
    """What the hub knows of one agent, over all its connections."""

    def __init__(self, name: str):
        self.name, self.seen = name, 0  # number of its last message that has arrived
        self.connection: Connection | None = None
        self.heard, self.left = 0.0, math.inf  # loop's time: last bytes of connections before this one, its end


class Hub:
    """Accepts agents on (host, port). Their messages are taken by `take`, the newest heartbeat of each by `beats`.

    A message counts against its agent's window (link.py) until it is taken, so the inbox is bounded, while reading
    never stops: however slow the taker is, no agent looks silent. `answer` replies to messages of kind "store" at once.
    """

    def __init__(self, host: str, answer: Answer | None = None, secret: str | None = None):
        self.secret, self._answer = secret or new_secret(), answer
        self._tls, self.certificate = new_certificate()
        self._agents: dict[str, _Agent] = {}
        self._greeted: dict[Connection, _Agent] = {}
        self._places = asyncio.Semaphore(MAX_STRANGERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._inbox: queue.SimpleQueue[tuple[str, Message | None, int]] = queue.SimpleQueue()
        self._taken: deque[tuple[str, int]] = deque()
        self._beats: dict[str, Message] = {}
        self._beats_lock = threading.Lock()
        self.refused = 0  # connections that did not prove themselves
        self._server = socket.create_server((host, 0), backlog=4096)
        self._server.setblocking(False)
        self.host, self.port = self._server.getsockname()[:2]
        self._thread = LoopThread("sparkring-hub")
        self._loop = self._thread.loop
        self._ticked = self._loop.time()
        for work in (self._accept(), self._tick()):
            asyncio.run_coroutine_threadsafe(work, self._loop)

    # ---- for the driver's threads

    def take(self, timeout_s: float) -> tuple[str, Message | None] | None:
        """The next (agent, message); message None: the agent's connection has ended. None: nothing within the time."""
        try:
            agent, message, number = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if number:
            self._taken.append((agent, number))
        return agent, message

    def beats(self) -> dict[str, Message]:
        """The newest heartbeat of each agent that has sent one since the last call."""
        with self._beats_lock:
            beats, self._beats = self._beats, {}
        return beats

    def beat_of(self, agent: str) -> Message | None:
        """The same of one agent."""
        with self._beats_lock:
            return self._beats.pop(agent, None)

    def send(self, agent: str, message: Message) -> bool:
        """False where that agent is not connected now. A large message waits until it has mostly left."""
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
        """Monotonic time at which the agent's connection ended; infinite while it stands."""
        known = self._agents.get(agent)
        return math.inf if known is None else known.left

    def silent_s(self, agent: str) -> float:
        """Seconds nothing has come from an agent, as of the last time everything that had come was read: a driver that
        was held up, or a clock that jumps, makes nobody silent."""
        known = self._agents.get(agent)
        if known is None:
            return 0.0
        heard = known.connection.heard if known.connection is not None else known.heard
        return max(0.0, self._ticked - heard)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._thread.call(self._shut())
            self._thread.close()
        self._server.close()

    # ---- in the loop

    async def _shut(self) -> None:
        for known in self._agents.values():
            if known.connection is not None:
                known.connection.abort()

    async def _tick(self) -> None:
        """Tell agents what has been taken. Timers run after all that was readable has been read."""
        while True:
            await asyncio.sleep(ACK_S)
            self._ticked = self._loop.time()
            newest: dict[str, int] = {}
            while self._taken:
                agent, number = self._taken.popleft()
                newest[agent] = max(number, newest.get(agent, 0))
            for agent, number in newest.items():
                self._write(self._agents[agent], {"kind": "seen", "n": number})

    def _write(self, known: _Agent, message: Message) -> None:
        if known.connection is not None:
            known.connection.write(encode(message))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            try:
                sock, address = await self._loop.sock_accept(self._server)
            except OSError:  # out of file descriptors; Crew.gather says so, or raises the limit
                await asyncio.sleep(ACK_S)
                continue
            await self._places.acquire()
            self._start(self._admit(sock, address))

    async def _admit(self, sock: socket.socket, address: object) -> None:
        connection = Connection(self._hear)
        try:
            async with asyncio.timeout(GREETING_S):
                await self._loop.connect_accepted_socket(lambda: connection, sock, ssl=self._tls)
                await connection.greeted
        except OSError as error:  # ProtocolError and TimeoutError are OSErrors
            connection.abort()
            if connection not in self._greeted:
                return self._refuse(address, error)
        finally:
            self._places.release()
        reason = await connection.ended
        known = self._greeted.pop(connection)
        if isinstance(reason, ProtocolError):
            log.warning("agent %s: %s", known.name, reason)
        if known.connection is connection:  # else it has come again since
            known.connection, known.heard, known.left = None, connection.heard, self._loop.time()
            self._inbox.put((known.name, None, 0))

    def _refuse(self, address: object, error: OSError) -> None:
        self.refused += 1
        if self.refused <= 3 or self.refused & (self.refused - 1) == 0:  # powers of two: a flood must not fill the log
            why = f"no hello within {GREETING_S:g} s" if isinstance(error, TimeoutError) else error
            log.warning("refused connection %d, from %s: %s", self.refused, address, why)

    def _greet(self, connection: Connection, hello: Message) -> None:
        if hello["kind"] != "hello":
            raise ProtocolError("no hello")
        name, secret = text_of(hello, "agent"), text_of(hello, "secret")
        if not hmac.compare_digest(secret.encode(), self.secret.encode()):
            raise ProtocolError("it does not know this launch's secret")
        known = self._agents.setdefault(name, _Agent(name))
        old, known.connection, known.left = known.connection, connection, math.inf
        self._greeted[connection] = known
        connection.trust()
        connection.write(encode({"kind": "welcome", "seen": known.seen}))
        if old is not None:
            old.abort()

    def _hear(self, connection: Connection, message: Message) -> None:
        known = self._greeted.get(connection)
        if known is None:
            return self._greet(connection, message)
        if message["kind"] == "beat":
            if "step" in message:
                with self._beats_lock:
                    self._beats[known.name] = message
            return None
        number = message.pop("n", 0)
        if not isinstance(number, int) or number <= known.seen:
            return None  # what a reconnection sends again
        known.seen = number
        if message["kind"] == "store" and self._answer is not None:
            self._taken.append((known.name, number))
            self._start(self._reply(known, self._answer(message)))
        else:
            self._inbox.put((known.name, message, number))
        return None

    async def _reply(self, known: _Agent, answer: Awaitable[Message]) -> None:
        self._write(known, await answer)
