"""Pin the sources of a dataset: each as it is now, with a fingerprint, before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from pyspark.sql import SparkSession

from sparkring.conf.sources import (
    CatalogSource,
    DeltaSource,
    FilesSource,
    IcebergSource,
    JdbcSource,
    SourceConfig,
)
from sparkring.conf.storage import open_storage
from sparkring.etl.sources.catalog.source import pin_table
from sparkring.etl.sources.delta.source import OpenDelta, open_delta
from sparkring.etl.sources.file_source import pin_files
from sparkring.etl.sources.iceberg.source import OpenIceberg, open_iceberg
from sparkring.etl.sources.jdbc import pin_query
from sparkring.etl.sources.snapshot import SourceSnapshot

LakeTables = dict[str, OpenDelta | OpenIceberg]  # by the table and version that sources ask for


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
    tables: LakeTables = {}
    return {name: open_source(name, config, context, tables)(config) for name, config in sources.items()}


def pin(name: str, config: SourceConfig, context: PinContext | None = None) -> SourceSnapshot:
    """Pin one source. Raises EtlError if there is no such table."""
    return open_source(name, config, context, {})(config)


def open_source(
    name: str, config: SourceConfig, context: PinContext | None, tables: LakeTables
) -> Callable[[SourceConfig], SourceSnapshot]:
    """Resolve which version of a table is read; returns the function that pins rows of that version, by any `where`.

    Tables of files and of catalogs have no versions: there each call pins what is there at that moment.

    Args:
        name: of the source.
        config: its declaration.
        context: what a source that NEEDS_SPARK is pinned with.
        tables: those opened before. Sources that name one lake table alike read it at one version.
    """
    opened: Any
    if isinstance(config, DeltaSource | IcebergSource):
        key = _table_of(config)
        if key not in tables:
            tables[key] = open_delta(name, config) if isinstance(config, DeltaSource) else open_iceberg(name, config)
        opened = replace(tables[key], name=name).pin
    elif isinstance(config, FilesSource):
        opened = partial(pin_files, name)
    elif isinstance(config, CatalogSource):
        assert context is not None, f"etl.sources.{name} is pinned with Spark"
        opened = partial(pin_table, name, session=context.session)
    elif isinstance(config, JdbcSource):
        assert context is not None, f"etl.sources.{name} is pinned with Spark"
        opened = partial(pin_query, name, session=context.session, datasets_uri=context.datasets_uri)
    else:
        raise TypeError(f"etl.sources.{name}: a {type(config).__name__} is no kind of source that can be pinned")
    return cast(Callable[[SourceConfig], SourceSnapshot], opened)


def _table_of(config: DeltaSource | IcebergSource) -> str:
    """Name the table and the version that a source asks for, whichever of its rows and columns it reads."""
    asked = config.model_dump(exclude={"where", "columns", "allowed_folders"})
    path = open_storage(config.path).uri if isinstance(config, DeltaSource) else config.path or ""
    return json.dumps(asked | {"path": path.rstrip("/")}, default=str)
