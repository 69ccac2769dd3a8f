"""The columns that a recipe declares of a table that knows its own."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkring.conf.schema import same_but_for_case
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.files.read import declared_schema, quoted


def select_declared(key: str, table: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """Select the declared columns, all of the table's if none are; EtlError names each that is not as declared."""
    found = {field.name: field.dataType.simpleString() for field in table.schema}
    if twice := same_but_for_case(found):
        raise EtlError(f"{key}: two columns are called {twice[0]!r} and {twice[1]!r}, one name to Spark; rename one")
    problems = []
    for field in declared_schema(key, columns):
        declared = field.dataType.simpleString()
        if field.name not in found:
            problems.append(f"has no column {field.name!r}; it has {list(found)}")
        elif found[field.name] != declared:
            problems.append(f"column {field.name!r} is {found[field.name]}, declared {declared}")
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in problems)
        raise EtlError(f"{key}: the table does not match the declared columns:\n{shown}")
    return table.select(*[F.col(quoted(name)) for name in columns or found])
