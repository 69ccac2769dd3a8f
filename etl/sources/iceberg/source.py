"""Iceberg tables as a source: one snapshot, fingerprinted by its metadata, read by Spark."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from sparkring.conf.manifest import digest
from sparkring.conf.sources import IcebergSource
from sparkring.conf.storage import open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.files import IcebergFile, deleted_rows, field_ids, gone, plan, split_host
from sparkring.etl.sources.iceberg.schema import comparable, field_id, spark_fields, stored
from sparkring.etl.sources.iceberg.table import TableVersion, instant, open_version
from sparkring.etl.sources.iceberg.where import file_filter
from sparkring.etl.sources.lake_files import LakeFile, LakeFiles, LakeSchema, quoted
from sparkring.etl.sources.predicate import parse
from sparkring.etl.sources.read import declared_schema
from sparkring.etl.sources.snapshot import SourceSnapshot


@dataclass(frozen=True)
class IcebergSnapshot(SourceSnapshot):
    """A table's files at one snapshot, and the columns that are read of them: those asked for, and the condition's."""

    config: IcebergSource
    version: TableVersion
    files: tuple[IcebergFile, ...]
    columns: StructType

    def read(self, spark: SparkSession) -> DataFrame:
        self._check_types()
        rows = self._rows(spark)
        if self.config.where is not None:
            rows = rows.where(self.config.where)
        return rows.select(*map(quoted, asked_names(self.config, self.version)))

    def _check_types(self) -> None:
        """Raise EtlError if a column is declared with another type than it has."""
        for want in declared_schema(self.key, self.config.columns):
            have = self.columns[want.name].dataType.simpleString()
            if have != want.dataType.simpleString():
                raise EtlError(
                    f"{self.key}.columns.{want.name} = {self.config.columns[want.name]!r}: the table's column is {have}; "
                    "declare that, and convert it in a view"
                )

    def _rows(self, spark: SparkSession) -> DataFrame:
        """All rows of the files but the deleted ones. A column that is the same in a whole file may not be in it."""
        if not self.files:
            return spark.createDataFrame([], self.columns)
        deleted = deleted_rows(self.key, self.version, self.files)
        groups: dict[tuple[str, tuple[str, ...]], list[LakeFile]] = {}
        for file, ids in zip(self.files, field_ids(self.key, self.version, self.files), strict=True):
            host, path = split_host(file.path)
            filled = dict(self._only_in_metadata(file, ids))
            rows = deleted.get(file.path, np.empty(0, np.int64))
            groups.setdefault((host, tuple(filled)), []).append(
                LakeFile(path, file.bytes, tuple(filled.values()), rows)
            )
        parts = [self._lake_files(host, filled, files) for (host, filled), files in groups.items()]
        return reduce(DataFrame.union, [part.read(spark) for part in parts])

    def _only_in_metadata(self, file: IcebergFile, ids: frozenset[int]) -> Iterator[tuple[str, Any]]:
        """Yield columns that the file has not, since its partition says their value: files of migrated tables."""
        names = {field_id(column): column.name for column in self.columns}
        for number, value in file.identity:
            if value is not None and number not in ids and number in names:
                yield names[number], value

    def _lake_files(self, host: str, filled: tuple[str, ...], files: list[LakeFile]) -> LakeFiles:
        """Files that are read in one way, below the last folder that has all of them."""
        common = os.path.commonprefix([file.path for file in files])
        root = common[: common.rindex("/")]
        below = tuple(replace(file, path=file.path[len(root) + 1 :]) for file in files)
        return LakeFiles(open_storage(host + root), LakeSchema(self.columns, stored(self.columns), filled), below)

    def check_unchanged(self) -> None:
        """Raise EtlError if files are gone: Spark may be set to read on without them. None is ever written again."""
        if problems := gone(self.version, self.files):
            raise EtlError(f"{self.key}: files of the table vanished while they were read: {problems[0]}")

    def lineage(self) -> dict[str, Any]:
        snapshot = self.version.snapshot
        return {
            "format": "iceberg",
            "table": self.config.table,
            "path": self.config.path,
            "table-uuid": str(self.version.metadata.table_uuid),
            "snapshot-id": snapshot and snapshot.snapshot_id,
            "committed": snapshot and instant(snapshot.timestamp_ms),
            "files": len(self.files),
            "bytes": sum(file.bytes for file in self.files),
            "fingerprint": self.fingerprint,
        }


def pin_iceberg(name: str, config: IcebergSource) -> IcebergSnapshot:
    """Pin one table. Raises EtlError if it, its snapshot or a column is not there, or it has what is not read."""
    key = f"etl.sources.{name}"
    version = open_version(key, config)
    where = None if config.where is None else parse(f"{key}.where", config.where, comparable(version.schema))
    names = [*asked_names(config, version), *sorted(where.columns if where else ())]
    columns = spark_fields(key, version.schema, dict.fromkeys(names))
    files = plan(key, version, where and file_filter(where.test, version.schema))
    return IcebergSnapshot(name, config, fingerprint(version, columns, files), version, files, columns)


def asked_names(config: IcebergSource, version: TableVersion) -> list[str]:
    return list(config.columns) or [field.name for field in version.schema.fields]


def fingerprint(version: TableVersion, columns: StructType, files: Sequence[IcebergFile]) -> str:
    """sha256 over columns and files, which never change: not over where the table is, nor the snapshot's id or name."""
    root = split_host(version.metadata.location)[1].rstrip("/") + "/"

    def states(found: Sequence[IcebergFile]) -> list[Any]:
        return sorted(
            [split_host(f.path)[1].removeprefix(root), f.bytes, [[n, repr(v)] for n, v in f.identity], states(f.deletes)]
            for f in found
        )

    return digest(["iceberg", columns.jsonValue(), states(files)])
