"""A Delta table as a source: pinned at one version by its log, read by Spark's connector or as files."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, DataType, StructField, StructType

from sparkring.conf.digest import digest
from sparkring.conf.sources import DeltaSource
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.delta.log import DeltaFile, DeltaVersion, list_log, open_version
from sparkring.etl.sources.lake_files import (
    FIELD_ID,
    LakeFile,
    LakeFiles,
    LakeSchema,
    check_types,
    map_fields,
    plain_field,
    quoted,
    select_columns,
)
from sparkring.etl.sources.predicate import parse
from sparkring.etl.sources.snapshot import OpenSource, PinContext, SourceSnapshot
from sparkring.etl.spark_platform.jvm import is_loadable

log = logging.getLogger(__name__)

CONNECTOR = "io.delta.sql.DeltaSparkSessionExtension"
PHYSICAL_NAME, COLUMN_ID = "delta.columnMapping.physicalName", "delta.columnMapping.id"
TRIED = 20  # versions looked at, newest first, for those that are whole when one is not


@dataclass(frozen=True)
class DeltaSnapshot(SourceSnapshot):
    """A Delta table at one version, and after `where`."""

    config: DeltaSource
    version: int
    table_id: str
    files: LakeFiles

    @property
    def is_empty(self) -> bool:
        return not self.files.files

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self.files.files]

    def read(self, spark: SparkSession) -> DataFrame:
        check_types(self.key, self.config.columns, self.files.schema.columns)
        self.check_unchanged()
        if not uses_connector(spark.conf.get("spark.sql.extensions", "") or "", partial(is_loadable, spark)):
            return self.files.read(spark)
        uri = self.files.storage.uri.partition("?")[0]
        rows = spark.read.format("delta").option("versionAsOf", self.version).load(uri)
        kept = rows if self.config.where is None else rows.where(self.config.where)
        return kept.select(*map(quoted, self.files.schema.columns.names))

    def check_unchanged(self) -> None:
        """Raise EtlError if the table, or a data file of this version, is gone."""
        if list_log(self.files.storage) is None:
            raise EtlError(
                f"{self.key}.path = {self.config.path!r}: the table is gone since version {self.version} of it was "
                "pinned: it was dropped or moved"
            )
        if gone := self.files.gone():
            whole = self._whole_versions()
            raise EtlError(
                f"{self.key}.path = {self.config.path!r}: data files of version {self.version} are gone, {len(gone)} "
                f"of {len(self.files.files)}, such as {gone[0]}: VACUUM has deleted them. Of the newest {TRIED} "
                f"versions these have all files: {whole or 'none'}"
            )

    def lineage(self) -> dict[str, Any]:
        return {
            "path": self.config.path,
            "format": "delta",
            "version": self.version,
            "where": self.config.where,
            "table_id": self.table_id,
            "files": len(self.files.files),
            "bytes": self.files.bytes,
            "fingerprint": self.fingerprint,
        }

    def _whole_versions(self) -> list[int]:
        """List which of the newest versions can be read and have all their data files."""
        found, whole = list_log(self.files.storage), []
        for version in found.versions[-TRIED:] if found else []:
            config = DeltaSource(format="delta", path=self.config.path, versionAsOf=version)
            with contextlib.suppress(EtlError):
                if not OpenDelta.open(self.name, config).select(config).gone():
                    whole.append(version)
        return whole


@dataclass(frozen=True)
class OpenDelta(OpenSource[DeltaSource]):
    """A table at the version that a recipe asks for, with its log read: `pin` reads nothing more of it."""

    storage: Storage
    version: DeltaVersion
    listed: tuple[DeltaFile, ...]

    @classmethod
    def open(cls, name: str, config: DeltaSource, context: PinContext | None = None) -> Self:
        """Resolve the version. Raises EtlError if there is no such version, or it cannot be read here."""
        storage = open_storage(config.path)
        found = open_version(f"etl.sources.{name}", config, storage)
        log.info("etl.sources.%s: version %d of %s", name, found.version, config.path)
        return cls(name, storage, found, tuple(found.files()))

    @staticmethod
    def version_asked(config: DeltaSource) -> str:
        asked = {"path": open_storage(config.path).uri.rstrip("/")}
        return json.dumps(asked | config.model_dump(include={"versionAsOf", "timestampAsOf"}))

    def pin(self, config: DeltaSource) -> DeltaSnapshot:
        """Pin the columns and files that `config` asks for. Raises EtlError for those that are not there."""
        files = self.select(config)
        fingerprint = digest(["delta", self.version.table_id, files.content()])
        return DeltaSnapshot(self.name, config, fingerprint, self.version.version, self.version.table_id, files)

    def select(self, config: DeltaSource) -> LakeFiles:
        """Select the columns and files that `config` asks for."""
        key, found = f"etl.sources.{self.name}", self.version
        table = StructType.fromJson(found.schema)
        schema = select_columns(key, config.columns, lake_schema(table, found.column_mapping, found.partition_columns))
        if odd := [name for name in schema.partitions if isinstance(schema.columns[name].dataType, BinaryType)]:
            raise EtlError(
                f"{key}: the table is partitioned by {odd[0]!r}, which is binary, and no certain bytes of it are in "
                "the log (writers escape them in different ways); leave it out of `columns`, or copy the table "
                "into one that is partitioned by base64 of it"
            )
        listed = self.listed
        if config.where is not None:
            kinds = {f.name: f.dataType.simpleString() for f in table if f.name in found.partition_columns}
            condition = parse(f"{key}.where", config.where, kinds)
            listed = tuple(file for file in listed if condition.matches(file.partition))
        values = [tuple(file.partition[name] for name in schema.partitions) for file in listed]
        files = [LakeFile(f.path, f.bytes, value, f.deleted) for f, value in zip(listed, values, strict=True)]
        return LakeFiles(self.storage, schema, tuple(files))


def uses_connector(extensions: str, loadable: Callable[[str], bool]) -> bool:
    """Return whether Spark reads Delta itself: `spark.sql.extensions` names the connector, its jar is there."""
    return CONNECTOR in extensions.replace(" ", "").split(",") and loadable(CONNECTOR)


def lake_schema(table: StructType, mapping: str, partitions: tuple[str, ...]) -> LakeSchema:
    """Return how the table's columns are found in its files, `delta.columnMapping.mode`: name, id or none."""

    def stored(field: StructField, kind: DataType) -> StructField:
        if mapping == "id":
            return StructField(field.name, kind, metadata={FIELD_ID: field.metadata[COLUMN_ID]})
        return StructField(field.metadata[PHYSICAL_NAME] if mapping == "name" else field.name, kind)

    return LakeSchema(map_fields(table, plain_field), map_fields(table, stored), partitions)
