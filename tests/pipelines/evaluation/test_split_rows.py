"""The rows that readers serve, seen from the driver: filters and damaged files count as they do for the ranks."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import ROW_NUMBER, Column
from sparkring.conf.storage import open_storage
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.split_rows import spark_path, split_rows
from tests.helpers.datasets import manifest_of, unread_file


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Two files of four rows each; x is the row's number, squared."""
    files = []
    for number in range(2):
        ids = list(range(4 * number, 4 * number + 4))
        path = tmp_path / f"test-{number}.parquet"
        pq.write_table(pa.table({"x": [float(i * i) for i in ids], ROW_NUMBER: pa.array(ids, pa.int64())}), path)
        files.append(unread_file("test", 4, path.name))
    manifest = manifest_of(columns=(Column(name="x", dtype="float64"),), files=files)
    return Dataset(manifest, open_storage(str(tmp_path)))


def test_without_filters_every_row_is_read_and_no_file_is_opened_for_the_numbers(dataset: Dataset) -> None:
    rows = split_rows(dataset, "test", DataConfig(), [])
    Path(dataset.folder.path("test-0.parquet")).unlink()
    assert rows.row_numbers().tolist() == list(range(8))


def test_a_damaged_file_is_left_out_and_the_others_keep_their_numbers(dataset: Dataset) -> None:
    rows = split_rows(dataset, "test", DataConfig(), ["test-0.parquet"])
    assert rows.row_numbers().tolist() == [4, 5, 6, 7]
    assert rows.column("x").to_pylist() == [16.0, 25.0, 36.0, 49.0]


def test_a_filter_keeps_numbers_and_values_together(dataset: Dataset) -> None:
    data = DataConfig.model_validate({"filters": [["x", ">", 4], ["x", "<", 40]]})
    rows = split_rows(dataset, "test", data, [])
    assert rows.row_numbers().tolist() == [3, 4, 5, 6] and rows.column("x").to_pylist() == [9.0, 16.0, 25.0, 36.0]


def test_a_split_of_which_nothing_is_left_has_no_rows(dataset: Dataset) -> None:
    assert split_rows(dataset, "test", DataConfig(), ["test-0.parquet", "test-1.parquet"]).row_numbers().tolist() == []


def test_spark_gets_local_paths_with_their_scheme(tmp_path: Path) -> None:
    assert spark_path(open_storage(str(tmp_path))) == f"file://{tmp_path}"
