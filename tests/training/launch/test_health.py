"""Hangs and stragglers: the decisions as pure functions, then a real hang of real ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from sparkring.training.launch.attempt import Limits
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.health import (
    RankProgress,
    StragglerDetector,
    hanging,
    innermost,
    name_culprit,
    stragglers,
    waiting_for_work,
    waits_in,
)
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.messages import Event, Heartbeat, Stacks, Straggler, WindowTiming

WAITS = """Thread 0x00007f1 (most recent call first):
  File "/x/training/launch/host/rank.py", line 105 in _listen

Current thread 0x00007f2 (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/x/train.py", line 3 in main
"""
SLEEPS = """Thread 0x00007f2 (most recent call first):
  File "/x/train.py", line 9 in load_batch
  File "/x/train.py", line 3 in main
"""


def rank(number: int, step: int | None, idle_s: float) -> RankProgress:
    return RankProgress(number, f"h{number}", step, "step", idle_s)


@pytest.mark.parametrize(
    ("idle", "steps", "expected"),
    [
        ([1.0, 1.0], [5, 5], []),
        ([11.0, 1.0], [5, 5], [0]),
        ([11.0, 12.0], [5, 5], [0, 1]),
        ([999.0, 999.0], [None, None], []),  # a script that reports nothing
        ([999.0, 1.0], [None, 3], [0]),  # but one silent rank among reporting ones
    ],
)
def test_who_hangs(idle: list[float], steps: list[int | None], expected: list[int]) -> None:
    ranks = [rank(i, step, s) for i, (step, s) in enumerate(zip(steps, idle, strict=True))]
    assert [r.rank for r in hanging(ranks, 10.0)] == expected


SAVES = """Current thread 0x00007f2 (most recent call first):
  File "/py/threading.py", line 1123 in join
  File "/x/anywhere/save.py", line 286 in wait
  File "/x/anywhere/else.py", line 20 in waiting_for_ranks
  File "/x/training/checkpoint/checkpointer.py", line 130 in save
"""


POLLS = """Current thread 0x00007f2 (most recent call first):
  File "/x/anywhere/ring.py", line 74 in wait
  File "/x/anywhere/else.py", line 20 in waiting_for_ranks
  File "/x/training/parallel/data_parallel/reduce.py", line 143 in finish
"""


@pytest.mark.parametrize(
    ("idle", "stacks", "waiting"),
    [
        ([11.0, 1.0], {0: WAITS, 1: SLEEPS}, [0]),  # rank 1 hashes its files, and says so
        ([11.0, 11.0, 1.0], {0: WAITS, 1: SAVES, 2: SLEEPS}, [0, 1]),
        ([11.0, 11.0, 1.0], {0: WAITS, 1: SLEEPS, 2: WAITS}, [0]),  # rank 1 is stuck
        ([11.0, 11.0], {0: WAITS, 1: SLEEPS}, []),  # as here, where nobody works
        ([11.0, 11.0], {0: WAITS, 1: WAITS}, []),  # both wait, for nobody
        ([11.0, 1.0], {0: SLEEPS, 1: WAITS}, []),  # rank 0 is stuck, rank 1 has just come to wait for it
        ([11.0, 1.0], {1: SLEEPS}, []),  # rank 0 has not even a stack
        ([11.0], {0: WAITS}, []),
    ],
)
def test_who_waits_for_a_rank_that_works_does_not_hang(
    idle: list[float], stacks: dict[int, str], waiting: list[int]
) -> None:
    assert waiting_for_work([rank(i, 5, s) for i, s in enumerate(idle)], stacks, 10.0) == waiting


def test_stacks_are_read() -> None:
    assert waits_in(WAITS) == "all_reduce"
    assert waits_in(POLLS) == "wait", "our ring polls Horovod, so the innermost frame is ours"
    assert waits_in(SLEEPS) is None
    stopped = {0: POLLS, 1: "process 7 is T (stopped): stopped by a signal"}
    assert name_culprit([rank(0, 5, 9.0), rank(1, 5, 9.0)], stopped)[0] == 1
    assert innermost(SLEEPS) == "load_batch (train.py:9)"
    assert innermost("process 7 is T (stopped)") == "process 7 is T (stopped)"


@pytest.mark.parametrize(
    ("ranks", "stacks", "expected"),
    [
        ([rank(0, 5, 20), rank(1, 5, 20)], {0: WAITS, 1: SLEEPS}, 1),
        ([rank(0, 5, 20), rank(1, 5, 20)], {0: SLEEPS, 1: WAITS}, 0),
        ([rank(0, 5, 20), rank(1, 4, 21)], {0: WAITS, 1: WAITS}, 1),  # all wait, in different steps
        ([rank(0, 5, 20), rank(1, 5, 25)], {}, 1),
        ([rank(0, 5, 20), rank(1, None, 25)], {0: WAITS, 1: WAITS}, 1),
        ([rank(0, 5, 20), rank(1, 5, 20)], {0: WAITS, 1: "process 7 is T (stopped): ..."}, 1),
    ],
)
def test_the_culprit_is_who_is_missing(ranks: list[RankProgress], stacks: dict[int, str], expected: int) -> None:
    found, words = name_culprit(ranks, stacks)
    assert found == expected
    assert words.startswith("hangs: no progress for")


def test_the_words_say_who_waits_where() -> None:
    _, words = name_culprit([rank(0, 5, 20), rank(1, 5, 21), rank(2, 5, 20)], {0: WAITS, 1: SLEEPS, 2: WAITS})
    assert words == "hangs: no progress for 21 s, in load_batch (train.py:9); ranks 0, 2 wait in all_reduce"


def timing(busy_s: float, wait_s: float = 0.0) -> WindowTiming:
    return WindowTiming(busy_s + wait_s, wait_s, 0.0, 0.0, {}, {}, {})


@pytest.mark.parametrize(
    ("busy", "expected"),
    [([1.0, 1.0, 1.0], []), ([1.0, 2.0, 1.0], [1]), ([1.0, 2.0], [1]), ([3.0, 2.0, 1.0, 1.0], [0, 2 - 1]), ([1.0], [])],
)
def test_who_is_slow(busy: list[float], expected: list[int]) -> None:
    assert stragglers({i: timing(b, 0.1) for i, b in enumerate(busy)}) == expected


def test_microseconds_make_no_straggler() -> None:
    assert stragglers({0: timing(1e-5), 1: timing(9e-5)}) == []


def found_by(watch: StragglerDetector, step_s: float, slow: Callable[[int], bool]) -> list[tuple[Any, ...]]:
    """What the detector says of rank 1 beside another that is busy for a fifth of each step."""
    found = []
    for step in range(10, 110, 10):
        for rank in range(2):
            wait_s = 0.0 if rank and slow(step) else 0.8 * step_s
            found += [(step, *new) for new in watch.add(rank, step, timing(step_s - wait_s, wait_s))]
    return found


def test_a_straggler_is_named_once_and_drawn() -> None:
    watch = StragglerDetector(world=2, windows=3)
    assert found_by(watch, 0.5, lambda step: step != 60) == [(30, 1, pytest.approx(0.5), pytest.approx(0.4))]
    assert watch.figure()["rank"] == [0, 1] * 10


def test_a_straggler_is_named_when_it_has_lasted() -> None:
    assert found_by(StragglerDetector(world=2), 0.02, lambda step: True) == []  # 2 s in all
    named = found_by(StragglerDetector(world=2), 0.2, lambda step: True)
    assert [(step, rank) for step, rank, *_ in named] == [(60, 1)]  # five windows of 2 s behind the first
    assert found_by(StragglerDetector(world=2), 0.2, lambda step: step % 50 != 0) == []  # never for so long at once


def slow_on_rank_1(ctx: Any) -> None:
    """Training steps of the payload's strategy; rank 1's model takes its time in every forward."""
    import torch
    from torch import nn

    from sparkring.conf.blocks.parallel import ParallelConfig
    from sparkring.training.data.batch import Batch
    from sparkring.training.launch.messages import WindowTiming
    from sparkring.training.parallel.compose import build_strategy

    class Sleepy(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.2 * ctx.rank)
            return super().forward(x).squeeze(-1)

    class Squares:
        def inputs(self, columns: dict[str, Any]) -> tuple[Any, ...]:
            return (columns["x"],)

        def loss(self, outputs: torch.Tensor, columns: dict[str, Any]) -> torch.Tensor:
            return outputs.square()

    settings = ParallelConfig(engine=ctx.payload["engine"], zero=ctx.payload["zero"])
    strategy = build_strategy(settings, ctx.rank_info, torch.device("cpu"))
    model = Sleepy(nn.Linear(4, 8), nn.Linear(8, 1))
    strategy.prepare(model, Squares(), lambda named: torch.optim.SGD(dict(named).values()))  # type: ignore[arg-type]
    for step in range(1, 5):
        began, waited_s = time.monotonic(), strategy.waited_s
        strategy.forward_backward(Batch({"x": torch.ones(2, 4)}, 2, 4, 4 * step))
        strategy.step(0.1)
        step_s = time.monotonic() - began
        # Each as if it were the mean of twenty: a straggler is named when it has lasted for ten seconds.
        wait_s = strategy.waited_s - waited_s
        ctx.metrics(20 * step, {}, timing=WindowTiming(step_s, wait_s, 0.0, 0.0, {}, {}, {}))
    strategy.close()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("engine", "zero"),
    [
        pytest.param("horovod", 0, marks=pytest.mark.horovod),
        pytest.param("horovod", 1, marks=[pytest.mark.horovod, pytest.mark.slow]),
        ("torch", 0),
        pytest.param("torch", 1, marks=pytest.mark.slow),
        ("torch", 3),
    ],
)
def test_every_engine_tells_waiting_from_work(group: WorkerGroup, engine: str, zero: int) -> None:
    events: list[Event] = []
    group.run(JobSpec(slow_on_rank_1, {"engine": engine, "zero": zero}), 2, events.append)
    (slow,) = [e for e in events if isinstance(e, Straggler)]
    assert slow.rank == 1 and min(slow.busy_s, slow.others_wait_s) > 0


def run_until_hang(group: WorkerGroup, entry: Any, hang_s: float = 2.5) -> tuple[WorkerFailed, list[Event]]:
    events: list[Event] = []
    with pytest.raises(WorkerFailed) as caught:
        group.run(JobSpec(entry), 2, events.append, limits=Limits(60, hang_s))
    return caught.value, events


@pytest.mark.ranks
def test_a_rank_that_sleeps_is_named_and_all_stacks_are_shown(group: WorkerGroup) -> None:
    def entry(ctx: Any) -> None:
        import torch
        import torch.distributed as dist

        def stuck_in_my_code() -> None:
            time.sleep(600)

        dist.init_process_group("gloo")
        for step in range(100):
            ctx.heartbeat(step, "step")
            if step == 3 and ctx.rank == 1:
                stuck_in_my_code()
            dist.all_reduce(torch.ones(1))

    error, events = run_until_hang(group, entry)
    assert (error.child.index, error.failure.cause, error.failure.step) == (1, "hang", 3)
    assert "stuck_in_my_code" in error.failure.words
    assert "rank 0 waits in all_reduce" in error.failure.words
    assert "stuck_in_my_code" in error.stacks[1] and "all_reduce" in error.stacks[0]
    assert {e.rank for e in events if isinstance(e, Stacks)} == {0, 1}
    assert "stacks of rank 0" in str(error)


@pytest.mark.ranks
def test_a_stopped_process_is_named_though_it_cannot_speak(group: WorkerGroup) -> None:
    def entry(ctx: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for step in range(100):
            ctx.heartbeat(step, "step")
            if step == 3 and ctx.rank == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(torch.ones(1))

    error, _ = run_until_hang(group, entry)
    assert error.child.index == 0
    assert "T (stopped)" in error.failure.words


@pytest.mark.slow  # who waits for a rank that works is decided above
@pytest.mark.ranks
def test_a_rank_whose_work_is_long_holds_up_the_others_and_nobody_hangs(group: WorkerGroup) -> None:
    """Rank 1 goes through its files for longer than the limit; rank 0 has none, and waits in a collective."""

    def entry(ctx: Any) -> int:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        ctx.heartbeat(0, "ring")
        for file in range(ctx.rank * 8):
            time.sleep(0.5)
            ctx.on_progress(f"hashed {file}")
        dist.all_reduce(torch.ones(1))
        return int(ctx.rank)

    events: list[Event] = []
    spec = JobSpec(entry)
    assert group.run(spec, 2, events.append, limits=Limits(60, 3.0)).results == [0, 1]
    assert len([e for e in events if isinstance(e, Heartbeat) and "hashed" in e.phase]) < 8, "one a second is sent"


@pytest.mark.slow  # who hangs is decided above
@pytest.mark.ranks
def test_slow_but_moving_is_no_hang(group: WorkerGroup) -> None:
    def entry(ctx: Any) -> int:
        for step in range(12):
            ctx.heartbeat(step, "step")
            time.sleep(0.5)
        return ctx.rank

    assert group.run(JobSpec(entry), 2, lambda e: None, limits=Limits(60, 5.0)).results == [0, 1]
