"""Modules that a test writes for the ranks of the suite's Spark session.

A session lives as long as a worker of the suite, keeps each file that it was given by its name, and fails every later
task when another file comes under a name it has. So a module of a test has a name of its own.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any


def write_module(folder: Path, text: str) -> Path:
    """Write the module into the folder and return its file, whose stem no other module of any test has."""
    path = folder / f"module_{uuid.uuid4().hex[:8]}.py"
    path.write_text(text)
    return path


def ship_module(spark: Any, path: Path) -> None:
    """Give the module to the session's ranks.

    :raises ValueError: when the session has another file of this name
    """
    for file in spark.sparkContext.listFiles:
        known = Path(file.removeprefix("file:"))
        if known.name == path.name and known.read_bytes() != path.read_bytes():
            raise ValueError(f"the session has {known} already: a module of a test is written by write_module")
    spark.sparkContext.addPyFile(str(path))
