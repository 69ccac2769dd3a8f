"""An agent's connection to the driver: never blocks who sends, heals itself, gives up only when the driver is gone
for good."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from training.channel import Message, ProtocolError, Wire, encode, greet_as_agent, keep_alive
from training.tls import TlsSocket, trusting

MAX_WAITING_BYTES = 32 << 20
BEAT_S = 1.0


@dataclass(frozen=True)
class Endpoint:
    """Where the driver listens, and what it takes to be let in."""

    addresses: tuple[str, ...]  # tried in order; the first whose driver proves it knows the secret is taken
    port: int
    secret: str
    certificate: str = ""  # PEM; the driver speaks TLS and must have its key. Empty: it speaks plainly

    def __repr__(self) -> str:
        return f"Endpoint({self.addresses}, {self.port})"  # never the secret, whoever prints it


class Unreachable(ConnectionError):
    """No address of the driver answered."""


def connect(endpoint: Endpoint, agent: str, patience_s: float, timeout_s: float = 5.0) -> tuple[Wire, int]:
    """An authenticated wire and how many messages the driver has seen of this agent; Unreachable says what was
    tried."""
    deadline, problems = time.monotonic() + patience_s, {}
    while True:
        for address in endpoint.addresses:
            try:
                sock = socket.create_connection((address, endpoint.port), timeout=timeout_s)
            except OSError as error:
                problems[address] = str(error)
                continue
            try:
                spoken = TlsSocket(sock, trusting(endpoint.certificate), False) if endpoint.certificate else sock
                wire, seen = greet_as_agent(spoken, endpoint.secret, agent, timeout_s)
                keep_alive(sock, dead_after_s=20)
                return wire, seen
            except (OSError, EOFError) as error:  # ProtocolError is an OSError: somebody else's port
                problems[address] = f"{type(error).__name__}: {error}"
                sock.close()
        if time.monotonic() >= deadline:
            tried = "; ".join(f"{a}:{endpoint.port}: {why}" for a, why in problems.items())
            raise Unreachable(
                f"agent {agent} cannot reach the driver ({tried}); set launch.interface, or open the port"
            )
        time.sleep(0.2)


class Link:
    """`send` queues; a thread writes, another reads. Lines of log are dropped, and counted, before anything else is."""

    def __init__(self, endpoint: Endpoint, agent: str, on_message: Callable[[Message | None], None], patience_s: float):
        self._endpoint, self._agent, self._patience_s = endpoint, agent, patience_s
        self._on_message = on_message
        self._queue: deque[tuple[int, Message, int]] = deque()  # numbered, not yet known to have arrived
        self._bytes = self._number = self._dropped = 0
        self._unsent = 0  # how many at the queue's end this connection has not been given
        self._ready = threading.Condition()
        self._closed = False
        self._wire, _ = connect(endpoint, agent, patience_s)
        self.local_address: str = self._wire.sock.getsockname()[0]
        threading.Thread(target=self._read, name="sparkring-link-read", daemon=True).start()
        self._writer = threading.Thread(target=self._write, name="sparkring-link-write", daemon=True)
        self._writer.start()

    def send(self, message: Message) -> None:
        """Queue for the driver. Raises only where the message itself cannot be sent."""
        size = len(encode(message))
        with self._ready:
            if self._bytes + size > MAX_WAITING_BYTES and message["kind"] in ("log", "heartbeat"):
                self._dropped += 1
                return
            self._number += 1
            self._queue.append((self._number, message, size))
            self._bytes += size
            self._unsent += 1
            self._ready.notify()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the driver has acknowledged everything."""
        with self._ready:
            return self._ready.wait_for(lambda: not self._queue, timeout_s)

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._wire.close()
        self._writer.join(timeout=2)

    def _write(self) -> None:
        while not self._closed:
            with self._ready:
                self._ready.wait_for(lambda: self._unsent or self._closed, BEAT_S)
                fresh = [self._queue[i] for i in range(len(self._queue) - self._unsent, len(self._queue))]
                self._unsent = 0
                wire = self._wire
            try:
                for number, message, _ in fresh:
                    wire.send({**message, "n": number})
                if not fresh:
                    wire.send({"kind": "beat", "n": 0})
            except OSError:
                time.sleep(0.05)  # the reader sees the same end and reconnects, which queues these again

    def _read(self) -> None:
        while not self._closed:
            try:
                message = self._wire.receive()
            except (OSError, EOFError):
                if self._closed or not self._reconnect():
                    break
                continue
            if message["kind"] == "seen":
                self._acknowledge(message["n"])
            else:
                self._on_message(message)
        if not self._closed:
            self._on_message(None)

    def _acknowledge(self, number: int) -> None:
        with self._ready:
            while self._queue and self._queue[0][0] <= number:
                self._bytes -= self._queue.popleft()[2]
            self._unsent = min(self._unsent, len(self._queue))
            self._ready.notify_all()

    def _reconnect(self) -> bool:
        """A new wire within the patience; False when the driver is gone."""
        self._wire.close()
        try:
            wire, seen = connect(self._endpoint, self._agent, self._patience_s)
        except (Unreachable, ProtocolError):
            return False
        with self._ready:  # all at once: the writer must not number past what is to be sent again
            self._wire = wire
            self._acknowledge(seen)
            self._unsent = len(self._queue)
            self._ready.notify_all()
        return True
