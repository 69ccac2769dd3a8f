"""A source at one moment: what every kind of source is pinned to before anything is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from sparkring.conf.sources import SourceConfig


@dataclass(frozen=True)
class SourceSnapshot(ABC):
    """A declared table at one moment. Equal fingerprints mean equal rows, columns and types, wherever the table is."""

    name: str
    config: SourceConfig
    fingerprint: str

    @property
    def key(self) -> str:
        return f"etl.sources.{self.name}"

    @property
    def is_empty(self) -> bool:
        """Whether there is no file to read, as may be of a lake table after `where`."""
        return False

    @property
    def paths(self) -> list[str]:
        """The files that are read, below the table's root or whole; [] where there are none to name."""
        return []

    @abstractmethod
    def read(self, spark: SparkSession) -> DataFrame:
        """Read the typed table. Raises EtlError naming what does not match the declaration."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise EtlError if the rows that `read` gives may have changed since the snapshot was taken."""

    @abstractmethod
    def lineage(self) -> dict[str, Any]:
        """What the manifest records about this source: where it is, what was read, its fingerprint."""
