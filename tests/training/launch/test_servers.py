"""Server processes beside the ranks, and ranks that are replaced while the others go on: real processes, real kills."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from sparkring.training.launch.attempt import Limits
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import Failure, LaunchError, WorkerFailed, first_failure
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import local_group
from sparkring.training.launch.messages import (
    ChildEnded,
    ChildEvent,
    Event,
    LogLines,
    RankReplaced,
    StartChild,
)
from sparkring.training.launch.restart import ReplacementLimit
from sparkring.training.launch.servers import Servers
from sparkring.training.launch.topology import AgentInfo, Child
from tests.helpers.groups import warm

pytestmark = pytest.mark.ranks
SERVE, WORK = "tests.training.launch.toy_servers:serve", "tests.training.launch.toy_servers:work"


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    with local_group(3, ("torch",)) as group:  # which each first rank opens a store with
        yield warm(group, 3)


class Seen:
    """Events of one attempt, by kind; what happens on them."""

    number = 0

    def __init__(self) -> None:
        Seen.number += 1
        self.attempt = Seen.number
        self.events: list[Event] = []
        self.control = Control()
        self.at_step: dict[int, Any] = {}  # step of rank 0 -> called once

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def of_servers(self, kind: type) -> list[Any]:
        return [event for event in self.of(kind) if event.child.role == "server"]

    def pids(self) -> list[int]:
        """Of the servers, by number: they report in any order."""
        return [event.data["pid"] for event in sorted(self.of_servers(ChildEvent), key=lambda each: each.child.index)]


def run(group: WorkerGroup, seen: Seen, world: int = 3, servers: int = 2, **payload: Any) -> list[dict[str, Any]]:
    job = JobSpec(
        WORK, payload, preload=(), servers_per_host=servers, server_entry=SERVE, replaceable_ranks=True,
        env={"PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip
    results: list[dict[str, Any]] = group.run(job, world, seen, seen.attempt, seen.control, Limits(30, 30)).results
    return results


def test_ranks_find_the_servers_that_were_started_before_them_and_none_is_left(group: WorkerGroup) -> None:
    seen = Seen()
    ranks = run(group, seen, steps=5)
    assert max(rank["totals"] for rank in ranks) == [15, 15]
    assert [e.child.role for e in seen.of(ChildEvent)] == ["server"] * 2 + ["rank"] * 3
    assert [e.data["attempt"] for e in seen.of_servers(ChildEvent)] == [seen.attempt] * 2
    lines = {(e.child.index, line) for e in seen.of_servers(LogLines) for line in e.lines}
    assert lines == {(i, f"server {i} of 2 for 3 ranks") for i in range(2)}
    assert [e.was_killed for e in seen.of_servers(ChildEnded)] == [True, True]
    assert not any(map(psutil.pid_exists, seen.pids()))


def test_a_killed_rank_is_replaced_and_the_others_go_on(group: WorkerGroup) -> None:
    seen = Seen()
    faults = [[1, 10, 0, "SIGKILL"], [1, 30, 1, "SIGSEGV"], [2, 20, 0, "SIGTERM"]]
    ranks = run(group, seen, steps=80, faults=faults)
    replaced = seen.of(RankReplaced)
    assert sorted((e.rank, e.replacement) for e in replaced) == [(1, 1), (1, 2), (2, 1)]
    assert [rank["replacement"] for rank in ranks] == [0, 2, 1] and {rank["step"] for rank in ranks} == {80}
    assert max(rank["totals"] for rank in ranks) == [240, 240], "every push once"
    begins = [e for e in seen.of(ChildEvent) if e.name == "begins" and e.data["replacement"]]
    assert sorted((e.child.index, e.data["step"]) for e in begins) == [(1, 10), (1, 30), (2, 20)]


def test_a_replaced_rank_takes_part_in_a_checkpoint_and_a_stop(group: WorkerGroup) -> None:
    """The first is asked for while the rank is dead, so that its process has offered nothing."""
    seen = Seen()

    def on_event(event: Event) -> None:
        seen(event)
        if isinstance(event, ChildEvent) and event.name == "fault":
            seen.control.checkpoint()
        elif isinstance(event, ChildEvent) and event.name == "begins" and event.data["replacement"]:
            seen.control.stop()

    job = JobSpec(
        WORK, {"steps": 100_000, "faults": [[1, 20, 0, "SIGKILL"]]}, preload=(), servers_per_host=1,
        server_entry=SERVE, replaceable_ranks=True,
    )  # fmt: skip
    ranks = group.run(job, 3, on_event, seen.attempt, seen.control, Limits(30, 30)).results
    assert len({(rank["step"], tuple(rank["saved"])) for rank in ranks}) == 1
    assert 1 <= len(ranks[0]["saved"]) <= 2 and ranks[0]["saved"][-1] == ranks[0]["step"] > 20


def test_a_rank_that_dies_before_an_announced_step_is_told_of_it_again(group: WorkerGroup) -> None:
    """Asked for at its step 10, half a second ahead; it dies at step 14."""
    seen = Seen()

    def on_event(event: Event) -> None:
        seen(event)
        if isinstance(event, ChildEvent) and event.name == "fault" and event.data["how"] == "SIGCONT":
            seen.control.checkpoint()

    job = JobSpec(
        WORK, {"steps": 36, "step_s": 0.05, "faults": [[1, 10, 0, "SIGCONT"], [1, 14, 0, "SIGKILL"]]}, preload=(),
        servers_per_host=1, server_entry=SERVE, replaceable_ranks=True,
    )  # fmt: skip
    ranks = group.run(job, 2, on_event, seen.attempt, seen.control, Limits(30, 30)).results
    assert ranks[0]["saved"] == ranks[1]["saved"] and len(ranks[0]["saved"]) == 1


@pytest.mark.parametrize(("how", "cause"), [("raise", "exception"), ("exit", "exit")])
def test_a_rank_that_raises_or_exits_is_not_replaced(group: WorkerGroup, how: str, cause: str) -> None:
    seen = Seen()
    with pytest.raises(WorkerFailed) as caught:
        run(group, seen, steps=1000, faults=[[1, 5, None, how]])
    assert (caught.value.child.index, caught.value.failure.cause) == (1, cause) and not seen.of(RankReplaced)
    assert not any(map(psutil.pid_exists, seen.pids()))


def test_a_rank_that_dies_at_the_same_step_again_and_again_ends_the_attempt(group: WorkerGroup) -> None:
    seen = Seen()
    with pytest.raises(WorkerFailed, match=r"rank 2 on .* killed by SIGKILL at step 5"):
        run(group, seen, steps=100_000, faults=[[2, 5, None, "SIGKILL"]])
    assert [event.replacement for event in seen.of(RankReplaced)] == [1, 2, 3]


def test_the_first_agents_rank_is_replaced_and_the_servers_beside_it_stay(group: WorkerGroup) -> None:
    """They are children of one fork server, which ends all that a dead rank has left, and nothing else."""
    seen = Seen()
    ranks = run(group, seen, steps=60, faults=[[0, 10, 0, "SIGKILL"]])
    assert [event.rank for event in seen.of(RankReplaced)] == [0] and len(seen.pids()) == 2
    assert max(rank["totals"] for rank in ranks) == [180, 180]


def test_a_rank_that_is_slow_to_come_back_is_not_taken_to_hang(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last step was long ago when its new process has not begun; here nobody starts that process for 2 s."""
    monkeypatch.setattr("sparkring.training.launch.health.DUMP_S", 0.3)
    seen = Seen()
    send = group.server.send

    def late(agent: str, message: Any) -> bool:
        if isinstance(message, StartChild) and message.rank and message.rank.replacement:
            threading.Timer(2.0, send, (agent, message)).start()
            return True
        return send(agent, message)

    group.server.send = late  # type: ignore[method-assign]
    job = JobSpec(
        WORK, {"steps": 30, "step_s": 0.02, "faults": [[1, 10, 0, "SIGKILL"]]}, preload=(), servers_per_host=1,
        server_entry=SERVE, replaceable_ranks=True,
    )  # fmt: skip
    try:
        ranks = group.run(job, 2, seen, seen.attempt, limits=Limits(30, 2.0)).results
    finally:
        group.server.send = send  # type: ignore[method-assign]
    assert [rank["replacement"] for rank in ranks] == [0, 1]


def test_a_rank_whose_fork_server_dies_is_replaced() -> None:
    """Agent 1 has no server below its fork server."""
    with local_group(3, ("torch",)) as group:
        ranks = run(group, Seen(), steps=60, faults=[[1, 10, 0, "fork server"]])
    assert [rank["replacement"] for rank in ranks] == [0, 1, 0] and max(r["totals"] for r in ranks) == [180, 180]


def test_a_killed_server_ends_the_attempt_and_the_next_one_has_its_own(group: WorkerGroup) -> None:
    seen = Seen()

    def on_event(event: Event) -> None:
        seen(event)
        if isinstance(event, ChildEvent) and event.name == "fault":
            os.kill(seen.pids()[1], signal.SIGKILL)

    job = JobSpec(
        WORK, {"steps": 100_000, "faults": [[0, 10, 0, "SIGCONT"]]}, preload=(), servers_per_host=2,
        server_entry=SERVE, replaceable_ranks=True,
    )  # fmt: skip
    with pytest.raises(WorkerFailed, match=r"server 1 on .* killed by SIGKILL") as caught:
        group.run(job, 3, on_event, seen.attempt, limits=Limits(30, 30))
    assert caught.value.failure.cause == "server" and caught.value.others, "ranks fail without it"
    assert not any(map(psutil.pid_exists, seen.pids()))
    again = Seen()
    assert {rank["step"] for rank in run(group, again, steps=5)} == {5}
    assert not set(again.pids()) & set(seen.pids())


def test_a_server_that_raises_returns_or_is_never_ready_is_named(group: WorkerGroup) -> None:
    seen = Seen()
    with pytest.raises(WorkerFailed, match=r"server 1 on .* raised ValueError: no such shard") as caught:
        run(group, seen, steps=5, end="raises")
    assert "traceback of server 1" in str(caught.value) and caught.value.failure.is_value_error
    with pytest.raises(WorkerFailed, match=r"server . on .* returned before the ranks had ended"):
        run(group, Seen(), steps=100_000, end="returns")
    job = JobSpec(WORK, {"end": "is never ready"}, preload=(), servers_per_host=1, server_entry=SERVE)
    with pytest.raises(LaunchError, match=r"server 0 on .* was not ready within 1 s; .*ctx\.ready\(port\)"):
        group.run(job, 2, seen, Seen().attempt, limits=Limits(1, 30))


def test_a_server_is_no_rank_its_output_and_silence_are_not_taken_for_a_hang(group: WorkerGroup) -> None:
    seen = Seen()
    job = JobSpec(WORK, {"steps": 20, "step_s": 0.08}, preload=(), servers_per_host=1, server_entry=SERVE)
    ranks = group.run(job, 2, seen, seen.attempt, limits=Limits(30, 2.5)).results
    assert {rank["step"] for rank in ranks} == {20}


def test_servers_are_numbered_host_by_host_on_the_first_agent_of_each() -> None:
    def agent(name: str, host: str) -> AgentInfo:
        return AgentInfo(name, 0, host, f"10.0.0.{host}", "eth0", 1, "127.0.0.1", 2)

    class Group:
        def name_of(self, agent: AgentInfo) -> str:
            return agent.host_key

    agents = [agent("a", "1"), agent("b", "1"), agent("c", "2"), agent("d", "2"), agent("e", "3")]
    job = JobSpec(WORK, servers_per_host=2, server_entry=SERVE)
    group: Any = Group()
    servers = Servers(group, job, agents, 1, lambda event: None)
    assert [(s.child.index, s.agent, s.host) for s in servers._states] == [
        (0, "a", "1"), (1, "a", "1"), (2, "c", "2"), (3, "c", "2"), (4, "e", "3"), (5, "e", "3"),
    ]  # fmt: skip
    assert len(servers.secret) == 64 != Servers(group, job, agents, 2, lambda event: None).secret
    assert not Servers(group, JobSpec(WORK), agents, 1, lambda event: None)._states


def test_a_rank_may_die_often_as_long_as_it_makes_steps_between() -> None:
    limit = ReplacementLimit(2)
    assert [limit.allows(0, step) for step in (5, 6, 7, 8, 8, 8)] == [True] * 5 + [False]
    assert limit.count(0) == 5 and limit.allows(1, None) and limit.allows(1, 0) and limit.count(1) == 2
    assert not ReplacementLimit(0).allows(0, 3)


def test_a_server_that_failed_is_the_cause_whoever_was_heard_first() -> None:
    words = "raised GoneError: server 1"
    rank = Failure(Child("rank", 0), "h", "exception", words, error_type="GoneError", message="server 1")
    server = Failure(Child("server", 1), "h", "server", "killed by SIGKILL")
    assert first_failure([rank, server]) is server and first_failure([rank]) is rank
    assert server.headline == "server 1 on h killed by SIGKILL"


def test_a_job_with_servers_names_what_they_run() -> None:
    with pytest.raises(
        ValueError, match=r"server_entry = 'serve': must be 'module:function', as servers_per_host is set"
    ):
        JobSpec(WORK, servers_per_host=2, server_entry="serve")
    with pytest.raises(ValueError, match=r"servers_per_host = -1"):
        JobSpec(WORK, servers_per_host=-1)
