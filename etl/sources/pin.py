"""Pin the sources of a dataset: each as it is now, with a fingerprint, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession

from sparkring.conf.sources import (
    CatalogSource,
    DeltaSource,
    FilesSource,
    IcebergSource,
    JdbcSource,
    SourceConfig,
)
from sparkring.etl.sources.catalog.source import pin_table
from sparkring.etl.sources.delta.source import pin_delta
from sparkring.etl.sources.file_source import pin_files
from sparkring.etl.sources.iceberg.source import pin_iceberg
from sparkring.etl.sources.jdbc import pin_query
from sparkring.etl.sources.snapshot import SourceSnapshot


@dataclass(frozen=True)
class PinContext:
    """What sources that need Spark are pinned with. `session` opens the job's at its first call; rows that must be
    copied to stay as they are land below `datasets_uri`."""

    session: Callable[[], SparkSession]
    datasets_uri: str


def pin_sources(sources: Mapping[str, SourceConfig], context: PinContext | None = None) -> dict[str, SourceSnapshot]:
    """Pin every source, by name. Files are read once each for that, unless `fingerprint: stat`.

    `context` may be None if no source is of a kind that NEEDS_SPARK.
    """
    return {name: pin(name, config, context) for name, config in sources.items()}


def pin(name: str, config: SourceConfig, context: PinContext | None = None) -> SourceSnapshot:
    """Pin one source. Raises EtlError if there is no such table."""
    if isinstance(config, FilesSource):
        return pin_files(name, config)
    if isinstance(config, DeltaSource):
        return pin_delta(name, config)
    if isinstance(config, IcebergSource):
        return pin_iceberg(name, config)
    assert context is not None, f"etl.sources.{name} is pinned with Spark"
    if isinstance(config, CatalogSource):
        return pin_table(name, config, context.session)
    if isinstance(config, JdbcSource):
        return pin_query(name, config, context.session, context.datasets_uri)
    raise TypeError(f"etl.sources.{name}: a {type(config).__name__} is no kind of source that can be pinned")
