"""The source files of our packages, as this process would import them: from folders or from an archive."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterator
from importlib.resources.abc import Traversable


def code_digest(package: str = "sparkring") -> str:
    """Hash (sha256) the names and contents of a package's Python files, subfolders included."""
    total = hashlib.sha256()
    for name, file in sorted(source_files(importlib.resources.files(package), package), key=lambda each: each[0]):
        total.update(f"{name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def source_files(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    """Yield (name/.../file.py, file) for each Python file in a package and its subfolders."""
    for entry in folder.iterdir():
        if entry.name.endswith(".py"):
            yield f"{name}/{entry.name}", entry
        elif entry.is_dir() and entry.name != "__pycache__":
            yield from source_files(entry, f"{name}/{entry.name}")
