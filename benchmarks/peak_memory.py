"""The peak memory of a process and all below it, and of folders on disk, watched from outside."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil


@contextmanager
def peak_pss(pid: int, every_s: float) -> Iterator[list[int]]:
    """A list of one number: the most bytes seen so far, as proportional set size (shared pages are counted once)."""
    peak, over = [0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(pid, every_s, peak, over), daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def _watch(pid: int, every_s: float, peak: list[int], over: threading.Event) -> None:
    while not over.wait(every_s):
        try:
            root = psutil.Process(pid)
            total = sum(_pss(process) for process in [root, *root.children(recursive=True)])
        except psutil.Error:
            continue
        peak[0] = max(peak[0], total)


@dataclass
class Peaks:
    """The most bytes seen so far of each: a Spark driver's Python, its JVM and its Python workers as proportional set
    size, and the files of some folders."""

    driver: int = 0
    jvm: int = 0
    workers: int = 0
    disk: int = 0

    def look(self, folders: Sequence[Path]) -> None:
        """Look once at this process, those below it, and the folders."""
        found = {"jvm": 0, "workers": 0}
        me = psutil.Process()
        for process in me.children(recursive=True):
            try:
                found["jvm" if process.name() == "java" else "workers"] += _pss(process)
            except psutil.Error:
                continue
        disk = sum(_sizes(folder) for folder in folders)
        self.driver, self.disk = max(self.driver, _pss(me)), max(self.disk, disk)
        self.jvm, self.workers = max(self.jvm, found["jvm"]), max(self.workers, found["workers"])


@contextmanager
def spark_peaks(folders: Sequence[Path], every_s: float) -> Iterator[Peaks]:
    """Watch this process, which is a Spark driver, and the files below the folders."""
    peaks, over = Peaks(), threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            peaks.look(folders)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()


def _sizes(folder: Path) -> int:
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(path, file)).st_size
            except FileNotFoundError:  # deleted meanwhile
                continue
    return total


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # ended meanwhile
        return 0
