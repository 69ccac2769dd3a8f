"""The raw tables of a recipe: one class per kind of source. Options have the names of Spark, Delta and Iceberg."""

from __future__ import annotations

import codecs
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from sparkring.conf.schema import Strict, check_case


class CsvOptions(Strict):
    """How a CSV file is written: RFC 4180. A quote within a quoted value is doubled; a backslash is a character."""

    sep: Annotated[str, Field(pattern=r"^[\t\x20-\x7e]$")] = ","
    quote: Annotated[str, Field(pattern=r"^[\x20-\x7e]?$")] = Field('"', description="'': quotes are characters")
    nullValue: str = Field("", description="what stands for null beside the empty value; quoted, both are texts")
    encoding: str = Field("utf-8", description="of Python's names: latin-1, windows-1252, utf-16")

    @field_validator("encoding")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            codecs.lookup(value)
        except LookupError as error:
            raise ValueError(f"{value!r} is no encoding Python knows") from error
        return value

    @model_validator(mode="after")
    def _differ(self) -> CsvOptions:
        if self.sep == self.quote:
            raise ValueError(f"sep and quote are both {self.sep!r}")
        return self


class SourceConfig(Strict):
    """What every kind of source has."""

    POINTERS: ClassVar[frozenset[str]]  # keys that say where the table is and which snapshot: not part of its content
    NEEDS_SPARK: ClassVar[bool] = False  # to pin it
    columns: dict[str, str]


class FilesSource(SourceConfig):
    """Files in a folder. A file that does not match the declared columns stops the job, named with the column."""

    POINTERS: ClassVar[frozenset[str]] = frozenset({"path"})
    path: str = Field(
        description="a file, a folder (all files below it named as the format: *.csv, *.csv.gz or *.parquet; text: all "
        "there are) or a glob (`*` stays within a folder, `**` crosses them); local or any storage URI"
    )
    format: Literal["csv", "parquet", "text"] = "csv"
    columns: dict[str, str] = Field(
        {},
        description="name -> Spark type (`int`, `decimal(10,2)`). csv: the whole header; parquet: the columns to read; "
        "text: none, rows are whole files with the columns `path` and `text`",
    )
    options: CsvOptions | None = Field(None, description="csv only; None: RFC 4180, null is the empty value")
    fingerprint: Literal["content", "stat"] = Field(
        "content", description="content: sha256 of every file; stat: path, size and mtime (for lakes too large to read)"
    )

    @model_validator(mode="after")
    def _columns_given(self) -> FilesSource:
        if (self.format == "text") != (not self.columns):
            raise ValueError("columns must be declared for csv and parquet, and may not be for text")
        check_case("columns", self.columns)
        if self.options is not None and self.format != "csv":
            raise ValueError(f"options are for csv; a {self.format} source has none")
        return self


class DeltaSource(SourceConfig):
    """A Delta table, at one version. Neither option: the latest, resolved when the job starts, and recorded."""

    POINTERS: ClassVar[frozenset[str]] = frozenset({"path", "versionAsOf", "timestampAsOf"})
    format: Literal["delta"]
    path: str = Field(description="the table's folder, on any storage")
    versionAsOf: Annotated[int, Field(ge=0)] | None = None
    timestampAsOf: str | None = Field(None, description="an instant, in UTC where it names no offset")
    where: str | None = Field(None, description="SQL condition on partition columns: other partitions are not read")
    columns: dict[str, str] = Field({}, description="name -> Spark type; {}: all of the table's")


class IcebergSource(SourceConfig):
    """An Iceberg table, at one snapshot. No option: the current one, resolved when the job starts, and recorded."""

    POINTERS: ClassVar[frozenset[str]] = frozenset({"table"})
    format: Literal["iceberg"]
    table: str = Field(description="catalog.database.table")
    columns: dict[str, str] = Field({}, description="name -> Spark type; {}: all of the table's")


EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


class JdbcSource(SourceConfig):
    """A table of a database, landed as Parquet when the job starts. Options have the names that Spark gives them.

    Where it is and who reads it come from environment variables alone, so that no file, log or store can hold them.
    """

    NEEDS_SPARK: ClassVar[bool] = True
    POINTERS: ClassVar[frozenset[str]] = frozenset(
        {"url_env", "user_env", "password_env", "driver", "dbtable", "query", "consistency", "fetchsize"}
        | {"partitionColumn", "lowerBound", "upperBound", "numPartitions"}
    )
    format: Literal["jdbc"]
    url_env: EnvironmentName = Field(description="the variable that holds the URL: jdbc:postgresql://host/database")
    user_env: EnvironmentName | None = None
    password_env: EnvironmentName | None = None
    driver: str | None = Field(None, description="its Java class; None: by the URL")
    dbtable: str | None = Field(None, description="a table, or a query in parentheses with an alias")
    query: str | None = Field(None, description="a SELECT, in place of dbtable; not read in partitions")
    partitionColumn: str | None = Field(None, description="a number, date or timestamp: rows are read by ranges of it")
    lowerBound: int | str | None = Field(None, description="where ranges begin; rows beyond are read too; None: min")
    upperBound: int | str | None = Field(None, description="where ranges end; rows beyond are read too; None: max")
    numPartitions: Annotated[int, Field(ge=1)] = Field(1, description="ranges, each read by a connection of its own")
    fetchsize: Annotated[int, Field(ge=1)] = Field(10_000, description="rows per round trip")
    consistency: Literal["snapshot", "none"] = Field(
        "snapshot",
        description="snapshot: all partitions read one exported snapshot (PostgreSQL); none: each reads what is there "
        "when it comes to it",
    )
    columns: dict[str, str] = Field({}, description="name -> Spark type; {}: all of the table's")

    @model_validator(mode="after")
    def _together(self) -> JdbcSource:
        check_case("columns", self.columns)
        if (self.dbtable is None) == (self.query is None):
            raise ValueError("give dbtable or query, one of them")
        if (self.partitionColumn is None) != (self.numPartitions == 1):
            raise ValueError(
                f"partitionColumn = {self.partitionColumn!r} and numPartitions = {self.numPartitions} go together: "
                "a column whose ranges are read, and how many (at least 2)"
            )
        if self.partitionColumn is not None and self.query is not None:
            raise ValueError("query is read by one connection; for partitions write dbtable: (SELECT ...) AS rows")
        bounds = [self.lowerBound, self.upperBound]
        if bounds != [None, None] and (None in bounds or self.partitionColumn is None):
            raise ValueError("lowerBound and upperBound go together, and with partitionColumn; without them: min, max")
        return self


class CatalogSource(SourceConfig):
    """A table of files, or a view of such tables, in a catalog that Spark knows: Hive's, Glue, Unity by spark.conf."""

    NEEDS_SPARK: ClassVar[bool] = True
    POINTERS: ClassVar[frozenset[str]] = frozenset({"table"})
    table: Annotated[str, Field(min_length=1)] = Field(
        description="as Spark names it: `database.table` or `catalog.database.table`"
    )
    where: str | None = Field(None, description="SQL condition on partition columns: other partitions are not read")
    columns: dict[str, str] = Field({}, description="name -> Spark type; {}: all of the table's")

    @model_validator(mode="after")
    def _case(self) -> CatalogSource:
        check_case("columns", self.columns)
        return self


KINDS: dict[str, type[SourceConfig]] = {
    **dict.fromkeys(("csv", "parquet", "text"), FilesSource),
    "delta": DeltaSource,
    "iceberg": IcebergSource,
    "jdbc": JdbcSource,
}


def _kind(value: Any) -> str | None:
    """The name of the class that a source is; None where its format is unknown."""
    if isinstance(value, SourceConfig):
        return type(value).__name__
    if not isinstance(value, dict):
        return FilesSource.__name__  # its error shows what was given
    if "format" not in value and "table" in value:
        return CatalogSource.__name__
    found = KINDS.get(value.get("format", "csv")) if isinstance(value.get("format", "csv"), str) else None
    return None if found is None else found.__name__


Source = Annotated[
    Annotated[FilesSource, Tag("FilesSource")]
    | Annotated[DeltaSource, Tag("DeltaSource")]
    | Annotated[IcebergSource, Tag("IcebergSource")]
    | Annotated[JdbcSource, Tag("JdbcSource")]
    | Annotated[CatalogSource, Tag("CatalogSource")],
    Discriminator(
        _kind, custom_error_type="source_format", custom_error_message=f"its format must be one of {sorted(KINDS)}"
    ),
]
