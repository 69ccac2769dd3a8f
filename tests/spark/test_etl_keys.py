"""A key that is in two parts is found, and counted once."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import functions as F

from sparkring.conf.storage import open_storage
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.errors import ChecksFailed
from sparkring.etl.shards.quarantine import PORTION
from sparkring.etl.windows.keys import count_keys, write_keys
from sparkring.etl.windows.window import pin_window
from tests.spark.sales import recipe, write_sales

pytestmark = pytest.mark.spark
VIEW = "SELECT *, amount % 10 AS other FROM sales"


def test_nulls_are_equal_and_keep_their_places(spark, tmp_path: Path, monkeypatch) -> None:
    storage = open_storage(str(tmp_path))
    schema = "x string, y string, z int"
    first = [("a", None, 1), ("a", None, 2), (None, "a", 1), (None, None, 1), (None, None, 3), ("", None, 1)]
    second = [("a", None, 9), ("b", "c", 1), (None, None, 4)]
    counts = []
    for name, rows in (("one", first), ("two", second), ("none", [])):
        frame = spark.createDataFrame(rows, schema).repartition(3).withColumn(PORTION, F.lit(0))
        counts += write_keys(frame, ["x", "y"], storage, [f"{name}.arrow"])
    assert counts == [4, 3, 0]
    portions = [
        spark.createDataFrame(rows, schema).withColumn(PORTION, F.lit(n)) for n, rows in ((2, first), (0, second))
    ]
    assert write_keys(portions[0].union(portions[1]), ["x", "y"], storage, ["b", "c", "a"]) == [3, 0, 4]
    assert all(
        storage.read_bytes(a) == storage.read_bytes(f"{b}.arrow")
        for a, b in zip("abc", ("one", "two", "none"), strict=True)
    )
    assert count_keys(spark, storage, {"one.arrow": 4, "two.arrow": 3, "none.arrow": 0}) == 5
    again = spark.createDataFrame(first, schema).repartition(1).withColumn(PORTION, F.lit(0))
    write_keys(again, ["x", "y"], storage, ["again.arrow"])
    assert storage.read_bytes("again.arrow") == storage.read_bytes("one.arrow")
    assert count_keys(spark, storage, {"one.arrow": 4, "again.arrow": 4}) == 4
    monkeypatch.setattr("sparkring.etl.windows.keys.KEYS_OF_A_TASK", 2)
    assert count_keys(spark, storage, {"one.arrow": 4, "two.arrow": 3, "none.arrow": 0}) == 5, "read by three tasks"


def test_equal_keys_of_two_parts_are_counted_over_the_window(spark, tmp_path: Path) -> None:
    """Days three and four: shops a and b, then a, b and c."""
    sales, root = write_sales(tmp_path / "sales"), tmp_path / "datasets"

    def build(max_share: float, window: int):
        check = {"name": "shop_once", "kind": "unique", "columns": ["shop"], "max_share": max_share}
        config = recipe(sales, VIEW, {"checks": [check]}, window=window)
        pinned = pin_window(config, {})
        return build_dataset(spark, BuildRequest(config, pinned, "sales", str(root)))

    (alone,) = build(0.0, 1).manifest.checks
    assert (alone["failing"], alone["rows"]) == (0, 3)
    with pytest.raises(ChecksFailed, match=r"shop_once: \(shop\) is unique: 2 of 5 rows failed"):
        build(0.3, 2)
    both = build(0.4, 2)
    assert both.manifest.checks[0]["failing"] == 2 and both.written_parts == ()
