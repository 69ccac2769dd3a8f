"""The agent of one rank: a Spark task, or a thread of the driver's own machine. It starts, watches and ends a rank,
and relays.

It offers a seat to the driver, then does as told: start, kill, stop, checkpoint, dump, bye. The rank is a child of the
agent's helper (zygote.py) and dies with it. When the driver is gone for good, the agent ends its rank and itself.
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
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from training.launch.channel import Message, Plain, ProtocolError
from training.launch.connection import LoopThread
from training.launch.facts import REACH_PEERS, collect_facts
from training.launch.link import Endpoint, Link
from training.launch.logpump import LogPump
from training.launch.processes import STACKS_SIGNAL, describe_status, kernel_oom_kills, state_of
from training.launch.rendezvous import Shim
from training.launch.worker_env import Seat
from training.launch.zygote import Helper

log = logging.getLogger(__name__)
FORWARDED = ("metrics", "heartbeat", "event", "running", "result", "error")  # from the rank to the driver
REQUESTS = ("stop", "checkpoint")  # from the driver to the rank
MAX_LOG_BYTES = 4 << 20  # of messages that wait for the driver; above, a rank whose every line is wanted waits too
LAST_LINES_S = 20.0  # for the driver to take what such a rank printed last


@dataclass(frozen=True)
class AgentOptions:
    """What every agent of a crew is told."""

    endpoint: Endpoint
    environment: Mapping[str, str]  # of helper and rank, before the rank's own variables
    preload: tuple[str, ...] = ("torch", "horovod.torch")
    interface: str | None = None  # of the ring; None: the one that reaches the driver
    patience_s: float = 20.0  # without the driver
    lines_per_s: float | None = 200.0  # of output; None: all, and a rank waits for the driver to take them


class DriverGone(ConnectionError):
    """The driver could not be reached for as long as the agent is patient."""


class Agent:
    """One seat. `run()` returns when the driver says bye; everything it started is gone by then."""

    def __init__(self, options: AgentOptions, index: int, name: str, gpus: tuple[str, ...] = ()):
        self._options = options
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._answers: dict[int, asyncio.Future[Message]] = {}  # in the loop
        self._asked = 0
        self._rank: Rank | None = None
        self._helper = Helper(options.preload, options.environment)  # first: it imports while we connect
        threading.Thread(target=self._read_helper, args=(self._helper,), daemon=True).start()
        self._thread = LoopThread("sparkring-link")
        try:
            self._link, self._shim = self._thread.call(self._open(name))
        except BaseException:  # ConnectionError above all
            self._thread.close()
            self._helper.close()
            raise
        address, interface = choose_interface(self._link.local_address, options.interface)
        self._store = socket.create_server((address, 0), backlog=256)
        self._seat = Seat(
            agent=name,
            index=index,
            host=host_key(address),
            address=address,
            interface=interface,
            store_port=self._store.getsockname()[1],
            shim_address=self._shim.address,
            shim_port=self._shim.port,
            gpus=gpus,
            pid=os.getpid(),
        )

    async def _open(self, name: str) -> tuple[Link, Shim]:
        link = Link(self._options.endpoint, name, self._receive, self._options.patience_s)
        await link.open()
        return link, await Shim(self._ask).open()

    def run(self) -> None:
        seat = {"kind": "seat", "seat": asdict(self._seat), "hostname": socket.gethostname()}
        self._link.send({**seat, "facts": collect_facts()})
        try:
            while True:
                message = self._inbox.get()
                if message is None:
                    raise DriverGone(f"the driver has not answered for {self._options.patience_s:g} s")
                if message["kind"] == "bye":
                    return
                self._act(message)
        finally:
            self._helper.close()
            if self._rank is not None:
                self._rank.close()
            self._store.close()
            self._thread.call(self._shim.close())
            self._thread.call(self._link.close())
            self._thread.close()

    def _act(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "start":
            self._start(message)
        elif kind == "kill":
            if self._rank is not None:
                self._rank.was_killed = True
            self._helper.kill()
        elif "helper" in message:
            if self._rank is None or message["helper"] != id(self._helper):
                return  # of a helper replaced since
            if kind == "started":
                self._rank.pid = message["pid"]
            else:
                self._ended(message.get("status"))
        elif kind == "reach":
            self._empty_store()
            threading.Thread(target=self._reach, args=(message["peers"],), daemon=True).start()
        elif kind == "dump" and self._rank is not None:
            threading.Thread(target=self._dump, args=(self._rank,), daemon=True).start()
        elif kind in REQUESTS and self._rank is not None:
            self._rank.request(message)

    def _start(self, message: Message) -> None:
        if not self._helper.alive:  # something killed it; the kernel has ended its rank
            self._helper.close()
            self._helper = Helper(self._options.preload, self._options.environment)
            threading.Thread(target=self._read_helper, args=(self._helper,), daemon=True).start()
        document = message["document"]
        document["env"] = {**self._options.environment, **document["env"]}
        self._rank = Rank(message["attempt"], document["rank_info"]["rank"], self._link, self._options.lines_per_s)
        try:
            self._helper.start(document, [*self._rank.child_fds(), self._store.fileno()])
        except OSError:
            self._ended(None)
        finally:
            self._rank.close_child_ends()

    def _ended(self, status: int | None) -> None:
        rank, self._rank = self._rank, None
        assert rank is not None
        rank.report_end(status)

    def _reach(self, peers: list[tuple[str, int]]) -> None:
        def knock(peer: tuple[str, int]) -> str:
            try:
                socket.create_connection((peer[0], peer[1]), timeout=3).close()
            except OSError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(REACH_PEERS) as pool:
            failed = [[*peer, why] for peer, why in zip(peers, pool.map(knock, peers), strict=True) if why]
        self._link.send({"kind": "reached", "failed": failed})

    def _empty_store(self) -> None:
        """Let go of who has knocked: nobody accepts before rank 0 does, and the kernel's queue is finite."""
        while select.select([self._store], [], [], 0)[0]:
            self._store.accept()[0].close()

    def _dump(self, rank: Rank) -> None:
        with contextlib.suppress(ValueError):  # its pipes are closed: it has ended meanwhile
            self._link.send({"kind": "stacks", "rank": rank.rank, "attempt": rank.attempt, "text": rank.stacks()})

    def _read_helper(self, helper: Helper) -> None:
        try:
            while True:
                self._inbox.put({**helper.receive(), "helper": id(helper)})
        except (EOFError, OSError, ProtocolError):
            self._inbox.put({"kind": "helper-lost", "helper": id(helper)})

    def _receive(self, message: Message | None) -> None:
        """In the loop."""
        if message is not None and message["kind"] == "value":
            answer = self._answers.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message)
        else:
            self._inbox.put(message)

    async def _ask(self, method: str, key: str, value: bytes) -> bytes | None:
        """One request of the rank's Horovod client, answered by the driver's store. TimeoutError after our patience."""
        attempt = self._rank.attempt if self._rank is not None else 0
        self._asked += 1
        number = self._asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        text = base64.b64encode(value).decode()
        request = {"id": number, "attempt": attempt, "method": method, "key": key, "value": text}
        self._link.send({"kind": "store", **request})
        try:
            reply = await asyncio.wait_for(answer, self._options.patience_s)
        finally:
            del self._answers[number]
        return None if reply["value"] is None else base64.b64decode(reply["value"])


class Rank:
    """What the agent holds of one running rank: its pipes, and the words it has said."""

    def __init__(self, attempt: int, rank: int, link: Link, lines_per_s: float | None):
        self.attempt, self.rank, self.pid = attempt, rank, 0
        self.was_killed = False  # by the driver's order
        self._link = link
        self._started = time.monotonic()
        self._oom_kills = kernel_oom_kills()
        output, self._output = os.pipe()
        ours, self._theirs = socket.socketpair()
        self._channel = Plain(ours)
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        self._over = threading.Event()
        self._drops_no_line = lines_per_s is None
        self._pump = LogPump(output, lines_per_s, self._log)
        self._pump.start()
        self._relay = threading.Thread(target=self._forward, name="sparkring-relay", daemon=True)
        self._relay.start()

    def child_fds(self) -> list[int]:
        return [self._output, self._theirs.fileno(), self._stacks.fileno()]

    def close_child_ends(self) -> None:
        os.close(self._output)
        self._theirs.close()

    def request(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # it is ending
            self._channel.send(message)

    def _tell(self, message: Message) -> None:
        self._link.send({**message, "rank": self.rank, "attempt": self.attempt})

    def _log(self, lines: list[str]) -> None:
        self._tell({"kind": "log", "lines": lines})
        while self._drops_no_line and self._link.waiting_bytes > MAX_LOG_BYTES and not self._over.wait(0.01):
            pass

    def _forward(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if message["kind"] in FORWARDED:
                    self._tell(message)
        except (EOFError, OSError, ProtocolError):
            return

    def stacks(self, wait_s: float = 2.0) -> str:
        """Python stacks of all its threads, written by faulthandler from the signal itself: no lock can keep it from
        that."""
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
        text = os.pread(self._stacks.fileno(), 200_000, before).decode("utf-8", "replace")
        return text or f"process {self.pid} is {state} and did not answer within {wait_s:g} s"

    def report_end(self, status: int | None) -> None:
        """Tell the driver how it ended, after everything it has said."""
        self._relay.join(timeout=2)
        self._pump.join(timeout=LAST_LINES_S if self._drops_no_line else 2)
        lost_memory = kernel_oom_kills() > self._oom_kills
        words = "was lost with its helper process" if status is None else describe_status(status, lost_memory)
        ended = {"status": status, "words": words, "was_killed": self.was_killed}
        self._tell({"kind": "ended", **ended, "last_lines": list(self._pump.last)})
        self.close()

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_RDWR)
        self._channel.sock.close()
        self._stacks.close()


def choose_interface(local_address: str, wanted: str | None) -> tuple[str, str]:
    """(IPv4 address, interface name) for the ring: the wanted interface, else the one whose address reached the
    driver."""
    found = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    if wanted is not None:
        if wanted not in found:
            raise ValueError(
                f"launch.interface = {wanted!r}: no such interface with an IPv4 address here; there are {found}"
            )
        return found[wanted], wanted
    for name, address in found.items():
        if address == local_address:
            return address, name
    raise ValueError(f"no interface has the address {local_address} that reached the driver; there are {found}")


def host_key(address: str) -> str:
    """An opaque name of what shares memory and loopback: machine, network namespace and address together."""
    parts = [socket.gethostname(), address]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/ipc"):
        try:
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            continue
    return "h" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
