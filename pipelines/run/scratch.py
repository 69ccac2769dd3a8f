"""Folders for one process in the temporary folder; what a killed process left there is deleted by the next one."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkring.conf.storage import lock_file, unlock

log = logging.getLogger(__name__)
PREFIX, LOCK = "sparkring-", ".lock"


@dataclass(frozen=True)
class ScratchFolder:
    """A new folder, whose lock tells others that the process which made it still runs."""

    path: Path
    _lock: int

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        unlock(self._lock)


def open_scratch(purpose: str) -> ScratchFolder:
    """Make a folder `sparkring-<purpose>-*`, and delete those of this purpose whose process has gone."""
    sweep(purpose)
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
        lock = lock_file(path / LOCK)
        if lock is not None:  # else it was swept away before it was locked
            return ScratchFolder(path, lock)


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Open a scratch folder as `open_scratch` does, for the block."""
    scratch = open_scratch(purpose)
    try:
        yield scratch.path
    finally:
        scratch.close()


def sweep(purpose: str) -> None:
    """Delete the folders of a purpose that no process holds. Only this user's, and only those with a lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}{purpose}-*"):
        try:
            if folder.lstat().st_uid != os.getuid() or not (folder / LOCK).is_file():
                continue
            lock = lock_file(folder / LOCK)
        except OSError:  # it went while it was looked at
            continue
        if lock is not None:
            log.info("deleting %s: left by a process that was killed", folder)
            shutil.rmtree(folder, ignore_errors=True)  # which follows no link
            unlock(lock)
