"""One attempt as the driver follows it: from the start messages to the end of the last rank, and why it failed if it
did."""

from __future__ import annotations

import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from training.launch.channel import Message
from training.launch.failure import Cancelled, Failure, RankState, WorkerFailed, first_failure
from training.launch.job import JobResult
from training.launch.results import unpack
from training.launch.watch import Progress, StragglerWatch, hanging, name_culprit, waiting_for_work

log = logging.getLogger(__name__)
OnEvent = Callable[[dict[str, Any]], None]
SETTLE_S = 0.5  # after a first failure: time for the one that caused it to be heard
END_S = 10.0  # for killed ranks to be gone
NO_ANSWER_S = 5.0  # without a word of an agent told to kill its rank: then it is lost, and likely the cause
HELD_LINES = 100  # of each rank's output after a failure
DUMP_S = 4.0  # for the stacks of all ranks to arrive
LOOK_S = 0.2  # between looks at all ranks, however much they say meanwhile
HASTE_S = 0.05  # the same after a first failure


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    start_s: float = 120.0  # for all ranks to be started
    hang_s: float | None = None  # without progress of a rank that reports its steps; None: never a hang
    by_output: bool = False  # a line of output of any rank is progress of all: for scripts, which report no steps


class Agents(Protocol):
    """What an attempt needs of the crew."""

    def tell(self, agent: str, kind: str) -> None: ...
    def next_message(self, timeout_s: float) -> tuple[str, Message | None] | None: ...
    def beats(self) -> dict[str, Message]: ...
    def beat_of(self, agent: str) -> Message | None: ...
    def note(self, agent: str, message: Message | None) -> None: ...
    def is_lost(self, agent: str, limit_s: float | None = None) -> bool: ...
    def is_connected(self, agent: str) -> bool: ...
    def left_at(self, agent: str) -> float: ...
    def why_over(self) -> str | None: ...


class Control:
    """Requests to a running attempt, from any thread or signal handler."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stopping = self.cancelled = False  # asked for, so no further attempt is wanted

    def checkpoint(self) -> None:
        """Every rank's ctx.should_checkpoint() becomes true once."""
        self.ask("checkpoint")

    def stop(self) -> None:
        """Every rank's ctx.should_stop() becomes true: end as soon as all ranks see it, with a checkpoint."""
        self.stopping = True
        self.ask("stop")

    def dump(self) -> None:
        """Stacks of every rank come as events of kind `stacks`."""
        self.ask("dump")

    def cancel(self) -> None:
        """Kill the ranks; the attempt raises Cancelled."""
        self.cancelled = True
        self.ask("cancel")

    def ask(self, request: str) -> None:
        self._requests.put(request)

    def heed(self, doing: str) -> None:
        """For whoever waits while no rank runs: Cancelled where an end is wanted, for there is nothing to save."""
        if self.stopping or self.cancelled:
            raise Cancelled(f"cancelled while {doing}")

    def forget_planned(self) -> None:
        """Before an attempt: a stop that was not the user's, and came when the attempt it was meant for had ended."""
        for request in self.pending():
            if request != "stop" or self.stopping:
                self.ask(request)

    def pending(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self._requests.get_nowait())
            except queue.Empty:
                return found


class Attempt:
    """One attempt, from the start messages to the end of the last rank. `follow` is its whole life."""

    def __init__(
        self,
        crew: Agents,
        states: list[RankState],
        attempt: int,
        on_event: OnEvent,
        control: Control,
        began: float,
        limits: Limits,
    ):
        self._crew, self._states, self._attempt = crew, states, attempt
        self._on_event, self._control = on_event, control
        self._by_agent = {state.agent: state for state in states}
        self._alive = dict.fromkeys(state.rank for state in states)  # ranks that have not ended, in order
        self._unstarted = set(self._alive)
        self._failures: list[Failure] = []
        self._failed: set[int] = set()  # ranks with a failure
        self._first_failed: float | None = None
        self._killed = False
        self._began, self._limits, self._deadline = began, limits, time.monotonic() + limits.start_s
        self._slow = StragglerWatch(len(states))
        self._stacks: dict[int, str] = {}
        self._output_at: float | None = None  # last line of any rank, where lines are progress
        self._held: dict[int, deque[str]] = {}  # output since the first failure, mostly of its victims
        self._dump_until: float | None = None
        self._next_look, self._seen_waiting = 0.0, dict[int, float]()
        self._result = JobResult([None] * len(states), len(states), attempt)

    def follow(self) -> JobResult:
        try:
            next_look = 0.0
            while self._alive:
                received = self._crew.next_message(next_look - time.monotonic())
                if received is not None:
                    self._take(*received)
                if time.monotonic() >= next_look:
                    self._look()
                    next_look = time.monotonic() + (HASTE_S if self._first_failed else LOOK_S)
        except BaseException:  # Ctrl-C above all: no rank may outlive it
            self._kill()
            self._drain()
            raise
        assert self._failures or all(state.has_result for state in self._states), "a rank ended unnoticed"
        if self._failures:
            first = first_failure(self._failures)
            self._emit("failure", first.to_json())
            for rank, lines in self._held.items():
                self._emit("log" if rank == first.rank else "late_log", {"rank": rank, "lines": list(lines)})
            stacks = self._stacks if first.cause == "hang" else None
            raise WorkerFailed(first, [f for f in self._failures if f is not first], stacks)
        self._result.results = [unpack(state.result) for state in self._states]
        self._result.timings = self._slow.figure()
        self._result.run_s = time.monotonic() - self._began
        return self._result

    def _look(self) -> None:
        """What no message says: requests, silence, time that ran out."""
        for request in self._control.pending():
            if request == "cancel":
                raise Cancelled(f"attempt {self._attempt} was cancelled by the driver")
            self._tell_all(request)
        for agent, beat in self._crew.beats().items():
            self._beat(agent, beat)
        now = time.monotonic()
        self._look_for_lost(self._crew.why_over())
        if self._first_failed is None:
            self._look_for_hangs(now)
            if self._unstarted and now > self._deadline:
                late = self._states[min(self._unstarted)]
                words = f"did not start within {self._limits.start_s:g} s"
                self._fail(late, Failure(late.rank, late.host, "start", words), ended=False)
        elif not self._killed and now > self._first_failed + SETTLE_S:
            self._kill()
        elif now > self._first_failed + SETTLE_S + END_S:
            self._alive.clear()

    def _tell_all(self, kind: str) -> None:
        for rank in self._alive:
            self._crew.tell(self._states[rank].agent, kind)

    def _look_for_lost(self, over: str | None) -> None:
        """Agents that have fallen silent, or lost whoever carried them; the one that left first is told first."""
        limit_s = NO_ANSWER_S if self._killed else None
        alive = [self._states[rank] for rank in self._alive]
        missing = [s for s in alive if self._crew.is_lost(s.agent, limit_s) or over or s.rank in self._failed]
        for state in sorted(missing, key=lambda s: self._crew.left_at(s.agent)):
            gone = not self._crew.is_connected(state.agent)
            told = state.rank in self._failed
            if told and (gone or self._crew.is_lost(state.agent, limit_s)):  # one named as hanging may be lost, too
                self._over(state)
            elif not told:
                words = f"was lost with its agent: {over}" if over else "was lost: nothing is heard of its agent"
                failure = Failure(state.rank, state.host, "lost", words, step=state.step, phase=state.phase)
                # Where the agent is still there its rank is yet to be ended.
                self._fail(state, failure, ended=gone or not over)

    def _look_for_hangs(self, now: float) -> None:
        """No progress for the limit: ask every rank for its stacks, then name the one that is missing. A rank that is
        seen to wait for one that works has the limit again from then; it is looked at four times meanwhile."""
        if self._limits.hang_s is None:
            return
        running = [self._states[rank] for rank in self._alive if rank not in self._unstarted]
        output, known = self._output_at or 0.0, 0 if self._output_at else None
        if not any(now - max(state.progressed, output) > self._limits.hang_s for state in running):
            self._dump_until = None
            return
        ranks = [
            Progress(s.rank, s.host, known if s.step is None else s.step, s.phase, now - max(s.progressed, output))
            for s in running
        ]
        idle = hanging(ranks, self._limits.hang_s)
        if not idle or now < self._next_look:
            self._dump_until = None
            return
        if self._dump_until is None:
            self._dump_until, self._stacks = now + DUMP_S, {}
            self._tell_all("dump")
        if len(self._stacks) < len(ranks) and now < self._dump_until:
            return
        self._seen_waiting |= dict.fromkeys(waiting_for_work(ranks, self._stacks, self._limits.hang_s), now)
        if all(now - self._seen_waiting.get(rank.rank, -math.inf) <= self._limits.hang_s for rank in idle):
            self._next_look = now + self._limits.hang_s / 4
            return
        culprit, words = name_culprit(ranks, self._stacks)
        state = self._states[culprit]
        failure = Failure(culprit, state.host, "hang", words, step=state.step, phase=state.phase)
        self._fail(state, failure, ended=False)

    def _take(self, agent: str, message: Message | None) -> None:
        state = self._by_agent.get(agent)
        if state is None or message is None or message.get("attempt") != self._attempt:
            self._crew.note(agent, message)
            return
        if beat := self._crew.beat_of(agent):  # it came before: the step at which a rank ends must be its last
            self._beat(agent, beat)
        kind = message["kind"]
        if kind == "running":
            state.progressed = time.monotonic()
            self._unstarted.discard(state.rank)
            if not self._unstarted:
                self._result.start_s = time.monotonic() - self._began
                self._emit("started", {"world": len(self._states), "start_s": self._result.start_s})
        elif kind == "result":
            state.has_result, state.result = True, message
        elif kind == "error":
            state.error = message
            self._first_failed = self._first_failed or time.monotonic()
        elif kind == "ended":
            self._end(state, message)
        else:
            self._report(state, message)

    def _beat(self, agent: str, message: Message) -> None:
        state = self._by_agent.get(agent)
        if state is not None and message["attempt"] == self._attempt and state.rank in self._alive:
            self._progress(state, message["step"], message["phase"])
            self._emit("heartbeat", message)

    def _progress(self, state: RankState, step: int, phase: str) -> None:
        if (step, phase) != (state.step, state.phase):
            state.step, state.phase, state.progressed = step, phase, time.monotonic()

    def _report(self, state: RankState, message: Message) -> None:
        """Metrics, logs and events: kept where the result wants them, and passed on."""
        kind = message["kind"]
        if kind == "stacks":
            self._stacks[state.rank] = message["text"]
        if kind == "log" and self._limits.by_output:
            self._output_at = time.monotonic()
        if kind == "log" and self._first_failed is not None:
            self._held.setdefault(state.rank, deque(maxlen=HELD_LINES)).extend(message["lines"])
            return
        if kind == "metrics":
            if state.step is None or message["step"] > state.step:  # else a heartbeat has overtaken it
                self._progress(state, message["step"], state.phase)
            if state.rank == 0:
                self._result.metrics.append({"step": message["step"], "values": message["values"]})
            for slow in self._slow.add(state.rank, message["step"], message["values"]):
                slow["host"] = self._states[slow["rank"]].host
                log.warning("straggler: rank %(rank)d on %(host)s is busy for %(busy_s).3f s a step", slow)
                self._emit("straggler", slow)
        self._emit(kind, message)

    def _end(self, state: RankState, message: Message) -> None:
        failure = state.failure(message)
        if failure is None or (message["was_killed"] and not state.error):
            self._over(state)  # a rank ended by us says nothing of itself, unless it had failed before
        else:
            self._fail(state, failure)  # also after our order to end: the cause may be heard after its consequences
        self._emit("ended", {"rank": state.rank, "words": message.get("words", ""), "status": message.get("status")})

    def _fail(self, state: RankState, failure: Failure, ended: bool = True) -> None:
        self._failures.append(failure)
        self._failed.add(state.rank)
        if ended:
            self._over(state)
        self._first_failed = self._first_failed or time.monotonic()

    def _over(self, state: RankState) -> None:
        self._alive.pop(state.rank, None)

    def _kill(self) -> None:
        self._killed = True
        self._tell_all("kill")

    def _drain(self) -> None:
        deadline = time.monotonic() + END_S
        for state in self._states:
            if not self._crew.is_connected(state.agent):
                self._over(state)
        while self._alive and time.monotonic() < deadline:
            agent, message = self._crew.next_message(0.1) or ("", None)
            if agent in self._by_agent and (message is None or message["kind"] == "ended"):
                self._over(self._by_agent[agent])

    def _emit(self, kind: str, data: dict[str, Any]) -> None:
        """To the caller; its own errors are logged and never end training."""
        try:
            self._on_event({**data, "kind": kind, "attempt": self._attempt})
        except Exception:
            log.exception("on_event failed for an event of kind %r", kind)
