"""Attempt after attempt, in one Spark application, until the job has ended or nothing is left to try.

Within a stage the next attempt is forked from warm helpers. A stage that lost an executor is over as a whole (that is
what a barrier means), and the next attempt gets a new one, on whatever slots are left. `training.launch.elastic`
decides, this file acts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import SparkSession

from pipelines.launch.barrier import StageOptions, barrier_crew
from pipelines.launch.preflight import check_slots, slots
from training.launch.attempt import Control, Limits, OnEvent
from training.launch.crew import Crew, log_event
from training.launch.elastic import (
    PLANNED,
    Decision,
    Ended,
    Policy,
    best_world,
    cool_until,
    decide,
    should_grow,
    steps_lost,
)
from training.launch.failure import LaunchError, PreflightError, WorkerFailed
from training.launch.job import JobResult, JobSpec
from training.launch.local import local_crew

log = logging.getLogger(__name__)
WATCH_S = 0.5


@dataclass(frozen=True)
class Platform:
    """Where attempts run: room for how many ranks, agents for a world with what their helpers import, the hosts that
    are about to leave (none of them is given an agent any more), and how hosts that fell silent are given up (they are
    no more room, until they are heard of again)."""

    slots: Callable[[], int]
    open_crew: Callable[[int, tuple[str, ...]], AbstractContextManager[Crew]]
    leaving: Callable[[], frozenset[str]] = frozenset
    give_up: Callable[[frozenset[str]], None] = lambda hosts: None


def spark_platform(spark: SparkSession, options: StageOptions) -> Platform:
    sc = spark.sparkContext
    return Platform(
        slots=lambda: slots(sc, options.profile),
        open_crew=lambda world, preload: barrier_crew(spark, world, preload, options),
        leaving=lambda: decommissioning(sc),
        give_up=lambda hosts: replace_executors(sc, hosts),
    )


def local_platform(world: int) -> Platform:
    """This machine without Spark; always room for `world`."""
    return Platform(slots=lambda: world, open_crew=local_crew)


def decommissioning(sc: Any) -> frozenset[str]:
    """Executors of this application that Spark has begun to take away (spot instance, node drain)."""
    leaving = sc._jsc.sc().taskScheduler().executorsPendingDecommission()
    return frozenset(str(leaving.keysIterator().mkString(" ")).split())  # one call, however many executors there are


def executors(sc: Any) -> dict[str, str]:
    """Hosts, as Spark calls them, of this application's executors by their ids."""
    found = sc._jsc.sc().statusStore().executorList(True)
    every = [found.apply(i) for i in range(found.size())]
    return {str(one.id()): str(one.hostPort()).rpartition(":")[0] for one in every if one.id() != "driver"}


def replace_executors(sc: Any, hosts: frozenset[str]) -> None:
    """Have Spark give up its executors on these hosts now; by itself it goes on counting their slots for up to
    spark.network.timeout. The cluster's manager starts others where, and as soon as, it can."""
    for name, host in executors(sc).items() if hosts else ():
        if host in hosts:
            log.warning("executor %s: %s has fallen silent, so Spark is asked for another", name, host)
            sc._jsc.sc().killAndReplaceExecutor(name)


def run_with_recovery(
    spark: SparkSession,
    make_job: Callable[[int, int], JobSpec],
    policy: Policy,
    on_event: OnEvent = log_event,
    *,
    latest_step: Callable[[], int | None] = lambda: None,
    is_finished: Callable[[JobResult], bool] = lambda result: True,
    control: Control | None = None,
    limits: Limits | None = None,
    options: StageOptions | None = None,
    first_attempt: int = 1,
) -> JobResult:
    """Run `make_job(attempt, world)` until it returns a result that is finished; see Recovery for the rest."""
    options = options or StageOptions()
    check_slots(spark, policy.world, policy.min_world, control=control, profile=options.profile)
    platform = spark_platform(spark, options)
    recovery = Recovery(platform, make_job, policy, on_event, latest_step, is_finished, control, limits)
    return recovery.run(first_attempt)


class Recovery:
    """The loop over attempts.

    Raises what the last attempt raised when the decision is to stop: WorkerFailed, LaunchError or Cancelled. Besides
    the attempts' own events it emits `attempt_ended` (attempt, world, cause, words, step, steps_lost, decision,
    next_world, why) and `recovered` (attempt, recover_s: from the last step heard of before the first of the failures
    in a row to the first one made after them).
    """

    def __init__(
        self,
        platform: Platform,
        make_job: Callable[[int, int], JobSpec],
        policy: Policy,
        on_event: OnEvent,
        latest_step: Callable[[], int | None] = lambda: None,
        is_finished: Callable[[JobResult], bool] = lambda result: True,
        control: Control | None = None,
        limits: Limits | None = None,
        slots_wait_s: float = 15.0,
    ):
        self._platform, self._make_job, self._policy = platform, make_job, policy
        self._on_event, self._latest_step, self._is_finished = on_event, latest_step, is_finished
        self._control, self._limits, self._slots_wait_s = control or Control(), limits or Limits(), slots_wait_s
        self._history: list[Ended] = []
        self._crew: Crew | None = None
        self._left: frozenset[str] = frozenset()  # hosts that were leaving when the crew was opened: not in it
        self._world = 0  # of the running attempt
        self._stack = ExitStack()
        self._stands_since: float | None = None  # the last step before the first failure in a row
        self._stepped = 0.0  # monotonic time of the last heartbeat
        self._planned: str | None = None  # why we have asked the running attempt to end

    def run(self, first_attempt: int = 1) -> JobResult:
        attempt, world = first_attempt, self._first_world()
        if world < self._policy.world:
            log.warning(
                "launch.world = %d: there is room for fewer, so training begins on %d", self._policy.world, world
            )
        with self._stack:
            while True:
                from_step = self._latest_step() or 0
                problem: WorkerFailed | LaunchError | None = None
                try:
                    result = self._attempt(attempt, world)
                except (WorkerFailed, LaunchError) as error:
                    self._stands_since = self._stands_since or self._stepped or time.monotonic()
                    if self._control.stopping:
                        raise  # the user wants an end, not another attempt
                    ended, problem = describe(error, attempt, world, from_step), error
                else:
                    if self._is_finished(result) or self._control.stopping:
                        return result
                    # An end nobody asked for is no result: tried again, and counted as a failure.
                    ended = Ended(attempt, world, self._planned or "unfinished", from_step)
                decision = self._decide(replace(ended, lost_hosts=self._lost_hosts(), at=time.monotonic()))
                self._tell(ended, decision, problem)
                if decision.action == "stop":
                    raise problem or LaunchError(decision.why)
                self._wait(decision.wait_s)
                attempt, world = attempt + 1, decision.world

    def _first_world(self) -> int:
        """The world wanted, or what there is room for where executors do not come within the wait."""
        deadline = time.monotonic() + self._slots_wait_s
        while (world := best_world(self._platform.slots(), self._policy)) < self._policy.world:
            if time.monotonic() > deadline:
                return world or self._policy.world  # too few even for the least: the launch says so
            self._wait(0.2)
        return world

    def _attempt(self, attempt: int, world: int) -> JobResult:
        job = self._make_job(attempt, world)
        job = replace(job, env={"TORCHELASTIC_MAX_RESTARTS": str(self._policy.max_attempts - 1), **job.env})
        crew = self._usable_crew(world, job.preload)
        self._planned, self._world = None, world
        self._control.forget_planned()
        with self._watching():
            return crew.run(job, world, self._listen, attempt, self._control, limits=self._limits)

    def _usable_crew(self, world: int, preload: tuple[str, ...]) -> Crew:
        """The crew of the attempt before while it stands and has a seat for every rank, else a new one."""
        if self._crew is not None and self._crew.why_over() is None and len(self._crew.seats) >= world:
            return self._crew
        self._close_crew()
        self._left = self._platform.leaving()
        self._crew = self._stack.enter_context(self._platform.open_crew(world, preload))
        return self._crew

    def _close_crew(self) -> None:
        self._crew = None
        self._stack.close()

    def _decide(self, ended: Ended) -> Decision:
        """Waits a little for slots to return before settling for fewer, but not for those of a host that fell silent; a
        decision to stop needs no slots.

        A host that leaves goes when nothing of ours is on it any more, so a crew that has an agent there is closed; as
        is one on a host that fell silent, whose task Spark would notice, and end the stage for, much later.
        """
        self._history.append(ended)
        leaves = ended.cause == "decommission" or ended.lost_hosts
        if self._crew is not None and (leaves or self._crew.why_over() is not None):
            self._close_crew()
        self._platform.give_up(ended.lost_hosts)
        deadline = time.monotonic() + self._slots_wait_s
        while True:
            decision = decide(self._history, self._platform.slots(), self._policy)
            hopeless = decide(self._history, self._policy.world, self._policy).action == "stop"
            if hopeless or decision.world == self._policy.world or time.monotonic() > deadline:
                return decision
            if (ended.cause in PLANNED or ended.lost_hosts) and decision.action != "stop":
                return decision
            self._wait(0.2)

    def _lost_hosts(self) -> frozenset[str]:
        return self._crew.lost_hosts if self._crew is not None else frozenset()

    def _wait(self, seconds: float) -> None:
        """Sleep, but not through a cancel or a stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._control.heed("no attempt was running")
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Beside a running attempt: hosts that are about to leave, slots that have come back."""
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
            with contextlib.suppress(Exception):  # the JVM is ending; the attempt hears of it too
                if self._platform.leaving() - self._left and not over.is_set():
                    self._end_for("decommission")

    def _end_for(self, reason: str) -> None:
        log.warning("%s: asking the ranks for a checkpoint and their end", reason)
        self._planned = reason
        self._control.ask("stop")

    def _listen(self, event: dict[str, Any]) -> None:
        if event["kind"] == "heartbeat":
            self._stepped = time.monotonic()
            if self._stands_since is not None and event["step"] > self._history[-1].from_step:
                taken, self._stands_since = self._stepped - self._stands_since, None
                self._on_event({"kind": "recovered", "attempt": event["attempt"], "recover_s": taken})
        at_boundary = event["kind"] == "event" and event["event"] == "checkpoint"
        wanting = self._world < self._policy.world and self._planned is None
        wanting = wanting and time.monotonic() >= cool_until(self._history, self._policy)
        if at_boundary and wanting and should_grow(self._world, self._platform.slots(), self._policy):
            self._end_for("grow")
        self._on_event(event)

    def _tell(self, ended: Ended, decision: Decision, problem: Exception | None) -> None:
        words = problem.failure.headline if isinstance(problem, WorkerFailed) else str(problem or ended.cause)
        saved = self._latest_step() or 0
        log.warning("attempt %d ended: %s; %s", ended.attempt, words, what_follows(decision, saved))
        event = {
            "kind": "attempt_ended",
            "attempt": ended.attempt,
            "world": ended.world,
            "cause": ended.cause,
            "words": words,
            "step": ended.step,
            "steps_lost": 0 if ended.cause in PLANNED else steps_lost(ended.step, saved),
            "decision": decision.action,
            "next_world": decision.world,
            "why": decision.why,
        }
        try:
            self._on_event(event)
        except Exception:
            log.exception("on_event failed for an event of kind 'attempt_ended'")


def what_follows(decision: Decision, saved: int) -> str:
    """The decision for a person who watches; `saved` is the step of the last checkpoint."""
    if decision.action == "stop":
        return f"no other attempt: {decision.why}"
    ranks = "1 rank" if decision.world == 1 else f"{decision.world} ranks"
    start = f"from the checkpoint of step {saved}" if saved else "from the start"
    return f"going on with {ranks} in {decision.wait_s:.0f} s, {start}"


def describe(error: WorkerFailed | LaunchError, attempt: int, world: int, from_step: int) -> Ended:
    """An attempt's end for the policy."""
    if isinstance(error, LaunchError):
        cause = "preflight" if isinstance(error, PreflightError) else "start"
        return Ended(attempt, world, cause, from_step, message=str(error))
    failure = error.failure
    return Ended(
        attempt,
        world,
        failure.cause,
        from_step,
        step=failure.step,
        error_type=failure.error_type,
        message=failure.message or failure.words,
        is_value_error=failure.is_value_error,
    )
