"""Iceberg tables as a source: one snapshot, fingerprinted by its metadata, read by Spark."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from sparkring.conf.digest import digest
from sparkring.conf.sources import IcebergSource
from sparkring.conf.storage import open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.files import IcebergFile, deleted_rows, field_ids, footers, gone, plan
from sparkring.etl.sources.iceberg.places import split_host
from sparkring.etl.sources.iceberg.schema import comparable, field_id, spark_fields, stored, stored_by_names
from sparkring.etl.sources.iceberg.table import TableVersion, instant, open_version, readable
from sparkring.etl.sources.iceberg.where import file_filter
from sparkring.etl.sources.lake_files import (
    LakeFile,
    LakeFiles,
    LakeSchema,
    check_types,
    map_fields,
    plain_field,
    quoted,
)
from sparkring.etl.sources.predicate import parse
from sparkring.etl.sources.snapshot import OpenSource, PinContext, SourceSnapshot
from sparkring.etl.spark_platform.jvm import is_loadable

CONNECTOR = "org.apache.iceberg.spark.source.IcebergSource"


@dataclass(frozen=True)
class IcebergSnapshot(SourceSnapshot):
    """A table's files at one snapshot, and the columns that are read of them: those asked for, and the condition's."""

    config: IcebergSource
    version: TableVersion
    files: tuple[IcebergFile, ...]
    columns: StructType

    @property
    def is_empty(self) -> bool:
        return not self.files

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self.files]

    def read(self, spark: SparkSession) -> DataFrame:
        check_types(self.key, self.config.columns, map_fields(self.columns, plain_field))
        rows = self._read_by_connector(spark) if self._connector_reads(spark) else self._read_files(spark)
        if self.config.where is not None:
            rows = rows.where(self.config.where)
        return rows.select(*map(quoted, asked_names(self.config, self.version)))

    def _connector_reads(self, spark: SparkSession) -> bool:
        catalog = (self.config.table or "").partition(".")[0]
        there = bool(catalog) and spark.conf.get(f"spark.sql.catalog.{catalog}", None) is not None
        return uses_connector(self.version, there, partial(is_loadable, spark))

    def _read_by_connector(self, spark: SparkSession) -> DataFrame:
        name = ".".join(map(quoted, str(self.config.table).split(".")))
        return spark.read.option("snapshot-id", self.version.metadata.current_snapshot_id).table(name)

    def _read_files(self, spark: SparkSession) -> DataFrame:
        """Read all rows but the deleted ones, as a union of groups of files that are read in one way."""
        if not self.files:
            return spark.createDataFrame([], self.columns)
        deleted = deleted_rows(self.key, self.version, self.files)
        groups: dict[tuple[str, StructType, tuple[str, ...]], list[LakeFile]] = {}
        for file, footer in zip(self.files, footers(self.key, self.version, self.files), strict=True):
            host, path = split_host(file.path)
            in_file, filled = self._way(file, footer)
            rows = deleted.get(file.path, np.empty(0, np.int64))
            found = LakeFile(path, file.bytes, tuple(filled.values()), rows)
            groups.setdefault((host, in_file, tuple(filled)), []).append(found)
        parts = [
            lake_files(host, files, LakeSchema(self.columns, in_file, filled))
            for (host, in_file, filled), files in groups.items()
        ]
        return reduce(lambda above, below: above.union(below), [part.read(spark) for part in parts])

    def _way(self, file: IcebergFile, footer: pa.Schema) -> tuple[StructType, dict[str, Any]]:
        """Return how to find the columns in a file, and the constant values of columns not in it.

        Files of a migrated table may lack a column by whose plain value they are partitioned.
        """
        ids = frozenset(field_ids(footer))
        by_id = {field_id(column): column.name for column in self.columns}
        if ids:
            return stored(self.columns), {
                by_id[n]: v for n, v in file.identity if n in by_id and n not in ids and v is not None
            }
        with readable(self.key):
            mapping = self.version.name_mapping
        if mapping is None:
            raise EtlError(
                f"{self.key}: {file.path} was written without field ids, and the table has no name mapping "
                "(schema.name-mapping.default): what its columns are is not certain. Rewrite it with the engine that "
                "keeps the table (CALL system.rewrite_data_files)"
            )
        try:
            named = stored_by_names(self.columns, mapping.root, footer)
        except ValueError as error:
            raise EtlError(f"{self.key}: {file.path} was written without field ids, and {error}") from error
        lacking = {c.name for c, s in zip(self.columns, named, strict=True) if s.name not in footer.names}
        return named, {by_id[n]: v for n, v in file.identity if by_id.get(n) in lacking and v is not None}

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
            "where": self.config.where,
            "files": len(self.files),
            "bytes": sum(file.bytes for file in self.files),
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class OpenIceberg(OpenSource[IcebergSource]):
    """A table at the snapshot that a recipe asks for: `pin` plans files of this one, whatever is committed since."""

    version: TableVersion

    @classmethod
    def open(cls, name: str, config: IcebergSource, context: PinContext | None = None) -> Self:
        """Resolve the snapshot. Raises EtlError if it, or the table, is not there."""
        return cls(name, open_version(f"etl.sources.{name}", config))

    @staticmethod
    def version_asked(config: IcebergSource) -> str:
        asked = {"path": (config.path or "").rstrip("/")}
        return json.dumps(asked | config.model_dump(include={"table", *config.SNAPSHOTS}))

    def pin(self, config: IcebergSource) -> IcebergSnapshot:
        """Pin the columns and files that `config` asks for. Raises EtlError for those that are missing or not read."""
        key, where = f"etl.sources.{self.name}", None
        version = replace(self.version, folders=(self.version.folders[0], *config.allowed_folders))
        if config.where is not None:
            where = parse(f"{key}.where", config.where, comparable(version.schema), "comparable column")
        names = [*asked_names(config, version), *sorted(where.columns if where else ())]
        columns = spark_fields(key, version.schema, dict.fromkeys(names))
        files = plan(key, version, None if where is None else file_filter(where.test, version.schema))
        return IcebergSnapshot(self.name, config, fingerprint(version, columns, files), version, files, columns)


def asked_names(config: IcebergSource, version: TableVersion) -> list[str]:
    return list(config.columns) or [field.name for field in version.schema.fields]


def fingerprint(version: TableVersion, columns: StructType, files: Sequence[IcebergFile]) -> str:
    """Hash (sha256) columns and files, which never change; the table's place and snapshot id do not count."""
    root = split_host(version.metadata.location)[1].rstrip("/") + "/"

    def states(found: Sequence[IcebergFile]) -> list[Any]:
        return sorted(
            [
                split_host(f.path)[1].removeprefix(root),
                f.bytes,
                [[n, repr(v)] for n, v in f.identity],
                states(f.deletes),
            ]
            for f in found
        )

    return digest(["iceberg", columns.jsonValue(), states(files)])


def uses_connector(version: TableVersion, has_catalog: bool, loadable: Callable[[str], bool]) -> bool:
    """Return whether Spark can read the table itself, by its Iceberg connector.

    The connector is there, Spark has a catalog of that name, and a snapshot read by its id has the schema that is
    wanted, which a snapshot of a branch may not.
    """
    snapshot = version.snapshot
    return (
        has_catalog
        and snapshot is not None
        and snapshot.schema_id == version.metadata.current_schema_id
        and loadable(CONNECTOR)
    )


def lake_files(host: str, files: Sequence[LakeFile], schema: LakeSchema) -> LakeFiles:
    """Group files of one host below the deepest folder that has all of them."""
    common = os.path.commonprefix([file.path for file in files])  # noqa: RUF071 (cut at a slash below)
    root = common[: common.rindex("/")]
    below = tuple(replace(file, path=file.path[len(root) + 1 :]) for file in files)
    return LakeFiles(open_storage(host + root), schema, below)
