"""`sparkring package`: our code as one .zip that executors can import (they do not import wheels)."""

from __future__ import annotations

import atexit
import io
import os
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import sparkring
from sparkring.conf.code import code_digest
from sparkring.conf.storage import open_storage
from sparkring.etl.spark_platform.application import add_code, shipped_names
from sparkring.pipelines.run.scratch import open_scratch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGE = "sparkring"
SUFFIXES = (".py", ".yaml", ".html")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # so that equal code makes equal bytes


def code_files(root: Path | None = None) -> list[tuple[str, Path]]:
    """List (name in the archive, file) of all our code, sorted."""
    root = root or Path(sparkring.__file__).absolute().parent  # not resolved: in a checkout our folders are links
    found = [
        (f"{PACKAGE}/{path.relative_to(root).as_posix()}", path)
        for folder, _, names in os.walk(root, followlinks=True)
        for path in (Path(folder, name) for name in names)
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts
    ]
    if not found:
        raise ValueError(
            f"no code of ours under {root}: run from a checkout or an installed wheel, not from an archive"
        )
    return sorted(found)


def code_archive(root: Path | None = None) -> bytes:
    """Build the archive, byte for byte the same for the same code."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in code_files(root):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def write_archive(target: Path) -> Path:
    """Write the archive for `spark-submit --py-files`; whole or not at all."""
    open_storage(str(target.parent)).put_atomic(target.name, code_archive())
    return target


def ship_code(spark: SparkSession) -> str:
    """Add this driver's code to the executors' path and return its digest.

    Once per application, because executors' Python processes keep loaded modules: later edits would not reach them.
    """
    for name in shipped_names(spark):
        if shipped := re.fullmatch(r"sparkring-([0-9a-f]{12})\.zip", name):
            return shipped[1]
    digest = code_digest()[:12]
    try:
        archive = code_archive()
    except ValueError:
        return digest  # we run from an archive ourselves, which --py-files has shipped
    # New and ours alone: executors import what is in it. Spark serves it for as long as the application lives.
    folder = open_scratch("code")
    atexit.register(folder.close)
    path = folder.path / f"sparkring-{digest}.zip"
    path.write_bytes(archive)
    add_code(spark, path)
    return digest
