"""The loop over attempts with real ranks: on this machine, and on Spark when an executor is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.etl.spark_platform.executors import executors
from sparkring.pipelines.launch import recover
from sparkring.pipelines.launch.barrier import LaunchOptions
from sparkring.pipelines.launch.preflight import SlotRequest
from sparkring.pipelines.launch.recover import (
    Platform,
    Recovery,
    RestartableJob,
    restart_policy,
    spark_platform,
    what_follows,
)
from sparkring.training.launch.attempt import Limits
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import Cancelled, Failure, LaunchError, WorkerFailed
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.job import JobResult, JobSpec
from sparkring.training.launch.local import local_group
from sparkring.training.launch.messages import AttemptEnded, ChildEvent, ChildFailed, Event, Heartbeat, Recovered
from sparkring.training.launch.restart import Decision, RestartPolicy
from sparkring.training.launch.topology import Child

pytestmark = pytest.mark.ranks
STEPS = 12


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the cluster every few milliseconds, not every few tenths of a second."""
    monkeypatch.setattr(recover, "WATCH_S", 0.02)
    monkeypatch.setattr(recover, "ROOM_POLL_S", 0.02)


def counting(ctx: Any) -> dict[str, Any]:
    """A job in small: steps with a Gloo all-reduce, a checkpoint every 4, faults as its payload says.

    The attempt ``waits`` waits before its last step but one until it is asked to stop.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    path = Path(ctx.payload["folder"]) / "checkpoint.json"
    state = json.loads(path.read_text()) if path.exists() else {"step": 0, "total": 0.0}
    while state["step"] < STEPS:
        ctx.heartbeat(state["step"] + 1, "step")
        if state["step"] == STEPS - 2 and ctx.attempt == ctx.payload.get("waits"):
            while not ctx.should_stop():
                time.sleep(0.01)
        for at, attempt, rank, fault in ctx.payload["faults"]:
            if (at, attempt, rank) == (state["step"] + 1, ctx.attempt, ctx.rank):
                if fault == "raise":
                    raise RuntimeError("injected")
                os.kill(os.getpid(), getattr(signal, fault))
        x = torch.ones(1, dtype=torch.float64) / ctx.world_size
        dist.all_reduce(x)
        state = {"step": state["step"] + 1, "total": state["total"] + float(x) * (state["step"] + 1)}
        stop = torch.tensor(float(ctx.should_stop()))
        dist.all_reduce(stop)
        if state["step"] % 4 == 0 or stop:
            if ctx.rank == 0:
                path.with_suffix(".new").write_text(json.dumps(state))
                path.with_suffix(".new").replace(path)
                ctx.event("checkpoint", {"step": state["step"]})
            dist.barrier()
        time.sleep(ctx.payload.get("sleep_s", 0))
        if stop:
            break
    dist.destroy_process_group()
    return {"finished": state["step"] >= STEPS, "total": state["total"], "world": ctx.world_size}


EXPECTED = sum(range(1, STEPS + 1))


def local_platform(world: int) -> Platform:
    """This machine without Spark; always room for `world`."""
    return Platform(slots=lambda: world, open_group=local_group)


def recovery(
    folder: Path,
    faults: list[list[Any]],
    policy: RestartPolicy,
    platform: Platform | None = None,
    events: list[Event] | None = None,
    **payload: Any,
) -> Recovery:
    job = JobSpec(counting, {"folder": str(folder), "faults": faults, **payload}, preload=("torch",))

    def latest_step() -> int | None:
        path = folder / "checkpoint.json"
        return json.loads(path.read_text())["step"] if path.exists() else None

    return Recovery(
        platform or local_platform(policy.world),
        RestartableJob(lambda attempt, world: job, policy, latest_step, lambda result: result.result["finished"]),
        (events if events is not None else []).append,
        limits=Limits(60, 2.5),
        slots_wait_s=0.1,
    )


def ends(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(e.attempt, e.cause, e.decision) for e in events if isinstance(e, AttemptEnded)]


def test_a_killed_a_stopped_and_a_raising_rank_in_one_run(tmp_path: Path) -> None:
    events: list[Event] = []
    faults = [[3, 1, 1, "SIGKILL"], [6, 2, 0, "SIGSTOP"], [11, 3, 1, "raise"]]
    job = recovery(tmp_path, faults, RestartPolicy(2, max_attempts=4, backoff_s=0.01), events=events)
    result = job.run()
    assert result.result == {"finished": True, "total": EXPECTED, "world": 2}
    assert ends(events) == [(1, "signal", "retry"), (2, "hang", "retry"), (3, "exception", "retry")]
    lost = [e.steps_lost for e in events if isinstance(e, AttemptEnded)]
    assert lost == [3, 2, 3]
    recovered = [e for e in events if isinstance(e, Recovered)]
    assert [e.attempt for e in recovered] == [2, 3, 4]
    assert all(e.recover_s > 0 for e in recovered)


def test_the_same_error_at_the_same_step_twice_is_the_users(tmp_path: Path) -> None:
    events: list[Event] = []
    faults = [[3, attempt, 0, "raise"] for attempt in range(1, 9)]
    with pytest.raises(WorkerFailed, match="injected"):
        recovery(tmp_path, faults, RestartPolicy(2, max_attempts=9, backoff_s=0.01), events=events).run()
    assert ends(events) == [(1, "exception", "retry"), (2, "exception", "stop")]


class Shrinking:
    """A cluster that loses a slot with its first failure and has it back once two ranks have made a checkpoint."""

    def __init__(self) -> None:
        self.room = 3
        self.opened: list[int] = []

    def open_group(self, world: int, preload: tuple[str, ...]) -> AbstractContextManager[WorkerGroup]:
        self.opened.append(world)
        return local_group(world, preload)


def test_fewer_ranks_while_a_slot_is_missing_and_more_when_it_returns(tmp_path: Path) -> None:
    cluster, events = Shrinking(), []

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, ChildFailed):
            cluster.room = 2
        if isinstance(event, Heartbeat) and event.attempt == 2:
            cluster.room = 3

    job = recovery(
        tmp_path,
        [[6, 1, 2, "SIGKILL"]],
        RestartPolicy(3, min_world=1, max_attempts=3, backoff_s=0.01),
        Platform(lambda: cluster.room, cluster.open_group),
        waits=2,
    )
    job._on_event = on_event
    result = job.run()
    assert result.result["finished"] and result.result["total"] == pytest.approx(EXPECTED, abs=1e-12)
    assert ends(events) == [(1, "signal", "shrink"), (2, "grow", "grow")]
    assert result.world == 3


def test_a_host_that_is_about_to_leave_is_left_with_a_checkpoint(tmp_path: Path) -> None:
    """Once, and with a new group: the host stays until no agent is on it, which must not end the next attempt too."""
    events: list[Event] = []
    crews, opened = local_platform(2), []

    def open_group(world: int, preload: tuple[str, ...]) -> AbstractContextManager[WorkerGroup]:
        opened.append(world)
        return crews.open_group(world, preload)

    def leaving() -> frozenset[str]:
        return frozenset({"executor 7"} if any(isinstance(e, Heartbeat) for e in events) else ())

    platform = Platform(crews.slots, open_group, leaving)
    result = recovery(tmp_path, [], RestartPolicy(2), platform, events, waits=1).run()
    assert result.result["total"] == EXPECTED
    assert ends(events) == [(1, "decommission", "retry")]
    assert opened == [2, 2]
    assert [e.steps_lost for e in events if isinstance(e, AttemptEnded)] == [0]


def test_the_ranks_of_a_host_that_leaves_are_killed_after_the_grace_time(tmp_path: Path) -> None:
    """They are in a step that is longer, so they see no request; the next attempt repeats what was not saved."""
    events: list[Event] = []

    def leaving() -> frozenset[str]:
        return frozenset({"executor 7"} if any(isinstance(e, Heartbeat) and e.step == 6 for e in events) else ())

    local = local_platform(2)
    policy = RestartPolicy(2, grace_s=0.3)
    job = recovery(tmp_path, [[6, 1, 0, "SIGSTOP"]], policy, Platform(local.slots, local.open_group, leaving), events)
    job._limits = Limits(60, 300.0)  # it does not count as a hang
    assert job.run().result == {"finished": True, "total": EXPECTED, "world": 2}
    assert ends(events) == [(1, "decommission", "retry")]
    assert [e.steps_lost for e in events if isinstance(e, AttemptEnded)] == [2], "step 6, and the checkpoint is of 4"
    assert not [e for e in events if isinstance(e, ChildFailed)]


def test_a_stop_by_the_user_is_not_followed_by_an_attempt(tmp_path: Path) -> None:
    control = Control()
    job = recovery(tmp_path, [], RestartPolicy(2), waits=1)
    job._control = control
    job._on_event = lambda e: control.stop() if isinstance(e, Heartbeat) and e.step >= 2 else None
    result = job.run()
    assert not result.result["finished"]
    assert json.loads((tmp_path / "checkpoint.json").read_text())["step"] < STEPS


def test_a_cancel_between_attempts_is_heard(tmp_path: Path) -> None:
    control = Control()
    job = recovery(tmp_path, [[1, 1, 0, "SIGKILL"]], RestartPolicy(2, backoff_s=3600.0))
    job._control = control
    job._on_event = lambda e: control.cancel() if isinstance(e, AttemptEnded) else None
    with pytest.raises(Cancelled):
        job.run()


@pytest.mark.parametrize(
    ("decision", "saved", "words"),
    [
        (Decision("retry", 2, 2.0, "signal"), 10, "going on with 2 ranks in 2 s, from the checkpoint of step 10"),
        (Decision("shrink", 1, 0.0, "lost"), 0, "going on with 1 rank in 0 s, from the start"),
        (Decision("stop", 0, 0.0, "the user's error"), 10, "no other attempt: the user's error"),
    ],
)
def test_what_follows_is_described(decision: Decision, saved: int, words: str) -> None:
    assert what_follows(decision, saved) == words


def test_a_failed_attempt_is_logged_with_rank_host_and_what_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recovery(tmp_path, [[6, 1, 1, "SIGKILL"]], RestartPolicy(2, backoff_s=0.01)).run()
    (told,) = [r.getMessage() for r in caplog.records if "ended" in r.getMessage()]
    assert re.fullmatch(
        r"attempt 1 ended: rank 1 on .* \(127\.0\.0\.1\) killed by SIGKILL at step 6 \(step\); "
        r"going on with 2 ranks in 0 s, from the checkpoint of step 4",
        told,
    )


class Filling:
    """A cluster whose executors come one after the other: slots by the number of times it was asked."""

    def __init__(self, *slots: int):
        self.given, self.asked = slots, 0

    def slots(self) -> int:
        self.asked += 1
        return self.given[min(self.asked, len(self.given)) - 1]

    def platform(self) -> Platform:
        return Platform(self.slots, local_group)


@pytest.mark.parametrize(
    ("cluster", "policy", "world", "waits"),
    [
        (Filling(4), RestartPolicy(4, min_world=1), 4, False),
        (
            Filling(1, 2, 2, 4),
            RestartPolicy(4, min_world=1),
            4,
            False,
        ),  # the rest comes within the limit
        (Filling(1, 1, 3), RestartPolicy(4, min_world=1), 3, True),  # it does not: on those there are
        (Filling(3), RestartPolicy(4, min_world=2, multiple_of=2), 2, True),
        (
            Filling(1),
            RestartPolicy(4, min_world=2),
            4,
            True,
        ),  # not even the least: the launch says what is missing
    ],
)
def test_the_first_attempt_waits_for_the_slots_still_coming(
    tmp_path: Path, cluster: Filling, policy: RestartPolicy, world: int, waits: bool
) -> None:
    job = recovery(tmp_path, [], policy, cluster.platform())
    job._slots_wait_s = 0.2 if waits else 600.0
    assert job._first_world() == world
    assert (cluster.asked > len(cluster.given)) == waits


def test_a_job_that_starts_on_the_first_free_slot_runs_on_all_that_come(tmp_path: Path) -> None:
    """One attempt on the world wanted, not one on the first slot and another to grow."""
    events: list[Event] = []
    job = recovery(tmp_path, [], RestartPolicy(2, min_world=1), Filling(0, 0, 1, 1, 2).platform(), events, sleep_s=0.0)
    job._slots_wait_s = 600.0
    assert job.run().result == {"finished": True, "total": EXPECTED, "world": 2}
    assert not ends(events)


def test_executors_are_waited_for_as_long_by_every_part() -> None:
    """Of four defaults of launch.hosts_wait_s one was 20 s."""
    waits = {RestartPolicy(1).room_wait_s, LaunchOptions().room_wait_s, SlotRequest(1).wait_s}
    assert waits == {LaunchConfig().hosts_wait_s}


def test_a_cancel_is_heard_while_slots_are_waited_for(tmp_path: Path) -> None:
    job = recovery(tmp_path, [], RestartPolicy(2), Filling(0).platform())
    job._slots_wait_s = 60.0
    job._control.cancel()
    with pytest.raises(Cancelled):
        job.run()


class Scripted:
    """A group whose attempts end at once, each `finished` or not; requests after their start come too late."""

    def __init__(self, finished: list[bool], control: Control, during: Any = lambda attempt: None):
        self.finished, self.control, self.during = finished, control, during
        self.agents, self.asked = [None, None], list[list[Any]]()
        self.lost_hosts = frozenset[str]()

    def trouble(self) -> None: ...

    def run(self, job: Any, world: int, on_event: Any, attempt: int, control: Control, limits: Any) -> JobResult:
        self.asked.append(control.pending())
        self.during(attempt)
        return JobResult([{"finished": self.finished[attempt - 1]}] * world, world, attempt)

    def recovery(self, folder: Path, policy: RestartPolicy) -> Recovery:
        group: Any = nullcontext(self)
        job = recovery(folder, [], policy, Platform(lambda: 2, lambda world, preload: group))
        job._control = self.control
        return job


def test_a_planned_stop_that_came_too_late_does_not_end_the_next_attempt(tmp_path: Path) -> None:
    control = Control()
    group = Scripted([False, True], control)
    job = group.recovery(tmp_path, RestartPolicy(2, backoff_s=0.0))
    group.during = lambda attempt: job._end_for("grow") if attempt == 1 else None
    assert job.run().result == {"finished": True}
    assert group.asked == [[], []]


def test_an_end_that_nobody_asked_for_is_no_result(tmp_path: Path) -> None:
    """Taken for one, the job would go on to publish a model there is not."""
    group = Scripted([False, True], Control())
    assert group.recovery(tmp_path, RestartPolicy(2, backoff_s=0.0)).run().result == {"finished": True}
    group = Scripted([False, False], Control())
    with pytest.raises(LaunchError, match=r"launch\.max_attempts = 2"):
        group.recovery(tmp_path, RestartPolicy(2, max_attempts=2, backoff_s=0.0)).run()
    stopped = Control()
    group = Scripted([False], stopped, lambda attempt: stopped.stop())
    assert group.recovery(tmp_path, RestartPolicy(2)).run().result == {"finished": False}


def test_a_beginning_on_fewer_ranks_than_asked_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Scripted([True], Control()).recovery(tmp_path, RestartPolicy(4, min_world=1)).run().world == 2
    assert "launch.world = 4: there is room for fewer, so training begins on 2" in caplog.messages


class Vanishing(Scripted):
    """Its first attempt ends by a host that fell silent; Spark counts that host's slot until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__([False, True], Control())
        self.room, self.opened, self.given_up = 2, list[int](), list[frozenset[str]]()

    def run(self, job: Any, world: int, on_event: Any, attempt: int, control: Control, limits: Any) -> JobResult:
        on_event(Heartbeat(0, attempt, attempt, "step"))
        if attempt == 1:
            time.sleep(0.05)
            self.lost_hosts = frozenset({"10.0.0.2"})
            words = "was lost: nothing is heard of its agent"
            raise WorkerFailed(Failure(Child("rank", 1), "h2 (10.0.0.2)", "lost", words, step=1))
        self.lost_hosts = frozenset()
        on_event(ChildEvent(Child("rank", 0), attempt, "checkpoint", {}))
        return super().run(job, world, on_event, attempt, control, limits)

    def open_group(self, world: int, preload: tuple[str, ...]) -> AbstractContextManager[Any]:
        self.opened.append(world)
        return nullcontext(self)

    def give_up(self, hosts: frozenset[str]) -> None:
        self.given_up.append(hosts)
        self.room -= len(hosts)


def test_a_host_that_fell_silent_costs_one_attempt_and_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark went on counting its slot: an attempt was made on it that took 120 s to fail. When it is back, the world
    does not grow before it has cooled down."""
    cluster, events = Vanishing(), list[Event]()
    platform = Platform(lambda: cluster.room, cluster.open_group, give_up=cluster.give_up)
    job = recovery(tmp_path, [], RestartPolicy(2, min_world=1, backoff_s=0.0), platform, events)
    job._slots_wait_s = 3600.0
    job._on_event = lambda event: (
        events.append(event),
        setattr(cluster, "room", 2) if isinstance(event, ChildEvent) else None,
    )
    assert job.run().world == 1
    assert (cluster.opened, cluster.given_up) == ([2, 1], [frozenset({"10.0.0.2"})])
    assert ends(events) == [(1, "lost", "shrink")]
    assert not [words for words in caplog.messages if "grow" in words]
    (recovered,) = [e.recover_s for e in events if isinstance(e, Recovered)]
    assert 0.05 <= recovered < 10, "counted from the last step before the failure"


class Replaced(Vanishing):
    """A cluster that starts another host for the lost one, once it has been asked `after` times."""

    def __init__(self, after: int):
        super().__init__()
        self.after = after

    def slots(self) -> int:
        if self.room < 2:
            self.after -= 1
        return self.room if self.after > 0 else 2


def test_another_host_is_waited_for_where_the_world_may_not_shrink(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of Spark's executors on a spot instance was lost, and its successor comes minutes later."""
    cluster, events = Replaced(after=3), list[Event]()
    platform = Platform(cluster.slots, cluster.open_group, give_up=cluster.give_up)
    policy = restart_policy(LaunchConfig(world=2, backoff_s=0.0))
    job = recovery(tmp_path, [], policy, platform, events)
    job._slots_wait_s = 0.0
    assert job.run().world == 2
    assert cluster.opened == [2, 2] and ends(events) == [(1, "lost", "retry")]
    (said,) = [words for words in caplog.messages if "waiting" in words]
    assert said.startswith("attempt 1 has failed: rank 1 on h2 (10.0.0.2) was lost: nothing is heard of its agent")
    assert said.endswith(
        "no world of at least 2 (launch.world) fits on them and the layout; waiting "
        "launch.hosts_wait_s = 300 s for more"
    )


@pytest.mark.parametrize("has_ended", [False, True])
def test_another_host_that_never_comes_ends_the_job_with_its_failure(
    tmp_path: Path, has_ended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is it waited for where the cluster has ended Spark's application."""
    cluster, events = Vanishing(), list[Event]()
    platform = Platform(lambda: cluster.room, cluster.open_group, give_up=cluster.give_up, has_ended=lambda: has_ended)
    job = recovery(tmp_path, [], RestartPolicy(2, backoff_s=0.0, room_wait_s=0.3), platform, events)
    with pytest.raises(WorkerFailed, match="nothing is heard"):
        job.run()
    assert cluster.opened == [2] and ends(events) == [(1, "lost", "stop")]
    assert bool([words for words in caplog.messages if "waiting" in words]) != has_ended


@pytest.mark.spark
def test_spark_says_how_much_room_there_is_and_that_nobody_leaves(spark: Any) -> None:
    platform = spark_platform(spark, LaunchOptions())
    assert platform.slots() == 2
    assert platform.leaving() == frozenset() and not platform.has_ended()
    assert executors(spark) == {}, "the driver is no executor that could be given up"


CLUSTER = """
import json, sys, threading, time
from pathlib import Path
import psutil
from pyspark.sql import SparkSession
sys.path.insert(0, sys.argv[2])
from test_recover import counting
from dataclasses import asdict
from sparkring.pipelines.launch.barrier import LaunchOptions
from sparkring.pipelines.launch.recover import Recovery, RestartableJob, spark_platform
from sparkring.training.launch.messages import AttemptEnded, Heartbeat, Recovered
from sparkring.training.launch.attempt import Limits
from sparkring.training.launch.restart import RestartPolicy
from sparkring.training.launch.job import JobSpec
folder = Path(sys.argv[1])
builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
for key in ("spark.driver.host", "spark.driver.bindAddress"):
    builder = builder.config(key, "127.0.0.1")
spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
events, killed = [], []
def is_executor(process):
    try:
        return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
    except psutil.Error:  # a short-lived child of the JVM, gone between the listing and the question
        return False
def on_event(event):
    if isinstance(event, AttemptEnded | Recovered):
        events.append({"kind": type(event).__name__, **asdict(event)})
    if isinstance(event, Heartbeat) and event.step >= 6 and event.attempt == 1 and not killed:
        executor = next(p for p in psutil.Process().children(recursive=True) if is_executor(p))
        executor.kill()
        killed.append(executor.pid)
def latest_step():
    path = folder / "checkpoint.json"
    return json.loads(path.read_text())["step"] if path.exists() else None
job = JobSpec(counting, {"folder": str(folder), "faults": [], "sleep_s": 0.4}, preload=("torch",))
policy = RestartPolicy(2, max_attempts=4, backoff_s=0.5)
restartable = RestartableJob(lambda attempt, world: job, policy, latest_step, lambda r: r.result["finished"])
options = LaunchOptions(Limits(90, 10.0))
platform = spark_platform(spark, options)
result = Recovery(platform, restartable, on_event, limits=options.limits, slots_wait_s=300.0).run()  # a JVM starts
print("RESULT", json.dumps({"result": result.result, "ends": events, "killed": killed}))
spark.stop()
"""


@pytest.mark.spark
def test_a_rank_killed_on_spark_is_a_new_attempt_in_the_same_application(spark: Any, tmp_path: Path) -> None:
    events: list[Event] = []
    policy, platform = RestartPolicy(2, backoff_s=0.01), spark_platform(spark, LaunchOptions())
    job = recovery(tmp_path, [[6, 1, 1, "SIGKILL"]], policy, platform, events)
    assert job.run().result == {"finished": True, "total": EXPECTED, "world": 2}
    assert ends(events) == [(1, "signal", "retry")] and [e.attempt for e in events if isinstance(e, Recovered)] == [2]


@pytest.mark.slow  # what is lost with an executor is decided as what is lost with a rank, above, and in tests/chaos
@pytest.mark.spark
def test_an_executor_killed_on_a_cluster_is_a_new_stage_of_the_same_application(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", CLUSTER, str(tmp_path), str(Path(__file__).parent)]
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=env, timeout=1200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    assert found["killed"], done.stderr[-4000:]
    assert found["result"] == {"finished": True, "total": EXPECTED, "world": 2}
    first = found["ends"][0]
    assert (first["cause"], first["decision"]) == ("lost", "retry")
    assert first["steps_lost"] <= 3
    assert any(e["kind"] == "Recovered" for e in found["ends"])
