"""The driver's end of the channel: one port, where agents prove themselves and strangers are sent away."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from training.channel import Message, ProtocolError, Wire, greet_as_driver, keep_alive, new_secret
from training.tls import TlsSocket

log = logging.getLogger(__name__)
MAX_STRANGERS = 64  # connections that have not proved themselves yet; one more ends the oldest
GREETING_TIMEOUT_S = 5.0


class Hub:
    """Accepts agents on (host, port). `on_message(agent, message)` runs in that agent's thread; None means it
    disconnected."""

    def __init__(
        self,
        host: str,
        on_message: Callable[[str, Message | None], None],
        secret: str | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.secret, self._tls = secret or new_secret(), tls
        self._on_message = on_message
        self._lock = threading.Lock()
        self._wires: dict[str, Wire] = {}
        self._heard: dict[str, float] = {}
        self._left: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._strangers: OrderedDict[int, socket.socket] = OrderedDict()
        self.refused = 0  # connections that did not prove themselves
        self._closed = False
        self._server = socket.create_server((host, 0), backlog=256)
        self.host, self.port = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, name="sparkring-hub", daemon=True).start()

    def send(self, agent: str, message: Message) -> bool:
        """False where that agent is not connected now."""
        wire = self._wires.get(agent)
        try:
            if wire is not None:
                wire.send(message)
            return wire is not None
        except OSError:
            return False

    def is_connected(self, agent: str) -> bool:
        return agent in self._wires

    def left_at(self, agent: str) -> float:
        """Monotonic time at which the agent's connection ended; infinite while it stands."""
        return math.inf if agent in self._wires else self._left.get(agent, math.inf)

    def silent_s(self, agent: str) -> float:
        """Seconds since anything was heard of an agent (monotonic: a clock that jumps does not matter)."""
        return time.monotonic() - self._heard.get(agent, time.monotonic())

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._server.close()
        with self._lock:
            wires, strangers = list(self._wires.values()), list(self._strangers.values())
            self._wires.clear()
        for wire in wires:
            wire.close()
        for sock in strangers:
            sock.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._server.accept()
            except OSError:  # closed, or out of file descriptors: strangers may hold them
                if not self._closed:
                    self._drop_oldest_stranger()
                    time.sleep(0.05)
                continue
            with self._lock:
                self._strangers[id(sock)] = sock
                crowded = len(self._strangers) > MAX_STRANGERS
            if crowded:
                self._drop_oldest_stranger()
            threading.Thread(target=self._greet, args=(sock, address), name="sparkring-agent", daemon=True).start()

    def _drop_oldest_stranger(self) -> None:
        with self._lock:
            if not self._strangers:
                return
            _, sock = self._strangers.popitem(last=False)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _greet(self, sock: socket.socket, address: object) -> None:
        try:
            sock.settimeout(GREETING_TIMEOUT_S)
            spoken = TlsSocket(sock, self._tls, is_server=True) if self._tls is not None else sock
            wire, agent = greet_as_driver(spoken, self.secret, lambda a: self._seen.get(a, 0), GREETING_TIMEOUT_S)
            keep_alive(sock, dead_after_s=20)
        except (OSError, EOFError) as error:
            sock.close()
            self.refused += 1
            if (
                self.refused <= 3 or self.refused & (self.refused - 1) == 0
            ):  # powers of two: a flood must not fill the log
                log.warning("refused connection %d, from %s: %s", self.refused, address, error)
            return
        finally:
            with self._lock:
                self._strangers.pop(id(sock), None)
        with self._lock:
            old, self._wires[agent] = self._wires.get(agent), wire
            self._heard[agent] = time.monotonic()
        if old is not None:
            old.close()
        self._listen(agent, wire)

    def _listen(self, agent: str, wire: Wire) -> None:
        try:
            while not self._closed:
                message = wire.receive()
                self._heard[agent] = time.monotonic()
                number = message.pop("n", 0)
                if not isinstance(number, int) or number <= self._seen.get(agent, 0):
                    continue  # a beat, or what a reconnection sends again
                self._seen[agent] = number
                self._on_message(agent, message)
                wire.send({"kind": "seen", "n": number})
        except (OSError, EOFError) as error:
            if isinstance(error, ProtocolError):
                log.warning("agent %s: %s", agent, error)
        wire.close()
        with self._lock:
            current = self._wires.get(agent) is wire
            if current:
                del self._wires[agent]
                self._left[agent] = time.monotonic()
        if current and not self._closed:
            self._on_message(agent, None)
