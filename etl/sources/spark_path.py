"""Paths as Spark reads them: the glob that matches one path, where its name has wildcards."""

from __future__ import annotations

from sparkring.etl.errors import EtlError
from sparkring.etl.spark_platform.paths import GLOB, HOST, escaped


def as_glob(path: str) -> str:
    """Return the glob that matches this path alone. Raises EtlError for a colon, which Hadoop's globs cannot have."""
    if not GLOB.search(path):
        return path
    if ":" in HOST.sub("", path):
        raise EtlError(
            f"{path}: Spark opens no path with a colon and one of {{}}[]*?\\ in it; rename the file or folder"
        )
    # TRICK: not by the option `__globPaths__`: without globbing Spark reads, for each path with one of these, all paths
    # once more (tests: folders called `a[x]`).
    return escaped(path)
