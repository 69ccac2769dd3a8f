"""The agent of one rank: a Spark task, or a thread of the driver's process.

It starts, watches and ends the rank, and, on the first agent of a host, the host's server processes. It tells the
driver that a rank can run here, then does what the driver's messages ask. They are children of the agent's fork server
and die with it. When the driver is gone for good, the agent ends them and itself.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import os
import queue
import select
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from sparkring.training.launch.channel.connection import LoopThread, listen
from sparkring.training.launch.channel.control_client import ControlClient, Endpoint
from sparkring.training.launch.channel.frames import ProtocolError
from sparkring.training.launch.channel.rendezvous import RendezvousProxy
from sparkring.training.launch.host.child_process import ChildProcess
from sparkring.training.launch.host.fork_server import ForkServer
from sparkring.training.launch.host.info import collect_host_info
from sparkring.training.launch.messages import (
    MAX_PEERS,
    AgentLeaving,
    AgentReady,
    Bye,
    ChildExited,
    ChildForked,
    CutAt,
    DumpStacks,
    FromForkServer,
    Joined,
    KillChildren,
    OfferCut,
    Peer,
    PeerFailure,
    PeersReached,
    ReachPeers,
    Stacks,
    StartChild,
    StopTraining,
    StoreMethod,
    StoreReply,
    StoreRequest,
    ToAgent,
    WriteCheckpoint,
)
from sparkring.training.launch.topology import AgentInfo, Child

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentOptions:
    """The same for every agent of a group."""

    endpoint: Endpoint
    environment: Mapping[str, str]  # of fork server and rank, before the rank's own variables
    preload: tuple[str, ...] = ("torch", "horovod.torch")
    interface: str | None = None  # of the ring; None: the one that reaches the driver
    patience_s: float = 20.0  # without the driver
    lines_per_s: float | None = 200.0  # of output; None: all, and a rank waits for the driver to take them
    joined: Joined | None = None  # of an agent that came by itself
    wait_s: float | None = None  # for such an agent's driver to come; None: `patience_s`


@dataclass(frozen=True)
class _FromForkServer:
    """A message of the fork server with this number; message None: it has ended."""

    server: int
    message: FromForkServer | None


class DriverGone(ConnectionError):
    """The driver has ended, or could not be reached for as long as the agent is patient."""


class Agent:
    """Runs one rank at a time. `run()` returns the driver's bye; everything it started is gone by then."""

    def __init__(self, options: AgentOptions, index: int, name: str, gpus: tuple[str, ...] = ()):
        self._options = options
        self._inbox: queue.SimpleQueue[ToAgent | _FromForkServer | None] = queue.SimpleQueue()
        self._replies: dict[int, asyncio.Future[StoreReply]] = {}  # in the loop
        self._requests = 0
        self._children: dict[Child, ChildProcess] = {}
        self._fork_servers = 0
        self._fork_server = self._start_fork_server()  # first: it imports while we connect
        self._thread = LoopThread("sparkring-agent")
        try:
            self._client, self._proxy = self._thread.call(self._open(name))
        except BaseException:  # ConnectionError above all
            self._thread.close()
            self._fork_server.close()
            raise
        address, interface = choose_interface(self._client.local_address, options.interface)
        self._store = listen(address, backlog=256)
        self._info = AgentInfo(
            name=name,
            index=index,
            host_key=host_key(address),
            address=address,
            interface=interface,
            store_port=self._store.getsockname()[1],
            proxy_address=self._proxy.address,
            proxy_port=self._proxy.port,
            gpus=gpus,
        )

    async def _open(self, name: str) -> tuple[ControlClient, RendezvousProxy]:
        client = ControlClient(self._options.endpoint, name, self._on_message, self._options.patience_s)
        await client.open(self._options.wait_s)
        return client, await RendezvousProxy(self._ask_store).open()

    def leave(self) -> None:
        """Tell the driver that this host is about to go. Safe from any thread."""
        self._client.send(AgentLeaving())

    def run(self) -> Bye:
        self._client.send(AgentReady(self._info, socket.gethostname(), collect_host_info(), self._options.joined))
        try:
            while True:
                message = self._inbox.get()
                if message is None:
                    raise DriverGone(self._client.why_gone)
                if isinstance(message, Bye):
                    return message
                self._handle(message)
        finally:
            self._fork_server.close()
            for child in self._children.values():
                child.close()
            self._store.close()
            self._thread.call(self._proxy.close())
            self._thread.call(self._client.close())
            self._thread.close()

    def _handle(self, message: ToAgent | _FromForkServer) -> None:
        match message:
            case StartChild():
                self._start(message)
            case KillChildren():
                for child, process in self._children.items():
                    process.was_killed |= child.role == message.role
                self._fork_server.kill(message.role)
            case ReachPeers():
                self._empty_store()
                threading.Thread(target=self._reach, args=(message.peers,), daemon=True).start()
            case DumpStacks() if rank := self._rank:
                threading.Thread(target=self._dump, args=(rank,), daemon=True).start()
            case StopTraining() | WriteCheckpoint() | OfferCut() | CutAt() if rank := self._rank:
                rank.request(message)
            case _FromForkServer() if message.server == self._fork_servers:
                self._on_fork_server(message.message)

    @property
    def _rank(self) -> ChildProcess | None:
        """The rank that runs here now. Safe from any thread: list() of a dictionary's values is one step."""
        newest_first = reversed(list(self._children.values()))
        return next((process for process in newest_first if process.child.role == "rank"), None)

    def _on_fork_server(self, message: FromForkServer | None) -> None:
        """Take a message of the fork server; None: it has ended, and with it all that it had forked."""
        match message:
            case ChildForked() if message.child in self._children:
                self._children[message.child].pid = message.pid
            case ChildExited() if message.child in self._children:
                self._mark_ended(message.child, message.status)
            case None:
                for child in [*self._children]:
                    self._mark_ended(child, None)

    def _need_fork_server(self) -> None:
        if not self._fork_server.alive:  # something killed it; the kernel has ended its rank
            self._fork_server.close()
            self._fork_server = self._start_fork_server()

    def _start(self, start: StartChild) -> None:
        self._need_fork_server()
        start = replace(start, env={**self._options.environment, **start.env})
        process = ChildProcess(start.child, start.attempt, self._client, self._options.lines_per_s)
        self._children[start.child] = process
        store = [self._store.fileno()] if start.child.role == "rank" else []
        try:
            self._fork_server.start(start, [*process.child_fds(), *store])
        except OSError:
            self._mark_ended(start.child, None)
        finally:
            process.close_child_ends()

    def _mark_ended(self, child: Child, status: int | None) -> None:
        self._children.pop(child).report_end(status)

    def _reach(self, peers: tuple[Peer, ...]) -> None:
        def connect(peer: Peer) -> str:
            try:
                socket.create_connection((peer.address, peer.port), timeout=3).close()
            except OSError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(MAX_PEERS) as pool:
            reasons = list(pool.map(connect, peers))
        failed = [PeerFailure(p.address, p.port, reason) for p, reason in zip(peers, reasons, strict=True) if reason]
        self._client.send(PeersReached(tuple(failed)))

    def _empty_store(self) -> None:
        """Close connections at the store's port. No rank accepts them yet, and the kernel's queue is finite."""
        with contextlib.suppress(OSError):  # no file descriptor is left: those that remain are refused by a rank
            while select.select([self._store], [], [], 0)[0]:
                self._store.accept()[0].close()

    def _dump(self, rank: ChildProcess) -> None:
        with contextlib.suppress(ValueError):  # its pipes are closed: it has ended meanwhile
            self._client.send(Stacks(rank.child.index, rank.attempt, rank.stacks()))

    def _start_fork_server(self) -> ForkServer:
        self._fork_servers += 1
        server = ForkServer(self._options.preload, self._options.environment)
        threading.Thread(target=self._read_fork_server, args=(server, self._fork_servers), daemon=True).start()
        return server

    def _read_fork_server(self, server: ForkServer, number: int) -> None:
        try:
            while True:
                self._inbox.put(_FromForkServer(number, server.receive()))
        except (EOFError, OSError, ProtocolError):
            self._inbox.put(_FromForkServer(number, None))

    def _on_message(self, message: ToAgent | None) -> None:
        """Take a message of the driver, in the loop; None: the driver is gone."""
        if isinstance(message, StoreReply):
            reply = self._replies.get(message.id)
            if reply is not None and not reply.done():
                reply.set_result(message)
        else:
            self._inbox.put(message)

    async def _ask_store(self, method: StoreMethod, key: str, value: bytes) -> bytes | None:
        """Make the driver's store answer a request of the rank's Horovod client. TimeoutError after our patience."""
        rank = self._rank
        attempt = rank.attempt if rank is not None else 0
        self._requests += 1
        number = self._requests
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._client.send(StoreRequest(number, attempt, method, key, base64.b64encode(value).decode()))
        try:
            found = (await asyncio.wait_for(reply, self._options.patience_s)).value
        finally:
            del self._replies[number]
        return None if found is None else base64.b64decode(found)


def choose_interface(local_address: str, wanted: str | None) -> tuple[str, str]:
    """Choose (address, interface) of the ring.

    That of the wanted interface, else of the one that reached the driver. Of several addresses of an interface: one of
    the family that reached the driver, and not one of the link alone, which also needs an interface's name.
    """
    found = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    if wanted is not None:
        of_wanted = [address for name, address in found if name == wanted]
        if not of_wanted:
            raise ValueError(
                f"launch.interface = {wanted!r}: no such interface with an address here; there are {found}"
            )
        return min(of_wanted, key=lambda each: ("%" in each, (":" in each) != (":" in local_address))), wanted
    for name, address in found:
        if address == local_address:
            return address, name
    raise ValueError(f"no interface has the address {local_address} that reached the driver; there are {found}")


def host_key(address: str) -> str:
    """Return a key for what shares memory and loopback: machine, network namespace and address."""
    parts = [socket.gethostname(), address]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/ipc"):
        try:
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            continue
    return "h" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
