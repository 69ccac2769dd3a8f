"""The identity of a process, by which another process can check later whether it still runs.

The start is counted in clock ticks since boot (proc(5), field 22 of /proc/PID/stat): a create time, as psutil gives it,
moves with every step of the wall clock.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """One process, never to be confused with a later one of the same pid."""

    host: str  # its name, boot and pid namespace
    pid: int
    start_ticks: int  # from boot to its start


def this_process() -> ProcessId:
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname(), boot.read_text()[:8] if boot.exists() else "", str(namespace.stat().st_ino)]
    ticks = start_ticks(os.getpid())
    assert ticks is not None, "this process runs"
    return ProcessId("/".join(parts), os.getpid(), ticks)


def start_ticks(pid: int) -> int | None:
    """Return clock ticks from boot to the start of the process; None if no process has this pid. A zombie has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything; field 3, the state, comes first
    return None if fields[0] in "ZX" else int(fields[19])


def is_running(process: ProcessId, here: ProcessId) -> bool | None:
    """Return whether the process runs; None on another host, boot or container than `here`, this process's."""
    if process.host != here.host:
        return None
    return start_ticks(process.pid) == process.start_ticks
