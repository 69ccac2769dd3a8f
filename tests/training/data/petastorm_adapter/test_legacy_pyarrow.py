"""What petastorm expects of old pyarrow."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.training.data.petastorm_adapter import legacy_pyarrow


def test_the_legacy_dataset(tmp_path: Path) -> None:
    for year, name in ((1, "a"), (2, "a"), (2, "b")):
        folder = tmp_path / f"year={year}" / f"name={name}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"v": [year]}), folder / "x.parquet")
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "y.parquet").write_bytes(b"?")
    (tmp_path / "_SUCCESS").write_bytes(b"")
    found = legacy_pyarrow.ParquetDataset(str(tmp_path))
    assert len(found.pieces) == 3 and found.partitions is not None
    assert found.partitions.partition_names == {"year", "name"}
    table = found.pieces[2].read(["v"], found.partitions)
    assert table.to_pydict() == {"v": [2], "year": [2], "name": ["b"]}
    for filters, kept in (
        ([("year", "=", 2)], 2),
        ([[("year", ">", 1), ("name", "in", ["b"])], [("year", "<", 2)]], 2),
    ):
        assert len(legacy_pyarrow.ParquetDataset(str(tmp_path), filters=filters).pieces) == kept
    with pytest.raises(ValueError, match="filter on 'month'"):
        legacy_pyarrow.ParquetDataset(str(tmp_path), filters=[("month", "=", 2)])
    with pytest.raises(OSError, match="no Parquet files"):
        (tmp_path / "empty").mkdir()
        legacy_pyarrow.ParquetDataset(str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError):
        legacy_pyarrow.ParquetDataset(str(tmp_path / "none"))


def test_a_subclass_of_the_local_file_system_can_be_pickled() -> None:
    import cloudpickle

    class Mine(legacy_pyarrow.LocalFileSystem):
        pass

    assert cloudpickle.loads(cloudpickle.dumps(Mine))().exists("/")


def test_names_that_are_not_here_are_those_of_pyarrow() -> None:
    assert legacy_pyarrow.ParquetFile is pq.ParquetFile and legacy_pyarrow.Table is pa.Table
    with pytest.raises(AttributeError):
        legacy_pyarrow.no_such_name  # noqa: B018
