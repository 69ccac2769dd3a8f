"""What the benchmarks share: what a result was measured with, and where it goes."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
LOAD_BEFORE = os.getloadavg()[0]  # as the benchmark begins


def commit_of_checkout() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def measured_with(*packages: str) -> str:
    """The command, date, commit, machine, load and the packages' versions."""
    commit = commit_of_checkout()
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


class ChildrenCpu:
    """CPU seconds of all processes below this one within the block, whoever waits for them.

    They are looked at every LOOK_S, so what a process uses after the last look is lost.
    """

    LOOK_S = 0.2

    def __enter__(self) -> ChildrenCpu:
        self._used: dict[tuple[int, float], float] = {}  # by pid and time of birth
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        return sum(self._used.values())

    def _look_on(self) -> None:
        while not self._ends.wait(self.LOOK_S):
            for process in psutil.Process().children(recursive=True):
                try:
                    times = process.cpu_times()
                    self._used[process.pid, process.create_time()] = times.user + times.system
                except psutil.NoSuchProcess:
                    continue
