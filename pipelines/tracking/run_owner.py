"""Whose run it is, and how its job ended: MLflow keeps what is RUNNING for ever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparkring.pipelines.run.process_id import ProcessId, is_running
from sparkring.pipelines.tracking.tags import HEARTBEAT, PROCESS

HEARTBEAT_S = 30.0
STALE_S = 600.0


def open_runs(runs: Mapping[str, str], ended: Iterable[str]) -> list[str]:
    """List the ids of runs (key -> id) without a recorded end."""
    over = set(ended)
    return [run for key, run in runs.items() if key not in over]


def end_status(error: BaseException | None) -> str:
    """Return MLflow's status for a job's end: Ctrl-C and SIGTERM (as `SystemExit(143)`) are KILLED."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "FINISHED"
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return "KILLED"
    if isinstance(error, SystemExit) and error.code in (128 + 2, 128 + 15):
        return "KILLED"
    return "FAILED"


OLDER = ("host", "pid", "start_ticks")


def process_tags(process: ProcessId, now: float) -> dict[str, str]:
    """Return tags that name the process of a run."""
    return {
        PROCESS: f"{process.host} {process.pid} {process.start_ticks}",
        HEARTBEAT: f"{now:.0f}",
    }


def is_abandoned(tags: Mapping[str, str], now: float, here: ProcessId) -> bool:
    """Return whether a RUNNING run's process is gone.

    It looks for a process of this host; elsewhere a heartbeat older than STALE_S counts. A run without our tags, or
    with changed ones, is left alone.
    """
    try:
        # runs of an older sparkring have three tags
        host, *owner = tags[PROCESS].split() if PROCESS in tags else [tags[f"sparkring.{name}"] for name in OLDER]
        pid, ticks, heartbeat = (int(number) for number in (*owner, tags[HEARTBEAT]))
    except (KeyError, ValueError):
        return False
    running = is_running(ProcessId(host, pid, ticks), here)
    return now - heartbeat > STALE_S if running is None else not running
