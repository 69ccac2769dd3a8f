"""Keep copies of files on a local disk.

Entries survive crashes and are shared by jobs. An entry is written to a part file under a lock, fsynced and renamed, so
it is whole or absent; locks are flock's, which die with their process. When a cache is full it keeps what it has:
reading a dataset larger than the cache again and again would evict every entry just before its use, while keeping the
first ones serves their share of every epoch. Only entries that no running job touches (of other datasets, idle for a
while) make room.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa

from sparkring.conf.manifest import DataFile
from sparkring.conf.storage import CHUNK_BYTES, HashingFile, Storage, lock_file, publish, unlock
from sparkring.training.data.decoding.columns import DataError
from sparkring.training.data.files import FileOpener, missing, other_content, unreadable

log = logging.getLogger(__name__)
IDLE_S = 600.0
PART = ".part"


class DiskCache:
    """Files by key in one folder, shared by threads and processes.

    `max_bytes`: of all together. `owners`: prefixes (before the first dash) of the keys that this job uses, which it
    never evicts. A folder that cannot be written, or a full disk, turns the cache off with one warning; reading
    continues without it.
    """

    def __init__(self, folder: str, max_bytes: int, owners: Collection[str], idle_s: float = IDLE_S) -> None:
        self.folder, self._max_bytes, self._idle_s = os.path.abspath(folder), max_bytes, idle_s
        self._owners = frozenset(owners)
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self.enabled = True
        try:
            os.makedirs(self._locks, exist_ok=True)
            with self._held("folder"):
                self._remove_abandoned()
        except OSError as error:
            self._turn_off(error)

    @property
    def _locks(self) -> str:
        return os.path.join(self.folder, "locks")

    def lookup(self, key: str) -> str | None:
        """Return the path of an entry, marked as used now; None if it is absent."""
        path = os.path.join(self.folder, key)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError:  # a read-only folder that another job filled still serves
            if not os.path.exists(path):
                return None
        self.count("cache_hit")
        return path

    def fill(self, key: str, size: int, write: Callable[[BinaryIO], None]) -> str | None:
        """Write an entry, if it is absent, and return its path.

        None if the cache is full or off. Errors of `write` pass through and leave no entry.
        """
        if not self.enabled:
            return None
        try:
            with self._held(key):
                path = os.path.join(self.folder, key)
                if os.path.exists(path):
                    return path
                part = self._reserve(key, size)
                return None if part is None else self._write(part, path, write)
        except OSError as error:  # of the cache's disk: where `write` cannot read its source, it raises DataError
            self._turn_off(error)
            return None

    def _write(self, part: str, path: str, write: Callable[[BinaryIO], None]) -> str:
        try:
            with open(part, "r+b") as file:
                write(file)
                file.truncate()
                publish(file, part, path)
        except BaseException:
            _unlink(part)
            raise
        return path

    def discard(self, key: str) -> None:
        _unlink(os.path.join(self.folder, key))

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def take_counts(self) -> dict[str, int]:
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken

    def _reserve(self, key: str, size: int) -> str | None:
        """Create a part file of the final size, so that its space is taken; None if full."""
        with self._held("folder"):
            entries = self._entries()
            excess = sum(entry.st_size for _, entry in entries) + size - self._max_bytes
            idle = time.time() - self._idle_s
            for name, entry in sorted(entries, key=lambda e: e[1].st_mtime):
                if excess <= 0:
                    break
                if entry.st_mtime < idle and not name.endswith(PART) and name.split("-")[0] not in self._owners:
                    _unlink(os.path.join(self.folder, name))
                    excess -= entry.st_size
            if excess > 0:
                self.count("cache_full")
                return None
            part = os.path.join(self.folder, f"{key}.{uuid.uuid4().hex}{PART}")
            descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            try:
                if size:
                    os.posix_fallocate(descriptor, 0, size)
            except OSError:
                _unlink(part)
                raise
            finally:
                os.close(descriptor)
            return part

    def _entries(self) -> list[tuple[str, os.stat_result]]:
        found = []
        for entry in os.scandir(self.folder):
            try:
                if entry.is_file():
                    found.append((entry.name, entry.stat()))
            except FileNotFoundError:
                continue
        return found

    def _remove_abandoned(self) -> None:
        """Remove part files whose writer is dead: nobody holds their key's lock."""
        for name, _ in self._entries():
            if name.endswith(PART):
                with self._held(name.split(".")[0], wait=False) as free:
                    if free:
                        _unlink(os.path.join(self.folder, name))

    @contextmanager
    def _held(self, name: str, wait: bool = True) -> Iterator[bool]:
        descriptor = lock_file(os.path.join(self._locks, name), wait, mode=0o666)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                unlock(descriptor)

    def _turn_off(self, error: OSError) -> None:
        with self._lock:
            was, self.enabled = self.enabled, False
        if was:
            log.warning("cache %s cannot be written (%s); reading continues without it", self.folder, error)


class CachedFiles(FileOpener):
    """Opens files from local copies, made on first use and checked while made."""

    def __init__(self, storage: Storage, cache: DiskCache) -> None:
        super().__init__(storage)
        self._cache = cache
        self._checked: set[str] = set()

    def open(self, file: DataFile) -> pa.NativeFile:
        path = self._local(file)
        return super().open(file) if path is None else pa.OSFile(path)

    def check(self, file: DataFile, content: bool) -> None:
        if not content or self._local(file) is None:
            super().check(file, content)

    def take_counts(self) -> dict[str, int]:
        return self._cache.take_counts()

    def _local(self, file: DataFile) -> str | None:
        path = self._cache.lookup(file.sha256)
        if path is not None and not self._intact(path, file):
            log.warning("cache entry %s is damaged and is fetched again", path)
            self._cache.discard(file.sha256)
            path = None
        if path is None:
            path = self._cache.fill(file.sha256, file.bytes, lambda out: self._fetch(file, out))
        return path

    def _intact(self, path: str, file: DataFile) -> bool:
        """Return whether a copy is intact: by its hash once per process, by its size every time."""
        try:
            if os.path.getsize(path) != file.bytes:
                return False
            if file.sha256 not in self._checked:
                with open(path, "rb") as copy:
                    if hashlib.file_digest(copy, "sha256").hexdigest() != file.sha256:
                        return False
                self._checked.add(file.sha256)
        except FileNotFoundError:  # evicted meanwhile
            return False
        return True

    def _fetch(self, file: DataFile, out: BinaryIO) -> None:
        """Copy the file to `out`. DataError where reading fails or the hash is another, OSError where writing fails."""
        copy = HashingFile(out)
        for chunk in self._chunks(file):
            copy.write(chunk)
        found = copy.sha256
        if found != file.sha256:
            raise other_content(file, found)
        self._checked.add(file.sha256)
        self._cache.count("cache_miss")
        self._cache.count("cache_fetched_bytes", file.bytes)

    def _chunks(self, file: DataFile) -> Iterator[bytes]:
        try:
            with self.storage.fs.open_input_stream(self.storage.path(file.path)) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    yield chunk
        except FileNotFoundError as error:
            raise DataError(missing(file, self.storage)) from error
        except (OSError, pa.ArrowException) as error:
            raise unreadable(file, self.storage, error) from error


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
