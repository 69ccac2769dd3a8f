"""Tables of a catalog that Spark knows."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from sparkring.conf.schema import check_case
from sparkring.conf.sources.base import SourceConfig


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

    @property
    def place(self) -> str:
        return self.table

    def lineage_name(self, name: str, environment: Mapping[str, str]) -> tuple[str, str]:
        return "spark_catalog", self.table
