"""One attempt as the driver follows it: what its work grows with, and who is named; then a thousand ranks in small."""

from __future__ import annotations

import importlib.util
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from training.launch.attempt import Attempt, Control, Limits
from training.launch.channel import Message
from training.launch.failure import RankState, WorkerFailed
from training.launch.link import BEAT_S
from training.launch.results import pack

BROKEN = {"type": "RuntimeError", "message": "Connection closed by peer", "traceback": ""}


class Scripted:
    """A crew whose agents are a list of messages; the looks at them are counted."""

    def __init__(self, *messages: tuple[int, Message]):
        self.messages = deque(messages)
        self.newest: dict[str, Message] = {}
        self.told: list[tuple[str, str]] = []
        self.looks = 0

    def next_message(self, timeout_s: float) -> tuple[str, Message | None] | None:
        if self.messages:
            rank, message = self.messages.popleft()
            return f"a{rank}", {"attempt": 1, **message}
        time.sleep(max(0.0, timeout_s))
        return None

    def beats(self) -> dict[str, Message]:
        newest, self.newest = self.newest, {}
        return newest

    def beat_of(self, agent: str) -> Message | None:
        return self.newest.pop(agent, None)

    def tell(self, agent: str, kind: str) -> None:
        self.told.append((agent, kind))

    def is_lost(self, agent: str, limit_s: float | None = None) -> bool:
        self.looks += 1
        return False

    def note(self, agent: str, message: Message | None) -> None: ...
    def is_connected(self, agent: str) -> bool:
        return True

    def left_at(self, agent: str) -> float:
        return math.inf

    def why_over(self) -> str | None:
        return None


def attempt_of(crew: Scripted, world: int, on_event: Any = lambda event: None) -> Attempt:
    states = [RankState(rank, f"a{rank}", f"h{rank}") for rank in range(world)]
    return Attempt(crew, states, 1, on_event, Control(), time.monotonic(), Limits(60, 60))


def said(rank: int, line: str) -> Message:
    return {"kind": "log", "rank": rank, "lines": [line]}


def ended(status: int = 0, was_killed: bool = False) -> Message:
    return {"kind": "ended", "status": status, "words": f"status {status}", "was_killed": was_killed}


def test_a_message_makes_nobody_look_at_all_ranks() -> None:
    """Each one did: a thousand ranks' messages cost the driver a million looks."""
    world, each = 300, 20
    script = [(rank, {"kind": "running"}) for rank in range(world)]
    for step in range(each):
        script += [(rank, {"kind": "metrics", "step": step, "values": {}}) for rank in range(world)]
    for rank in range(world):
        script += [(rank, {"kind": "result", **pack(rank, "f", None)}), (rank, ended())]
    crew, began = Scripted(*script), time.monotonic()
    assert attempt_of(crew, world).follow().results == list(range(world))
    assert crew.looks <= world * (2 + (time.monotonic() - began) / 0.2)


def test_the_step_at_which_a_rank_ends_is_its_last_though_heartbeats_do_not_queue() -> None:
    crew = Scripted((0, {"kind": "running"}), (0, {"kind": "error", **BROKEN}), (0, ended(1)))
    events: list[dict[str, Any]] = []
    crew.newest["a0"] = {"kind": "beat", "attempt": 1, "rank": 0, "step": 17, "phase": "step"}
    with pytest.raises(WorkerFailed) as caught:
        attempt_of(crew, 1, events.append).follow()
    assert (caught.value.failure.step, caught.value.failure.phase) == (17, "step")
    assert [e["kind"] for e in events][:2] == ["heartbeat", "started"]


def test_a_cause_that_is_heard_after_the_order_to_end_is_still_the_cause() -> None:
    """Of a thousand ranks the one that began may be the last to be heard; what the order ended is no cause."""

    class Late(Scripted):
        def tell(self, agent: str, kind: str) -> None:
            super().tell(agent, kind)
            self.messages.append((int(agent[1:]), ended(-9, was_killed=agent != "a1")))

    crew = Late(*((rank, {"kind": "running"}) for rank in range(3)), (0, {"kind": "error", **BROKEN}))
    with pytest.raises(WorkerFailed) as caught:
        attempt_of(crew, 3).follow()
    assert set(crew.told) == {("a0", "kill"), ("a1", "kill"), ("a2", "kill")}
    assert caught.value.rank == 1 and [other.rank for other in caught.value.others] == [0]


def test_the_host_that_does_not_answer_is_the_cause_and_not_the_rank_whose_ring_broke() -> None:
    """It was named 14 s and ninety lines after its victims, or not at all."""

    class Vanished(Scripted):
        def is_lost(self, agent: str, limit_s: float | None = None) -> bool:
            return agent == "a1" and min(20.0, limit_s or 20.0) < 6.0  # nothing has been heard of it for so long

        def tell(self, agent: str, kind: str) -> None:
            if agent == "a0":
                self.messages.append((0, ended(1, was_killed=True)))

    crew = Vanished(
        (0, {"kind": "running"}),
        (1, {"kind": "running"}),
        (0, said(0, "before")),
        (0, {"kind": "error", **BROKEN}),
        *((0, said(0, f"line {n} of a traceback")) for n in range(500)),
        (1, said(1, "the cause's last words")),
    )
    events, began = list[dict[str, Any]](), time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        attempt_of(crew, 2, events.append).follow()
    assert (caught.value.rank, caught.value.failure.cause) == (1, "lost")
    assert time.monotonic() - began < 5
    told = [(e["kind"], e.get("rank"), len(e.get("lines", ()))) for e in events]
    told = [each for each in told if each[0] not in ("started", "ended")]
    assert told == [("log", 0, 1), ("failure", 1, 0), ("late_log", 0, 100), ("log", 1, 1)]


@pytest.mark.ranks
def test_the_benchmark_of_a_thousand_ranks_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[3] / "benchmarks/control_channel.py"
    monkeypatch.syspath_prepend(str(path.parent))  # as for a script
    spec = importlib.util.spec_from_file_location("control_channel", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    found = benchmark.simulate(ranks=64, beats=20.0, seconds=2.0)  # it asserts who is named
    assert found["refused"] == 0
    assert found["beats_per_s"] < 64 / BEAT_S * 1.3, "heartbeats are merged at the agent"
    seconds = benchmark.pure_parts(10_000)
    assert max(seconds["look"], seconds["all fail: look"]) < benchmark.TARGETS["look_s"]
    assert sum(seconds.values()) < benchmark.TARGETS["pure_s"]
