"""Requests to a running attempt, and the group of agents as an attempt and its servers see it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol, TypeAlias

from sparkring.training.launch.channel.control_server import ControlServer
from sparkring.training.launch.failure import Cancelled
from sparkring.training.launch.messages import DumpStacks, KillChildren, StopTraining, ToDriver, WriteCheckpoint
from sparkring.training.launch.topology import AgentInfo

Request: TypeAlias = StopTraining | WriteCheckpoint | DumpStacks | KillChildren


class AgentGroup(Protocol):
    """What an attempt asks of the `WorkerGroup` that its agents belong to."""

    server: ControlServer

    def wait(
        self, is_done: Callable[[], bool], limit_s: float, on_message: Callable[[str, ToDriver | None], object] = ...
    ) -> bool: ...

    def note(self, agent: str, message: ToDriver | None) -> None: ...

    def trouble(self) -> str | None: ...

    def is_lost(self, agent: str, limit_s: float | None = ...) -> bool: ...

    def name_of(self, agent: AgentInfo) -> str: ...


class Control:
    """Requests to a running attempt, from any thread or signal handler."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.stopping = self.cancelled = False  # asked for, so no further attempt is wanted

    def checkpoint(self) -> None:
        """Make every rank write a checkpoint after the same step; ctx.should_checkpoint() is true once."""
        self.ask(WriteCheckpoint())

    def stop(self) -> None:
        """Make every rank end after the same step, with a checkpoint; ctx.should_stop() becomes true."""
        self.stopping = True
        self.ask(StopTraining())

    def dump(self) -> None:
        """Request the stacks of every rank as `Stacks` events."""
        self.ask(DumpStacks())

    def cancel(self) -> None:
        """Kill the ranks; the attempt raises Cancelled."""
        self.cancelled = True
        self.ask(KillChildren("rank"))

    def ask(self, request: Request) -> None:
        """Pass a request to the running attempt, without marking the job as stopping."""
        self._requests.put(request)

    def raise_if_ending(self, doing: str) -> None:
        """Raise Cancelled where an end is wanted while no rank runs: there is nothing to save."""
        if self.stopping or self.cancelled:
            raise Cancelled(f"cancelled while {doing}")

    def forget_planned(self) -> None:
        """Drop requests to end that are not the user's: the attempt they were meant for has ended."""
        for request in self.pending():
            if self.stopping or self.cancelled or not isinstance(request, StopTraining | KillChildren):
                self.ask(request)

    def pending(self) -> list[Request]:
        """Take all requests."""
        found = []
        while True:
            try:
                found.append(self._requests.get_nowait())
            except queue.Empty:
                return found
