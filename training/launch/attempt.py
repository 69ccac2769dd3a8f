"""One attempt as the driver follows it, from the first start to the last end."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sparkring.training.launch.child import ChildState
from sparkring.training.launch.control import AgentGroup, Control, Request
from sparkring.training.launch.cuts import Cuts, Orders
from sparkring.training.launch.events import OnEvent, emit
from sparkring.training.launch.failure import (
    Cancelled,
    Failure,
    WorkerFailed,
    because_of_death,
    cause_of,
    first_failure,
)
from sparkring.training.launch.health import HangDetector, RankProgress, StragglerDetector
from sparkring.training.launch.job import JobResult
from sparkring.training.launch.means import MeanMerger
from sparkring.training.launch.messages import (
    AttemptStarted,
    CheckpointWanted,
    ChildEnded,
    ChildError,
    ChildEvent,
    ChildFailed,
    CutOffered,
    DumpStacks,
    Event,
    FromChild,
    FromRank,
    Heartbeat,
    KillChildren,
    LateLogLines,
    LogLines,
    RankMetrics,
    RankReplaced,
    RankResult,
    RankRunning,
    Stacks,
    StopTraining,
    Straggler,
    ToDriver,
    WriteCheckpoint,
)
from sparkring.training.launch.restart import ReplacementLimit
from sparkring.training.launch.results import unpack
from sparkring.training.launch.servers import Servers

log = logging.getLogger(__name__)
SETTLE_S = 0.5  # after a first failure: time for the one that caused it to arrive
END_S = 10.0  # for killed ranks to be gone
NO_ANSWER_S = 5.0  # without anything from an agent that must kill its rank: then it is lost, and likely the cause
HELD_LINES = 100  # of each rank's output after a failure
CHECK_S = 0.2  # between checks of all ranks, however many messages they send meanwhile
CHECK_AFTER_FAILURE_S = 0.05


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    start_s: float = 120.0  # for all ranks to be started
    hang_s: float | None = None  # without progress of a rank that reports its steps; None: never a hang
    by_output: bool = False  # a line of output of any rank is progress of all: for scripts, which report no steps


@dataclass(frozen=True)
class Replacing:
    """How the ranks of an attempt are replaced."""

    start: Callable[[int, int], None]  # (rank, replacement): start the rank's next process
    max_in_a_row: int


@dataclass
class Waiting:
    """A rank whose process has died, until the next one runs."""

    replacement: int
    since: float  # monotonic time


@dataclass
class RankState(ChildState):
    """What the driver knows of one rank of the running attempt."""

    result: RankResult | None = None
    progress_at: float = 0.0  # monotonic time of the last change of step or phase

    @property
    def rank(self) -> int:
        return self.child.index

    def on_progress(self, step: int, phase: str) -> None:
        if (step, phase) != (self.step, self.phase):
            self.step, self.phase, self.progress_at = step, phase, time.monotonic()

    def failure(self, ended: ChildEnded) -> Failure | None:
        """Make the failure that its end is; None where it has returned."""
        status, words, lines = ended.status, ended.words, ended.last_lines
        if self.error is not None:
            return self.raised(ended, cause_of(self.error.error_type, self.error.message))
        if status == 0 and self.result is not None:
            return None
        if status == 0:
            return self.failed("exit", "exited with code 0 without returning from its entry", last_lines=lines)
        if status is None:
            return self.failed("lost", words, last_lines=lines)
        if status > 0:
            return self.failed("exit", words, last_lines=lines)
        return self.failed("memory" if "out of memory" in words else "signal", words, last_lines=lines)


class Attempt:
    """One attempt, from the start messages to the end of the last rank. `follow` is its whole life."""

    def __init__(
        self,
        group: AgentGroup,
        states: list[RankState],
        attempt: int,
        on_event: OnEvent,
        control: Control,
        limits: Limits,
        servers: Servers | None = None,
        replacing: Replacing | None = None,
    ):
        """Follow ranks that are being started.

        Args:
            group: group with the agents that run them.
            states: one per rank, in rank order.
            attempt: number, from 1.
            on_event: called with every Event, from the driver's thread; its errors are logged.
            control: requests to this attempt.
            limits: seconds for the start and without progress.
            servers: servers that the ranks need, if any.
            replacing: replacement of dead ranks; None ends the attempt with the first rank that dies.
        """
        self._parameter_servers, self._replacing = servers, replacing
        self._dead: dict[int, Waiting] = {}  # by rank
        self._deaths: dict[int, Failure] = {}  # by rank: the one that had come furthest
        self._replacements = ReplacementLimit(replacing.max_in_a_row if replacing else 0)
        self._group, self._control_server = group, group.server
        self._states, self._attempt = states, attempt
        self._on_event, self._control, self._limits = on_event, control, limits
        self._by_agent = {state.agent: state for state in states}
        self._alive = dict.fromkeys(state.rank for state in states)  # ranks that have not ended, in order
        self._unstarted = set(self._alive)
        self._failures: list[Failure] = []
        self._failed: set[int] = set()  # ranks with a failure
        self._first_failed_at: float | None = None
        self._killed = False
        self._began = time.monotonic()
        self._deadline = self._began + limits.start_s
        self._cuts, self._means = Cuts(self._alive), MeanMerger(len(states))
        self._stragglers = StragglerDetector(len(states))
        self._hangs = HangDetector(limits.hang_s)
        self._output_at: float | None = None  # last line of any rank, where lines are progress
        self._held: dict[int, deque[str]] = {}  # output since the first failure, mostly of its victims
        self._result = JobResult([None] * len(states), len(states), attempt)

    def follow(self, began: float | None = None) -> JobResult:
        """Wait for the end of all ranks. `began`: monotonic time from which the start is measured."""
        self._began = self._began if began is None else began
        try:
            next_check = 0.0
            while self._alive:
                received = self._control_server.take(next_check - time.monotonic())
                if received is not None:
                    self._take(*received)
                self._obey()
                if time.monotonic() >= next_check:
                    self._check()
                    next_check = time.monotonic() + (CHECK_AFTER_FAILURE_S if self._first_failed_at else CHECK_S)
        except BaseException:  # Ctrl-C above all: no rank may outlive it
            self._kill()
            self._wait_for_killed()
            raise
        if self._failures:
            self._raise_failure()
        results = [state.result for state in self._states if state.result is not None]
        assert len(results) == len(self._states), "a rank ended unnoticed"
        self._result.results = [unpack(result) for result in results]
        self._result.timings = self._stragglers.figure()
        self._result.run_s = time.monotonic() - self._began
        return self._result

    def _raise_failure(self) -> None:
        first = first_failure(self._failures)
        self._emit(ChildFailed(first.child, self._attempt, first))
        for rank, lines in self._held.items():
            child, text = self._states[rank].child, tuple(lines)
            is_first = child == first.child
            self._emit(LogLines(child, self._attempt, text) if is_first else LateLogLines(rank, self._attempt, text))
        stacks = self._hangs.stacks if first.cause == "hang" else None
        raise WorkerFailed(first, [f for f in self._failures if f is not first], stacks)

    def _obey(self) -> None:
        """Pass on what was asked for meanwhile, by the callback above all."""
        for request in self._control.pending():
            if isinstance(request, KillChildren):
                raise Cancelled(f"attempt {self._attempt} was cancelled by the driver")
            self._send_all(request)
            if isinstance(request, StopTraining | WriteCheckpoint):
                is_stop = isinstance(request, StopTraining)
                self._send_each(self._cuts.ask(stop=is_stop, checkpoint=not is_stop))

    def _check(self) -> None:
        """Detect failures that send no message: silent agents and timeouts."""
        for agent, heartbeat in self._control_server.heartbeats().items():
            self._heartbeat(agent, heartbeat)
        now = time.monotonic()
        self._check_lost(self._group.trouble())
        if self._parameter_servers is not None and (failure := self._parameter_servers.lost()):
            self._note_failure(failure)
        if self._first_failed_at is None:
            self._check_hangs(now)
            if self._unstarted and now > self._deadline:
                late = self._states[min(self._unstarted)]
                words = f"did not start within {self._limits.start_s:g} s"
                self._fail(late, Failure(late.child, late.host, "start", words), ended=False)
            for rank, dead in self._dead.items():
                if now > dead.since + self._limits.start_s:
                    words = f"died, and its next process did not start within {self._limits.start_s:g} s"
                    self._fail(self._states[rank], self._states[rank].failed("start", words), ended=False)
        elif not self._killed and now > self._first_failed_at + SETTLE_S:
            self._kill()
        elif now > self._first_failed_at + SETTLE_S + END_S:
            self._alive.clear()

    def _send_all(self, message: Request) -> None:
        for rank in self._alive:
            self._control_server.send(self._states[rank].agent, message)

    def _send_each(self, orders: Orders) -> None:
        for rank, message in orders:
            self._control_server.send(self._states[rank].agent, message)

    def _check_lost(self, trouble: str | None) -> None:
        """Find agents that are silent, or whose carrier has ended; the one that left first fails first."""
        limit_s = NO_ANSWER_S if self._killed else None
        alive = [self._states[rank] for rank in self._alive]
        missing = [s for s in alive if self._group.is_lost(s.agent, limit_s) or trouble or s.rank in self._failed]
        for state in sorted(missing, key=lambda s: self._control_server.left_at(s.agent)):
            gone = not self._control_server.is_connected(state.agent)
            has_failed = state.rank in self._failed
            if has_failed and (gone or self._group.is_lost(state.agent, limit_s)):  # one that hangs may be lost, too
                self._over(state)
            elif not has_failed:
                words = f"was lost with its agent: {trouble}" if trouble else "was lost: nothing is heard of its agent"
                # Where the agent is still there its rank is yet to be ended.
                self._fail(state, state.failed("lost", words), ended=gone or not trouble)

    def _check_hangs(self, now: float) -> None:
        limit_s = self._limits.hang_s
        if limit_s is None:
            return
        starting = self._unstarted | self._dead.keys()
        running = [self._states[rank] for rank in self._alive if rank not in starting]
        output_at, known_step = self._output_at or 0.0, 0 if self._output_at else None
        if not any(now - max(state.progress_at, output_at) > limit_s for state in running):
            return self._hangs.reset()
        ranks = [
            RankProgress(
                s.rank, s.host, known_step if s.step is None else s.step, s.phase, now - max(s.progress_at, output_at)
            )
            for s in running
        ]
        culprit = self._hangs.check(ranks, now, lambda: self._send_all(DumpStacks()))
        if culprit is not None:
            state = self._states[culprit[0]]
            self._fail(state, state.failed("hang", culprit[1]), ended=False)
        return None

    def _take(self, agent: str, message: ToDriver | None) -> None:
        if not isinstance(message, FromChild | FromRank) or message.attempt != self._attempt:
            return self._group.note(agent, message)
        if isinstance(message, FromChild) and message.child.role == "server":
            if self._parameter_servers is not None and (failure := self._parameter_servers.on_message(message)):
                self._note_failure(failure)
            return None
        state = self._by_agent.get(agent)
        if state is None or state.child != message.child:
            return None
        if heartbeat := self._control_server.heartbeat_of(
            agent
        ):  # sent before: the step at which a rank ends must be its last
            self._heartbeat(agent, heartbeat)
        match message:
            case RankRunning():
                self._running(state)
            case RankResult():
                state.result = message
            case ChildError():
                state.error = message
                self._first_failed_at = self._first_failed_at or time.monotonic()
            case ChildEnded():
                self._end(state, message)
            case Stacks():
                self._hangs.stacks[state.rank] = message.text
                self._emit(message)
            case LogLines():
                self._log(state, message)
            case RankMetrics():
                self._metrics(state, message)
            case CutOffered():
                self._send_each(self._cuts.offered(state.rank, message.number, message.step))
            case CheckpointWanted():
                self._send_each(self._cuts.ask(stop=False, checkpoint=True))
            case ChildEvent():
                self._emit(message)
        return None

    def _running(self, state: RankState) -> None:
        state.progress_at = time.monotonic()
        if dead := self._dead.pop(state.rank, None):
            took_s = time.monotonic() - dead.since
            return self._emit(RankReplaced(state.rank, self._attempt, dead.replacement, took_s))
        self._unstarted.discard(state.rank)
        if not self._unstarted:
            self._result.start_s = time.monotonic() - self._began
            self._emit(AttemptStarted(self._attempt, len(self._states), self._result.start_s))
        return None

    def _heartbeat(self, agent: str, heartbeat: Heartbeat) -> None:
        state = self._by_agent.get(agent)
        if state is not None and heartbeat.attempt == self._attempt and state.rank in self._alive:
            state.on_progress(heartbeat.step, heartbeat.phase)
            self._emit(heartbeat)

    def _log(self, state: RankState, message: LogLines) -> None:
        if self._limits.by_output:
            self._output_at = time.monotonic()
        if self._first_failed_at is not None:
            self._held.setdefault(state.rank, deque(maxlen=HELD_LINES)).extend(message.lines)
        else:
            self._emit(message)

    def _metrics(self, state: RankState, message: RankMetrics) -> None:
        if state.step is None or message.step > state.step:  # else a heartbeat has overtaken it
            state.on_progress(message.step, state.phase)
        timing = message.timing
        new = [] if timing is None else self._stragglers.add(state.rank, message.step, timing)
        for slow, busy_s, others_wait_s in new:
            host = self._states[slow].host
            log.warning("straggler: rank %d on %s is busy for %.3f s a step", slow, host, busy_s)
            self._emit(Straggler(slow, self._attempt, host, message.step, busy_s, others_wait_s))
        for shown in self._means.add(message):
            if shown.rank == 0:
                self._result.metrics.append(shown)
            self._emit(shown)

    def _end(self, state: RankState, ended: ChildEnded) -> None:
        failure = state.failure(ended)
        if failure is None or (ended.was_killed and state.error is None):
            self._over(state)  # a rank that we ended has not failed
            self._send_each(self._cuts.returned(state.rank))
        elif self._is_replaced(state, failure):
            self._replace(state, failure)
        else:
            failure = because_of_death(failure, self._deaths.get(state.rank))
            self._fail(state, failure)  # also after our order to end: the cause may arrive after its consequences
        self._emit(ended)

    def _is_replaced(self, state: RankState, failure: Failure) -> bool:
        """Return whether to restart a rank that ended: its process died, and nothing else is wrong."""
        died = failure.cause in ("signal", "memory", "lost")
        if self._replacing is None or not died or self._first_failed_at is not None:
            return False
        return self._replacements.allows(state.rank, state.step)

    def _replace(self, state: RankState, failure: Failure) -> None:
        assert self._replacing is not None
        number = self._replacements.count(state.rank)
        log.warning("%s; the others go on, and its process number %d is started", failure.headline, number + 1)
        began = self._dead[state.rank].since if state.rank in self._dead else time.monotonic()
        self._dead[state.rank] = Waiting(number, began)
        furthest = self._deaths.setdefault(state.rank, failure)  # the next process may die as it begins
        if (failure.step or 0) >= (furthest.step or 0):
            self._deaths[state.rank] = failure
        state.result = None
        self._replacing.start(state.rank, number)
        self._send_each(self._cuts.replaced(state.rank, state.step or 0))

    def _fail(self, state: RankState, failure: Failure, ended: bool = True) -> None:
        self._failed.add(state.rank)
        if ended:
            self._over(state)
        self._note_failure(failure)

    def _note_failure(self, failure: Failure) -> None:
        self._failures.append(failure)
        self._first_failed_at = self._first_failed_at or time.monotonic()

    def _over(self, state: RankState) -> None:
        self._alive.pop(state.rank, None)

    def _kill(self) -> None:
        self._killed = True
        self._send_all(KillChildren("rank"))

    def _wait_for_killed(self) -> None:
        def on_message(agent: str, message: ToDriver | None) -> None:
            state = self._by_agent.get(agent)
            is_end = isinstance(message, ChildEnded) and state is not None and message.child == state.child
            if state is not None and (message is None or is_end):
                self._over(state)

        for state in self._states:
            if not self._control_server.is_connected(state.agent):
                self._over(state)
        self._group.wait(lambda: not self._alive, END_S, on_message)

    def _emit(self, event: Event) -> None:
        emit(self._on_event, event)
