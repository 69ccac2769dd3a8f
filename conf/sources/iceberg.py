"""Iceberg tables."""

import datetime as dt
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from sparkring.conf.schema import check_case
from sparkring.conf.sources.base import SourceConfig, instant

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


ICEBERG_METADATA = re.compile(r"/metadata(?:/[^/]*\.metadata\.json)?$")  # of a table's folder


class IcebergSource(SourceConfig):
    """An Iceberg table, at one snapshot. No option: the current one, resolved when the job starts, and recorded."""

    FORMATS: ClassVar[tuple[str, ...]] = ("iceberg",)
    POINTERS: ClassVar[frozenset[str]] = frozenset(
        {"table", "path", "snapshot_id", "branch", "tag", "as_of_timestamp", "allowed_folders"}
    )
    VERSION_KEY: ClassVar[str | None] = "snapshot-id"
    SNAPSHOTS: ClassVar[tuple[str, ...]] = ("snapshot_id", "branch", "tag", "as_of_timestamp")
    format: Literal["iceberg"]
    table: str | None = Field(
        None,
        description="catalog.namespace.table; pyiceberg finds the catalog, and its credentials, by ~/.pyiceberg.yaml "
        "or PYICEBERG_CATALOG__* variables",
    )
    path: str | None = Field(
        None,
        description="a table without a catalog: one of its *.metadata.json files, or the folder of a table whose "
        "versions are numbered (metadata/v7.metadata.json, metadata/version-hint.text)",
    )
    snapshot_id: int | None = Field(None, alias="snapshot-id", description="read with the schema of that snapshot")
    branch: str | None = Field(None, description="its last snapshot, read with the table's current schema")
    tag: str | None = Field(None, description="read with the schema of that snapshot")
    as_of_timestamp: int | str | None = Field(
        None,
        alias="as-of-timestamp",
        description="what was current then: milliseconds since 1970, or an instant, in UTC where it names no offset; "
        "read with the schema of that snapshot",
    )
    allowed_folders: list[Annotated[str, Field(pattern="/")]] = Field(
        [], description="folders outside the table's own whose files its metadata may name: s3://lake/other/data"
    )
    where: str | None = Field(
        None, description="SQL condition on columns: other rows are not read, nor files that hold no such row"
    )
    columns: dict[str, str] = Field({}, description="name -> Spark type; {}: all of the table's")

    @field_validator("table")
    @classmethod
    def _names_a_catalog(cls, value: str | None) -> str | None:
        if value is not None and (value.count(".") < 2 or "" in value.split(".")):
            raise ValueError("must be catalog.namespace.table")
        return value

    @field_validator("as_of_timestamp", mode="before")
    @classmethod
    def _is_an_instant(cls, value: Any) -> Any:
        if isinstance(value, dt.date):  # YAML makes one of a text without quotes
            return value.isoformat()
        if isinstance(value, str) and not value.isdecimal():
            instant(value)  # its ValueError names the text
        return value

    @model_validator(mode="after")
    def _one_table_at_one_snapshot(self) -> Self:
        if (self.table is None) == (self.path is None):
            raise ValueError("exactly one of table and path must be given")
        fields = type(self).model_fields
        given = [fields[name].alias or name for name in self.SNAPSHOTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; a table is read at one snapshot")
        check_case("columns", self.columns)
        return self

    @property
    def as_of_ms(self) -> int | None:
        """`as-of-timestamp` in whole milliseconds since 1970 UTC, in which Iceberg dates its snapshots."""
        value = self.as_of_timestamp
        if value is None or isinstance(value, int) or value.isdecimal():
            return None if value is None else int(value)
        return (instant(value) - EPOCH) // dt.timedelta(milliseconds=1)

    @property
    def location(self) -> str | None:
        return self.path

    @property
    def place(self) -> str:
        return self.path or self.table or ""

    @property
    def lineage_location(self) -> str | None:
        return self.path and ICEBERG_METADATA.sub("", self.path)

    def lineage_name(self, name: str, environment: Mapping[str, str]) -> tuple[str, str]:
        assert self.table is not None
        catalog, _, table = self.table.partition(".")
        return f"iceberg://{catalog}", table

    def at_version(self, read: Mapping[str, Any]) -> Self:
        return self.model_copy(update=dict.fromkeys(self.SNAPSHOTS) | {"snapshot_id": read["snapshot-id"]})
