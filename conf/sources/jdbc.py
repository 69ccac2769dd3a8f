"""Tables of databases."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sparkring.conf.schema import check_case
from sparkring.conf.sources.base import SourceConfig

EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
DATABASE = re.compile(r"jdbc:(?P<kind>\w+)://(?:[^/?;@]*@)?(?P<where>[^/?;@]+)/(?P<database>[^/?;@]+)(?=[?;]|$)")
PORTS = {"postgresql": ("postgres", 5432), "mysql": ("mysql", 3306)}  # and the kind's name in OpenLineage's namespace
TABLE = re.compile(r"[\w.\"`]+")


class JdbcSource(SourceConfig):
    """A table of a database, landed as Parquet when the job starts. Options have the names that Spark gives them.

    Where it is and who reads it come from environment variables alone, so that no file, log or store can hold them.
    """

    FORMATS: ClassVar[tuple[str, ...]] = ("jdbc",)
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

    def lineage_name(self, name: str, environment: Mapping[str, str]) -> tuple[str, str]:
        """Return (namespace, name) of the table, or of the query by its source's name; no credentials."""
        table = self.dbtable if self.dbtable and TABLE.fullmatch(self.dbtable) else None
        found = DATABASE.match(environment.get(self.url_env, ""))
        if found is None:
            return f"jdbc:{self.url_env}", table or name
        kind, port = PORTS.get(found["kind"], (found["kind"], None))
        where = found["where"] if ":" in found["where"] or port is None else f"{found['where']}:{port}"
        if table is not None and "." not in table and kind == "postgres":
            table = f"public.{table}"
        return f"{kind}://{where}", f"{found['database']}.{table or name}"
