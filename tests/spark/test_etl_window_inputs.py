"""Bad input of windows: columns renamed, days missing or late, two writers, parts of another recipe, odd days."""

from __future__ import annotations

import datetime as dt
import logging
import threading
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.transforms import IdentityTransform

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.storage import open_storage
from sparkring.etl.build import BuildRequest, Built, build_dataset
from sparkring.etl.errors import EtlError
from sparkring.etl.windows.window import NONE_KNOWN, KnownParts, pin_window
from tests.etl.sources.iceberg.tables import NAME, catalog_at
from tests.spark.sales import recipe, write_sales

pytestmark = pytest.mark.spark
VIEW = "SELECT *, amount % 10 AS other FROM sales"
Night = tuple[Path, Path, Built]  # tables, datasets, what was built of them


def build(spark: Any, config: EtlConfig, root: Path, known: KnownParts = NONE_KNOWN) -> Built:
    pinned = pin_window(config, {}, known=known)
    return build_dataset(spark, BuildRequest(config, pinned, "sales", str(root)))


def stored(built: Built) -> pa.Table:
    folder = built.manifest.files_folder(open_storage(built.uri))
    return pa.concat_tables([pq.read_table(folder.path(file.path)) for file in built.manifest.files])


def days_of_parts(root: Path) -> list[str]:
    return sorted(path.parts[-3] for path in root.glob("parts/sales/*/*/_part.json"))


def test_a_column_renamed_between_two_days_of_files_is_named_with_its_file(spark: Any, tmp_path: Path) -> None:
    sales, root = write_sales(tmp_path / "sales"), tmp_path / "datasets"
    build(spark, recipe(sales, VIEW, last="2024-03-01", window=1), root)
    file = sales / "day=2024-03-02/x.parquet"
    pq.write_table(pq.read_table(file, partitioning=None).rename_columns(["shop", "sum"]), file)
    with pytest.raises(EtlError, match=r"etl\.sources\.sales: .*\n  - day=2024-03-02/x.parquet: .*'amount'"):
        build(spark, recipe(sales, VIEW, last="2024-03-02", window=2), root)
    assert days_of_parts(root) == ["2024-03-01"] and not list(root.glob("parts/sales/2024-03-02/*/data-*"))


def test_a_column_of_iceberg_renamed_between_two_days_is_one_column(spark: Any, tmp_path: Path) -> None:
    schema = pa.schema([("day", pa.date32()), ("shop", pa.string()), ("amount", pa.int64())])
    with catalog_at(tmp_path) as catalog:
        table = catalog.create_table("db.t", schema)
        with table.update_spec() as spec:
            spec.add_field("day", IdentityTransform(), "day")
        first, second = dt.date(2024, 3, 1), dt.date(2024, 3, 2)
        table.append(pa.table({"day": [first] * 2, "shop": ["a", "b"], "amount": [1, 2]}, schema=schema))
        with table.update_schema() as update:
            update.rename_column("amount", "sum")
        renamed = schema.set(2, pa.field("sum", pa.int64()))
        table.append(pa.table({"day": [second], "shop": ["a"], "sum": [3]}, schema=renamed))
        sources = {"sales": {"format": "iceberg", "table": NAME}}
        view = "SELECT day, shop, sum AS amount, sum AS other FROM sales"
        config = recipe(tmp_path, view, {"sources": sources}, last=second.isoformat(), window=2)
        built = build(spark, config, tmp_path / "datasets")
    rows = stored(built).select(["day", "shop", "amount"]).to_pylist()
    assert sorted((row["day"], row["shop"], row["amount"]) for row in rows) == [
        (first, "a", 1),
        (first, "b", 2),
        (second, "a", 3),
    ]


def test_a_missing_day_is_skipped_and_found_when_it_arrives_and_a_late_file_makes_its_part_anew(
    spark: Any, tmp_path: Path
) -> None:
    sales, root = write_sales(tmp_path / "sales"), tmp_path / "datasets"
    second = sales / "day=2024-03-02"
    second.rename(tmp_path / "kept")
    config = recipe(sales, VIEW, last="2024-03-03", window=3, missing="skip")
    with pytest.raises(EtlError, match=r"1 of 3 intervals have no file: 2024-03-02 \(etl.sources.sales\)"):
        build(spark, recipe(sales, VIEW, last="2024-03-03", window=3), root)
    assert not root.exists()
    without = build(spark, config, root)
    assert without.manifest.missing == ("2024-03-02",) and without.manifest.accounting.rows_out == 5
    assert stored(without)["sparkring_row"].to_pylist() == [0, 1, 2, 0, 1]  # of each part
    (tmp_path / "kept").rename(second)
    arrived = build(spark, config, root)
    assert arrived.written_parts == ("2024-03-02",) and arrived.manifest.missing == ()
    pq.write_table(
        pa.table({"shop": ["z"], "amount": pa.array([1], pa.int64())}), sales / "day=2024-03-01/late.parquet"
    )
    late = build(spark, config, root)
    assert late.written_parts == ("2024-03-01",) and late.manifest.accounting.rows_out == 9
    assert "z" in late.manifest.features["features"][0]["values"]
    assert days_of_parts(root) == ["2024-03-01", "2024-03-01", "2024-03-02", "2024-03-03"]


def test_two_jobs_that_write_one_part_at_once_use_the_same_files(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sales, root = write_sales(tmp_path / "sales"), tmp_path / "datasets"
    config, barrier, built = recipe(sales, VIEW, last="2024-03-01", window=1), threading.Barrier(2), list[Built]()

    def job() -> None:
        barrier.wait()
        built.append(build(spark, config, root))

    threads = [threading.Thread(target=job) for _ in range(2)]
    with caplog.at_level(logging.INFO):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert caplog.text.count("was written by another job meanwhile") == 1
    assert built[0].manifest.files == built[1].manifest.files != ()
    assert len(list(root.glob("parts/sales/2024-03-01/*/data-*"))) == 1 and stored(built[0]).num_rows == 3


@pytest.mark.parametrize("what", ["corrected", "added", "deleted"])
def test_a_file_that_changes_between_pin_and_write_leaves_no_part(spark: Any, tmp_path: Path, what: str) -> None:
    sales, root = write_sales(tmp_path / "sales"), tmp_path / "datasets"
    config = recipe(sales, VIEW, last="2024-03-01", window=1)
    pinned = pin_window(config, {})
    file = sales / "day=2024-03-01/x.parquet"
    content = pq.read_table(file, partitioning=None)
    if what == "deleted":
        file.unlink()
    else:
        pq.write_table(content.slice(1), file if what == "corrected" else file.with_name("y.parquet"))
    words = {"deleted": "day=2024-03-01/x.parquet: not a readable"}.get(what, "its files changed while they were read")
    with pytest.raises(EtlError, match=words):
        build_dataset(spark, BuildRequest(config, pinned, "sales", str(root)))
    assert days_of_parts(root) == [] and not list(root.glob("**/*.parquet"))


@pytest.mark.parametrize("window", [1, 2])
def test_a_known_part_of_another_feature_block_is_named(spark: Any, night: Night, window: int) -> None:
    """`other` is stored and typed alike, and measured as itself or as its logarithm."""
    sales, root, first = night
    known = KnownParts(str(root), "sales", {part.interval: part.fingerprint for part in first.manifest.parts})
    features = {"shop": {"kind": "categorical"}, "other": {"kind": "numeric", "transform": "log1p"}}
    config = recipe(sales, VIEW, {"features": features}, last=f"2024-03-0{window}", window=window)
    with pytest.raises(EtlError, match=r"the part 2024-03-01 was measured for other features \(.*'none'.*'log1p'"):
        build(spark, config, root, known)


@pytest.fixture(scope="module")
def night(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Night:
    sales, root = write_sales(tmp_path_factory.mktemp("sales")), tmp_path_factory.mktemp("datasets")
    return sales, root, build(spark, recipe(sales, VIEW, last="2024-03-01", window=1), root)


NEW_YORK = ZoneInfo("America/New_York")


@pytest.mark.parametrize(("day", "hours"), [("2013-03-10", 23), ("2013-11-03", 25)])
def test_a_day_of_23_or_25_hours_is_one_part_with_all_of_them(spark: Any, tmp_path: Path, day: str, hours: int) -> None:
    begin = dt.datetime.fromisoformat(day).replace(tzinfo=NEW_YORK).astimezone(dt.UTC)
    table = tmp_path / "sales"
    for name, moved in ((day, 0), ((dt.date.fromisoformat(day) + dt.timedelta(1)).isoformat(), hours)):
        (table / f"date={name}").mkdir(parents=True)
        count = hours if name == day else 24
        at = [begin + dt.timedelta(hours=moved + n) for n in range(count)]
        pq.write_table(pa.table({"at": at, "n": list(range(count))}), table / f"date={name}/x.parquet")
    sources = {
        "sales": {
            "path": str(table), "format": "parquet", "columns": {"at": "timestamp", "n": "bigint"},
            "partitions": {"date": "date"},
        }
    }  # fmt: skip
    interval = {"column": "at", "sources": {"sales": "date"}, "time_zone": str(NEW_YORK), "last": day, "window": 1}
    changes = {"sources": sources, "key": ["at"], "features": {"n": {"kind": "numeric"}}, "keep": ["at"]}
    config = recipe(table, "SELECT * FROM sales", changes, **interval)
    found = stored(build(spark, config, tmp_path / "datasets"))
    assert sorted(found["n"].to_pylist()) == list(range(hours))
