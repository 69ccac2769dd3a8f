"""Check that the folders a job writes to can be made and written. Light: every date begins with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow.fs as pafs

from sparkring.conf.config import RunConfig
from sparkring.conf.errors import first_line
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage, open_storage
from sparkring.pipelines.run.problems import Problems

DATASETS = "storage.datasets"  # a dataset that is there may be on a disk that cannot be written
JOB_FOLDERS = ("storage.runs", "tracking.root")
ALL_FOLDERS = (*JOB_FOLDERS, DATASETS)


LEAST_FREE_BYTES = 1 << 20  # less is full: a job's first files do not fit


def check_folders(config: RunConfig, folders: Sequence[str]) -> None:
    """Make the folders of these keys. LaunchError for those that cannot be made or written."""
    storage_problems(config, folders, make=True).raise_any(config.name)


def storage_problems(config: RunConfig, keys: Sequence[str] = ALL_FOLDERS, make: bool = False) -> Problems:
    """List the recipe's folders that cannot be made or written. `make`: create local ones.

    A recipe without etl has no dataset folder; one with a tracking server, or without tracking, no tracking folder.
    """
    folders = {"storage.runs": config.storage.runs}
    if config.etl is not None:
        folders[DATASETS] = config.storage.datasets
    if config.tracking.enabled and config.tracking.uri is None:
        folders["tracking.root"] = config.tracking.root
    folders = {key: uri for key, uri in folders.items() if key in keys}
    problems = {key: _unwritable(uri, make) for key, uri in folders.items()}
    return Problems(
        resources=[
            f"{key} = {folders[key]!r}: cannot be made or written: {why}; name a folder that can"
            for key, why in problems.items()
            if why
        ]
    )


def _unwritable(uri: str, make: bool) -> str:
    """Return why a folder cannot be written; "" if it can, as far as known without writing a file."""
    try:
        storage = open_storage(uri)
        if not storage.is_local:
            return _remote_problem(storage)
        problem = _local_problem(Path(storage.root))
        if make and not problem:
            os.makedirs(storage.root, exist_ok=True)
        return problem
    except (OSError, ValueError) as error:
        return first_line(error)


def _local_problem(folder: Path) -> str:
    there = next(above for above in (folder, *folder.parents) if above.exists() or above.is_symlink())
    if not there.is_dir():
        return f"{there} is a file" if there.exists() else f"{there} is a link to nothing"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"no right to write in {there}"
    disk = os.statvfs(there)
    if disk.f_flag & os.ST_RDONLY:
        return f"{there} is on a filesystem that is read-only"
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < LEAST_FREE_BYTES:  # no blocks at all: it does not say, as mounts of object stores
        return f"{there} is on a disk that is full ({count_of(free, 'byte is', ',')} free)"
    if disk.f_files and not disk.f_favail:
        return f"{there} is on a filesystem that takes no more files (no inode is free)"
    return ""


def _remote_problem(storage: Storage) -> str:
    """Return a problem with a remote folder, or "". OSError if it does not answer."""
    storage.fs.get_file_info(storage.root)
    bucket = storage.root.partition("/")[0]
    if not isinstance(storage.fs, pafs.S3FileSystem):
        return ""
    try:
        return f"there is no bucket {bucket!r}" if not Storage(storage.remote, bucket, storage.uri).exists() else ""
    except OSError:  # the right to write below a prefix does not include that to look at the bucket
        return ""
