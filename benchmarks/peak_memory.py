"""The peak memory of a process and all below it, watched from outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # ended meanwhile
        return 0
