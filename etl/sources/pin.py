"""Pin the sources of a dataset: each as it is now, with a fingerprint, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping

from sparkring.conf.sources import DeltaSource, FilesSource, IcebergSource, SourceConfig
from sparkring.etl.sources.delta.source import pin_delta
from sparkring.etl.sources.file_source import pin_files
from sparkring.etl.sources.iceberg.source import pin_iceberg
from sparkring.etl.sources.snapshot import SourceSnapshot


def pin_sources(sources: Mapping[str, SourceConfig]) -> dict[str, SourceSnapshot]:
    """Pin every source, by name. Files are read once each for that, unless `fingerprint: stat`; needs no Spark."""
    return {name: pin(name, config) for name, config in sources.items()}


def pin(name: str, config: SourceConfig) -> SourceSnapshot:
    """Pin one source. Raises EtlError if there is no such table."""
    if isinstance(config, FilesSource):
        return pin_files(name, config)
    if isinstance(config, DeltaSource):
        return pin_delta(name, config)
    if isinstance(config, IcebergSource):
        return pin_iceberg(name, config)
    raise NotImplementedError(type(config).__name__)
