"""Publish the predictions of an interval whole: a reader sees those of one run or of another, never of two.

    <to>/day=<date>/part-*.parquet     on a local disk written to a hidden folder next to it, which then takes its place
                    _predictions.json  of which model, of which sources, how many rows, and the files with their sha256

On a local disk both folders change places in one step (renameat2). An object store cannot rename: files are added under
new names, `_predictions.json` is replaced last, and then the others are deleted. In between it names the files of one
run; a reader that takes every file of the folder may find those of two.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from sparkring.conf.storage import Storage, lock_file, open_storage, unlock
from sparkring.conf.stored import CLOSED, Count, Label, RelativePath, Sha256, StoredError, read, up_to
from sparkring.training.launch.failure import LaunchError

log = logging.getLogger(__name__)
MANIFEST = "_predictions.json"
PART_FILE = re.compile(r"part-\d{5,}-[0-9a-f]{32}-\d+\.parquet")
STAGING = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.staging")
AT_CWD, EXCHANGE = -100, 2  # of renameat2(2)


@dataclass(frozen=True)
class PredictionFile:
    """`path`: below the folder of the manifest."""

    __pydantic_config__ = CLOSED

    path: RelativePath
    rows: Count
    bytes: Count
    sha256: Sha256


@dataclass(frozen=True)
class PublishedPredictions:
    """The fields of `_predictions.json`. rows_in = rows_out + the sum of `refused` (column -> rows with a null).

    `missed`: scored rows whose contributions do not sum to their raw prediction.
    """

    __pydantic_config__ = CLOSED

    interval: Label | None
    scored_at: Label  # ISO 8601, UTC
    model: Label  # URI
    model_name: Label
    model_version: Label
    model_run_id: str
    weights_sha256: Sha256
    mlflow_run_id: Label | None  # of the scoring; None where the store did not answer
    config_digest: Sha256
    commit: str
    rows: Label  # view or source
    sources: dict[str, Label]  # name -> fingerprint
    rows_in: Count
    rows_out: Count
    refused: dict[str, Count]
    files: tuple[PredictionFile, ...]
    missed: Count = 0
    format: Annotated[int, up_to(1)] = 1

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


class PredictionsTaken(LaunchError):
    """Another live process is writing predictions of the same interval."""


def read_predictions(folder: Storage) -> PublishedPredictions:
    """Read `_predictions.json`. StoredError where it is missing or damaged."""
    return read(PublishedPredictions, folder, MANIFEST)


def check_own(target: Storage) -> None:
    """Raise StoredError where the folder holds anything that is not of `predict`: it is replaced whole."""
    if foreign := [path for path in target.list_files() if path != MANIFEST and not PART_FILE.fullmatch(path)]:
        raise StoredError(
            f"{target.uri}: holds {foreign[0]!r}, which `predict` did not write, and the folder is replaced whole; "
            "point predict.to at a folder of its own"
        )


@contextmanager
def staged(target: Storage) -> Iterator[Storage]:
    """Give the folder that files are to be written to; what is left of it afterwards is deleted.

    On a local disk one process at a time has a target: PredictionsTaken where another holds it. An object store has no
    such lock, and the folder is the target itself.
    """
    if not target.is_local:
        yield target
        return
    root = Path(target.root)
    root.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_file(root.parent / f".{root.name}.lock")
    if lock is None:
        raise PredictionsTaken(f"{target.uri}: another process is writing there; wait for it")
    try:
        _sweep(root)
        folder = root.parent / f".{root.name}.{uuid.uuid4().hex}.staging"
        folder.mkdir()
        try:
            yield open_storage(str(folder))
        finally:
            with contextlib.suppress(OSError):
                _delete(folder)
    finally:
        unlock(lock)


def _sweep(root: Path) -> None:
    """Delete what killed processes left; the caller holds the lock of `root`."""
    for left in root.parent.glob(".*.staging"):
        if (found := STAGING.fullmatch(left.name)) and found["name"] == root.name:
            log.info("deleting %s: left by a process that was killed", left)
            _delete(left)


def _delete(folder: Path) -> None:
    """Delete a staging folder, which is a symbolic link where it was exchanged for one: then only the link goes."""
    open_storage(str(folder.parent)).delete(folder.name)


def publish(target: Storage, staging: Storage, predictions: PublishedPredictions) -> None:
    """Make the staged files, and no others, what `target` holds."""
    staging.put_atomic(MANIFEST, predictions.to_json())
    if target.is_local:
        listed = {MANIFEST, *(file.path for file in predictions.files)}
        for path in set(staging.list_files()) - listed:  # of tasks that Spark tried twice
            staging.delete(path)
        replace_folder(Path(staging.root), Path(target.root))
    else:
        delete_unlisted(target, predictions)


def replace_folder(new: Path, old: Path) -> None:
    """Swap `new` with `old`; if `old` is missing, only move `new` there."""
    if not old.exists():
        os.rename(new, old)
    elif not _exchange(new, old):
        # A filesystem that cannot exchange: for a moment there is neither.
        aside = new.with_name(f".{old.name}.{uuid.uuid4().hex}.staging")
        os.rename(old, aside)
        os.rename(new, old)
        os.rename(aside, new)
    _sync(old.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where this system or filesystem has no such call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(AT_CWD, os.fsencode(one), AT_CWD, os.fsencode(other), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_unlisted(target: Storage, predictions: PublishedPredictions) -> None:
    """Delete the files of earlier runs, and of killed ones. Only our own: a name that no run gives stays."""
    listed = {file.path for file in predictions.files}
    for path in target.list_files():
        if path not in listed and PART_FILE.fullmatch(path):
            target.delete(path)
