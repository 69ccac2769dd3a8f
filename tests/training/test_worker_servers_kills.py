"""A run on parameter servers through twenty deaths of ranks and twenty of servers loses and repeats nothing."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import psutil
import pytest

from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.group import WorkerGroup
from tests.descendants import imports_for_all
from tests.training.test_worker import Job
from tests.training.test_worker_servers import SERVED, check_whole
from tests.training.test_worker_tables import hashed  # noqa: F401

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
log = logging.getLogger(__name__)
KILLS = 20  # of ranks, and of servers
CHECKPOINT = 10  # steps
MODES = ("parallel.servers.bound=2", "parallel.servers.bound=null", "parallel.servers.backup=1")
LONG = ("train.epochs=80", "train.eval_every_steps=100", f"checkpoint.every_steps={CHECKPOINT}")


def forked() -> list[int]:
    """Process ids of ranks and servers, which are forks of a fork server, as that may be of what imports for all."""
    return [process.pid for process in psutil.Process().children(recursive=True) if is_child(process)]


def is_child(process: psutil.Process) -> bool:
    """Whether a process is a rank or a server: a fork has its parent's command."""
    try:
        command = process.cmdline()
        same = list(takewhile(lambda each: each.cmdline() == command, process.parents()))
        return process.status() != psutil.STATUS_ZOMBIE and len(same) > imports_for_all(process)
    except psutil.NoSuchProcess:
        return False


@dataclass
class Killer:
    """Kills ranks, and then a server, after random numbers of steps of each attempt."""

    job: Job
    random: random.Random
    ranks: list[int] = field(default_factory=list)  # process ids that were killed
    servers: list[int] = field(default_factory=list)
    rank_at: int = 0
    server_at: int = 0

    def begin(self, step: int) -> None:
        """Draw the moments of an attempt that goes on from a step; two in three get past a checkpoint."""
        self.rank_at = step + self.random.randint(1, CHECKPOINT)
        self.server_at = step + self.random.randint(2, 3 * CHECKPOINT)

    def on_step(self, step: int) -> None:
        if step >= self.server_at and len(self.servers) < KILLS:
            self.servers.append(self._kill(self.job.servers[-2:]))
            self.server_at = 1 << 30
        elif step >= self.rank_at and len(self.ranks) < KILLS:
            if alive := sorted(set(forked()) - set(self.job.servers)):
                self.ranks.append(self._kill(alive))
            self.rank_at = step + self.random.randint(1, 2 * CHECKPOINT)

    def _kill(self, among: list[int]) -> int:
        time.sleep(self.random.uniform(0, 0.03))  # some part of a step
        os.kill(pid := self.random.choice(among), signal.SIGKILL)
        return pid


def run_to_its_end(job: Job, group: WorkerGroup, killer: Killer) -> list[str]:
    """Make attempts until one is not ended; returns why the others were."""
    reasons: list[str] = []
    while len(reasons) < 3 * KILLS:
        killer.begin(job.from_step)
        try:
            job.run(group, 3, len(reasons) + 1, on_step=killer.on_step)
            return reasons
        except WorkerFailed as failure:
            assert not forked(), "an attempt that has ended leaves no process"
            reasons.append(str(failure).splitlines()[0])
    raise AssertionError(f"no end after {len(reasons)} attempts: {reasons}")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_through_twenty_kills_of_ranks_and_twenty_of_servers(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
    mode: str,
) -> None:
    job, began = Job(tmp_path / "run", hashed, *SERVED, *LONG, mode), time.monotonic()
    killer = Killer(job, random.Random(mode))
    reasons = run_to_its_end(job, group, killer)
    took, train_s = sorted(event.took_s for event in job.replaced), time.monotonic() - began
    assert len(killer.servers) == len(killer.ranks) == KILLS and job.result.finished
    assert job.result.steps == 800
    assert not forked() and not any(map(psutil.pid_exists, killer.servers + killer.ranks))
    check_whole(job)
    of_servers = sum("server" in each.partition("killed")[0] for each in reasons)
    log.info(
        f"{mode}: {of_servers} attempts ended by a server, {len(reasons) - of_servers} by a rank; {len(took)} ranks "
        f"replaced, median {statistics.median(took):.2f} s, worst {took[-1]:.2f} s; {train_s:.0f} s, load average "
        f"{os.getloadavg()[0]:.1f}"
    )
    for reason, count in Counter(re.sub(r"\d+", "N", each)[:100] for each in reasons).items():
        log.info(f"{count} times: {reason}")
