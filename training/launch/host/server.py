"""Inside a server's process: environment, function, error to the agent. It ends when it is killed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
from typing import Any

from sparkring.training.launch.channel.frames import SocketChannel
from sparkring.training.launch.host.processes import STACKS_SIGNAL
from sparkring.training.launch.host.rank import describe_error, flush_output, load_function
from sparkring.training.launch.messages import (
    ChildEvent,
    FromServerToAgent,
    ServerReady,
    StartChild,
)


class ServerContext:
    """What a server's function is called with."""

    def __init__(self, start: StartChild, channel: SocketChannel):
        own = start.server
        assert own is not None
        self.server, self.servers, self.world_size = start.child.index, own.servers, own.world_size
        self.address = own.address  # IPv4, of the interface that ranks reach
        self.attempt, self.payload = start.attempt, start.payload
        self.secret = bytes.fromhex(start.server_secret)  # of this attempt; ranks have it too
        self._child, self._channel = start.child, channel

    def ready(self, port: int) -> None:
        """Tell the driver that it listens on `address` and this port. Ranks start when every server has."""
        self._send(ServerReady(self._child, self.attempt, self.address, int(port)))

    def event(self, name: str, data: dict[str, Any]) -> None:
        """Send the driver's callback a ChildEvent. `data`: JSON."""
        self._send(ChildEvent(self._child, self.attempt, str(name), data))

    def error(self, error: BaseException) -> None:
        """Tell the driver that the function has raised an exception."""
        self._send(describe_error(error, self._child, self.attempt))

    def _send(self, message: FromServerToAgent) -> None:
        with contextlib.suppress(OSError):  # the agent is lost; the kernel ends us
            self._channel.send(message)


def run_server(start: StartChild, sock: socket.socket, stacks_fd: int) -> int:
    """Run the function and return the exit code of this process: 0, or 1 after an exception.

    Args:
        start: what to run, and as which server.
        sock: connected to the agent.
        stacks_fd: file for the stacks of all threads.
    """
    os.environ.clear()
    os.environ.update(start.env)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True, chain=False)
    context = ServerContext(start, SocketChannel(sock, FromServerToAgent))
    try:
        load_function(start.entry.name)(context)
    except BaseException as error:
        context.error(error)
        return 1
    finally:
        flush_output()
    return 0
