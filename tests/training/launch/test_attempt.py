"""One attempt as the driver follows it: what its work grows with, and who is named; then a thousand ranks in small."""

from __future__ import annotations

import importlib.util
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from sparkring.training.launch import attempt as attempt_module
from sparkring.training.launch.attempt import Attempt, Limits, RankState
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import Cancelled, WorkerFailed
from sparkring.training.launch.messages import (
    AttemptStarted,
    ChildEnded,
    ChildError,
    ChildFailed,
    Event,
    FromChild,
    FromRank,
    Heartbeat,
    KillChildren,
    LateLogLines,
    LogLines,
    RankMetrics,
    RankRunning,
)
from sparkring.training.launch.results import pack
from sparkring.training.launch.topology import Child


def running(rank: int) -> RankRunning:
    return RankRunning(rank, 1)


def broken(rank: int) -> ChildError:
    return ChildError(Child("rank", rank), 1, "RuntimeError", "Connection closed by peer", "", False)


def said(rank: int, line: str) -> LogLines:
    return LogLines(Child("rank", rank), 1, (line,))


def ended(rank: int, status: int = 0, was_killed: bool = False) -> ChildEnded:
    return ChildEnded(Child("rank", rank), 1, status, f"status {status}", was_killed)


class Scripted:
    """A group, and its server, whose agents are a list of messages; checks of them are counted."""

    def __init__(self, *messages: FromChild | FromRank):
        self.server = self
        self.messages = deque(messages)
        self.newest: dict[str, Heartbeat] = {}
        self.sent: list[tuple[str, Any]] = []
        self.checks = 0

    def take(self, timeout_s: float) -> tuple[str, FromChild | FromRank | None] | None:
        if self.messages:
            message = self.messages.popleft()
            return f"a{message.child.index}", message
        time.sleep(max(0.0, timeout_s))
        return None

    def heartbeats(self) -> dict[str, Heartbeat]:
        newest, self.newest = self.newest, {}
        return newest

    def heartbeat_of(self, agent: str) -> Heartbeat | None:
        return self.newest.pop(agent, None)

    def send(self, agent: str, message: Any) -> bool:
        self.sent.append((agent, message))
        return True

    def is_lost(self, agent: str, limit_s: float | None = None) -> bool:
        self.checks += 1
        return False

    def note(self, agent: str, message: Any) -> None: ...
    def is_connected(self, agent: str) -> bool:
        return True

    def left_at(self, agent: str) -> float:
        return math.inf

    def trouble(self) -> str | None:
        return None


def attempt_of(group: Any, world: int, on_event: Any = lambda event: None) -> Attempt:
    states = [RankState(Child("rank", rank), f"a{rank}", f"h{rank}") for rank in range(world)]
    return Attempt(group, states, 1, on_event, Control(), Limits(60, 60))


def test_a_message_makes_the_driver_check_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one did: a thousand ranks' messages cost the driver a million checks."""
    world, each = 300, 20
    script: list[FromChild | FromRank] = [running(rank) for rank in range(world)]
    for step in range(each):
        script += [RankMetrics(rank, 1, step, {}, None) for rank in range(world)]
    for rank in range(world):
        script += [pack(rank, "f", None, rank), ended(rank)]
    group = Scripted(*script)
    monkeypatch.setattr(attempt_module, "CHECK_S", 3600.0)
    assert attempt_of(group, world).follow().results == list(range(world))
    assert group.checks <= world * 2


def test_what_a_server_sends_is_not_taken_for_the_rank_with_its_number() -> None:
    server = Child("server", 0)
    last = [
        ChildError(server, 1, "ValueError", "no such shard", "", True),
        ChildEnded(server, 1, 1, "exited with code 1"),
    ]
    group = Scripted(running(0), *last, pack("result", "f", None, 0), ended(0))
    assert attempt_of(group, 1).follow().results == ["result"]


def test_a_cancelled_rank_has_ended_when_its_own_process_has() -> None:
    """The end of a server that the same agent runs says nothing of the rank."""

    class Cancelling(Scripted):
        def wait(self, is_done: Any, limit_s: float, on_message: Any) -> bool:
            on_message("a0", ChildEnded(Child("server", 0), 1, -9, "killed by SIGKILL", True))
            self.was_done = [is_done()]
            on_message("a0", ended(0, -9, was_killed=True))
            self.was_done.append(is_done())
            return True

    group, control = Cancelling(running(0)), Control()
    control.cancel()
    states = [RankState(Child("rank", 0), "a0", "h0")]
    with pytest.raises(Cancelled):
        Attempt(group, states, 1, lambda event: None, control, Limits(60, 60)).follow()  # type: ignore[arg-type]
    assert group.was_done == [False, True]


def test_the_step_at_which_a_rank_ends_is_its_last_though_heartbeats_do_not_queue() -> None:
    group = Scripted(running(0), broken(0), ended(0, 1))
    events: list[Event] = []
    group.newest["a0"] = Heartbeat(0, 1, 17, "step")
    with pytest.raises(WorkerFailed) as caught:
        attempt_of(group, 1, events.append).follow()
    assert (caught.value.failure.step, caught.value.failure.phase) == (17, "step")
    assert [type(e) for e in events][:2] == [Heartbeat, AttemptStarted]


def test_a_cause_that_is_heard_after_the_order_to_end_is_still_the_cause() -> None:
    """Of a thousand ranks the one that began may be the last to be heard; what the order ended is no cause."""

    class Late(Scripted):
        def send(self, agent: str, message: Any) -> bool:
            self.messages.append(ended(int(agent[1:]), -9, was_killed=agent != "a1"))
            return super().send(agent, message)

    group = Late(*map(running, range(3)), broken(0))
    with pytest.raises(WorkerFailed) as caught:
        attempt_of(group, 3).follow()
    assert group.sent == [(f"a{rank}", KillChildren("rank")) for rank in range(3)]
    assert caught.value.child.index == 1 and [other.child.index for other in caught.value.others] == [0]


def test_the_host_that_does_not_answer_is_the_cause_and_not_the_rank_whose_ring_broke() -> None:
    """It was named 14 s and ninety lines after its victims, or not at all."""

    class Vanished(Scripted):
        def is_lost(self, agent: str, limit_s: float | None = None) -> bool:
            return agent == "a1" and min(20.0, limit_s or 20.0) < 6.0  # nothing has been heard of it for so long

        def send(self, agent: str, message: Any) -> bool:
            if agent == "a0":
                self.messages.append(ended(0, 1, was_killed=True))
            return True

    group = Vanished(
        running(0),
        running(1),
        said(0, "before"),
        broken(0),
        *(said(0, f"line {n} of a traceback") for n in range(500)),
        said(1, "the cause's last words"),
    )
    events = list[Event]()
    with pytest.raises(WorkerFailed) as caught:
        attempt_of(group, 2, events.append).follow()
    assert (caught.value.child.index, caught.value.failure.cause) == (1, "lost")
    shown = [e for e in events if not isinstance(e, AttemptStarted | ChildEnded)]
    assert [(type(e), e.child.index, len(getattr(e, "lines", ()))) for e in shown] == [  # type: ignore[union-attr]
        (LogLines, 0, 1),
        (ChildFailed, 1, 0),
        (LateLogLines, 0, 100),
        (LogLines, 1, 1),
    ]


@pytest.mark.ranks
def test_the_benchmark_of_a_thousand_ranks_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[3] / "benchmarks/control_channel.py"
    monkeypatch.syspath_prepend(str(path.parent))  # as for a script
    spec = importlib.util.spec_from_file_location("control_channel", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    found = benchmark.simulate(ranks=64, steps_per_s=20.0, seconds=1.5)  # it asserts who is named
    assert found["refused"] == 0
    assert found["heartbeats_per_s"] < 64 * 20.0 / 2, "heartbeats are merged at the agent"
    assert benchmark.pure_parts(1_000).keys() >= {"check", "all fail: check"}  # it asserts what they return
