"""The process next to an agent that forks ranks.

It has torch and Horovod imported, so a rank starts in a tenth of a second. It is a program of its own, or forked from
the process that imports for all agents of a host (shared_imports.py). It keeps to one thread, never touches a GPU (a
forked CUDA context is broken) and runs one rank at a time, and server processes next to it. Commands come over a socket
pair from its agent; at end of file it kills everything below it and exits. Because it adopts orphans, nothing a rank
has forked, daemonized or not, survives; what a server has daemonized ends with the next rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import NoReturn

from sparkring.training.launch.channel.frames import ProtocolError, SocketChannel
from sparkring.training.launch.host.processes import (
    adopt_orphans,
    die_with_parent,
    end_descendants,
    import_before_forks,
)
from sparkring.training.launch.host.shared_imports import (
    MOST_BYTES,
    end_process,
    find_shared,
    rank_environment,
    start_process,
)
from sparkring.training.launch.messages import (
    ChildExited,
    ChildForked,
    FromForkServer,
    KillChildren,
    StartChild,
    ToForkServer,
)
from sparkring.training.launch.topology import Child, Role

OWN = ("sparkring.training.launch.host.rank", "sparkring.training.launch.host.server")  # imported before forks
FDS_PER_RANK = 4  # output, channel to the agent, file for stacks, listening socket for torch's store: not of a server


class ForkServer:
    """The agent's end. The fork server ends, and its rank, with the agent's process."""

    def __init__(self, preload: Iterable[str], environment: Mapping[str, str]):
        """Start the fork server. `preload`: modules to import before the first fork; absent ones are skipped."""
        self._socket, theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        shared = find_shared(environment)
        with theirs:
            if shared is None or not shared.fork(preload, theirs):
                arguments = [str(os.getpid()), *preload]
                self._process = start_process("main", [theirs], arguments, rank_environment(environment))
        self._channel = SocketChannel(self._socket, FromForkServer)

    @property
    def alive(self) -> bool:
        return not self._is_closed(within_s=0)

    def start(self, start: StartChild, fds: list[int]) -> None:
        """Fork a rank or a server; `fds` as in FDS_PER_RANK. Its pid and its end arrive by `receive`."""
        self._channel.send(start)
        socket.send_fds(self._socket, [b"f"], fds)

    def kill(self, role: Role) -> None:
        """Send SIGKILL to the rank, or the servers, and all they have started."""
        with contextlib.suppress(OSError):
            self._channel.send(KillChildren(role))

    def receive(self) -> FromForkServer:
        """Wait for the next message; EOFError when the fork server is gone."""
        message: FromForkServer = self._channel.receive()
        return message

    def close(self) -> None:
        """End the fork server and everything below it, and wait until that is done."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._is_closed(within_s=10)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # close alone would wait for the thread that reads it
        self._socket.close()
        if self._process is not None:
            end_process(self._process)

    def _is_closed(self, within_s: float) -> bool:
        """Return whether the other end is closed, as after the fork server's end, or closes within `within_s`."""
        if self._socket.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(within_s * 1000))


def main() -> None:
    """Run a fork server that was started as a program: import, then fork on command until the agent has ended."""
    fd, parent, preload = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    die_with_parent(parent)
    import_before_forks((*preload, *OWN))
    _run(socket.socket(fileno=fd), parent)


def fork_on_request() -> None:
    """Import what fork servers need, and fork them, until nobody is left who could ask for one (SharedImports)."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that have ended
    while True:
        data, fds, _, _ = socket.recv_fds(requests, MOST_BYTES, 1)
        if not data:
            return
        request = json.loads(data)
        sys.path[:] = request["path"]
        import_before_forks((*request["preload"], *OWN))
        if not os.fork():
            requests.close()
            os.setsid()
            with contextlib.suppress(OSError):  # it was removed
                os.chdir(request["folder"])
            _run(socket.socket(fileno=fds[0]), None)
        os.close(fds[0])


def _run(sock: socket.socket, parent: int | None) -> NoReturn:
    """Fork on command until the agent has ended; `parent`: its process, where that made this one."""
    adopt_orphans()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for noticed in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(noticed, lambda *_: None)
    if parent is not None:
        die_with_parent(parent, signal.SIGTERM)  # from here on: not before everything below us has been ended
    with contextlib.suppress(EOFError, OSError, ProtocolError):  # the agent has ended, or ended us
        _serve(SocketChannel(sock, ToForkServer), wake_read, parent)
    end_descendants()
    os._exit(0)


def _serve(channel: SocketChannel, wake: int, parent: int | None) -> None:
    sock = channel.sock
    children = _Children(channel)
    while True:
        ready, _, _ = select.select([sock.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 512)
            if parent is not None and os.getppid() != parent:
                raise EOFError("the agent's process has ended")
            children.reap()
        if sock.fileno() not in ready:
            continue
        match channel.receive():
            case StartChild() as start:
                pid = _fork(sock, start)
                children.running[pid] = start.child
                channel.send(ChildForked(start.child, pid))
            case KillChildren(role="rank"):
                end_descendants(keep=children.servers)
            case KillChildren(role="server"):
                for pid in children.servers:
                    _kill_session(pid)


class _Children:
    """The processes that were forked and have not been collected."""

    def __init__(self, channel: SocketChannel):
        self.channel = channel
        self.running: dict[int, Child] = {}  # by pid

    @property
    def servers(self) -> list[int]:
        """Their pids."""
        return [pid for pid, child in self.running.items() if child.role == "server"]

    def reap(self) -> None:
        """Collect ended processes. End what a rank or a server has left, and report its end."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.running.pop(pid, None)
            if child is None:
                continue
            if child.role == "rank":
                end_descendants(keep=self.servers)
            else:
                _kill_session(pid)
            self.channel.send(ChildExited(child, os.waitstatus_to_exitcode(status)))


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _fork(sock: socket.socket, start: StartChild) -> int:
    _, fds, _, _ = socket.recv_fds(sock, 1, FDS_PER_RANK)
    if not fds:
        raise EOFError("agent closed while starting a rank or a server")
    server = os.getpid()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    status = 1
    try:
        _become_child(sock, server, fds)
        if start.child.role == "server":
            from sparkring.training.launch.host.server import run_server

            status = run_server(start, socket.socket(fileno=fds[1]), stacks_fd=fds[2])
        else:
            from sparkring.training.launch.host.rank import run_rank

            status = run_rank(start, socket.socket(fileno=fds[1]), stacks_fd=fds[2], store_fd=fds[3])
    finally:
        os._exit(status)


def _become_child(sock: socket.socket, server: int, fds: list[int]) -> None:
    """Make a session, default signals and output into the agent's pipe, and close the fork server's ends."""
    os.setsid()
    die_with_parent(server)
    signal.set_wakeup_fd(-1)
    for changed in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(changed, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sock.close()
    os.dup2(fds[0], 1)
    os.dup2(fds[0], 2)
    os.close(fds[0])
    for fd in fds[1:]:
        os.set_inheritable(fd, False)
    threading.current_thread().name = "MainThread"
    if "numpy" in sys.modules:  # else every rank forked from one server would draw the same
        sys.modules["numpy"].random.seed()
