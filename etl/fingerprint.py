"""The fingerprint of a dataset: a hash over all that decides its content, known before anything is built."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable

from sparkring.conf.config import EtlConfig
from sparkring.conf.manifest import FORMAT_VERSION, digest
from sparkring.etl.session import decides_rows
from sparkring.etl.sources.snapshot import SourceSnapshot
from sparkring.etl.views import own_modules


def dataset_fingerprint(
    config: EtlConfig, sources: Mapping[str, SourceSnapshot], spark_version: str, settings: Mapping[str, str]
) -> str:
    """sha256 over the sources' content, the etl block, the code, Spark's version and its `settings`.

    The location of a source is not content, so paths are left out; the order of keys is (columns are stored in it).
    """
    block = config.model_dump(mode="json")
    for declared in block["sources"].values():
        del declared["path"]
    deciding = {key: value for key, value in sorted(settings.items()) if decides_rows(key)}
    prints = {name: source.fingerprint for name, source in sources.items()}
    parts = [FORMAT_VERSION, prints, json.dumps(block), own_modules(config.rows), code_digest()]
    return digest([*parts, spark_version, deciding])


def code_digest() -> str:
    """sha256 of this package's sources, subfolders included: other code may build other rows."""
    return digest(sorted(python_sources(importlib.resources.files(__package__), "etl")))


def python_sources(folder: Traversable, name: str) -> Iterator[list[str]]:
    """(name, text) of every Python file in a package folder and its subfolders."""
    for entry in folder.iterdir():
        if entry.name.endswith(".py"):
            yield [f"{name}/{entry.name}", entry.read_text()]
        elif entry.is_dir():
            yield from python_sources(entry, f"{name}/{entry.name}")
