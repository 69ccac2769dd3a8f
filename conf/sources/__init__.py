"""The raw tables of a recipe: a class per kind of source, and which of them a source is."""

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from sparkring.conf.sources.base import SourceConfig
from sparkring.conf.sources.catalog import CatalogSource
from sparkring.conf.sources.delta import DeltaSource
from sparkring.conf.sources.files import FilesSource
from sparkring.conf.sources.iceberg import IcebergSource
from sparkring.conf.sources.jdbc import JdbcSource

SOURCES: tuple[type[SourceConfig], ...] = (FilesSource, DeltaSource, IcebergSource, JdbcSource, CatalogSource)
BY_FORMAT = {name: kind for kind in SOURCES for name in kind.FORMATS}
VERSION_KEYS = frozenset(kind.VERSION_KEY for kind in SOURCES if kind.VERSION_KEY is not None)


def _kind(value: Any) -> str | None:
    """Return the name of a source's configuration class; None if its format is unknown."""
    if isinstance(value, SourceConfig):
        return type(value).__name__
    if not isinstance(value, dict):
        return FilesSource.__name__  # its error shows what was given
    if "format" not in value and "table" in value:
        return CatalogSource.__name__
    asked = value.get("format", "csv")
    if asked == "avro":  # refused there
        return FilesSource.__name__
    found = BY_FORMAT.get(asked) if isinstance(asked, str) else None
    return None if found is None else found.__name__


Source = Annotated[
    Annotated[FilesSource, Tag("FilesSource")]
    | Annotated[DeltaSource, Tag("DeltaSource")]
    | Annotated[IcebergSource, Tag("IcebergSource")]
    | Annotated[JdbcSource, Tag("JdbcSource")]
    | Annotated[CatalogSource, Tag("CatalogSource")],
    Discriminator(
        _kind,
        custom_error_type="source_format",
        custom_error_message=f"its format must be one of {sorted(BY_FORMAT)}",
    ),
]
