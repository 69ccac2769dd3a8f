"""The loop in real processes: stops and checkpoints at one same step, though no rank waits for another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sparkring.conf.blocks.checkpoint import CheckpointConfig
from sparkring.conf.blocks.train import TrainConfig
from sparkring.training.data.batch import Batch, Meter
from sparkring.training.launch.control import Control
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.host import cuts
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.messages import ChildEvent, Event, Heartbeat, RankMetrics
from sparkring.training.loop.fit import Callbacks, TrainerState, fit
from sparkring.training.parallel.local import StepInfo
from tests.ranks.cases_replicas import Dense
from tests.ranks.problem import SquaredError, make_strategy, rank_part, table_batch

pytestmark = pytest.mark.ranks
ENDLESS = 10_000_000


@pytest.fixture
def attempt(counter: list[int] = [0]) -> int:  # noqa: B006
    """A number that no other attempt of the group has had."""
    counter[0] += 1
    return counter[0]


class Apart:
    """A strategy that never meets other ranks, and its reader; each rank has its own pace."""

    waited_s, steps_per_epoch, lookahead, meter = 0.0, ENDLESS, 1, Meter()

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def batches(self, consumed: int, count: int) -> Any:
        return (Batch({}, 1, 1, i + 1) for i in range(consumed, consumed + count))

    def ahead(self, batches: Any) -> Any:
        return batches

    def forward_backward(self, batch: Any) -> torch.Tensor:
        time.sleep(self.step_s)
        return torch.tensor(1.0)

    def step(self, lr: float) -> StepInfo:
        return StepInfo(grad_norm=0.0)

    @property
    def meeting(self) -> Any:
        return self

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        return values

    share_of_sum = sum_over_data


def train_apart(
    ctx: Any, step_s: float, steps: int, evaluate: Callable[[int], dict[str, float]] | None = None, **how: Any
) -> dict[str, Any]:
    """Train; the steps at which this rank has written a checkpoint, and its last. A cut is announced 0.1 s ahead."""
    cuts.LEAD_S = 0.1  # of this rank's process
    apart: Any = Apart(step_s * (1 + 0.3 * ctx.rank))
    saved = list[int]()

    def save(state: TrainerState, metric: float | None) -> None:
        saved.append(state.step)
        ctx.event("saved", {"step": state.step})

    def on_step(epoch: int, step: int, batch: Any) -> None:
        if step + 2 == steps:
            ctx.event("near the end", {})

    callbacks = Callbacks(lambda _: 0.1, evaluate or (lambda _: {"loss": 0.0}), save, on_step)
    config = TrainConfig(
        epochs=None, steps=steps, log_every_steps=1000, eval_every_steps=how.pop("eval_every", ENDLESS)
    )
    checkpoint = CheckpointConfig(on_improvement=False, **{"every_s": None, **how})
    state = fit(apart, apart, callbacks, ctx, config, checkpoint, TrainerState())
    return {"saved": saved, "step": state.step}


@pytest.mark.parametrize(("step_s", "world"), [(0.001, 1), (0.001, 3), (0.5, 3)])
def test_a_checkpoint_and_then_a_stop_come_at_one_same_step_of_all_ranks(
    group: WorkerGroup, attempt: int, step_s: float, world: int
) -> None:
    control, saved = Control(), set[int]()

    def on_event(event: Event) -> None:
        if isinstance(event, Heartbeat) and event.step and not saved:
            control.checkpoint()
            saved.add(-1)
        elif isinstance(event, ChildEvent) and event.name == "saved":
            saved.add(event.child.index)
            if len(saved) == world + 1:
                control.stop()

    job = JobSpec(train_apart, args=(step_s, ENDLESS))
    ranks = group.run(job, world, on_event, attempt, control).results
    assert ranks == [ranks[0]] * world
    checkpoint, stop = ranks[0]["saved"]
    assert 0 < checkpoint < stop == ranks[0]["step"]
    if step_s == 0.5:
        assert stop <= checkpoint + 3, "a stop costs no more than the running step of the rank that is ahead"


def test_a_checkpoint_by_the_clock_comes_at_one_same_step_of_all_ranks(group: WorkerGroup, attempt: int) -> None:
    """Each has a clock of its own; rank 0 asks for all."""
    ranks = group.run(JobSpec(train_apart, args=(0.01, 80), kwargs={"every_s": 0.1}), 2, quiet, attempt).results
    assert ranks[0] == ranks[1]
    assert len(ranks[0]["saved"]) >= 3 and ranks[0]["saved"][-1] == 80


def quiet(event: Event) -> None:
    """Events are of no interest to a test about something else."""


def test_a_stop_asked_for_just_before_the_last_step_is_the_same_on_all_ranks(group: WorkerGroup, attempt: int) -> None:
    control = Control()

    def on_event(event: Event) -> None:
        if isinstance(event, ChildEvent) and event.name == "near the end":
            control.stop()

    ranks = group.run(JobSpec(train_apart, args=(0.05, 9)), 3, on_event, attempt, control).results
    assert ranks == [{"saved": [ranks[0]["step"]], "step": ranks[0]["step"]}] * 3
    assert ranks[0]["step"] in (8, 9)


def begins_late(ctx: Any, file: str) -> dict[str, Any]:
    """Train; rank 1 begins when the file is there."""
    ctx.heartbeat(0, "prepare")
    while ctx.rank == 1 and not Path(file).exists():
        time.sleep(0.01)
    return train_apart(ctx, 0.01, ENDLESS)


def test_a_stop_that_is_asked_for_while_a_checkpoint_is_agreed_makes_one_cut_with_it(
    group: WorkerGroup, attempt: int, tmp_path: Path
) -> None:
    """Rank 0 has offered a step and waits there, rank 1 has not begun."""
    control, file = Control(), tmp_path / "go"

    def on_event(event: Event) -> None:
        if isinstance(event, Heartbeat) and event.rank == 0 and event.step == 1:
            control.checkpoint()
            control.stop()
            threading.Timer(0.3, file.touch).start()

    def waits(event: Event) -> None:
        if isinstance(event, Heartbeat) and event.step and not control.stopping:
            on_event(Heartbeat(0, event.attempt, 1, event.phase))

    ranks = group.run(JobSpec(begins_late, args=(str(file),)), 2, waits, attempt, control).results
    assert ranks[0] == ranks[1] and ranks[0]["saved"] == [ranks[0]["step"]]


def test_a_stop_while_a_long_evaluation_runs_comes_when_it_ends(
    group: WorkerGroup, attempt: int, tmp_path: Path
) -> None:
    """Steps of 0.3 s, longer than a cut is announced ahead: not one more is made."""
    control, file = Control(), tmp_path / "asked"

    def train(ctx: Any) -> dict[str, Any]:
        def evaluate(step: int) -> dict[str, float]:
            ctx.event("evaluates", {})
            while not file.exists():
                time.sleep(0.01)
            time.sleep(2.0)  # until the request has come
            return {"loss": 0.0}

        return train_apart(ctx, 0.3, ENDLESS, evaluate, eval_every=2)

    def on_event(event: Event) -> None:
        if isinstance(event, ChildEvent) and event.name == "evaluates" and event.child.index == 0:
            control.stop()
            file.touch()

    ranks = group.run(JobSpec(train), 2, on_event, attempt, control).results
    assert ranks == [{"saved": [2], "step": 2}] * 2


def far_apart(ctx: Any, file: str) -> dict[str, Any]:
    """Train replicas; rank 1 makes its 14th step when rank 0 has made sixty.

    In the tenth step all ranks meet, once, to find parameters that no gradient reaches.
    """
    strategy = make_strategy(
        ctx.rank, ctx.world_size, {"engine": "torch", "averaging": {"kind": "local_sgd", "every": ENDLESS}}
    )
    torch.manual_seed(0)
    strategy.prepare(Dense().double(), SquaredError(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.0))
    reader: Any = Apart(0.0)
    reader.batches = lambda consumed, count: (rank_part(table_batch(i, 4), strategy) for i in range(count))
    own, saved = dict[int, float](), list[int]()

    def on_step(epoch: int, step: int, batch: Any) -> None:
        time.sleep(0.002)
        while ctx.rank == 1 and step == 13 and not Path(file).exists():
            time.sleep(0.01)
        if ctx.rank == 0 and step == 60:
            Path(file).touch()
            ctx.event("far ahead", {})

    def on_stepped(state: TrainerState, made: Any) -> None:
        own[state.step] = float(made.loss_sum)

    callbacks = Callbacks(
        lambda _: 0.1, lambda _: {"loss": 0.0}, lambda state, _: saved.append(state.step), on_step, on_stepped
    )
    config = TrainConfig(epochs=None, steps=ENDLESS, log_every_steps=5, eval_every_steps=ENDLESS)
    checkpoint = CheckpointConfig(every_s=None, on_improvement=False)
    failed = True
    try:
        state = fit(strategy, reader, callbacks, ctx, config, checkpoint, TrainerState())
        failed = False
    finally:
        strategy.close(failed)
    return {"saved": saved, "step": state.step, "losses": [own[step] for step in sorted(own)]}


def test_a_replica_that_is_ahead_is_held_by_no_log_line_and_both_stop_at_one_step(
    group: WorkerGroup, attempt: int, tmp_path: Path
) -> None:
    """Nine log lines are between them; they met at the first one, and at a poll of the driver once a second."""
    control, logged = Control(), dict[int, float]()

    def on_event(event: Event) -> None:
        if isinstance(event, ChildEvent) and event.name == "far ahead":
            control.stop()
        elif isinstance(event, RankMetrics) and event.rank == 0:
            logged[event.step] = event.values["train/loss"]

    job = JobSpec(far_apart, args=(str(tmp_path / "go"),), collective_timeout_s=60)
    fast, slow = group.run(job, 2, on_event, attempt, control).results
    assert fast["step"] == slow["step"] >= 61 and fast["saved"] == slow["saved"] == [fast["step"]]
    for step, loss in logged.items():
        window = slice(step - 5, step)
        expected = sum(fast["losses"][window]) + sum(slow["losses"][window])
        rows = sum(table_batch(number, 4).global_rows for number in range(step - 5, step))
        assert loss == pytest.approx(expected / rows, rel=1e-12)
    assert [*logged] == [*range(5, fast["step"] + 1, 5)], "every window, in order, whoever was first"


DRIVER = """
import os, sys, time
from sparkring.training.launch.control import Control
from sparkring.training.launch.host import cuts
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import run_local
control = Control()
def entry(ctx):
    cuts.LEAD_S = 0.1
    print("PID", os.getpid())
    if ctx.rank == 1:
        time.sleep(600)  # never begins, so never offers
    ctx.begin_steps(0, 10**6)
    for step in range(1, 10**6):
        time.sleep(0.02)
        ctx.cut_after(step)
        ctx.event("step", {})
        print("STEP", step)
def show(event):
    if getattr(event, "name", "") == "step":
        control.stop()
    for line in getattr(event, "lines", ()):
        print(line, flush=True)
run_local(JobSpec(entry, preload=()), 2, show, control=control)
"""


def test_ranks_end_with_a_driver_that_dies_between_an_offer_and_the_announcement(no_torch: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(no_torch)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None
    lines, last_at = list[str](), [time.monotonic()]

    def read() -> None:
        for line in driver.stdout or ():
            lines.append(line)
            last_at[0] = time.monotonic()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        deadline = time.monotonic() + 60
        while not (any("STEP" in line for line in lines) and time.monotonic() - last_at[0] > 1.0):
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
        pids = [int(line.split()[1]) for line in lines if line.startswith("PID")]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids)), "rank 0 stands where it has offered"
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    reader.join(60)
    driver.stdout.close()
    assert not any(map(psutil.pid_exists, pids))
