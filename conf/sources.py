"""The raw tables of a recipe: one class per kind of source. Options have the names of Spark, Delta and Iceberg."""

import codecs
import datetime as dt
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from sparkring.conf.schema import Strict, check_case

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class CsvOptions(Strict):
    """How a CSV file is written: RFC 4180. A quote within a quoted value is doubled; a backslash is a character."""

    sep: Annotated[str, Field(pattern=r"^[\t\x20-\x7e]$")] = Field(",", description="character between two values")
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
    def _differ(self) -> Self:
        if self.sep == self.quote:
            raise ValueError(f"sep and quote are both {self.sep!r}")
        return self


FILE_FORMATS = ("csv", "json", "orc", "parquet")  # with declared columns
WHOLE_FILES = {"text": {"path": "string", "text": "string"}, "binaryFile": {"path": "string", "content": "binary"}}
"""Format of which a row is a whole file -> its columns and their Spark types. `path` is below the source's root."""
AVRO = (
    "Spark reads Avro only with a package, org.apache.spark:spark-avro_2.13, and its files cannot be checked before "
    "they are read. Save the table once as Parquet, with spark-submit --packages org.apache.spark:spark-avro_2.13:"
    "<version of Spark>: spark.read.format('avro').load(PATH).write.parquet(NEW_PATH), and declare NEW_PATH as parquet"
)


class SourceConfig(Strict):
    """What every kind of source has."""

    POINTERS: ClassVar[frozenset[str]]  # keys that say where the table is and which snapshot: not part of its content
    NEEDS_SPARK: ClassVar[bool] = False  # to pin it
    columns: dict[str, str]


class FilesSource(SourceConfig):
    """Files in a folder. A file that does not match the declared columns stops the job, named with the column."""

    POINTERS: ClassVar[frozenset[str]] = frozenset({"path", "where", "missing_columns"})
    path: str = Field(
        description="a file, a folder (all files below it named as the format: *.csv, *.csv.gz or *.parquet; text and "
        "binaryFile: all there are) or a glob (`*` stays within a folder, `**` crosses them); local or any storage URI"
    )
    format: Literal["csv", "json", "orc", "parquet", "text", "binaryFile"] = Field("csv", description="kind of file")
    columns: dict[str, str] = Field(
        {},
        description="name -> Spark type (`int`, `decimal(10,2)`). csv: the whole header; json, orc, parquet: the "
        "columns to read; text, binaryFile: none, rows are whole files with the columns `path` and `text` or `content`",
    )
    partitions: dict[str, str] = Field(
        {}, description="column -> Spark type, in the order of the folders below `path`: `day=2024-01-31/country=DE`"
    )
    where: str | None = Field(
        None, description="SQL condition on partition columns: the folders of other partitions are not opened"
    )
    options: CsvOptions | None = Field(None, description="csv only; None: RFC 4180, null is the empty value")
    fingerprint: Literal["content", "stat"] = Field(
        "content", description="content: sha256 of every file; stat: path, size and mtime (for lakes too large to read)"
    )

    missing_columns: Literal["refuse", "null"] = Field(
        "refuse", description="parquet, orc: a declared column that some files lack stops the job, or is null there"
    )

    @field_validator("format", mode="before")
    @classmethod
    def _not_avro(cls, value: Any) -> Any:
        if value == "avro":
            raise ValueError(AVRO)
        return value

    @model_validator(mode="after")
    def _columns_given(self) -> Self:
        if (self.format in WHOLE_FILES) != (not self.columns):
            whole = " and ".join(WHOLE_FILES)
            raise ValueError(f"columns must be declared for {', '.join(FILE_FORMATS)}, and may not be for {whole}")
        check_case("columns", self.columns)
        if self.missing_columns == "null" and self.format not in ("parquet", "orc"):
            raise ValueError(f"missing_columns is for parquet and orc; a {self.format} source has none")
        if self.options is not None and self.format != "csv":
            raise ValueError(f"options are for csv; a {self.format} source has none")
        return self

    @model_validator(mode="after")
    def _partitions_fit(self) -> Self:
        both = {name: kind for name, kind in self.partitions.items() if name in self.columns}
        if differ := [name for name, kind in both.items() if self.columns[name] != kind]:
            raise ValueError(
                f"{differ[0]!r} is {both[differ[0]]} in partitions and {self.columns[differ[0]]} in columns"
            )
        names = WHOLE_FILES.get(self.format, self.columns)
        check_case("columns and partitions", [*names, *(name for name in self.partitions if name not in both)])
        if self.where is not None and not self.partitions:
            raise ValueError("where is a condition on partition columns; declare them in partitions")
        return self


def instant(text: str) -> dt.datetime:
    """Parse an ISO 8601 instant; in UTC where it names no offset. Raises ValueError."""
    found = dt.datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)


def as_text(value: Any) -> Any:
    """YAML makes a date of 2026-11-21."""
    return value.isoformat() if isinstance(value, dt.date) else value


Instant = Annotated[str, BeforeValidator(as_text), AfterValidator(lambda text: text if instant(text) else "")]


class DeltaSource(SourceConfig):
    """A Delta table, at one version. Neither option: the latest, resolved when the job starts, and recorded."""

    POINTERS: ClassVar[frozenset[str]] = frozenset({"path", "versionAsOf", "timestampAsOf"})
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


class IcebergSource(SourceConfig):
    """An Iceberg table, at one snapshot. No option: the current one, resolved when the job starts, and recorded."""

    POINTERS: ClassVar[frozenset[str]] = frozenset(
        {"table", "path", "snapshot_id", "branch", "tag", "as_of_timestamp", "allowed_folders"}
    )
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
    user_env: EnvironmentName | None = Field(None, description="the variable that holds the user's name")
    password_env: EnvironmentName | None = Field(None, description="the variable that holds the password")
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
    def _together(self) -> Self:
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
    POINTERS: ClassVar[frozenset[str]] = frozenset({"table", "where"})
    table: Annotated[str, Field(min_length=1)] = Field(
        description="as Spark names it: `database.table` or `catalog.database.table`"
    )
    where: str | None = Field(None, description="SQL condition on partition columns: other partitions are not read")
    columns: dict[str, str] = Field({}, description="name -> Spark type; {}: all of the table's")

    @model_validator(mode="after")
    def _case(self) -> Self:
        check_case("columns", self.columns)
        return self


KINDS: dict[str, type[SourceConfig]] = {
    **dict.fromkeys((*FILE_FORMATS, *WHOLE_FILES, "avro"), FilesSource),  # avro: refused there
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
        _kind,
        custom_error_type="source_format",
        custom_error_message=f"its format must be one of {sorted(KINDS.keys() - {'avro'})}",
    ),
]
