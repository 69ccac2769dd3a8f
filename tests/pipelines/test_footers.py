"""What a plan learns of a dataset's rows: lengths of lists by footers, distinct ids of some rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.context.footers import mean_lengths
from sparkring.pipelines.model.plan import cost_plan
from sparkring.pipelines.model.reading import reader_bytes
from sparkring.pipelines.model.table_work import distinct_ids, planned_tables
from sparkring.training.models.sparse_embedding import SparseEmbedding
from tests.helpers.datasets import listed, manifest_of, write_manifest

COLUMNS = (
    Column(name="user", dtype="int64"),
    Column(name="seen", dtype="int64", layout="ragged"),
    Column(name="liked", dtype="int32", role="label"),
)
ROWS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 users, two rows each; the lists of even rows are empty, those of odd ones have 9 of 100 ids."""
    made: Path = tmp_path_factory.mktemp("dataset")
    lists = [[(row + step) % 100 for step in range(9)] if row % 2 else [] for row in range(ROWS)]
    table = pa.table(
        {"user": [row // 2 for row in range(ROWS)], "seen": lists, "liked": pa.array([0, 1] * 300, pa.int32())}
    )
    pq.write_table(table, made / "a.parquet", row_group_size=100)
    write_manifest(made, manifest_of(COLUMNS, [listed(made, made / "a.parquet", "train")], name="films"))
    return made


@pytest.fixture
def manifest(folder: Path) -> DatasetManifest:
    return manifest_of(COLUMNS, [listed(folder, folder / "a.parquet", "train")], name="films")


def test_the_mean_length_of_lists_is_read_from_footers(folder: Path, manifest: DatasetManifest) -> None:
    assert mean_lengths(open_storage(str(folder)), manifest) == {"seen": 4.5}, "an empty list has no values"


def test_lengths_are_those_of_rows_to_train_on(tmp_path: Path) -> None:
    files = []
    for split, length in {"train": 3, "test": 7}.items():
        lists = pa.array([[1] * length, None, [2] * length], pa.list_(pa.int64()))
        table = pa.table({"user": [1, 2, 3], "seen": lists, "liked": pa.array([0, 1, 0], pa.int32())})
        pq.write_table(table, tmp_path / f"{split}.parquet")
        files.append(listed(tmp_path, tmp_path / f"{split}.parquet", split))
    folder = open_storage(str(tmp_path))
    assert mean_lengths(folder, manifest_of(COLUMNS, files, name="films")) == {"seen": 2.0}
    assert mean_lengths(folder, manifest_of(COLUMNS, files[1:], name="films")) == {"seen": 14 / 3}


def test_a_dataset_without_files_has_no_lengths(folder: Path) -> None:
    assert mean_lengths(open_storage(str(folder)), manifest_of(COLUMNS, name="films")) == {}


@pytest.mark.parametrize(
    ("columns", "rows", "expected"),
    [
        (["user"], 100, 50),
        (["user"], 250, 125),  # from three row groups
        (["user"], 5_000, 300),  # all there are
        (["seen"], 20, 27),
        (["user", "seen"], ROWS, 300),  # one table, whose ids are the same numbers
    ],
)
def test_distinct_ids_are_those_of_so_many_rows(
    columns: list[str], rows: int, expected: int, folder: Path, manifest: DatasetManifest
) -> None:
    assert distinct_ids(open_storage(str(folder)), manifest, "train", columns, rows) == expected


def test_distinct_ids_beyond_the_rows_read_are_scaled(
    folder: Path, manifest: DatasetManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkring.pipelines.model.table_work.MOST_ROWS", 100)
    assert distinct_ids(open_storage(str(folder)), manifest, "train", ["user"], 400) == 200


def test_a_model_of_lists_is_planned_with_their_mean_length(folder: Path, manifest: DatasetManifest) -> None:
    def kept(rows: int) -> int:
        config = RunConfig.model_validate(
            {
                "name": "films",
                "dataset": str(folder),
                "model": {"factory": "sparkring.training.models.factors:FactorizationMachine", "task": "binary"},
                "train": {"global_batch": rows},
            }
        )
        plan = cost_plan(config, manifest)
        assert not plan.untraced
        return plan.stages[0].activations or 0

    assert 0 < kept(64) < kept(128) == pytest.approx(2 * kept(64), rel=0.05)


def test_of_a_dataset_it_is_known_what_the_reader_holds(folder: Path, manifest: DatasetManifest) -> None:
    """Nothing is known without one, or of settings that the reader refuses: training says why."""

    films = Dataset(manifest, open_storage(str(folder)))

    def held(dataset: Dataset | None, ranks: int, **data: int) -> int | None:
        words = {"name": "films", "dataset": str(folder), "train": {"global_batch": 64}, "data": data}
        return reader_bytes(RunConfig.model_validate(words), dataset, ranks)

    one, two = held(films, 1), held(films, 2)
    assert one is not None and two is not None and ROWS * 20 < two < one
    assert held(None, 1) is None and held(films, 1, max_bytes=1000) is None


def test_a_sparse_table_has_a_row_for_each_id_of_the_training_split_as_far_as_it_may(
    folder: Path, manifest: DatasetManifest
) -> None:
    def most(**tables: int) -> int:
        words = {"name": "films", "dataset": str(folder), "tables": tables}
        model = nn.ModuleDict({"users": SparseEmbedding(["user"], 16)})
        dataset = Dataset(manifest, open_storage(str(folder)))
        (table,) = planned_tables(RunConfig.model_validate(words), dataset, model)
        return table.most_rows

    assert most() == 300 and most(max_rows=1024) == 300
