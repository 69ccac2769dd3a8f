"""Files as a source: listed, looked at, each file hashed once, read by their format."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from sparkring.conf.digest import digest
from sparkring.conf.errors import first_line
from sparkring.conf.sources import FilesSource
from sparkring.conf.sources.files import WHOLE_FILES, CsvOptions
from sparkring.conf.storage import Storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.files import csv_file
from sparkring.etl.sources.files.footers import check_footers
from sparkring.etl.sources.files.listing import LOOKED_AT, FileList, list_files, spread
from sparkring.etl.sources.files.read import declared_schema, line_format, read_files
from sparkring.etl.sources.files.task import unreadable
from sparkring.etl.sources.predicate import parse
from sparkring.etl.sources.snapshot import ExaminedTable, OpenSource, PinContext, SourceSnapshot
from sparkring.etl.sources.types import known_schema

HASH_THREADS = 16
SHOWN = 5  # problems of a table in a message


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


class OpenFiles(OpenSource[FilesSource]):
    """Files, which have no versions: pinned as they are at that moment."""

    @classmethod
    def open(cls, name: str, config: FilesSource, context: PinContext | None) -> Self:
        return cls(name)

    def pin(self, config: FilesSource) -> FilesSnapshot:
        return pin_files(self.name, config)

    @classmethod
    def examine(cls, name: str, config: FilesSource, pinned_soon: bool) -> ExaminedTable:
        if pinned_soon and config.fingerprint == "stat":
            return ExaminedTable()
        return examine_files(name, config)

    @staticmethod
    def declared_schema(name: str, config: FilesSource) -> StructType:
        """Return the columns in the order of `read_files`."""
        key = f"etl.sources.{name}"
        columns = declared_schema(key, WHOLE_FILES.get(config.format, config.columns))
        fields = [*columns, *declared_schema(key, config.partitions, "partitions")]
        return StructType([*{field.name: field for field in fields}.values()])


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
    """Hash (sha256) the declared columns, options and files: their bytes, or with `stat` sizes and times.

    A file's path names its partition. Partitions that `where` leaves out do not count.
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


def examine_files(name: str, config: FilesSource) -> ExaminedTable:
    """Compare some of the files with the declared columns; the build compares all."""
    key = f"etl.sources.{name}"
    if config.format in ("csv", "json"):
        line_format(key, config, known_schema(config.columns))
    listed = list_source(name, config)
    problems = _file_problems(config, FileList(listed.storage, spread(listed.files, LOOKED_AT)))
    shown = [f"{key}: {problem}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        shown.append(f"{key}: and {len(problems) - SHOWN} more differences")
    rows = None
    if config.format == "parquet" and not problems and len(listed.files) <= LOOKED_AT:
        rows = sum(_rows(listed, file.full) for file in listed.files)
    return ExaminedTable(shown, len(listed.files), listed.bytes, rows)


def _file_problems(config: FilesSource, listed: FileList) -> list[str]:
    """List how the files differ from the declared columns."""
    if config.format == "csv":
        return [f"{file.path}: {problem}" for file in listed.files for problem in _header(config, listed, file.full)]
    if config.format not in ("parquet", "orc"):
        return []
    columns, partitions = known_schema(config.columns), known_schema(config.partitions)
    footers = check_footers(listed, config.format, columns, partitions, config.missing_columns == "null")
    return [problem for footer in footers for problem in footer.problems]


def _header(config: FilesSource, listed: FileList, path: str) -> list[str]:
    opener = partial(listed.storage.fs.open_input_stream, path, compression="detect")
    try:
        return csv_file.header_problems(opener, config.options or CsvOptions(), [*config.columns])
    except OSError as error:
        return [unreadable(error)]


def _rows(listed: FileList, path: str) -> int:
    try:
        with listed.storage.fs.open_input_file(path) as stream:
            return int(pq.ParquetFile(stream).metadata.num_rows)
    except (pa.ArrowInvalid, OSError) as error:
        raise EtlError(f"{path}: {first_line(error)}") from error


def _sha256(storage: Storage, full: str) -> str:
    folder, _, name = full.rpartition("/")
    return Storage(storage.remote, folder, storage.uri).sha256(name)
