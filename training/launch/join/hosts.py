"""Hosts that come by themselves: each was started with the same command, and knows where host 0 is (placement.py).

Host 0 is the driver: it listens where the others look for it, waits until all have come, and refuses those that were
started with something else. Every host, host 0 too, runs the agents of its ranks as threads. A host that comes later
takes the place of one that was lost; training grows onto it at a checkpoint.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sparkring.conf.plain_text import count_of
from sparkring.training.launch.channel.control_client import Endpoint
from sparkring.training.launch.channel.tls import shared_certificate
from sparkring.training.launch.failure import LaunchError, PreflightError
from sparkring.training.launch.group import SharedPort, WorkerGroup
from sparkring.training.launch.host.agent import Agent, AgentOptions, DriverGone
from sparkring.training.launch.host.info import collect_host_info, problems
from sparkring.training.launch.host.processes import usable_cores
from sparkring.training.launch.host.shared_imports import shared_imports
from sparkring.training.launch.join.placement import ALONE, Placement
from sparkring.training.launch.messages import AgentReady, Bye, Joined
from sparkring.training.launch.topology import AgentInfo

log = logging.getLogger(__name__)
REFUSED = 5  # exit code of a host that is sent away: RESOURCES of pipelines/run/exit_codes.py
LOOPBACK = ALONE.address
OWN_PORT = "give each job its own MASTER_PORT, or launch.port"
FAREWELL_S = 10.0  # since host 0 listens, for which it stays to tell the others why the job does not begin
ALIVE_S = 2.0  # since an agent was heard of, within which no other can have been started in its place
CLOSE_S = 15.0  # for the agents of this host to end
Check = Callable[[WorkerGroup, list[AgentInfo]], None]


@dataclass(frozen=True)
class JoinOptions:
    """How a host joins. Seconds end in `_s`."""

    placement: Placement
    recipe: str  # digest of what was resolved here, and of the user's modules
    dataset: str  # fingerprint
    problem: str  # what keeps this host from running ranks; empty: nothing
    ranks: int  # that this host has room for
    preload: tuple[str, ...]
    secret: str | None = field(default=None, repr=False)  # that all hosts know; None: there is one host
    wait_s: float = 300.0  # for all hosts to come
    silence_timeout_s: float = 20.0
    interface: str | None = None
    lines_per_s: float | None = 200.0
    process: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def joined(self) -> Joined:
        return Joined(self.placement.rank, self.process, self.recipe, self.dataset, self.problem)


class HostAgents:
    """The agents of one host, each in a thread, until the driver says bye."""

    def __init__(self, options: JoinOptions, endpoint: Endpoint):
        self._agents: list[Agent] = []
        self._left = False
        self._byes: list[Bye] = []
        self._running, self._lock, self._all_ended = options.ranks, threading.Lock(), threading.Event()
        self.error: Exception | None = None  # of the first agent that could not continue
        threads_per_rank = max(1, usable_cores() // options.ranks)
        self._options = AgentOptions(
            endpoint,
            {"OMP_NUM_THREADS": str(threads_per_rank), **os.environ},
            options.preload,
            options.interface,
            lines_per_s=options.lines_per_s,
            joined=options.joined,
            wait_s=options.wait_s,
        )
        gpus = visible_gpus(os.environ)
        for slot in range(options.ranks):
            own = share(gpus, options.ranks, slot)
            threading.Thread(target=self._run, args=(options, slot, own), name="sparkring-agent", daemon=True).start()

    def _run(self, options: JoinOptions, slot: int, gpus: tuple[str, ...]) -> None:
        index = options.placement.rank * options.ranks + slot
        sharing = shared_imports(self._options.environment) if options.ranks > 1 else nullcontext()
        try:
            with sharing:
                agent = Agent(self._options, index, agent_name(options, slot), gpus)
                self._agents.append(agent)
                if self._left:
                    agent.leave()
                self._byes.append(agent.run())
        except (OSError, ValueError) as error:  # ConnectionErrors above all
            self.error = self.error or error
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._all_ended.set()

    @property
    def have_come(self) -> bool:
        """Whether one has found the driver."""
        return bool(self._agents)

    def leave(self) -> None:
        """Tell the driver that this host is about to go."""
        self._left = True
        for agent in [*self._agents]:
            agent.leave()

    def wait(self, limit_s: float) -> bool:
        """Wait for the end of all agents; False where `limit_s` seconds pass before.

        Not by Thread.join: where a signal's handler raises in it, Python 3.11 takes the thread to have ended.
        """
        return self._all_ended.wait(limit_s)

    def result(self) -> Bye:
        """Return the driver's last message. LaunchError if the agents ended without it."""
        if self.error is not None:
            where = "; look at the log of host 0" if isinstance(self.error, DriverGone) else ""
            raise LaunchError(f"{self.error}{where}") from self.error
        return next((bye for bye in self._byes if bye.code), Bye())


def agent_name(options: JoinOptions, slot: int) -> str:
    """Return the name of an agent of this host; TLS takes it for the name of a server."""
    return f"host{options.placement.rank}-{slot}-{options.process[:8]}"


def rank_of(agent: str) -> int | None:
    """Read the rank of a host from the name of one of its agents."""
    found = re.match(r"host(\d+)-", agent)
    return int(found[1]) if found else None


def join_driver(options: JoinOptions) -> HostAgents:
    """Start the agents of a host that is not host 0."""
    place = options.placement
    assert options.secret is not None
    if is_loopback(place.address):
        raise LaunchError(
            f"MASTER_ADDR = {place.address!r}: leads host {place.rank} to itself; set it to an address of the first "
            "host that the others reach"
        )
    _, certificate, secret = shared_certificate(options.secret)
    return HostAgents(options, Endpoint((place.address,), place.port, secret, certificate))


class JoinedHosts:
    """The driver's view of the hosts: who has come, and room for how many ranks they have."""

    def __init__(self, options: JoinOptions, group: WorkerGroup, own: HostAgents):
        self._options, self._group, self._own = options, group, own
        self._accepted: set[str] = set()
        self._named: set[str] = set()  # addresses of hosts with another secret
        self._end, self._stays = Bye(REFUSED, "the driver has failed"), False
        self._began = time.monotonic()

    def gather(self, least: int) -> None:
        """Wait for all hosts; PreflightError where they were started with different things.

        `least`: ranks to begin with where some hosts do not come in time. LaunchError names these where there is room
        for fewer.
        """
        options = self._options
        self._group.wait(self._have_all_come, options.wait_s)
        if self.missing():
            late = self._why_missing()
            if options.placement.rank in self.missing():
                late += (
                    f"; host 0 does not reach itself at {options.placement.address}: set MASTER_ADDR to its own address"
                )
            if (room := len(self._here())) < least:
                raise LaunchError(
                    f"{late}; there is room for {count_of(room, 'rank')}, and {least} must fit (launch.min_world)"
                )
            log.warning("%s; training begins on the others", late)
        agents = self._group.agents
        self._accepted |= {agent.name for agent in agents}  # those that come while these are checked are late
        self._group.on_ready = self._check_late
        self._group.check_new(agents)

    def _have_all_come(self) -> bool:
        if (bye := self._own.result()).why:  # another driver has sent our own agents away
            raise LaunchError(bye.why)
        self._name_strangers()
        ready = self._here()
        if found := [*doubles(ready, self._options.placement), *self.differences(ready)]:
            lines = "\n".join(f"  - {line}" for line in found)
            raise PreflightError(f"the hosts do not fit together:\n{lines}\nWhere one is another job's, {OWN_PORT}")
        return not self.missing()

    def _strangers(self) -> dict[int, str]:
        """Return addresses, by rank, of hosts that called with another secret."""
        found = ((rank_of(name), address) for name, address in [*self._group.server.other_secret.items()])
        return {rank: address for rank, address in found if rank is not None}

    def _name_strangers(self) -> None:
        """Log each address from which a host with another secret has called, once."""
        for rank, address in self._strangers().items():
            if address not in self._named:
                self._named.add(address)
                log.warning(
                    "a host with another secret, %s, tried to join from %s, and has ended: set SPARKRING_SECRET there "
                    "to that of host 0, and start it again; where it is another job's, %s",
                    self._options.placement.name_of(rank), address, OWN_PORT,
                )  # fmt: skip

    def _why_missing(self) -> str:
        """Describe which hosts are missing, and why as far as it is known."""
        strangers, name_of = self._strangers(), self._options.placement.name_of
        refused = [f"{name_of(rank)} at {strangers[rank]}" for rank in self.missing() if rank in strangers]
        late = [name_of(rank) for rank in self.missing() if rank not in strangers]
        secret = f"{', '.join(refused)}: another SPARKRING_SECRET than host 0; give all of a job the same; {OWN_PORT}"
        waited = f"{', '.join(late)}: not here within launch.hosts_wait_s = {self._options.wait_s:g} s"
        return "; ".join([secret] * bool(refused) + [waited] * bool(late))

    def missing(self) -> list[int]:
        """List the ranks of hosts that lack some of their agents."""
        return self._absent(self._here())

    def _absent(self, ready: Sequence[AgentReady]) -> list[int]:
        """List the ranks of hosts that do not have all their agents among these."""
        ranks = [each.joined.rank for each in ready if each.joined is not None]
        return [rank for rank in range(self._options.placement.count) if ranks.count(rank) < self._options.ranks]

    def _here(self) -> list[AgentReady]:
        """List the agents that are ready and connected."""
        return [each for each in self._group.ready if self._group.server.is_connected(each.agent.name)]

    def differences(self, ready: Sequence[AgentReady]) -> list[str]:
        """List what hosts were started with that host 0 was not, a line for each of a host."""
        mine, driver = self._options.joined, collect_host_info()
        found: dict[str, None] = {}
        for each in ready:
            name = self._group.name_of(each.agent)
            host, skew_s = self._group.host_of(each.agent)
            found |= dict.fromkeys([*unequal(name, mine, each.joined), *problems(driver, {name: host}, {name: skew_s})])
        return [*found]

    def slots(self) -> int:
        """Count the ranks that fit on hosts that answer."""
        self._group.look()
        self._name_strangers()
        self._judge_late()
        return len([each for each in self._here() if not self._group.is_lost(each.agent.name)])

    def _check_late(self, ready: AgentReady) -> None:
        """Send a late host away at once: one started with something else, or with the number of one that answers."""
        if ready.agent.name in self._accepted:
            return
        server = self._group.server
        here = [one for one in self._here() if one.agent.name in self._accepted]
        alive = [one for one in here if server.silent_s(one.agent.name) < ALIVE_S]
        if why := self.differences([ready]) or doubles([*alive, ready], self._options.placement):
            self._refuse(ready, why)

    def _judge_late(self) -> None:
        """Accept hosts that have come since, or send them away if their number is another's.

        Not as soon as they come, but where that one answers: it may be lost, and not yet known to be.
        """
        for each in [one for one in self._group.ready if one.agent.name not in self._accepted]:
            here = [one for one in self._here() if one.agent.name in self._accepted]
            if why := doubles([*here, each], self._options.placement):
                self._refuse(each, why)
            else:
                log.info("%s has come", self._group.name_of(each.agent))
                self._accepted.add(each.agent.name)

    def _refuse(self, ready: AgentReady, why: Sequence[str]) -> None:
        words = "; ".join([*why, f"where this is another job's, {OWN_PORT}"])
        log.warning("a host has come, and is sent away: %s", words)
        self._group.refuse(ready.agent.name, Bye(REFUSED, words))

    @property
    def leaving(self) -> frozenset[str]:
        """Agents whose hosts are about to go."""
        return frozenset(self._group.leaving)

    @contextmanager
    def open_group(self, world: int, preload: tuple[str, ...]) -> Iterator[WorkerGroup]:
        """Give the group for the next attempts, without the hosts that are gone; the others' agents stay."""
        self._group.forget_gone()
        yield self._group

    def end(self, code: int, why: str = "", stays: bool = False) -> None:
        """Decide with what exit code, and what words, the other hosts end.

        `stays`: whether a job that has not begun waits a moment for hosts that have never come, to tell them.
        """
        self._end, self._stays = Bye(code, why), stays

    def close(self) -> None:
        """Send all hosts away, one that came in vain with the reason."""
        if self._accepted:  # else training has not begun, and `_end` says why
            self._judge_late()
        deadline = time.monotonic() + CLOSE_S
        while not self._own.wait(0.02) and time.monotonic() < deadline:
            self._group.dismiss(self._end)  # again: an agent may become ready only now
        while self._is_awaited() and time.monotonic() < self._began + FAREWELL_S:
            time.sleep(0.05)
            self._group.dismiss(self._end)
        self._group.close(self._end)

    def _is_awaited(self) -> bool:
        """Return whether an uninformed host may still come, before the job starts."""
        informed = {*self._strangers()}
        return self._stays and not self._accepted and not informed.issuperset(self._absent(self._group.ready))


@contextmanager
def joined_hosts(options: JoinOptions, check: Check) -> Iterator[JoinedHosts]:
    """Run host 0: listen for the others, and run the agents of this host. `check` as of WorkerGroup."""
    place = options.placement
    bind, address = driver_addresses(place)
    shared = SharedPort(place.port, options.secret)
    try:
        group = WorkerGroup(bind, (address,), "sparkring", options.silence_timeout_s, check=check, shared=shared)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise LaunchError(
            f"port {place.port} of {bind}: another process listens there, such as another job with this MASTER_PORT, "
            f"or one more of this job with {place.rank_key} = 0; {OWN_PORT}, and each host its own {place.rank_key}"
        ) from error
    hosts = JoinedHosts(options, group, HostAgents(options, group.endpoint))
    try:
        yield hosts
    finally:
        hosts.close()


def driver_addresses(place: Placement) -> tuple[str, str]:
    """Choose (address to listen on, address by which this host's own agents reach it).

    The second decides which interface the ring takes on this host, so it is never the loopback where there are others.
    """
    if place.count == 1:
        return LOOPBACK, LOOPBACK
    found = resolved(place.address)
    if found and not is_loopback(found):
        return (found if found in own_addresses() else any_address(found)), place.address
    own = resolved(socket.gethostname())
    if not own or is_loopback(own):
        raise LaunchError(
            f"MASTER_ADDR = {place.address!r}: leads other hosts nowhere, and the name of this one, "
            f"{socket.gethostname()!r}, has no other address; set MASTER_ADDR to one that the others reach"
        )
    return own, own


def any_address(address: str) -> str:
    """Return the address that stands for all of this host's, of the same family."""
    return "::" if ":" in address else "0.0.0.0"


def resolved(name: str) -> str:
    """Resolve a name to an address; '' where it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def is_loopback(address: str) -> bool:
    found = resolved(address)
    return bool(found) and ipaddress.ip_address(found.partition("%")[0]).is_loopback


def own_addresses() -> set[str]:
    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


def doubles(ready: Sequence[AgentReady], place: Placement) -> list[str]:
    """List the ranks that more than one host was given."""
    hosts: dict[int, dict[str, str]] = {}
    for each in ready:
        if each.joined is not None:
            hosts.setdefault(each.joined.rank, {})[each.joined.process] = f"{each.hostname} ({each.agent.address})"
    return [
        f"{place.rank_key} = {rank}: given to {' and '.join(sorted(names.values()))}; give each host its own"
        for rank, names in sorted(hosts.items())
        if len(names) > 1
    ]


def unequal(name: str, mine: Joined, theirs: Joined | None) -> list[str]:
    """Describe what a host was started with that this one was not."""
    if theirs is None:
        return [f"{name}: was not started as a host that joins"]
    if theirs.problem:
        return [f"{name}: {theirs.problem}"]
    words = {
        "recipe": "another recipe, other overrides or other modules of yours than host 0; start the same command, with "
        "the same files, on every host",
        "dataset": "another dataset than host 0; give every host the same dataset=URI",
    }
    return [f"{name}: has {text}" for key, text in words.items() if getattr(mine, key) != getattr(theirs, key)]


def visible_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    """List the GPUs that this process may use: by CUDA_VISIBLE_DEVICES, else all of the host."""
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(gpu.strip() for gpu in named.split(",") if gpu.strip())
    return tuple(str(index) for index in range(len([*Path("/dev").glob("nvidia[0-9]*")])))


def share(gpus: Sequence[str], ranks: int, slot: int) -> tuple[str, ...]:
    """Return the GPUs of one of a host's ranks, equally many for each; () with fewer GPUs than ranks."""
    each = len(gpus) // ranks
    return tuple(gpus[slot * each : (slot + 1) * each])
