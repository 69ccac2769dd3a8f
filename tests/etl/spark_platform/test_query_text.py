"""Which files a query reads, where a session without a JVM shows no plan."""

from __future__ import annotations

import pytest

from sparkring.etl.spark_platform.query_text import _pruned
from sparkring.etl.spark_platform.reads import ReadFile, ReadTable

A, B = ReadFile("a", 1, 1, ()), ReadFile("b", 1, 1, ())
TABLE = ReadTable("t", "/t/", (), ("parquet",), (A, B))


@pytest.mark.parametrize(
    ("read", "has_subquery", "places", "files"),
    [
        ({"/t/a"}, False, 1, (A,)),
        (set[str](), False, 1, ()),
        (set[str](), True, 1, (A, B)),  # the subquery may be what reads it
        ({"/t/a"}, True, 1, (A,)),
        ({"/t/a"}, True, 2, (A, B)),  # the other place may be in the subquery
    ],
)
def test_files_are_left_out_where_it_is_certain_that_no_part_of_the_query_reads_them(
    read: set[str], has_subquery: bool, places: int, files: tuple[ReadFile, ...]
) -> None:
    found = _pruned(TABLE, read, has_subquery, {TABLE.location: places})
    assert isinstance(found, ReadTable) and found.files == files
