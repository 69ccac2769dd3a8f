"""Pin the sources of a dataset: their files as they are now, each file hashed once, and a fingerprint of each table."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sparkring.conf.config import SourceConfig
from sparkring.conf.manifest import digest
from sparkring.conf.storage import Storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.files import SourceFile, list_files

HASH_THREADS = 16


@dataclass(frozen=True)
class SourceSnapshot:
    """A declared table, its files and their fingerprint at one moment."""

    name: str
    config: SourceConfig
    storage: Storage
    files: tuple[SourceFile, ...]
    fingerprint: str

    @property
    def key(self) -> str:
        return f"etl.sources.{self.name}"

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def spark_paths(self) -> list[str]:
        """Full paths as Spark reads them: `file:///...` locally, else with the scheme and host of the recipe."""
        if self.storage.is_local:
            return [f"file://{file.full}" for file in self.files]
        root = self.storage.uri.partition("?")[0].rstrip("/")
        return [root + file.full[len(self.storage.root.rstrip("/")) :] for file in self.files]

    def lineage(self) -> dict[str, Any]:
        """What the manifest records about this source."""
        return {
            "path": self.config.path,
            "format": self.config.format,
            "files": len(self.files),
            "bytes": self.bytes,
            "fingerprint": self.fingerprint,
        }

    def check_unchanged(self) -> None:
        """Raise EtlError if files were added, removed or written since the snapshot, by name, size and time."""
        if list_files(self.name, self.config)[1] != self.files:
            raise EtlError(f"{self.key}: its files changed while they were read; run again when they are at rest")


def pin_sources(sources: Mapping[str, SourceConfig]) -> dict[str, SourceSnapshot]:
    """Pin every source, by name. This reads each file once (with `fingerprint: stat`, none)."""
    return {name: pin(name, config) for name, config in sources.items()}


def pin(name: str, config: SourceConfig) -> SourceSnapshot:
    """Pin one source. Raises EtlError if it has no files."""
    storage, files = list_files(name, config)
    return SourceSnapshot(name, config, storage, files, _fingerprint(config, storage, files))


def _fingerprint(config: SourceConfig, storage: Storage, files: tuple[SourceFile, ...]) -> str:
    """sha256 over the declared columns, options and files: their bytes, or with `stat` their sizes and times."""
    if config.fingerprint == "stat":
        states: list[list[Any]] = [[f.path, f.bytes, f.mtime_ns] for f in files]
    else:
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            hashes = pool.map(lambda f: _sha256(storage, f.full), files)
            states = [[f.path, f.bytes, h] for f, h in zip(files, hashes, strict=True)]
    declared = config.model_dump(mode="json", include={"format", "columns", "options", "fingerprint"})
    return digest([declared, list(config.columns), states])


def _sha256(storage: Storage, full: str) -> str:
    folder, _, name = full.rpartition("/")
    return Storage(storage.fs, folder, storage.uri).sha256(name)
