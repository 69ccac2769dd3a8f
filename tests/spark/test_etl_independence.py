"""A view that looks across intervals is found, unless the recipe says how far it looks back."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.storage import open_storage
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.errors import EtlError
from sparkring.etl.rows import RowsJob
from sparkring.etl.spark_platform.session import build_session
from sparkring.etl.windows.independence import prove_independent, row_digest
from sparkring.etl.windows.window import pin_window
from tests.spark.sales import recipe, write_sales

pytestmark = pytest.mark.spark
WITHIN = "SELECT *, count(*) OVER (PARTITION BY shop, day) AS other FROM sales"
BACK = "SELECT *, lag(amount) OVER (PARTITION BY shop ORDER BY day) AS other FROM sales"
AHEAD = "SELECT *, lead(amount) OVER (PARTITION BY shop ORDER BY day) AS other FROM sales"


@pytest.fixture(scope="module")
def sales(tmp_path_factory) -> Path:
    return write_sales(tmp_path_factory.mktemp("sales"))


def prove(spark, config: EtlConfig, root: Path) -> None:
    pinned = pin_window(config, {})
    job = RowsJob(config, build_session(spark, {}), open_storage(str(root)))
    prove_independent(job, "sales", [p.sources for p in pinned.parts if p.sources is not None])


def notes(root: Path) -> list[str]:
    return [str(path.relative_to(root).parent) for path in root.rglob("*.json")]


def test_a_view_within_intervals_is_proved_once(spark, sales, tmp_path, monkeypatch) -> None:
    prove(spark, recipe(sales, WITHIN), tmp_path)
    assert notes(tmp_path) == ["parts/sales/independent"]
    monkeypatch.setattr("sparkring.etl.windows.independence.row_digest", None)  # not asked again
    prove(spark, recipe(sales, WITHIN, last="2024-03-03", window=3), tmp_path)


@pytest.mark.parametrize("view", [BACK, AHEAD], ids=["back", "ahead"])
def test_a_view_that_looks_at_other_intervals_is_refused(spark, sales, tmp_path, view: str) -> None:
    with pytest.raises(EtlError, match=r"the rows of 2024-03-03 are others .* a view looks across intervals"):
        prove(spark, recipe(sales, view), tmp_path)
    assert notes(tmp_path) == []


def test_an_interval_without_rows_proves_nothing(spark, sales, tmp_path) -> None:
    with pytest.raises(EtlError, match=r"the rows of 2024-03-02 are others"):
        prove(spark, recipe(sales, BACK + " WHERE day <> DATE '2024-03-03'"), tmp_path)
    prove(spark, recipe(sales, WITHIN + " WHERE shop = 'nobody'"), tmp_path)
    assert notes(tmp_path) == []


@pytest.mark.parametrize(("look_back", "said"), [(1, 1), (2, 0)])
def test_a_view_that_looks_further_than_declared_is_warned_of(
    spark, sales, tmp_path, caplog, look_back: int, said: int
) -> None:
    view = (
        "SELECT *, count(*) OVER (PARTITION BY shop ORDER BY unix_date(day) RANGE BETWEEN 2 PRECEDING AND CURRENT ROW)"
    )
    prove(spark, recipe(sales, f"{view} AS other FROM sales", look_back=look_back), tmp_path)
    assert caplog.text.count("looks further than etl.interval.look_back = 1") == said


def test_a_declared_look_back_is_read_so_far_and_no_further(spark, sales, tmp_path) -> None:
    config = recipe(sales, BACK, look_back=1, window=2)
    pinned = pin_window(config, {})
    built = build_dataset(spark, BuildRequest(config, pinned, "sales", str(tmp_path)))
    folder = built.manifest.files_folder(open_storage(built.uri))
    rows = pa.concat_tables([pq.read_table(folder.path(f.path)) for f in built.manifest.files]).to_pylist()
    found = {(row["shop"], row["day"].day): row["other"] for row in rows}
    assert len(rows) == 5 == built.manifest.accounting.rows_in
    # Shop c sold nothing on the third, and the second is too far back.
    assert found == {("a", 3): 20, ("b", 3): 21, ("a", 4): 30, ("b", 4): 31, ("c", 4): None}


def test_a_digest_is_of_values_and_their_places_not_of_the_order_of_rows(spark) -> None:
    rows = [("a", None, 1.0), (None, "a", 2.0), ("b", "c", None)]
    frame = spark.createDataFrame(rows, "x string, y string, z double")
    assert row_digest(frame) == row_digest(frame.repartition(3).orderBy("z"))
    swapped = spark.createDataFrame([(None, "a", 1.0), ("a", None, 2.0), rows[2]], frame.schema)
    assert row_digest(swapped)[0] == 3 and row_digest(swapped) != row_digest(frame)
    assert row_digest(frame.union(frame.limit(1)))[0] == 4
    assert row_digest(frame.limit(0)) == (0, "None")
