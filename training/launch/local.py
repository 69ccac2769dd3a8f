"""Ranks on this machine, without Spark: the same agents, as threads of the calling process.

`run_local` is `run_barrier` for one machine: to try an entry, to debug it, and for tests.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from sparkring.training.launch.attempt import Limits
from sparkring.training.launch.control import Control
from sparkring.training.launch.events import OnEvent
from sparkring.training.launch.group import WorkerGroup, log_event
from sparkring.training.launch.host.agent import Agent, AgentOptions
from sparkring.training.launch.host.processes import usable_cores
from sparkring.training.launch.host.shared_imports import shared_imports
from sparkring.training.launch.job import JobResult, JobSpec
from sparkring.training.launch.topology import check_world

log = logging.getLogger(__name__)


def run_local(
    job: JobSpec,
    world: int,
    on_event: OnEvent = log_event,
    *,
    attempt: int = 1,
    control: Control | None = None,
    limits: Limits | None = None,
) -> JobResult:
    """Run `job` on `world` processes of this machine; arguments and errors are those of WorkerGroup.run.

    Args:
        job: what every rank runs.
        world: number of ranks.
        on_event: called with every Event.
        attempt: number, from 1.
        control: requests to the attempt, from other threads.
        limits: seconds for the start and without progress.
    """
    job.check()  # before anything starts
    with local_group(world, job.preload) as group:
        return group.run(job, world, on_event, attempt, control, limits)


@contextmanager
def local_group(
    world: int,
    preload: tuple[str, ...],
    *,
    lines_per_s: float | None = 200.0,
    run_id: str = "local",
    host: str = "127.0.0.1",
) -> Iterator[WorkerGroup]:
    """Start `world` agents on this machine, for any number of attempts.

    Their fork servers stay warm between them.

    Args:
        world: number of agents, one rank each.
        preload: modules that fork servers import.
        lines_per_s: limit of log lines, see AgentOptions.
        run_id: run id for torch's variables.
        host: address that the driver listens on.
    """
    check_world(world)
    environment = {"OMP_NUM_THREADS": str(max(1, usable_cores() // world)), **os.environ}
    sharing = shared_imports(environment) if world > 1 else nullcontext()
    with sharing, WorkerGroup(host, run_id=run_id) as group:
        options = AgentOptions(group.endpoint, environment, preload, lines_per_s=lines_per_s)
        threads = [threading.Thread(target=_run_agent, args=(options, i), daemon=True) for i in range(world)]
        for thread in threads:
            thread.start()
        try:
            yield group
        finally:
            # An agent may become ready only now: without an answer it would wait for as long as it is patient.
            deadline = time.monotonic() + 15
            while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
                group.dismiss()
                threads[0].join(timeout=0.02)
                threads = [thread for thread in threads if thread.is_alive()]


def _run_agent(options: AgentOptions, index: int) -> None:
    try:
        Agent(options, index, f"local-{index}").run()
    except ConnectionError as error:
        log.debug("agent %d: %s", index, error)
