"""What the benchmarks share: what a result was measured with, and where it goes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
PR_SET_CHILD_SUBREAPER = 36
LOAD_BEFORE = os.getloadavg()[0]  # as the benchmark begins


def measured_with(*packages: str) -> str:
    """The command, date, commit, machine, load and the packages' versions."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":")[1].strip() for x in cpus if x.startswith("model name")), "unknown CPU")
    versions = ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)])
    return (
        f"`{shlex.join(['python', *sys.argv])}`, {time.strftime('%Y-%m-%d')}, commit {commit}; {cpu}, {os.cpu_count()} "
        f"cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()} {platform.machine()}, load "
        f"average {LOAD_BEFORE:.1f} before and {os.getloadavg()[0]:.1f} after; {versions}"
    )


def publish(text: str, out: Path | None) -> None:
    """Print a result, and write it to the file that was asked for."""
    print(text)
    if out:
        out.write_text(text)


def become_subreaper() -> None:
    """Have processes that a child leaves behind come to this one, so that their CPU seconds count."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def used_by_children() -> float:
    """CPU seconds of the processes that have been waited for, and of those below them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wait_for_orphans() -> None:
    """Wait for processes that a command left, which come to this one as their subreaper."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
