"""Delta tables."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sparkring.conf.schema import check_case
from sparkring.conf.sources.base import Instant, SourceConfig


class DeltaSource(SourceConfig):
    """A Delta table, at one version. Neither option: the latest, resolved when the job starts, and recorded."""

    FORMATS: ClassVar[tuple[str, ...]] = ("delta",)
    POINTERS: ClassVar[frozenset[str]] = frozenset({"path", "versionAsOf", "timestampAsOf"})
    VERSION_KEY: ClassVar[str | None] = "version"
    format: Literal["delta"]
    path: str = Field(description="the table's folder, on any storage")
    versionAsOf: Annotated[int, Field(ge=0)] | None = Field(None, description="version of the table")
    timestampAsOf: Instant | None = Field(
        None, description="the last version committed then or before: an instant, in UTC where it names no offset"
    )
    where: str | None = Field(None, description="SQL condition on partition columns: other partitions are not read")
    columns: dict[str, str] = Field({}, description="name -> Spark type, as in the table; {}: all of the table's")

    @model_validator(mode="after")
    def _one_version(self) -> Self:
        if self.versionAsOf is not None and self.timestampAsOf is not None:
            raise ValueError("versionAsOf and timestampAsOf both name a version; leave one of them out")
        check_case("columns", self.columns)
        return self

    @property
    def location(self) -> str | None:
        return self.path

    def at_version(self, read: Mapping[str, Any]) -> Self:
        return self.model_copy(update={"versionAsOf": read["version"], "timestampAsOf": None})
