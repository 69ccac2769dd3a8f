"""Where the files of an Iceberg table are: their paths compared, and no file opened."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sparkring.etl.spark_platform.paths import HOST

METADATA = ".metadata.json"  # how a metadata file's name ends
ONE_STORE = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}  # schemes of the same store


def split_host(path: str) -> tuple[str, str]:
    """Split `s3://bucket/a/b` -> (`s3://bucket`, `/a/b`); a local path in any spelling has no host."""
    host = HOST.match(path)
    if host is None or host[0].startswith("file:"):
        return "", path[len(host[0]) :] if host else path
    return host[0], path[len(host[0]) :]


def is_below(location: str, folders: Sequence[str]) -> bool:
    """Return whether a file is in one of the folders, links followed. False for `.` or `..` in paths.

    A local folder may be spelled in any way: by a link to it, from the working directory.
    """
    host, path = _canonical(location)
    if {".", ".."} & set(path.split("/")) or "\0" in path:
        return False
    for folder in folders:
        its_host, root = _canonical(folder)
        if host == its_host and (host or path.startswith("/")):
            found, below = (path, root) if host else (os.path.realpath(path), os.path.realpath(root))
            if found.startswith(below.rstrip("/") + "/"):
                return True
    return False


def _canonical(location: str) -> tuple[str, str]:
    host, path = split_host(location)
    scheme, mark, rest = host.partition(":")
    return ONE_STORE.get(scheme, scheme) + mark + rest, path
