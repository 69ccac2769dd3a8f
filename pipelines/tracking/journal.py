"""A journal on disk of what is to be tracked: it outlives the driver and a dead server.

    <root>/buffer/<job>-<time>-<pid>/ops.jsonl    one operation per line, appended by the driver
                                     state.json   how many bytes of it have been applied, and the run id of each key
                                     sent.json    how many OpenLineage events of it have been sent
                                     files/       artifacts and models waiting to be uploaded
                                     lock         held (flock) by the process that owns the journal

The tracker appends and returns; one thread applies. A journal whose lock is free belongs to a dead process: the next
job or `replay` finishes it. A damaged one is renamed `damaged~...`. A disk that takes no more ends nothing: operations
wait in memory.
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
from itertools import chain
from pathlib import Path

from sparkring.conf.storage import lock_file, open_storage, unlock
from sparkring.conf.stored import StoredError, parse
from sparkring.pipelines.tracking.ops import Op, Sent, State, StoredOp

log = logging.getLogger(__name__)
UNBORN, DAMAGED = "new~", "damaged~"  # how the names begin of folders that are not journals to be sent
MOST_UNWRITTEN_BYTES = 16 << 20  # days of metrics


class Journal:
    """One job's operations. `append` and `read` may be called from any thread; `pending` and `done` from one."""

    def __init__(self, folder: Path, lock: int):
        self.folder = folder
        self._lock, self._append_lock = lock, threading.Lock()
        self.state: State = {"done": 0, "runs": {}}
        if (folder / "state.json").exists():
            self.state = parse(State, (folder / "state.json").read_bytes(), f"{folder}/state.json")
        self._ops = os.open(folder / "ops.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._end = os.fstat(self._ops).st_size  # of what is in the file for good
        if self.state["done"] > self._end:
            os.close(self._ops)
            raise StoredError(
                f"{folder}/state.json: done = {self.state['done']}, but ops.jsonl has {self._end} bytes: operations "
                "are lost, and others may not have been sent"
            )
        self._unwritten: list[bytes] = []  # lines after it, while the disk takes no more
        self.dropped = 0  # operations for which there was no room in memory either

    @classmethod
    def create(cls, root: Path, job: str) -> Journal:
        name = f"{job}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        root.mkdir(parents=True, exist_ok=True)
        (root / "buffer").mkdir(mode=0o700, exist_ok=True)  # logs and stacks of a job are its user's alone
        unborn = root / "buffer" / f"{UNBORN}{name}"
        (unborn / "files").mkdir(parents=True)
        lock = _try_lock(unborn / "lock")
        assert lock is not None, "no other process looks at a journal that is being made"
        return cls(unborn.rename(root / "buffer" / name), lock)

    def append(self, op: Op) -> None:
        """Write one line. While the disk takes no more, keep it in memory, or count it where there is no room."""
        text = json.dumps(vars(op), allow_nan=False, ensure_ascii=False)
        line = (text + "\n").encode(errors="replace")  # no reader of JSON takes half a surrogate pair
        with self._append_lock:
            if self._unwritten and sum(map(len, self._unwritten)) + len(line) > MOST_UNWRITTEN_BYTES:
                self.dropped += 1
                return
            self._unwritten.append(line)
            try:
                if len(self._unwritten) > 1:
                    os.ftruncate(self._ops, self._end)  # what a try that failed has left
                left = b"".join(self._unwritten)
                while left:
                    left = left[os.write(self._ops, left) :]
            except OSError as error:
                if len(self._unwritten) == 1:
                    log.error("%s/ops.jsonl: %s; training continues, and tracking in memory", self.folder, error)
                return
            if len(self._unwritten) > 1:
                log.info("%s/ops.jsonl can be written again", self.folder)
            self._end += sum(map(len, self._unwritten))
            self._unwritten.clear()

    def add_file(self, source: Path | bytes, name: str) -> str:
        """Copy a file, a folder or bytes into the journal; the path below `files/`. OSError leaves nothing."""
        relative = f"{uuid.uuid4().hex[:8]}/{name}"
        target = self.folder / "files" / relative
        try:
            target.parent.mkdir(parents=True)
            if isinstance(source, bytes):
                target.write_bytes(source)
            elif source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copyfile(source, target)
        except OSError:
            shutil.rmtree(target.parent, ignore_errors=True)
            raise
        return relative

    def file(self, relative: str) -> Path:
        """Return the path of an added file. StoredError if a link leads out of the journal, which makes none."""
        path, files = self.folder / "files" / relative, self.folder.resolve() / "files"
        for found in (path, *path.rglob("*")):
            if not found.resolve().is_relative_to(files):
                raise StoredError(f"{found} leads out of the journal, to {found.resolve()}")
        return path

    def pending(self, most: int = 500) -> list[tuple[Op, int]]:
        """Return the next operations not yet applied, in the form of `read`."""
        return self.read(self.state["done"], most)

    def read(self, position: int, most: int = 500) -> list[tuple[Op, int]]:
        """Return the operations from a position on, each with the position after it. Thread-safe.

        A line cut by a kill is left out. StoredError for a damaged line.
        """
        found: list[tuple[Op, int]] = []
        with self._append_lock:
            end, unwritten = self._end, list(self._unwritten)
        with open(self.folder / "ops.jsonl", "rb") as file:
            file.seek(min(position, end))
            start = file.tell()  # of the line; the position is behind it where lines in memory have been applied
            for line in chain(iter(lambda: file.readline() if file.tell() < end else b"", b""), unwritten):
                if not line.endswith(b"\n") or len(found) == most:
                    break
                start += len(line)
                if start > position:
                    found.append((parse(StoredOp, line, f"{self.folder}/ops.jsonl").root, start))
        return found

    def done(self, position: int) -> None:
        """Record that everything before `position` has been applied; saves other changes of `state` too.

        If the disk refuses, a replay only sends again what is stored already.
        """
        self.state["done"] = position
        try:
            open_storage(str(self.folder)).put_atomic("state.json", json.dumps(self.state).encode())
        except OSError as error:
            log.debug("%s/state.json: %s", self.folder, error)

    @property
    def sent(self) -> int:
        """OpenLineage events of it that the collector has. StoredError where the file is damaged."""
        path = self.folder / "sent.json"
        return parse(Sent, path.read_bytes(), str(path))["events"] if path.exists() else 0

    def note_sent(self, events: int) -> None:
        """Store `sent`. A disk that does not take it costs no more than that a replay sends the last ones again."""
        try:
            open_storage(str(self.folder)).put_atomic("sent.json", json.dumps(Sent(events=events)).encode())
        except OSError as error:
            log.debug("%s/sent.json: %s", self.folder, error)

    def set_aside(self) -> Path:
        """Rename a damaged journal, so that no later job tries it again; its new name. `close` comes after."""
        self.folder = self.folder.rename(self.folder.with_name(DAMAGED + self.folder.name))
        return self.folder

    def close(self, delete: bool) -> None:
        """Release the journal. `delete`: everything in it has been applied."""
        if lost := self.dropped + (0 if delete else len(self._unwritten)):
            log.error("%s: %d operations were lost, its disk took no more", self.folder, lost)
        os.close(self._ops)
        if delete:
            shutil.rmtree(self.folder, ignore_errors=True)
        unlock(self._lock)


def abandoned_journals(root: Path) -> Iterator[Journal]:
    """Yield the journals left by dead processes, oldest first, each locked for the caller, who closes it.

    One whose state is damaged (a power cut) is set aside, and named in the log.
    """
    for folder in sorted((root / "buffer").glob("*/"), key=_modified):
        skipped = folder.name.startswith((UNBORN, DAMAGED)) or folder.is_symlink()
        lock = None if skipped else _try_lock(folder / "lock")
        if lock is None:
            continue
        if not (folder / "ops.jsonl").exists():
            unlock(lock)
            continue
        try:
            journal = Journal(folder, lock)
        except (OSError, ValueError) as error:
            unlock(lock)
            aside = folder.rename(folder.with_name(DAMAGED + folder.name))
            log.warning("%s is damaged (%s); this journal is set aside, others are sent", aside, error)
            continue
        yield journal


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another job has just finished it
        return 0.0


def _try_lock(path: Path) -> int | None:
    """Return the locked descriptor; None if another process has the lock, or deletes the journal."""
    try:
        return lock_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be locked, its journal stays: %s", path, error)
        return None
