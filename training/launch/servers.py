"""The server processes of one attempt, as the driver sees them: started before the ranks, ended after them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from sparkring.conf.plain_text import count_of
from sparkring.training.launch.child import ChildState
from sparkring.training.launch.control import AgentGroup, Control
from sparkring.training.launch.events import OnEvent, emit
from sparkring.training.launch.failure import Failure, LaunchError, WorkerFailed
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.messages import (
    ChildEnded,
    ChildError,
    ChildEvent,
    ChildFailed,
    Entry,
    FromChild,
    KillChildren,
    LogLines,
    ServerAddress,
    ServerReady,
    ServerStart,
    StartChild,
    ToDriver,
)
from sparkring.training.launch.topology import AgentInfo, Child

END_S = 10.0  # for killed servers to be gone


@dataclass
class ServerState(ChildState):
    """What the driver knows of one server."""

    address: str = ""  # of its agent
    ready: ServerReady | None = None
    has_ended: bool = False

    def failure(self, ended: ChildEnded) -> Failure:
        """Make the failure that its end is while ranks need it."""
        words = "returned before the ranks had ended" if ended.status == 0 else ended.words
        raised = self.raised(ended, "exception")
        return raised or self.failed("server", words, last_lines=ended.last_lines)


class Servers:
    """The first agent of each host runs `job.servers_per_host` of them, numbered host by host."""

    def __init__(self, group: AgentGroup, job: JobSpec, agents: list[AgentInfo], attempt: int, on_event: OnEvent):
        """Choose where servers run.

        Args:
            group: group with the agents that run them.
            job: job with the servers' entry and number.
            agents: those of the ranks, in rank order.
            attempt: number, from 1.
            on_event: called with every Event of a server.
        """
        self._group, self._job, self._attempt, self._on_event = group, job, attempt, on_event
        self._world = len(agents)
        firsts = {agent.host_key: agent for agent in reversed(agents)}
        places = [agent for agent in agents if agent is firsts[agent.host_key]] * job.servers_per_host
        places.sort(key=agents.index)
        self._states = [
            ServerState(Child("server", i), agent.name, group.name_of(agent), address=agent.address)
            for i, agent in enumerate(places)
        ]
        self._killed = False
        self.secret = secrets.token_hex(32) if places else ""

    @property
    def addresses(self) -> tuple[ServerAddress, ...]:
        """Where they listen, by index, once all are ready."""
        return tuple(ServerAddress(s.ready.address, s.ready.port) for s in self._states if s.ready is not None)

    def start(self, limit_s: float, control: Control) -> None:
        """Start them and wait until all are ready.

        Raises WorkerFailed where one ends before, LaunchError where one is not ready in time, and Cancelled.
        """
        payload = self._job.checked_payload() if self._states else {}
        for state in self._states:
            start = StartChild(
                child=state.child,
                attempt=self._attempt,
                entry=Entry("name", self._job.server_entry),
                payload=payload,
                env=dict(self._job.env),
                server=ServerStart(len(self._states), self._world, state.address),
                server_secret=self.secret,
            )
            self._group.server.send(state.agent, start)

        def late() -> list[ServerState]:
            return [state for state in self._states if state.ready is None]

        def is_done() -> bool:
            if late():
                control.raise_if_ending(f"{len(late())} of {count_of(len(self._states), 'server was')} waited for")
                self._raise(self.lost())
            return not late()

        if not self._group.wait(is_done, limit_s, lambda _, message: self._raise(self.on_message(message))):
            raise LaunchError(
                f"{late()[0].child} on {late()[0].host} was not ready within {limit_s:g} s; its function calls "
                "ctx.ready(port) when it listens"
            )

    def _raise(self, failure: Failure | None) -> None:
        if failure is not None:
            emit(self._on_event, ChildFailed(failure.child, self._attempt, failure))
            raise WorkerFailed(failure)

    def on_message(self, message: ToDriver | None) -> Failure | None:
        """Take a message, if it is of a server; a failure where one has ended that ranks need."""
        if not isinstance(message, FromChild) or message.child.role != "server":
            return None
        if message.attempt != self._attempt or not 0 <= message.child.index < len(self._states):
            return None
        state = self._states[message.child.index]
        match message:
            case ServerReady():
                state.ready = message
            case ChildError():
                state.error = message
            case LogLines() | ChildEvent():
                emit(self._on_event, message)
            case ChildEnded():
                state.has_ended = True
                emit(self._on_event, message)
                if not (self._killed or message.was_killed):
                    return state.failure(message)
        return None

    def lost(self) -> Failure | None:
        """Return a failure if a server's agent is silent for too long, or its platform has ended."""
        for state in self._states:
            trouble = self._group.trouble()
            if not state.has_ended and (trouble or self._group.is_lost(state.agent)):
                state.has_ended = True
                words = f"was lost with its agent: {trouble or 'nothing is heard of it'}"
                return state.failure(ChildEnded(state.child, self._attempt, None, words))
        return None

    def stop(self) -> None:
        """Kill them, and wait until they are gone."""
        running = [state for state in self._states if not state.has_ended]
        self._killed = True
        for agent in {state.agent for state in running}:
            self._group.server.send(agent, KillChildren("server"))
        self._group.wait(lambda: all(map(self._is_over, running)), END_S, lambda _, message: self.on_message(message))

    def _is_over(self, state: ServerState) -> bool:
        return state.has_ended or not self._group.server.is_connected(state.agent)
