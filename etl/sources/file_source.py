"""Files as a source: listed, each file hashed once, read by their format."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from sparkring.conf.digest import digest
from sparkring.conf.sources import FilesSource
from sparkring.conf.storage import Storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.files import FileList, list_files
from sparkring.etl.sources.predicate import parse
from sparkring.etl.sources.read import read_files
from sparkring.etl.sources.snapshot import SourceSnapshot

HASH_THREADS = 16


@dataclass(frozen=True)
class FilesSnapshot(SourceSnapshot):
    """The files of a table at one moment."""

    config: FilesSource
    listed: FileList

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self.listed.files]

    def read(self, spark: SparkSession) -> DataFrame:
        return read_files(spark, self.key, self.config, self.listed)

    def lineage(self) -> dict[str, Any]:
        found = {
            "path": self.config.path,
            "format": self.config.format,
            "files": len(self.listed.files),
            "bytes": self.listed.bytes,
            "fingerprint": self.fingerprint,
        }
        if not self.config.partitions:
            return found
        folders = self.listed.partition_folders(len(self.config.partitions))
        read = {"partitions": len(folders), "first_partition": folders[0], "last_partition": folders[-1]}
        return found | read | {"where": self.config.where}

    def check_unchanged(self) -> None:
        """Raise EtlError if files were added, removed or written since the snapshot, by name, size and time."""
        if list_source(self.name, self.config) != self.listed:
            raise EtlError(f"{self.key}: its files changed while they were read; run again when they are at rest")


def pin_files(name: str, config: FilesSource) -> FilesSnapshot:
    """Pin one source. Raises EtlError if it has no files."""
    listed = list_source(name, config)
    return FilesSnapshot(name, config, file_fingerprint(config, listed), listed)


def list_source(name: str, config: FilesSource) -> FileList:
    """List the files of a source that its `where` keeps. Raises EtlError if there are none."""
    if config.where is None:
        return list_files(name, config)
    return list_files(name, config, parse(f"etl.sources.{name}.where", config.where, config.partitions).may_match)


def file_fingerprint(config: FilesSource, listed: FileList) -> str:
    """sha256 over the declared columns, options and files: their bytes, or with `stat` their sizes and times.

    A file's path names its partition. Of the partitions that `where` leaves out nothing is known here.
    """
    if config.fingerprint == "stat":
        states: list[list[Any]] = [[f.path, f.bytes, f.mtime_ns] for f in listed.files]
    else:
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            hashes = pool.map(lambda f: _sha256(listed.storage, f.full), listed.files)
            states = [[f.path, f.bytes, h] for f, h in zip(listed.files, hashes, strict=True)]
    declared = config.model_dump(mode="json", include={"format", "columns", "options", "fingerprint"})
    kinds = [list(config.columns), list(config.partitions.items())]
    return digest([declared, kinds, states])


def _sha256(storage: Storage, full: str) -> str:
    folder, _, name = full.rpartition("/")
    return Storage(storage.remote, folder, storage.uri).sha256(name)
