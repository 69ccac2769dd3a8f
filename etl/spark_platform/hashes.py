"""Hash whole rows by Spark."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import Column
from pyspark.sql import functions as F


def hash_of(names: Iterable[str], *salt: int) -> Column:
    """Return the 64-bit hash of the named columns, in which nulls count; `salt` varies it."""
    columns = [F.col(f"`{name}`") for name in names]
    # xxhash64 passes over a null as if it were not there, so which values are null is hashed too.
    return F.xxhash64(*map(F.lit, salt), *columns, *[column.isNull() for column in columns])
