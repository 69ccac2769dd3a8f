"""Tables of files: CSV, JSON, ORC, Parquet, and files of which each is a row."""

import codecs
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from sparkring.conf.schema import Strict, check_case
from sparkring.conf.sources.base import SourceConfig

FILE_FORMATS = ("csv", "json", "orc", "parquet")  # with declared columns
WHOLE_FILES = {"text": {"path": "string", "text": "string"}, "binaryFile": {"path": "string", "content": "binary"}}
"""Format of which a row is a whole file -> its columns and their Spark types. `path` is below the source's root."""
AVRO = (
    "Spark reads Avro only with a package, org.apache.spark:spark-avro_2.13, and its files cannot be checked before "
    "they are read. Save the table once as Parquet, with spark-submit --packages org.apache.spark:spark-avro_2.13:"
    "<version of Spark>: spark.read.format('avro').load(PATH).write.parquet(NEW_PATH), and declare NEW_PATH as parquet"
)


class CsvOptions(Strict):
    """How a CSV file is written: RFC 4180. A quote within a quoted value is doubled; a backslash is a character."""

    sep: Annotated[str, Field(pattern=r"^[\t\x20-\x7e]$")] = Field(",", description="character between two values")
    quote: Annotated[str, Field(pattern=r"^[\x20-\x7e]?$")] = Field('"', description="'': quotes are characters")
    nullValue: str = Field("", description="what stands for null beside the empty value; quoted, both are texts")
    nulls: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(
        {}, description="column -> texts that stand for null in it as well, quoted or not: {price: [NA, 'n.v.']}"
    )
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


class FilesSource(SourceConfig):
    """Files in a folder. A file that does not match the declared columns stops the job, named with the column."""

    FORMATS: ClassVar[tuple[str, ...]] = (*FILE_FORMATS, *WHOLE_FILES)
    POINTERS: ClassVar[frozenset[str]] = frozenset({"path", "where", "missing_columns"})
    IS_FILES: ClassVar[bool] = True
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
        if self.options is not None and (unknown := [name for name in self.options.nulls if name not in self.columns]):
            raise ValueError(f"options.nulls: {unknown[0]!r} is not in columns; there are {[*self.columns]}")
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

    @property
    def location(self) -> str | None:
        return self.path

    def known_columns(self) -> list[str] | None:
        return list(dict.fromkeys([*(self.columns or WHOLE_FILES[self.format]), *self.partitions]))

    def cut_problem(self, name: str, column: str) -> str | None:
        kind = self.partitions.get(column)
        if kind == "date":
            return None
        return (
            f"interval.sources.{name} = {column!r}: must be a partition column of type date, and it is "
            f"{'none' if kind is None else kind}; declare it in etl.sources.{name}.partitions"
        )
