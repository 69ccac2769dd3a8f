"""`sparkring package`: our code as one .zip that executors can import (they do not import wheels)."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import sparkring
from sparkring.conf.storage import open_storage

PACKAGE = "sparkring"
SUFFIXES = (".py", ".yaml", ".html")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # so that equal code makes equal bytes


def code_files(root: Path | None = None) -> list[tuple[str, Path]]:
    """(name in the archive, file) of all our code, sorted."""
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
    """The archive, byte for byte the same for the same code."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in code_files(root):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def write_archive(target: Path) -> Path:
    """Write the archive for `spark-submit --py-files`; whole or not at all."""
    open_storage(str(target.parent)).put_atomic(target.name, code_archive())
    return target
