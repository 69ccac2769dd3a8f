"""The driver's side of a launch: gather agents, start ranks on them, follow one attempt to its end.

A group outlives an attempt: the next one is forked from fork servers that are warm already. The group is made first;
its endpoint is handed to what starts the agents: threads (local.py) or a barrier stage of Spark.
"""

from __future__ import annotations

import base64
import logging
import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from sparkring.conf.plain_text import count_of
from sparkring.training.launch.attempt import Attempt, Limits, RankState, Replacing
from sparkring.training.launch.channel.control_client import Endpoint
from sparkring.training.launch.channel.control_server import ControlServer
from sparkring.training.launch.channel.rendezvous import Store
from sparkring.training.launch.control import Control
from sparkring.training.launch.events import OnEvent
from sparkring.training.launch.failure import LaunchError
from sparkring.training.launch.host.info import HostInfo
from sparkring.training.launch.job import JobResult, JobSpec
from sparkring.training.launch.messages import (
    MAX_PEERS,
    AgentLeaving,
    AgentReady,
    Bye,
    ChildFailed,
    Event,
    LogLines,
    Peer,
    PeerFailure,
    PeersReached,
    RankStart,
    ReachPeers,
    StartChild,
    StoreReply,
    StoreRequest,
    ToDriver,
)
from sparkring.training.launch.servers import Servers
from sparkring.training.launch.topology import (
    AgentInfo,
    Child,
    Rendezvous,
    assign_ranks,
    choose_agents,
    rank_environment,
    reach_plan,
    visible_devices,
)

log = logging.getLogger(__name__)
POLL_S = 0.1  # between looks at what is waited for, where no message comes
SPARE_DESCRIPTORS = 512  # for unauthenticated connections, and whatever else the driver opens


def log_event(event: Event) -> None:
    """Log rank output with a prefix (default event callback)."""
    if isinstance(event, LogLines):
        for line in event.lines:
            log.info("[%s] %s", event.child, line)
    elif isinstance(event, ChildFailed):
        log.error("%s on %s %s", event.child, event.failure.host, event.failure.words)


@dataclass(frozen=True)
class SharedPort:
    """What agents that come by themselves know before: the driver's port, and a secret."""

    port: int  # 0: any free one
    secret: str | None  # None: a new one

    def __repr__(self) -> str:
        return f"SharedPort({self.port})"  # never the secret


class WorkerGroup:
    """Agents under one driver. As a context manager it ends the agents and closes the port at its end."""

    def __init__(
        self,
        host: str,
        addresses: tuple[str, ...] = (),
        run_id: str = "run",
        silence_timeout_s: float = 20.0,
        trouble: Callable[[], str | None] = lambda: None,
        check: Callable[[WorkerGroup, list[AgentInfo]], None] = lambda group, agents: None,
        shared: SharedPort | None = None,
    ):
        """Listen for agents.

        Args:
            host: address of the interface to listen on.
            addresses: by which agents reach it, tried in order; (): `host`.
            run_id: for torch's elastic variables.
            silence_timeout_s: without anything from an agent, after which it is lost.
            trouble: says why what runs the agents has failed, if it has.
            check: raises LaunchError where ranks would fail on these agents; called before their first rank.
            shared: for agents that come by themselves; None: a free port and a new secret.
        """
        self.trouble = trouble
        self._check = check
        self._agents: dict[str, AgentReady] = {}
        self._skews_s: dict[str, float] = {}  # by agent: how far its clock was ahead of ours
        self._checked: set[str] = set()
        self._lost: set[str] = set()
        self.leaving: set[str] = set()  # agents whose hosts are about to go
        self.on_ready: Callable[[AgentReady], object] = lambda ready: None  # called as soon as an agent has come
        self._is_running = False  # an attempt, which takes the messages
        self._run_id, self._silence_timeout_s = run_id, silence_timeout_s
        self._stores: dict[int, Store] = {}  # by attempt
        shared = shared or SharedPort(0, None)
        self.server = ControlServer(host, self._answer, shared.port, shared.secret)
        reached = tuple(address.strip("[]") for address in addresses or (host,))  # Spark's brackets around IPv6
        self.endpoint = Endpoint(reached, self.server.port, self.server.secret, self.server.certificate)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def agents(self) -> list[AgentInfo]:
        """Agents that can be given a rank now."""
        return [ready.agent for ready in self.ready]

    @property
    def ready(self) -> list[AgentReady]:
        """The reports of agents that can be given a rank now."""
        gone = self._lost | self.leaving
        return [ready for name, ready in self._agents.items() if name not in gone]

    @property
    def lost_hosts(self) -> frozenset[str]:
        """Addresses and names of hosts whose agents have all fallen silent."""
        answering = {agent.address for agent in self.agents}
        lost = [self._agents[name] for name in self._lost if name in self._agents]
        lost = [ready for ready in lost if ready.agent.address not in answering]
        return frozenset(name for ready in lost for name in (ready.agent.address, ready.hostname))

    def look(self) -> None:
        """Take note of what has come since the last attempt; while one runs it does that itself."""
        while not self._is_running and (received := self.server.take(0)):
            self.note(*received)

    def dismiss(self, bye: Bye | None = None) -> None:
        """Send a goodbye to every agent that is ready by now."""
        self.look()
        for agent in self._agents:
            self.server.send(agent, bye or Bye())

    def refuse(self, agent: str, bye: Bye) -> None:
        """Send an agent away; it is not used again, and no host is taken to be lost with it."""
        self.server.send(agent, bye)
        self._agents.pop(agent, None)
        self._lost.discard(agent)
        self.leaving.discard(agent)

    def forget_gone(self) -> None:
        """Send away the agents whose hosts leave, and forget those that were lost."""
        for agent in [*self.leaving, *self._lost]:
            self.refuse(agent, Bye())

    def close(self, bye: Bye | None = None) -> None:
        self.dismiss(bye)
        deadline = time.monotonic() + 1.0 + len(self._agents) / 100
        while any(map(self.server.is_connected, self._agents)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.server.close()

    async def _answer(self, request: StoreRequest) -> StoreReply:
        """Make the attempt's store answer a request of a rank's Horovod."""
        store = self._stores.get(request.attempt)
        value = None
        if store is not None:
            value = await store.handle(request.method, request.key, base64.b64decode(request.value))
        return StoreReply(request.id, None if value is None else base64.b64encode(value).decode())

    def gather(self, count: int, timeout_s: float, control: Control | None = None) -> None:
        """Wait until `count` agents are ready; LaunchError says how many are. Cancelled where an end is asked for."""
        allow_descriptors(count)

        def is_done() -> bool:
            if len(self.agents) >= count:
                return True
            if control is not None:
                control.raise_if_ending(f"{count - len(self.agents)} of {count_of(count, 'agent')} had not come")
            if why := self.trouble():
                raise LaunchError(f"the agents could not be started: {why}")
            return False

        if not self.wait(is_done, timeout_s):
            raise LaunchError(f"{len(self.agents)} of {count_of(count, 'agent')} reported within {timeout_s:g} s")

    def wait(
        self,
        is_done: Callable[[], bool],
        limit_s: float,
        on_message: Callable[[str, ToDriver | None], object] = lambda agent, message: None,
    ) -> bool:
        """Pass what agents send to `on_message` until `is_done`; False when `limit_s` have passed before.

        `on_message` takes (agent, message), None for a lost connection. Both functions may raise.
        """
        deadline = time.monotonic() + limit_s
        while not is_done():
            if time.monotonic() > deadline:
                return False
            if received := self.server.take(POLL_S):
                self.note(*received)
                on_message(*received)
        return True

    def note(self, agent: str, message: ToDriver | None) -> None:
        """Take note of an agent that is ready."""
        if isinstance(message, AgentReady):
            self._agents[agent] = message
            self._skews_s[agent] = message.host.time_s - time.time()
            self.on_ready(message)
        elif isinstance(message, AgentLeaving):
            self.leaving.add(agent)

    def run(
        self,
        job: JobSpec,
        world: int,
        on_event: OnEvent = log_event,
        attempt: int = 1,
        control: Control | None = None,
        limits: Limits | None = None,
    ) -> JobResult:
        """Run one attempt. Raises WorkerFailed, LaunchError or Cancelled; no rank and no server is left by then.

        Args:
            job: what every rank runs.
            world: number of ranks; each takes one agent.
            on_event: called with every Event.
            attempt: number, from 1; none is used twice on one group.
            control: requests to the attempt, from other threads.
            limits: seconds for the start and without progress.
        """
        entry, payload = job.describe_entry(), job.checked_payload()
        began = time.monotonic()
        limits, control = limits or Limits(), control or Control()
        self.gather(world, limits.start_s, control)
        agents = choose_agents(self.agents, world)
        self.check_new(agents)
        by_host: dict[str, list[AgentInfo]] = {}
        for agent in agents:
            by_host.setdefault(agent.host_key, []).append(agent)
        infos = assign_ranks([agent.host_key for agent in agents])
        states = [RankState(Child("rank", i.rank), a.name, self.name_of(a)) for i, a in zip(infos, agents, strict=True)]
        rendezvous = Rendezvous(self._run_id, attempt, agents[0], job.collective_timeout_s)
        self._stores = {attempt: Store()}
        servers = Servers(self, job, agents, attempt, on_event)

        def start_rank(rank: int, replacement: int = 0) -> None:
            info, agent = infos[rank], agents[rank]
            devices = visible_devices(agent, by_host[agent.host_key], job.devices)
            env = rank_environment(info, agent, rendezvous, devices) | dict(job.env)
            of_rank = RankStart(info, job.results, servers.addresses, replacement)
            start = StartChild(
                states[rank].child, attempt, entry, payload, env, rank=of_rank, server_secret=servers.secret
            )
            self.server.send(agent.name, start)

        replacing = Replacing(start_rank, job.max_replacements) if job.replaceable_ranks else None
        self._is_running = True
        try:
            servers.start(limits.start_s, control)
            for rank in range(world):
                start_rank(rank)
            return Attempt(self, states, attempt, on_event, control, limits, servers, replacing).follow(began)
        finally:
            servers.stop()
            self._stores, self._is_running = {}, False

    def check_new(self, agents: list[AgentInfo]) -> None:
        """Check agents, unless all of them were checked before."""
        if fresh := {agent.name for agent in agents} - self._checked:
            self._check(self, agents)
            self._checked |= fresh

    def name_of(self, agent: AgentInfo) -> str:
        """Name the host of an agent, for people."""
        return f"{self._agents[agent.name].hostname} ({agent.address})"

    def host_of(self, agent: AgentInfo) -> tuple[HostInfo, float]:
        """Return (agent's report on its host, seconds its clock was ahead of ours)."""
        return self._agents[agent.name].host, self._skews_s[agent.name]

    def reach(self, agents: list[AgentInfo], timeout_s: float = 10.0) -> dict[str, tuple[PeerFailure, ...]]:
        """Make these agents connect to each other, by topology.reach_plan: agent -> peers it could not reach."""
        waiting = {agent.name for agent in agents}
        for agent, others in zip(agents, reach_plan(len(agents), MAX_PEERS), strict=True):
            peers = tuple(Peer(agents[other].address, agents[other].store_port) for other in others)
            self.server.send(agent.name, ReachPeers(peers))
        found: dict[str, tuple[PeerFailure, ...]] = {}

        def on_message(agent: str, message: ToDriver | None) -> None:
            if isinstance(message, PeersReached):
                waiting.discard(agent)
                found[agent] = message.failed

        self.wait(lambda: not waiting, timeout_s, on_message)
        return found | {name: (PeerFailure("its peers", 0, f"no answer within {timeout_s:g} s"),) for name in waiting}

    def is_lost(self, agent: str, limit_s: float | None = None) -> bool:
        """Return whether an agent was silent for the timeout, or `limit_s`; it is not used again."""
        if self.server.silent_s(agent) > min(self._silence_timeout_s, limit_s or math.inf):
            self._lost.add(agent)
        return agent in self._lost


def allow_descriptors(agents: int) -> None:
    """Raise the soft limit of open files to a connection per agent and more.

    LaunchError where the hard limit is less.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + agents + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise LaunchError(
            f"{count_of(agents, 'agent needs')} about {needed} open files in the driver, and its hard limit is {hard} "
            "(`ulimit -Hn`); raise it (LimitNOFILE= of systemd, /etc/security/limits.conf, --ulimit of the container)"
        )
    if needed > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
