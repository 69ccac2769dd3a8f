"""The declared columns of a table that knows its own: selected in their order, or refused one by one."""

from __future__ import annotations

from typing import Any

import pytest

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.declared import select_declared
from sparkring.etl.sources.files.read import quoted

pytestmark = pytest.mark.spark


def test_declared_columns_come_in_their_order_and_none_means_all(spark: Any) -> None:
    table = spark.sql("SELECT 1 AS a, 'x' AS `b.c`, array(1.5D) AS `d``e`")
    assert select_declared("k", table, {}).columns == ["a", "b.c", "d`e"]
    found = select_declared("k", table, {"d`e": "array<double>", "a": "INTEGER"})
    assert [tuple(row) for row in found.collect()] == [([1.5], 1)]


def test_every_column_that_is_not_as_declared_is_named(spark: Any) -> None:
    with pytest.raises(EtlError) as caught:
        select_declared("k", spark.sql("SELECT 1 AS a, 2L AS b"), {"a": "string", "b": "bigint", "A": "int"})
    assert str(caught.value) == (
        "k: the table does not match the declared columns:\n  - column 'a' is int, declared string\n"
        "  - has no column 'A'; it has ['a', 'b']"
    )
    with pytest.raises(EtlError, match="k: two columns are called 'a' and 'A', one name to Spark"):
        select_declared("k", spark.sql("SELECT 1 AS a, 2 AS A"), {})


def test_a_name_is_quoted_whatever_it_holds() -> None:
    assert quoted("a`b.c") == "`a``b.c`"
