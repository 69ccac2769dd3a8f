"""Runs with random settings, strategies and disturbances: none hangs, loses a row or repeats one."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkring.pipelines.cli.audit import audit_run
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.local import local_group
from tests.training.conftest import PRELOAD
from tests.training.test_worker import Job
from tests.training.test_worker_servers import MODELS, SERVED, check_whole
from tests.training.test_worker_servers_kills import forked
from tests.training.test_worker_tables import SETTINGS, hashed  # noqa: F401

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
HANGS_S = 40  # a round or a part that takes longer fails the run
MOST_ATTEMPTS = 40
EXPECTED = ("killed by SIGKILL", "it may not have finished", "of which its part is lost")


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    """Of each test its own: the fork servers that it kills are replaced by others, which must end with it."""
    with local_group(5, PRELOAD) as group:
        yield group


TORCH = "parallel.engine=torch"
STRATEGIES = (
    [TORCH],
    ["parallel.engine=horovod"],
    *([TORCH, f"parallel.{word}"] for word in ("zero=1", "zero=2", "zero=3", "accumulate=2")),
    *([TORCH, f"parallel.compress.codec={codec}"] for codec in ("int8", "powersgd", "topk")),
    *(
        [f"parallel.servers.per_host={count}", *(f"parallel.servers.{word}" for word in words)]
        for count in (1, 2)
        for words in (["bound=0"], ["bound=2"], ["bound=null"], ["bound=null", "max_lag=6"], ["backup=1"])
    ),
)


def settings_of(draw: random.Random) -> list[str]:
    return [
        "launch.world=5",  # half of which a step must wait for
        "train.epochs=5",
        f"train.eval_every_steps={draw.choice([1, 2, 3, 7, 1000])}",
        f"checkpoint.every_steps={draw.choice([1, 4, 9, 1000])}",
        f"checkpoint.timeout_s={HANGS_S}",
        *draw.choice([[], [f"{MODELS}Slow"]]),
    ]


class Disturber:
    """Asks for checkpoints and stops, and kills or suspends processes, after random steps of rank 0."""

    def __init__(self, job: Job, draw: random.Random):
        self.job, self.draw, self.did, self.control = job, draw, list[str](), Control()

    def on_step(self, step: int) -> None:
        kinds, weights = ("", "checkpoint", "stop", "rank", "server", "suspend"), (60, 20, 4, 8, 3, 5)
        kind = self.draw.choices(kinds, weights)[0]
        ranks = sorted(set(forked()) - set(self.job.servers))
        if not kind or not ranks:
            return
        self.did.append(f"{kind} {step}")
        if kind == "checkpoint":
            self.control.checkpoint()
        elif kind == "stop":
            self.control.stop()
        elif kind == "suspend":
            os.kill(pid := self.draw.choice(ranks), signal.SIGSTOP)
            threading.Timer(self.draw.uniform(0.1, 1.5), resume, [pid]).start()
        else:
            os.kill(self.draw.choice(ranks if kind == "rank" else self.job.servers[-2:]), signal.SIGKILL)


class Stopper(Disturber):
    """Stops an attempt once, after a step; three in ten times a process is killed in that moment."""

    def __init__(self, job: Job, draw: random.Random, until: int):
        super().__init__(job, draw)
        self.until, self.kills = until, draw.random() < 0.3

    def on_step(self, step: int) -> None:
        if step >= self.until and not self.did:
            self.did.append(f"{'kill and ' if self.kills else ''}stop {step}")
            if self.kills:
                os.kill(self.draw.choice(sorted(forked())), signal.SIGKILL)
            self.control.stop()


def resume(pid: int) -> None:
    """Let a suspended process go on, if it is still there."""
    if pid in forked():
        os.kill(pid, signal.SIGCONT)


def run_to_its_end(group: WorkerGroup, job: Job, begin: Callable[[], tuple[str, int, Disturber]]) -> None:
    """Make attempts until one has finished; each ends for a reason that a disturber may give, and leaves no process.

    `begin`: before each attempt, gives what it is called, its ranks and who disturbs it.
    """
    for attempt in range(1, MOST_ATTEMPTS):
        name, world, disturber = begin()
        try:
            job.run(group, world, attempt, on_step=disturber.on_step, control=disturber.control)
            reason = "finished" if job.result.finished else "stopped"
        except WorkerFailed as failure:
            reason = str(failure)
            assert any(expected in reason for expected in EXPECTED) and disturber.did, reason
        print(f"attempt {attempt}, {name}, {world} ranks: {disturber.did}: {reason.splitlines()[0]}")
        assert not forked(), "an attempt that has ended leaves no process"
        if reason == "finished":
            return
    raise AssertionError(f"no end after {MOST_ATTEMPTS} attempts")


@pytest.mark.parametrize("seed", range(24))
def test_a_run_goes_to_its_end_whatever_is_asked_of_it(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
    seed: int,
) -> None:
    draw = random.Random(seed)
    job = Job(tmp_path / "run", hashed, *SERVED, *(words := settings_of(draw)))
    print(f"seed {seed}: {words}")

    def begin() -> tuple[str, int, Disturber]:
        mode = draw.choice(["backup=1", "backup=1", "backup=2", "bound=0", "bound=2", "bound=null"])
        job.config = Job(tmp_path / "run", hashed, *SERVED, *words, f"parallel.servers.{mode}").config
        return mode, draw.randint(2, 5), Disturber(job, draw)

    run_to_its_end(group, job, begin)
    check_whole(job)


@pytest.mark.horovod
@pytest.mark.parametrize("seed", range(16))
def test_a_run_goes_on_with_another_strategy_after_every_stop_and_kill(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
    seed: int,
) -> None:
    draw, until = random.Random(seed), 0
    words = ["launch.world=4", "train.epochs=6", f"checkpoint.timeout_s={HANGS_S}"]
    words += [f"train.eval_every_steps={draw.choice([3, 1000])}", f"checkpoint.every_steps={draw.choice([2, 7, 1000])}"]
    job = Job(tmp_path / "run", hashed, *SETTINGS)

    def begin() -> tuple[str, int, Disturber]:
        nonlocal until
        until += draw.randint(1, 12)
        strategy = draw.choice(STRATEGIES)
        job.config = Job(tmp_path / "run", hashed, *SETTINGS, "data.audit=true", *words, *strategy).config
        return " ".join(strategy), draw.randint(2, 4), Stopper(job, draw, until)

    run_to_its_end(group, job, begin)
    assert (report := audit_run(str(job.folder))).ok, report.lines()
