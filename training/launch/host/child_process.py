"""An agent's end of a running rank or server: its output, its messages, its stacks and its end."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time

from sparkring.training.launch.channel.control_client import ControlClient
from sparkring.training.launch.channel.frames import ProtocolError, SocketChannel
from sparkring.training.launch.host.logpump import LogPump
from sparkring.training.launch.host.processes import STACKS_SIGNAL, describe_status, kernel_oom_kills, state_of
from sparkring.training.launch.messages import (
    MAX_STACKS_CHARS,
    ChildEnded,
    FromRankToAgent,
    FromServerToAgent,
    LogLines,
    ToRank,
)
from sparkring.training.launch.topology import Child

MAX_LOG_BYTES = 4 << 20  # of messages that wait for the driver; above, a rank whose every line is wanted waits too
LAST_LINES_S = 20.0  # for the driver to take what such a rank printed last


class ChildProcess:
    """One rank or server of one attempt. The fork server starts it with `child_fds`, and says its pid and its end."""

    def __init__(self, child: Child, attempt: int, client: ControlClient, lines_per_s: float | None):
        """Open the pipes and sockets that the process is started with.

        Args:
            child: which rank or server to start.
            attempt: number of the launch's attempt.
            client: connection to the driver.
            lines_per_s: limit of log lines, see AgentOptions.
        """
        self.child, self.attempt, self.pid = child, attempt, 0
        self.was_killed = False  # by the driver's order
        self._client = client
        self._oom_kills = kernel_oom_kills()
        output, self._output = os.pipe()
        ours, self._theirs = socket.socketpair()
        self._channel = SocketChannel(ours, FromRankToAgent if child.role == "rank" else FromServerToAgent)
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        self._closed = threading.Event()
        self._all_lines = lines_per_s is None
        self._pump = LogPump(output, lines_per_s, self._send_lines)
        self._pump.start()
        self._relay = threading.Thread(target=self._forward, name="sparkring-relay", daemon=True)
        self._relay.start()

    def child_fds(self) -> list[int]:
        return [self._output, self._theirs.fileno(), self._stacks.fileno()]

    def close_child_ends(self) -> None:
        os.close(self._output)
        self._theirs.close()

    def request(self, message: ToRank) -> None:
        with contextlib.suppress(OSError):  # it is ending
            self._channel.send(message)

    def _send_lines(self, lines: list[str]) -> None:
        self._client.send(LogLines(self.child, self.attempt, tuple(lines)))
        while self._all_lines and self._client.waiting_bytes > MAX_LOG_BYTES and not self._closed.wait(0.01):
            pass

    def _forward(self) -> None:
        try:
            while True:
                self._client.send(self._channel.receive())
        except (EOFError, OSError, ProtocolError):
            return

    def stacks(self, wait_s: float = 2.0) -> str:
        """Read the Python stacks of all its threads.

        faulthandler writes them from the signal itself, so no lock can keep it from that.
        """
        state = state_of(self.pid)
        if state.startswith(("T", "t")):
            return f"process {self.pid} is {state}: stopped by a signal, its stacks cannot be read"
        before = os.fstat(self._stacks.fileno()).st_size
        try:
            os.kill(self.pid, STACKS_SIGNAL)
        except OSError as error:
            return f"process {self.pid}: {error}"
        size, deadline = -1, time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(0.1)
            size, previous = os.fstat(self._stacks.fileno()).st_size, size
            if size > before and size == previous:
                break
        text = os.pread(self._stacks.fileno(), MAX_STACKS_CHARS, before).decode("utf-8", "replace")
        return text or f"process {self.pid} is {state} and did not answer within {wait_s:g} s"

    def report_end(self, status: int | None) -> None:
        """Tell the driver how it ended, after everything it has sent and printed."""
        self._relay.join(timeout=2)
        self._pump.join(timeout=LAST_LINES_S if self._all_lines else 2)
        lost_memory = kernel_oom_kills() > self._oom_kills
        words = "was lost with its fork server" if status is None else describe_status(status, lost_memory)
        last = tuple(self._pump.last)
        self._client.send(ChildEnded(self.child, self.attempt, status, words, self.was_killed, last))
        self.close()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_RDWR)
        self._channel.sock.close()
        self._stacks.close()
