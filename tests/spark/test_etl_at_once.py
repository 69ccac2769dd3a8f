"""Several parts written in one pass of Spark: each is what it is when it is written alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame

from sparkring.conf.manifest import MANIFEST_NAME
from sparkring.conf.storage import open_storage
from sparkring.etl.build import BuildRequest, Built, build_dataset
from sparkring.etl.columns.statistics import Statistics
from sparkring.etl.errors import EtlError
from sparkring.etl.windows import window
from sparkring.etl.windows.window import pin_window
from tests.spark.sales import recipe, write_sales

pytestmark = pytest.mark.spark
CHECKS = [
    {"name": "cheap", "kind": "range", "column": "amount", "max": 39, "level": "row"},
    {"name": "has_shop", "kind": "null_share", "column": "shop", "level": "row"},
    {"name": "shop_once", "kind": "unique", "columns": ["shop"], "max_share": 1.0},
    {"name": "low", "kind": "range", "column": "amount", "max": 20, "max_share": 1.0},
]


@pytest.fixture(scope="module")
def sales(tmp_path_factory) -> Path:
    """Sales of four days: the second has none; on the third, many of one shop, and some of a shop without a name."""
    folder = write_sales(tmp_path_factory.mktemp("sales"))
    second, third = (folder / f"day=2024-03-0{day}/x.parquet" for day in (2, 3))
    pq.write_table(pq.read_table(second).slice(0, 0), second)
    shops, amounts = [None, None] + ["a"] * 40, list(range(42))
    pq.write_table(pa.table({"shop": shops, "amount": pa.array(amounts, pa.int64())}), third)
    return folder


VIEW = "SELECT *, amount / 3 AS other FROM sales"


def build(spark: Any, sales: Path, root: Path, view: str = VIEW, **changes: Any) -> Built:
    split = {"kind": "hash", "shares": {"train": 0.7, "test": 0.3}, "key": ["amount"]}
    config = recipe(sales, view, {"checks": CHECKS, "split": split, "shard": {"row_group": 4}} | changes)
    return build_dataset(spark, BuildRequest(config, pin_window(config, {}), "sales", str(root)))


def content(built: Built) -> dict[str, Any]:
    """All that is written of a window, but for the folders of builds and times."""
    root = Path(built.manifest.files_folder(open_storage(built.uri)).root)
    found: dict[str, Any] = {"manifest": built.manifest.model_dump(exclude={"created_at", "files", "lineage"})}
    found["files"] = [f.model_dump(exclude={"path"}) | {"name": Path(f.path).name} for f in built.manifest.files]
    for part in built.manifest.parts:
        for file in sorted((root / part.folder).rglob("data-*/**/*")):
            name = f"{part.interval} {file.name}"
            if file.name == "statistics.arrow":
                read = Statistics.from_bytes(file.read_bytes(), name)
                found[name] = (read.rows, read.numbers, {k: t.to_pylist() for k, t in read.values.items()})
            elif "quarantine" in file.parts and file.is_file():
                found[name] = sorted(map(str, pq.read_table(file).to_pylist()))
            elif file.suffix == ".arrow":
                found[name] = file.read_bytes()
    return found


def test_parts_written_at_once_are_those_written_one_by_one(spark, sales: Path, tmp_path: Path, monkeypatch) -> None:
    at_once = build(spark, sales, tmp_path / "at once")
    passes: list[int] = []
    write = window.write_parts
    monkeypatch.setattr(window, "PARTS_AT_ONCE", 1)
    monkeypatch.setattr(window, "write_parts", lambda job, new: passes.append(len(new)) or write(job, new))
    alone = build(spark, sales, tmp_path / "alone")
    assert passes == [1] * 4
    found = content(at_once)
    assert found == content(alone)
    assert found["manifest"]["accounting"]["quarantined"] == {"cheap": 5, "has_shop": 2}
    assert [p["rows"] for p in found["manifest"]["parts"]] == [3, 0, 38, 0]
    assert {name for name in found if name.endswith("cheap.parquet")} == {
        "2024-03-03 cheap.parquet",
        "2024-03-04 cheap.parquet",
    }
    assert sum(name.endswith("keys-0.arrow") for name in found) == 4


def test_a_part_that_fails_leaves_none_of_those_written_with_it(spark, sales: Path, tmp_path: Path) -> None:
    view = "SELECT shop, amount, if(amount = 5, date_add(day, 9), day) AS day, amount / 3 AS other FROM sales"
    with pytest.raises(EtlError, match=r"of the sources' interval 2024-03-03 1 row is in no interval .*2024-03-12"):
        build(spark, sales, tmp_path, view)
    assert not [file for file in tmp_path.glob("parts/*/2024*/**/*") if file.is_file()]
    assert not list(tmp_path.rglob(MANIFEST_NAME)) and list(tmp_path.rglob("independent/*.json"))


def by_size(tables: dict[str, DataFrame]) -> DataFrame:
    """Rows whose type depends on how many there are."""
    kind = "int" if tables["sales"].count() == 3 else "bigint"
    return tables["sales"].selectExpr("shop", f"cast(amount AS {kind}) AS amount", "day", "amount / 3 AS other")


def test_columns_of_several_parts_are_not_widened_to_fit(spark, sales: Path, tmp_path: Path) -> None:
    with pytest.raises(EtlError, match=r"the parts 2024-03-01 and 2024-03-02 do not fit: .*'amount' was int as"):
        build(spark, sales, tmp_path, rows="tests.spark.test_etl_at_once:by_size")
