"""Pin the sources of a dataset: each as it is now, with a fingerprint, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sparkring.conf.sources import CatalogSource, DeltaSource, FilesSource, IcebergSource, JdbcSource, SourceConfig
from sparkring.etl.sources.catalog.source import OpenCatalog
from sparkring.etl.sources.delta.source import OpenDelta
from sparkring.etl.sources.files.source import OpenFiles
from sparkring.etl.sources.iceberg.source import OpenIceberg
from sparkring.etl.sources.jdbc import OpenJdbc
from sparkring.etl.sources.snapshot import OpenSource, PinContext, SourceSnapshot

OPENED: dict[type[SourceConfig], type[OpenSource[Any]]] = {
    FilesSource: OpenFiles,
    DeltaSource: OpenDelta,
    IcebergSource: OpenIceberg,
    CatalogSource: OpenCatalog,
    JdbcSource: OpenJdbc,
}
OpenTables = dict[tuple[type, str], OpenSource[Any]]  # by the table and version that sources ask for


def pin_sources(sources: Mapping[str, SourceConfig], context: PinContext | None = None) -> dict[str, SourceSnapshot]:
    """Pin every source, by name. Files are read once each for that, unless `fingerprint: stat`.

    `context` may be None if no source is of a kind that NEEDS_SPARK.
    """
    tables: OpenTables = {}
    return {name: open_source(name, config, context, tables)(config) for name, config in sources.items()}


def pin(name: str, config: SourceConfig, context: PinContext | None = None) -> SourceSnapshot:
    """Pin one source. Raises EtlError if there is no such table."""
    return open_source(name, config, context, {})(config)


def open_source(
    name: str, config: SourceConfig, context: PinContext | None, tables: OpenTables
) -> Callable[[SourceConfig], SourceSnapshot]:
    """Resolve which version of a table is read; returns the function that pins rows of that version, by any `where`.

    Args:
        name: name of the source.
        config: configuration of the source.
        context: session and settings for sources that NEEDS_SPARK.
        tables: tables opened so far; sources asking for the same table and version share one.
    """
    assert context is not None or not config.NEEDS_SPARK, f"etl.sources.{name} is pinned with Spark"
    kind = kind_of(config)
    asked = kind.version_asked(config)
    if asked is None:
        return kind.open(name, config, context).pin
    if (kind, asked) not in tables:
        tables[kind, asked] = kind.open(name, config, context)
    return replace(tables[kind, asked], name=name).pin


def kind_of(config: SourceConfig) -> type[OpenSource[Any]]:
    """Return the class that opens sources of this kind."""
    if type(config) not in OPENED:
        raise TypeError(f"{type(config).__name__} is not in OPENED (etl/sources/pin.py): it cannot be pinned")
    return OPENED[type(config)]
