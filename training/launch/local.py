"""Ranks on this machine, without Spark: the same agents as threads of the calling process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from training.launch.agent import Agent, AgentOptions
from training.launch.attempt import Control, Limits, OnEvent
from training.launch.crew import Crew, log_event
from training.launch.job import JobResult, JobSpec
from training.launch.worker_env import check_world

log = logging.getLogger(__name__)


def run_local(
    job: JobSpec,
    world: int,
    on_event: OnEvent = log_event,
    *,
    attempt: int = 1,
    control: Control | None = None,
    limits: Limits | None = None,
    lines_per_s: float | None = 200.0,
    run_id: str = "local",
) -> JobResult:
    """Run `job` on `world` processes of this machine and return what they return; see Crew.run for what it raises."""
    job.to_json()  # what cannot travel is said before anything starts
    with local_crew(world, job.preload, lines_per_s=lines_per_s, run_id=run_id) as crew:
        return crew.run(job, world, on_event, attempt, control, limits)


@contextmanager
def local_crew(
    world: int,
    preload: tuple[str, ...],
    *,
    lines_per_s: float | None = 200.0,
    run_id: str = "local",
) -> Iterator[Crew]:
    """`world` agents on loopback, for as many attempts as one likes; their helpers stay warm between them."""
    check_world(world)
    environment = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world)), **os.environ}
    with Crew("127.0.0.1", run_id=run_id) as crew:
        options = AgentOptions(crew.endpoint, environment, preload, lines_per_s=lines_per_s)
        threads = [threading.Thread(target=_run_agent, args=(options, i), daemon=True) for i in range(world)]
        for thread in threads:
            thread.start()
        try:
            yield crew
        finally:
            # An agent may offer its seat only now: with nobody to answer it would wait for as long as it is patient.
            deadline = time.monotonic() + 15
            while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
                crew.dismiss()
                threads[0].join(timeout=0.02)
                threads = [thread for thread in threads if thread.is_alive()]


def _run_agent(options: AgentOptions, index: int) -> None:
    try:
        Agent(options, index, f"local-{index}").run()
    except ConnectionError as error:
        log.debug("agent %d: %s", index, error)
