"""Attempt after attempt, in one Spark application or on hosts that have joined, until the job has ended.

Within a stage the next attempt is forked from warm fork servers. A stage that lost an executor is over as a whole (that
is what a barrier means), and the next attempt gets a new one, on the slots that are left.
`sparkring.training.launch.restart` decides, this file acts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.plain_text import count_of
from sparkring.training.launch.attempt import Limits
from sparkring.training.launch.control import Control
from sparkring.training.launch.events import OnEvent
from sparkring.training.launch.failure import Cancelled, LaunchError, PreflightError, WorkerFailed
from sparkring.training.launch.group import WorkerGroup, log_event
from sparkring.training.launch.job import JobResult, JobSpec
from sparkring.training.launch.messages import (
    AttemptEnded,
    ChildEvent,
    Event,
    Heartbeat,
    KillChildren,
    Recovered,
    StopTraining,
)
from sparkring.training.launch.restart import (
    REQUESTED,
    AttemptOutcome,
    Decision,
    RestartPolicy,
    best_world,
    cool_until,
    decide,
    steps_lost,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkring.pipelines.launch.barrier import LaunchOptions

log = logging.getLogger(__name__)
WATCH_S = 0.5
ROOM_POLL_S = 0.2  # between counts of the slots while more may come
SLOTS_WAIT_S = 15.0  # for slots to come, before fewer ranks are used


def restart_policy(
    launch: LaunchConfig, multiple_of: int = 1, fits: Callable[[int], bool] = lambda world: True
) -> RestartPolicy:
    """Read the restarts of a recipe's `launch` block. `multiple_of`, `fits`: worlds that are possible."""
    return RestartPolicy(
        launch.world,
        launch.min_world,
        launch.max_attempts,
        launch.backoff_s,
        launch.max_backoff_s,
        room_wait_s=launch.hosts_wait_s,
        grace_s=launch.grace_s,
        multiple_of=multiple_of,
        fits=fits,
    )


def launch_limits(launch: LaunchConfig) -> Limits:
    """Read how long an attempt of a recipe's `launch` block may take to start, and stand still."""
    return Limits(launch.start_timeout_s, launch.hang_timeout_s)


@dataclass(frozen=True)
class RestartableJob:
    """A job that continues from its last checkpoint."""

    make_job: Callable[[int, int], JobSpec]  # (attempt, world) -> what the ranks run
    policy: RestartPolicy
    latest_step: Callable[[], int | None] = lambda: None  # of the last checkpoint
    is_finished: Callable[[JobResult], bool] = lambda result: True  # else an end is tried again
    first_attempt: int = 1


@dataclass(frozen=True)
class Platform:
    """Where attempts run."""

    slots: Callable[[], int]  # room for how many ranks
    open_group: Callable[[int, tuple[str, ...]], AbstractContextManager[WorkerGroup]]  # (world, preload) -> agents
    leaving: Callable[[], frozenset[str]] = frozenset  # hosts that are about to leave: they get no new agents
    has_ended: Callable[[], bool] = lambda: False  # whether no more slots can come
    give_up: Callable[[frozenset[str]], None] = lambda hosts: None  # hosts that fell silent: they are no more room


def spark_platform(spark: SparkSession, options: LaunchOptions) -> Platform:
    from sparkring.etl.spark_platform.application import has_ended
    from sparkring.etl.spark_platform.executors import decommissioning, replace_executors
    from sparkring.pipelines.launch.barrier import barrier_group
    from sparkring.pipelines.launch.preflight import slots

    return Platform(
        slots=lambda: slots(spark, options.profile),
        open_group=lambda world, preload: barrier_group(spark, world, preload, options),
        leaving=lambda: decommissioning(spark),
        has_ended=lambda: has_ended(spark),
        give_up=lambda hosts: replace_executors(spark, hosts),
    )


def run_with_recovery(
    spark: SparkSession,
    job: RestartableJob,
    on_event: OnEvent = log_event,
    control: Control | None = None,
    options: LaunchOptions | None = None,
) -> JobResult:
    """Run a job until it returns a result that is finished; see Recovery for the rest.

    Args:
        spark: session whose executors run the ranks.
        job: how to make each attempt's job, and when to try again.
        on_event: called with every Event.
        control: requests to the ranks, from other threads.
        options: interface, output, resources, limits.
    """
    from sparkring.pipelines.launch.barrier import LaunchOptions
    from sparkring.pipelines.launch.preflight import SlotRequest, check_slots

    options = options or LaunchOptions()
    policy = job.policy
    check_slots(spark, SlotRequest(policy.world, policy.min_world, options.profile, options.room_wait_s), control)
    return Recovery(spark_platform(spark, options), job, on_event, control, options.limits).run()


class Recovery:
    """The loop over attempts.

    Raises what the last attempt raised when the decision is to stop: WorkerFailed, LaunchError or Cancelled. Besides
    the attempts' own events it emits AttemptEnded and Recovered.
    """

    def __init__(
        self,
        platform: Platform,
        job: RestartableJob,
        on_event: OnEvent,
        control: Control | None = None,
        limits: Limits | None = None,
        slots_wait_s: float | None = None,
    ):
        """Prepare the first attempt.

        Args:
            platform: platform that runs attempts.
            job: how to make each attempt's job, and when to try again.
            on_event: called with every Event.
            control: requests to the ranks, from other threads.
            limits: limits of each attempt.
            slots_wait_s: seconds to wait for slots before using fewer ranks; None for SLOTS_WAIT_S.
        """
        self._platform, self._job, self._policy = platform, job, job.policy
        self._on_event, self._control = on_event, control or Control()
        self._limits = limits or Limits()
        self._slots_wait_s = SLOTS_WAIT_S if slots_wait_s is None else slots_wait_s
        self._history: list[AttemptOutcome] = []
        self._group: WorkerGroup | None = None
        self._left: frozenset[str] = frozenset()  # hosts that were leaving when the group was opened: not in it
        self._world = 0  # of the running attempt
        self._step: int | None = None  # last one of the running attempt
        self._stepped_at = 0.0  # monotonic time of the last heartbeat
        self._broken_since: float | None = None  # the last step before the first failure in a row
        self._planned: str | None = None  # why we have asked the running attempt to end
        self._stack = ExitStack()

    def run(self) -> JobResult:
        attempt, world = self._job.first_attempt, self._first_world()
        if world < self._policy.world:
            log.warning(
                "launch.world = %d: there is room for fewer, so training begins on %d", self._policy.world, world
            )
        with self._stack:
            while True:
                from_step = self._job.latest_step() or 0
                problem: WorkerFailed | LaunchError | None = None
                try:
                    result = self._attempt(attempt, world)
                except (WorkerFailed, LaunchError) as error:
                    self._broken_since = self._broken_since or self._stepped_at or time.monotonic()
                    if self._control.stopping:
                        raise  # the user wants an end, not another attempt
                    outcome, problem = outcome_of(error, attempt, world, from_step), error
                except Cancelled:
                    if self._planned is None or self._control.stopping or self._control.cancelled:
                        raise
                    outcome = AttemptOutcome(attempt, world, self._planned, from_step, self._step)
                else:
                    if self._job.is_finished(result) or self._control.stopping:
                        return result
                    # An end nobody asked for is no result: tried again, and counted as a failure.
                    outcome = AttemptOutcome(attempt, world, self._planned or "unfinished", from_step)
                words = problem.failure.headline if isinstance(problem, WorkerFailed) else str(problem or outcome.cause)
                decision = self._decide(replace(outcome, lost_hosts=self._lost_hosts(), at=time.monotonic()), words)
                self._report(outcome, decision, words)
                if decision.action == "stop":
                    raise problem or LaunchError(decision.why)
                self._wait(decision.wait_s)
                attempt, world = attempt + 1, decision.world

    def _first_world(self) -> int:
        """Return the wanted world, or what fits if executors do not come within the wait."""
        deadline = time.monotonic() + self._slots_wait_s
        while (world := best_world(self._platform.slots(), self._policy)) < self._policy.world:
            if time.monotonic() > deadline:
                return world or self._policy.world  # too few even for the least: the launch says so
            self._wait(ROOM_POLL_S)
        return world

    def _attempt(self, attempt: int, world: int) -> JobResult:
        job = self._job.make_job(attempt, world)
        job = replace(job, env={"TORCHELASTIC_MAX_RESTARTS": str(self._policy.max_attempts - 1), **job.env})
        group = self._usable_group(world, job.preload)
        self._planned, self._world, self._step = None, world, None
        self._control.forget_planned()
        with self._watching():
            return group.run(job, world, self._on_attempt_event, attempt, self._control, limits=self._limits)

    def _usable_group(self, world: int, preload: tuple[str, ...]) -> WorkerGroup:
        """Return the previous attempt's group if it runs with an agent per rank, else a new one."""
        if self._group is not None and self._group.trouble() is None and len(self._group.agents) >= world:
            return self._group
        self._close_group()
        self._left = self._platform.leaving()
        self._group = self._stack.enter_context(self._platform.open_group(world, preload))
        return self._group

    def _close_group(self) -> None:
        self._group = None
        self._stack.close()

    def _decide(self, outcome: AttemptOutcome, words: str) -> Decision:
        """Wait a little for slots to return before deciding for fewer ranks, and longer where none may be fewer.

        Not for those of a host that fell silent, where fewer ranks will do. A stop for another reason needs no slots.

        A host that leaves goes when nothing of ours is on it any more, so a group that has an agent there is closed; so
        is one on a host that fell silent, whose task Spark would notice, and end the stage for, much later.
        """
        self._history.append(outcome)
        leaves = outcome.cause == "decommission" or outcome.lost_hosts
        if self._group is not None and (leaves or self._group.trouble() is not None):
            self._close_group()
        self._platform.give_up(outcome.lost_hosts)
        is_hopeless = decide(self._history, self._policy.world, self._policy).action == "stop"
        began, is_said = time.monotonic(), False
        while True:
            decision = decide(self._history, self._platform.slots(), self._policy)
            lacks_room = decision.action == "stop"
            if is_hopeless or decision.world == self._policy.world or (lacks_room and self._platform.has_ended()):
                return decision
            if not lacks_room and (outcome.cause in REQUESTED or outcome.lost_hosts):
                return decision
            limit_s = max(self._slots_wait_s, self._policy.room_wait_s) if lacks_room else self._slots_wait_s
            if time.monotonic() > began + limit_s:
                return decision
            if lacks_room and not is_said:
                line = "attempt %d has failed: %s; %s; waiting launch.hosts_wait_s = %g s for more"
                log.warning(line, outcome.attempt, words, decision.why, self._policy.room_wait_s)
                is_said = True
            self._wait(ROOM_POLL_S)

    def _lost_hosts(self) -> frozenset[str]:
        return self._group.lost_hosts if self._group is not None else frozenset()

    def _wait(self, seconds: float) -> None:
        """Sleep, but not through a cancel or a stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._control.raise_if_ending("no attempt was running")
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Watch for hosts that are about to leave, while an attempt runs."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="sparkring-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=5)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(WATCH_S) and self._planned is None:
            with contextlib.suppress(Exception):  # the JVM is ending; the attempt notices that too
                if self._platform.leaving() - self._left and not over.is_set():
                    self._end_for("decommission")
        if self._planned == "decommission" and not over.wait(self._policy.grace_s):
            log.warning("decommission: the ranks have not ended within %g s (launch.grace_s)", self._policy.grace_s)
            self._control.ask(KillChildren("rank"))

    def _end_for(self, reason: str) -> None:
        log.warning("%s: asking the ranks for a checkpoint and their end", reason)
        self._planned = reason
        self._control.ask(StopTraining())

    def _on_attempt_event(self, event: Event) -> None:
        if isinstance(event, Heartbeat):
            self._step, self._stepped_at = event.step, time.monotonic()
            if self._broken_since is not None and event.step > self._history[-1].from_step:
                recover_s, self._broken_since = self._stepped_at - self._broken_since, None
                self._on_event(Recovered(event.attempt, recover_s))
        if isinstance(event, ChildEvent) and event.name == "checkpoint" and self._should_grow():
            self._end_for("grow")
        self._on_event(event)

    def _should_grow(self) -> bool:
        """Return whether an attempt on too few ranks should end at this checkpoint, to restart with more."""
        if self._world >= self._policy.world or self._planned is not None:
            return False
        if time.monotonic() < cool_until(self._history, self._policy):
            return False
        return best_world(self._platform.slots(), self._policy) > self._world

    def _report(self, outcome: AttemptOutcome, decision: Decision, words: str) -> None:
        saved = self._job.latest_step() or 0
        log.warning("attempt %d ended: %s; %s", outcome.attempt, words, what_follows(decision, saved))
        event = AttemptEnded(
            attempt=outcome.attempt,
            world=outcome.world,
            cause=outcome.cause,
            words=words,
            step=outcome.step,
            steps_lost=steps_lost(outcome.step, saved),
            decision=decision.action,
            next_world=decision.world,
            why=decision.why,
        )
        try:
            self._on_event(event)
        except Exception:
            log.exception("on_event failed for AttemptEnded")


def what_follows(decision: Decision, saved: int) -> str:
    """Describe the decision for a person; `saved` is the step of the last checkpoint."""
    if decision.action == "stop":
        return f"no other attempt: {decision.why}"
    start = f"from the checkpoint of step {saved}" if saved else "from the start"
    return f"going on with {count_of(decision.world, 'rank')} in {decision.wait_s:.0f} s, {start}"


def outcome_of(error: WorkerFailed | LaunchError, attempt: int, world: int, from_step: int) -> AttemptOutcome:
    """Describe a failed attempt for the policy."""
    if isinstance(error, LaunchError):
        cause = "preflight" if isinstance(error, PreflightError) else "start"
        return AttemptOutcome(attempt, world, cause, from_step, message=str(error))
    failure = error.failure
    return AttemptOutcome(
        attempt,
        world,
        failure.cause,
        from_step,
        step=failure.step,
        error_type=failure.error_type,
        message=failure.message or failure.words,
        is_value_error=failure.is_value_error,
    )
