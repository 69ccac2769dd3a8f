"""Groups of agents that several tests share."""

from __future__ import annotations

from typing import Any

from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.job import JobSpec


def warm(group: WorkerGroup, world: int) -> WorkerGroup:
    """Run a rank on each agent, else its fork server would seem to be left by the test in which it starts."""
    group.run(JobSpec(_nothing), world)
    return group


def _nothing(ctx: Any) -> None:
    return None
