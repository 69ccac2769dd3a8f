"""What is to be tracked, on disk first: a journal of operations that outlives the driver and a dead server.

    <root>/buffer/<job>-<time>-<pid>/ops.jsonl    one operation per line, appended by the driver
                                     state.json   how many bytes of it have been applied, and the run id of each key
                                     files/       artifacts and models waiting to be uploaded
                                     lock         held (flock) by the process that owns the journal

The tracker appends and returns; one thread applies. A journal whose lock is free belongs to a dead process: the next
job or `replay` finishes it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conf.storage import lock_file

log = logging.getLogger(__name__)
Op = dict[str, Any]
UNBORN = "new~"


class Journal:
    """One job's operations. `append` may be called from any thread; reading and `done` from one."""

    def __init__(self, folder: Path, lock: int):
        self.folder = folder
        self._lock, self._append_lock = lock, threading.Lock()
        self.state: dict[str, Any] = {"done": 0, "runs": {}}
        if (folder / "state.json").exists():
            self.state = json.loads((folder / "state.json").read_text())
        self._ops = open(folder / "ops.jsonl", "ab")  # noqa: SIM115

    @classmethod
    def create(cls, root: Path, job: str) -> Journal:
        name = f"{job}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        unborn = root / "buffer" / f"{UNBORN}{name}"
        (unborn / "files").mkdir(parents=True)
        lock = _try_lock(unborn / "lock")
        assert lock is not None, "nobody looks at a journal that is being made"
        return cls(unborn.rename(root / "buffer" / name), lock)

    def append(self, op: Op) -> None:
        line = (json.dumps(op | {"at": time.time()}, allow_nan=False) + "\n").encode()
        with self._append_lock:
            self._ops.write(line)
            self._ops.flush()

    def add_file(self, source: Path | bytes, name: str) -> str:
        """Copy a file, a folder or bytes into the journal; its path relative to `files/`."""
        relative = f"{uuid.uuid4().hex[:8]}/{name}"
        target = self.folder / "files" / relative
        target.parent.mkdir(parents=True)
        if isinstance(source, bytes):
            target.write_bytes(source)
        elif source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
        return relative

    def file(self, relative: str) -> Path:
        return self.folder / "files" / relative

    def pending(self, most: int = 500) -> list[tuple[Op, int]]:
        """The next operations not yet applied, each with the position after it. A line cut by a kill is left out."""
        found: list[tuple[Op, int]] = []
        with open(self.folder / "ops.jsonl", "rb") as file:
            file.seek(self.state["done"])
            position = self.state["done"]
            for line in file:
                if not line.endswith(b"\n") or len(found) == most:
                    break
                position += len(line)
                found.append((json.loads(line), position))
        return found

    def done(self, position: int) -> None:
        """Everything before `position` has been applied; also saves changes made to `state`."""
        self.state["done"] = position
        part = self.folder / "state.json.part"
        part.write_text(json.dumps(self.state))
        os.replace(part, self.folder / "state.json")

    def close(self, delete: bool) -> None:
        self._ops.close()
        if delete:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def abandoned_journals(root: Path) -> Iterator[Journal]:
    """Journals left by dead processes, oldest first, locked for the caller, who closes each. One whose state cannot be
    read (a power cut) stays where it is, and is named in the log.
    """
    for folder in sorted((root / "buffer").glob("*/"), key=lambda path: path.stat().st_mtime):
        lock = None if folder.name.startswith(UNBORN) else _try_lock(folder / "lock")
        if lock is None:
            continue
        if not (folder / "ops.jsonl").exists():
            os.close(lock)
            continue
        try:
            journal = Journal(folder, lock)
        except (OSError, ValueError) as error:
            os.close(lock)
            log.warning("%s cannot be replayed, its state.json is unreadable (%s); delete it", folder, error)
            continue
        yield journal


def _try_lock(path: Path) -> int | None:
    """The locked descriptor, None where another process holds it or the journal is just being deleted."""
    try:
        return lock_file(path)
    except OSError:
        return None
