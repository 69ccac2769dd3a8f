"""What Spark's event log says of some work: jobs, stages, tasks, and the bytes they read, shuffled and cached."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Stage:
    """One stage as it ran. Bytes are sums over its tasks."""

    job: int
    name: str
    tasks: int = 0
    cpu_s: float = 0.0
    run_s: float = 0.0
    read: int = 0
    read_rows: int = 0
    shuffled: int = 0
    fetched: int = 0
    spilled: int = 0


@dataclass
class Work:
    """The stages of some work, in the order of their first task."""

    stages: list[Stage] = field(default_factory=list)

    @property
    def jobs(self) -> int:
        return len({stage.job for stage in self.stages})

    def total(self, what: str) -> int:
        return sum(getattr(stage, what) for stage in self.stages)


def event_settings(folder: Path) -> dict[str, str]:
    """The session's settings that make Spark write an event log to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{folder.resolve()}",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
    }


def read_events(folder: Path, since_ms: float = 0.0, until_ms: float = math.inf) -> Work:
    """Read what began between two times (of the epoch); stages that were skipped have no task and are left out."""
    stages: dict[int, Stage] = {}
    job_of: dict[int, int] = {}
    for event in _events(folder):
        if event["Event"] == "SparkListenerJobStart":
            job_of |= {stage: event["Job ID"] for stage in event["Stage IDs"] if stage not in job_of}
        elif event["Event"] == "SparkListenerStageSubmitted":
            info = event["Stage Info"]
            if since_ms <= info["Submission Time"] <= until_ms:
                stages[info["Stage ID"]] = Stage(job_of[info["Stage ID"]], info["Stage Name"])
        elif event["Event"] == "SparkListenerTaskEnd" and event["Stage ID"] in stages and event.get("Task Metrics"):
            _add(stages[event["Stage ID"]], event["Task Metrics"])
    return Work(list(stages.values()))


def _add(stage: Stage, metrics: dict[str, Any]) -> None:
    fetched = metrics["Shuffle Read Metrics"]
    stage.tasks += 1
    stage.cpu_s += metrics["Executor CPU Time"] / 1e9
    stage.run_s += metrics["Executor Run Time"] / 1e3
    stage.read += metrics["Input Metrics"]["Bytes Read"]
    stage.read_rows += metrics["Input Metrics"]["Records Read"]
    stage.shuffled += metrics["Shuffle Write Metrics"]["Shuffle Bytes Written"]
    stage.fetched += fetched["Remote Bytes Read"] + fetched["Local Bytes Read"]
    stage.spilled += metrics["Disk Bytes Spilled"]


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    for log in sorted(folder.iterdir()):
        for line in log.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # the last line, where the log is still written
                return
