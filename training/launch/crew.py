"""The driver's side of a launch: gather agents, seat ranks, follow one attempt to its end, find who failed first.

A crew outlives an attempt: the next one is forked from helpers that are warm already. Whoever brings the agents
(threads here, a barrier stage of Spark) creates the crew first and hands its endpoint to them.
"""

from __future__ import annotations

import base64
import logging
import math
import os
import resource
import time
from collections.abc import Callable
from typing import Any

from conf.rank_info import RankInfo
from training.launch.attempt import Attempt, Control, Limits, OnEvent
from training.launch.channel import Message
from training.launch.facts import reach_plan
from training.launch.failure import LaunchError, RankState
from training.launch.hub import Hub
from training.launch.job import JobResult, JobSpec
from training.launch.link import Endpoint
from training.launch.rendezvous import Store
from training.launch.worker_env import Seat, assign_ranks, choose_seats, rank_environment, visible_devices

log = logging.getLogger(__name__)
SPARE_DESCRIPTORS = 512  # strangers at the port, and whatever else the driver opens


class Crew:
    """Agents under one driver. Used as a context manager: at the end agents are told bye and the port is closed."""

    def __init__(
        self,
        host: str,
        addresses: tuple[str, ...] = (),
        run_id: str = "run",
        silence_timeout_s: float = 20.0,
    ):
        self._seats: dict[str, Seat] = {}
        self._hostnames: dict[str, str] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._checked: set[str] = set()
        self._run_id, self._silence_timeout_s = run_id, silence_timeout_s
        self._stores: dict[int, Store] = {}
        self._lost: set[str] = set()
        self.check: Callable[[Crew, list[Seat]], None] = lambda crew, seats: None  # before ranks first sit there
        self.trouble: Callable[[], str | None] = lambda: None  # why the agents' own carrier has failed, if it has
        self._hub = Hub(host, self._answer)
        self.endpoint = Endpoint(addresses or (host,), self._hub.port, self._hub.secret, self._hub.certificate)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seats(self) -> list[Seat]:
        """Of agents that can be given a rank now."""
        return [seat for agent, seat in self._seats.items() if agent not in self._lost]

    @property
    def lost_hosts(self) -> frozenset[str]:
        """Addresses and names of hosts whose agents have all fallen silent."""
        answering = {seat.address for seat in self.seats}
        lost = [seat for agent, seat in self._seats.items() if agent in self._lost and seat.address not in answering]
        return frozenset(name for seat in lost for name in (seat.address, self._hostnames[seat.agent]))

    @property
    def refused(self) -> int:
        """Connections by strangers that were sent away."""
        return self._hub.refused

    def dismiss(self) -> None:
        """Say bye to every agent that has offered a seat by now."""
        while received := self.next_message(0):
            self.note(*received)
        for agent in self._seats:
            self._hub.send(agent, {"kind": "bye"})

    def close(self) -> None:
        self.dismiss()
        deadline = time.monotonic() + 1.0 + len(self._seats) / 100
        while self._connected() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._hub.close()

    def _connected(self) -> bool:
        return any(self._hub.is_connected(agent) for agent in self._seats)

    async def _answer(self, message: Message) -> Message:
        """One request of a rank's Horovod to its attempt's store."""
        store = self._stores.get(message["attempt"])
        value = None
        if store is not None:
            value = await store.handle(message["method"], message["key"], base64.b64decode(message["value"]))
        text = None if value is None else base64.b64encode(value).decode()
        return {"kind": "value", "id": message["id"], "value": text}

    def gather(self, count: int, timeout_s: float, control: Control | None = None) -> None:
        """Wait until `count` agents offer seats; LaunchError says how many do. Cancelled where an end is asked for."""
        allow_descriptors(count)
        deadline = time.monotonic() + timeout_s
        while len(self.seats) < count:
            if control is not None:
                control.heed(f"{count - len(self.seats)} of {count} agents were waited for")
            if why := self.trouble():
                raise LaunchError(f"the agents could not be started: {why}")
            if time.monotonic() > deadline:
                raise LaunchError(f"{len(self.seats)} of {count} agents have reported within {timeout_s:g} s")
            if received := self.next_message(0.1):
                self.note(*received)

    def note(self, agent: str, message: Message | None) -> None:
        """What is said outside an attempt."""
        if message is not None and message["kind"] == "seat":
            self._seats[agent] = Seat.from_json(message["seat"])
            self._hostnames[agent] = message["hostname"]
            self._facts[agent] = {**message["facts"], "received": time.time()}

    def run(
        self,
        job: JobSpec,
        world: int,
        on_event: OnEvent,
        attempt: int = 1,
        control: Control | None = None,
        limits: Limits | None = None,
    ) -> JobResult:
        """One attempt on `world` of the seats. Raises WorkerFailed, LaunchError or Cancelled; no rank is left by
        then."""
        document = job.to_json()
        began = time.monotonic()
        limits = limits or Limits()
        self.gather(world, limits.start_s, control)
        seats = choose_seats(self.seats, world)
        if fresh := [seat for seat in seats if seat.agent not in self._checked]:
            self.check(self, seats)
            self._checked |= {seat.agent for seat in fresh}
        infos = assign_ranks([seat.host for seat in seats])
        self._stores = {attempt: Store()}
        states = [RankState(p.rank, s.agent, self.name_of(s)) for p, s in zip(infos, seats, strict=True)]
        try:
            by_host: dict[str, list[Seat]] = {}
            for seat in seats:
                by_host.setdefault(seat.host, []).append(seat)
            for rank_info, seat in zip(infos, seats, strict=True):
                self._start(document, rank_info, seat, seats[0], by_host[seat.host], attempt)
            return Attempt(self, states, attempt, on_event, control or Control(), began, limits).follow()
        finally:
            self._stores = {}

    def name_of(self, seat: Seat) -> str:
        return f"{self._hostnames.get(seat.agent, seat.host)} ({seat.address})"

    def facts_of(self, seat: Seat) -> dict[str, Any]:
        """What the agent has said of its host (facts.py), with `received`, the driver's time then."""
        return self._facts[seat.agent]

    def reach(self, seats: list[Seat], timeout_s: float = 10.0) -> dict[str, list[list[Any]]]:
        """Have the agents of these seats connect to others' (facts.reach_plan): agent -> [[address, port, why not]]."""
        waiting = {seat.agent for seat in seats}
        for seat, others in zip(seats, reach_plan(len(seats)), strict=True):
            peers = [[seats[other].address, seats[other].store_port] for other in others]
            self._hub.send(seat.agent, {"kind": "reach", "peers": peers})
        found: dict[str, list[list[Any]]] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            agent, message = self.next_message(0.1) or ("", None)
            if message is not None and message["kind"] == "reached":
                waiting.discard(agent)
                found[agent] = message["failed"]
            elif agent:
                self.note(agent, message)
        return found | {agent: [["its peers", 0, f"no answer within {timeout_s:g} s"]] for agent in waiting}

    def _start(
        self, job: dict[str, Any], rank_info: RankInfo, seat: Seat, master: Seat, neighbours: list[Seat], attempt: int
    ) -> None:
        devices = visible_devices(seat, neighbours, job["visible_devices"])
        env = rank_environment(rank_info, seat, master, attempt, job["collective_timeout_s"], self._run_id, devices)
        part = {key: job[key] for key in ("entry", "payload", "results")}
        document = {**part, "rank_info": rank_info.to_json(), "attempt": attempt, "env": {**env, **job["env"]}}
        self._hub.send(seat.agent, {"kind": "start", "attempt": attempt, "document": document})

    def tell(self, agent: str, kind: str) -> None:
        self._hub.send(agent, {"kind": kind})

    def why_over(self) -> str | None:
        """Why whoever carries the agents has ended; None while it has not."""
        return self.trouble()

    def is_connected(self, agent: str) -> bool:
        return self._hub.is_connected(agent)

    def left_at(self, agent: str) -> float:
        """Monotonic time at which the agent's connection ended; infinite while it stands."""
        return self._hub.left_at(agent)

    def is_lost(self, agent: str, limit_s: float | None = None) -> bool:
        """An agent not heard of for longer than the silence allowed, or `limit_s`; it is not used again."""
        if self._hub.silent_s(agent) > min(self._silence_timeout_s, limit_s or math.inf):
            self._lost.add(agent)
        return agent in self._lost

    def next_message(self, timeout_s: float) -> tuple[str, Message | None] | None:
        """The next (agent, message), None where nothing comes within the time; message None: it has disconnected."""
        return self._hub.take(timeout_s)

    def beats(self) -> dict[str, Message]:
        """The newest heartbeat by agent, of those that have sent one since the last call."""
        return self._hub.beats()

    def beat_of(self, agent: str) -> Message | None:
        """The same of one agent."""
        return self._hub.beat_of(agent)


def allow_descriptors(agents: int) -> None:
    """Raise the soft limit of open files to a connection per agent and more; LaunchError where the hard one is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + agents + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise LaunchError(
            f"{agents} agents need about {needed} open files in the driver, and its hard limit is {hard} "
            "(`ulimit -Hn`); raise it (LimitNOFILE= of systemd, /etc/security/limits.conf, --ulimit of the container)"
        )
    if needed > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def log_event(event: dict[str, Any]) -> None:
    """The callback of who gave none: lines of the ranks into the log, prefixed."""
    if event["kind"] == "log":
        for line in event["lines"]:
            log.info("[rank %d] %s", event["rank"], line)
    elif event["kind"] == "failure":
        log.error("rank %s on %s %s", event["rank"], event["host"], event["words"])
