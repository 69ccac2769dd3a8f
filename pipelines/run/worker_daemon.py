"""Spark's daemon of Python workers, with what our workers use imported once, before it forks the first.

`spark.python.daemon.module` names it, in sessions on this machine. A worker that Spark's own daemon forks imports
pyarrow, pandas and our modules itself, which takes it seconds, and a job of a minute has four of them. Its workers
become the agents of the ranks too, whose fork servers import torch once.
"""

from __future__ import annotations

import os
import sys

from sparkring.training.launch.host.search_path import library_first, working_folder

if __name__ == "__main__":  # before anything is imported that a user's file may be named as
    sys.path[:] = library_first(sys.path, working_folder())
    os.environ.pop("PYTHONSAFEPATH", None)  # of this process: its working directory is not before Python's library

from pathlib import Path

from sparkring.training.launch.host.processes import import_before_forks
from sparkring.training.launch.host.shared_imports import share_with_forks

PRELOAD = (
    "pyarrow.parquet",
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "sparkring.etl.sources.files.task",
    "sparkring.etl.shards.quarantine",
    "sparkring.etl.shards.write",
    "pandas",  # whatever a worker returns to Spark SQL
    "sparkring.pipelines.launch.barrier",
)


def installed_first(path: list[str]) -> list[str]:
    """Put archives of PySpark that lie in the installed PySpark behind the folder of that one.

    Spark puts them first. Python compiles each module of an archive again: half a second of every session.
    """
    archives = [each for each in path if each.endswith(".zip") and lies_in_installed(Path(each), path)]
    return [each for each in path if each not in archives] + archives


def lies_in_installed(archive: Path, path: list[str]) -> bool:
    """Return whether it is FOLDER/pyspark/python/lib/NAME.zip of a FOLDER that Python imports from."""
    return archive.parent.parts[-3:] == ("pyspark", "python", "lib") and str(archive.parents[3]) in path


if __name__ == "__main__":
    sys.path[:] = installed_first(sys.path)
    from pyspark.daemon import manager

    share_with_forks()
    import_before_forks(PRELOAD)
    manager()
