"""What every kind of source has besides its configuration: how it is opened, and what it is pinned to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from sparkring.conf.sources import SourceConfig

Config = TypeVar("Config", bound=SourceConfig)


@dataclass(frozen=True)
class PinContext:
    """What sources that need Spark are pinned with.

    `session` opens the job's at its first call; rows that must be copied to stay as they are land below `datasets_uri`.
    """

    session: Callable[[], SparkSession]
    datasets_uri: str


@dataclass(frozen=True)
class ExaminedTable:
    """What was found in a table without Spark: problems, and sizes as far as they are known."""

    problems: list[str] = field(default_factory=list)
    files: int | None = None
    bytes: int | None = None
    rows: int | None = None


@dataclass(frozen=True)
class OpenSource(ABC, Generic[Config]):
    """A table at the version that a recipe asks for: `pin` selects rows and columns of that version.

    Tables of files and of catalogs have no versions: there each call of `pin` pins what is there at that moment.
    """

    name: str

    @classmethod
    @abstractmethod
    def open(cls, name: str, config: Config, context: PinContext | None) -> Self:
        """Resolve the version. Raises EtlError if there is no such table.

        `context` is given where config.NEEDS_SPARK.
        """

    @abstractmethod
    def pin(self, config: Config) -> SourceSnapshot:
        """Pin the rows and columns that `config` asks for."""

    @staticmethod
    def version_asked(config: Config) -> str | None:
        """Return the table and version asked for: sources with equal ones share an opened table.

        None: nothing is shared.
        """
        return None

    @classmethod
    def examine(cls, name: str, config: Config, pinned_soon: bool) -> ExaminedTable:
        """Check the source without Spark. Raises EtlError if there is no such table.

        `pinned_soon`: leave it alone if the pin of a job, which is about to come, costs no more than this.
        """
        if not (config.NEEDS_SPARK or pinned_soon):
            cls.open(name, config, None).pin(config)
        return ExaminedTable()

    @staticmethod
    def declared_schema(name: str, config: Config) -> StructType | None:
        """Return the columns that `read` will give, by the declaration alone; None if the table decides them."""
        return None


@dataclass(frozen=True)
class SourceSnapshot(ABC):
    """A declared table at one moment. Equal fingerprints mean equal rows, columns and types, wherever the table is."""

    # Whether each interval of a window is checked again once all are pinned: tables without versions, in which one
    # command may move rows from an interval that was pinned to one that was not.
    CHECKED_TOGETHER: ClassVar[bool] = False

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
        """Return the manifest's record of this source: where it is, what was read, its fingerprint."""
