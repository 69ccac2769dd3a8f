"""Which process this is, so that another process can tell later whether it still runs.

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
    """`host`: name, boot and pid namespace, inside which `pid` and `start_ticks` name one process for ever."""

    host: str
    pid: int
    start_ticks: int


def this_process() -> ProcessId:
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname(), boot.read_text()[:8] if boot.exists() else "", str(namespace.stat().st_ino)]
    ticks = start_ticks(os.getpid())
    assert ticks is not None, "this process runs"
    return ProcessId("/".join(parts), os.getpid(), ticks)


def start_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process; None where none of this pid runs (a zombie has ended)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything; field 3, the state, comes first
    return None if fields[0] in "ZX" else int(fields[19])


def is_running(process: ProcessId, here: ProcessId) -> bool | None:
    """Whether the process runs; None where `here`, this process, cannot see it: another host, boot or container."""
    if process.host != here.host:
        return None
    return start_ticks(process.pid) == process.start_ticks
