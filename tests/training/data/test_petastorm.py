"""petastorm behind the reader protocol: equal steps, exact batches, declared dtypes, on modern libraries."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.manifest import Column, DatasetManifest
from conf.schema_data import DataConfig
from conf.storage import open_storage
from training.data import petastorm_compat
from training.data.build import make_reader
from training.data.petastorm import (
    PetastormReader,
    PetastormSettings,
    equal_steps,
    row_group_rows,
    rows_per_shard,
    tensor_of,
)
from training.data.reader import ParquetReader

MakeDataset = Callable[..., DatasetManifest]
ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.filterwarnings("ignore")


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 200))
def test_every_rank_takes_as_many_steps_as_the_poorest_can_fill(groups: list[int], size: int, gb: int) -> None:
    try:
        shards = rows_per_shard(groups, size)
        steps = equal_steps(shards, gb)
    except ValueError:
        assert len(groups) < size or gb < size or any(rows < -(-gb // size) for rows in rows_per_shard(groups, size))
        return
    shares = [gb * (r + 1) // size - gb * r // size for r in range(size)]
    assert sum(shards) == sum(groups) and all(steps * share <= rows for share, rows in zip(shares, shards, strict=True))
    assert any((steps + 1) * share > rows for share, rows in zip(shares, shards, strict=True))


@pytest.fixture
def dataset(make_dataset: MakeDataset, tmp_path: Path) -> DatasetManifest:
    return make_dataset(tmp_path, [[30, 30, 10], [25], [30, 5]])  # 130 rows in 6 row groups


@pytest.mark.parametrize("pool", ["dummy", "thread", "process"])
def test_uneven_shards_end_together_with_exact_batches(
    dataset: DatasetManifest, tmp_path: Path, caplog: pytest.LogCaptureFixture, pool: str
) -> None:
    config = DataConfig.model_validate({"reader": "petastorm", "petastorm": {"pool": pool, "workers": 2}})
    readers = [
        make_reader(config, open_storage(str(tmp_path)), dataset, "train", None, 20, rank, 2) for rank in range(2)
    ]
    assert readers[0].steps_per_epoch == readers[1].steps_per_epoch == 6  # shards of 70 and 60 rows
    assert "ranks own [70, 60] rows; every rank takes 6 steps, 10 of 130 rows are left out" in caplog.text
    ids: list[int] = []
    for reader in readers:
        batches = list(reader.batches(0))
        assert [b.rows for b in batches] == [10] * 6 and {b.global_rows for b in batches} == {20}
        for batch in batches:
            assert batch.columns["id"].dtype == torch.int64 and batch.columns["x"].dtype == torch.float32
            assert batch.columns["x"].tolist() == batch.columns["id"].tolist()
            ids += batch.columns["id"].tolist()
        assert reader.locate(batches[2].cursor) == (0, 3)  # type: ignore[attr-defined]
        reader.close()
    assert len(set(ids)) == len(ids) == 120


def test_evaluation_is_native_and_has_every_row(dataset: DatasetManifest, tmp_path: Path) -> None:
    config = DataConfig(reader="petastorm")
    reader = make_reader(config, open_storage(str(tmp_path)), dataset, "train", None, 50, evaluation=True)
    assert isinstance(reader, ParquetReader)
    assert sorted(i for b in reader.batches(0) for i in b.columns["id"][b.row_weights() > 0].tolist()) == list(
        range(130)
    )
    reader.close()


def read(
    folder: Path, gb: int = 10, start: int = 0, epoch: int = 0, columns: Any = None, steps: int | None = None,
    **how: Any,
) -> list[Any]:  # fmt: skip
    how = {"pool": "dummy", "workers": 1} | how
    reader = PetastormReader(f"file://{folder}", columns, gb, settings=PetastormSettings(**how))
    return list(reader.batches(epoch, start, steps))


def test_order_follows_seed_and_epoch_and_resumes(dataset: DatasetManifest, tmp_path: Path) -> None:
    folder = tmp_path / "data-test"
    order = [b.columns["id"].tolist() for b in read(folder)]
    assert order == [b.columns["id"].tolist() for b in read(folder)]
    assert order[4:] == [b.columns["id"].tolist() for b in read(folder, start=4)]
    later = [b.columns["id"].tolist() for b in read(folder, epoch=1)]
    assert order != later
    assert (order + later)[4:-2] == [b.columns["id"].tolist() for b in read(folder, start=4, steps=2 * len(order) - 6)]
    assert order != [b.columns["id"].tolist() for b in read(folder, seed=5)]
    plain = [i for b in read(folder, shuffle=False) for i in b.columns["id"].tolist()]
    assert plain == list(range(130))
    blocks = [i for b in read(folder, shuffle_rows=65) for i in b.columns["id"].tolist()]
    assert sorted(blocks) == list(range(130))


def test_fewer_row_groups_than_ranks_is_said_before_anyone_hangs(dataset: DatasetManifest, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="6 row groups for 7 ranks"):
        PetastormReader(f"file://{tmp_path}/data-test", None, 70, 0, 7)


def test_integers_with_nulls_are_refused_not_turned_into_floats(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([1, None, 3] * 10, pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"column 'n' is declared int64, petastorm gives torch.float64"):
        read(tmp_path, columns=[Column(name="n", dtype="int64")])


def test_partitions_of_folders_become_columns(tmp_path: Path) -> None:
    for year in (2024, 2025):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(pa.table({"v": list(range(10))}), tmp_path / f"year={year}" / "a.parquet")
    (batch,) = read(tmp_path, gb=20)
    assert sorted(batch.columns["year"].tolist()) == [2024] * 10 + [2025] * 10


def test_tensors_of_petastorms_columns() -> None:
    assert tensor_of("t", np.array(["1970-01-01T00:00:01"], "datetime64[ns]")).tolist() == [1_000_000]  # type: ignore[union-attr]
    ragged = tensor_of("r", [np.array([1, 2]), np.array([3])])
    assert ragged.offsets[0].tolist() == [0, 2, 3]  # type: ignore[union-attr]
    assert tensor_of("s", np.array(["a", "b"])) == ["a", "b"]
    with pytest.raises(ValueError, match="column 's' holds nulls"):
        tensor_of("s", ["a", None])


# --- the compatibility module ----------------------------------------------------------------------------------------


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_petastorm_does_not_import_without_it_and_does_with_it() -> None:
    assert run("import petastorm").returncode != 0
    done = run("import training.data.petastorm_compat, petastorm, petastorm.pytorch, petastorm.etl.dataset_metadata")
    assert done.returncode == 0, done.stderr


def test_pyarrow_and_numpy_stay_as_they_are() -> None:
    done = run("""
        import numpy as np, pyarrow.parquet as pq
        before = pq.ParquetDataset
        import training.data.petastorm_compat, petastorm
        assert pq.ParquetDataset is before and not hasattr(np, "unicode_") and not hasattr(np, "string_")
    """)
    assert done.returncode == 0, done.stderr


def test_it_says_when_it_comes_too_late() -> None:
    done = run("""
        import sys, types
        sys.modules["petastorm"] = types.ModuleType("petastorm")
        import training.data.petastorm_compat
    """)
    assert "petastorm was imported before" in done.stderr


def test_nothing_else_of_the_data_path_loads_petastorm() -> None:
    done = run(
        "import sys, training.data.build, training.data.mix, training.data.audit\nassert 'petastorm' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_the_legacy_dataset(tmp_path: Path) -> None:
    for year, name in ((1, "a"), (2, "a"), (2, "b")):
        folder = tmp_path / f"year={year}" / f"name={name}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"v": [year]}), folder / "x.parquet")
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "y.parquet").write_bytes(b"?")
    (tmp_path / "_SUCCESS").write_bytes(b"")
    found = petastorm_compat.ParquetDataset(str(tmp_path))
    assert len(found.pieces) == 3 and found.partitions is not None
    assert found.partitions.partition_names == {"year", "name"}
    table = found.pieces[2].read(["v"], found.partitions)
    assert table.to_pydict() == {"v": [2], "year": [2], "name": ["b"]}
    for filters, kept in (
        ([("year", "=", 2)], 2),
        ([[("year", ">", 1), ("name", "in", ["b"])], [("year", "<", 2)]], 2),
    ):
        assert len(petastorm_compat.ParquetDataset(str(tmp_path), filters=filters).pieces) == kept
    with pytest.raises(ValueError, match="filter on 'month'"):
        petastorm_compat.ParquetDataset(str(tmp_path), filters=[("month", "=", 2)])
    with pytest.raises(OSError, match="no Parquet files"):
        (tmp_path / "empty").mkdir()
        petastorm_compat.ParquetDataset(str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError):
        petastorm_compat.ParquetDataset(str(tmp_path / "none"))


def test_row_groups_are_counted_in_petastorms_order(dataset: DatasetManifest, tmp_path: Path) -> None:
    assert row_group_rows(f"file://{tmp_path}/data-test") == [30, 30, 10, 25, 30, 5]


def test_names_that_numpy_dropped_are_replaced_wherever_petastorm_uses_them() -> None:
    done = run("""
        import training.data.petastorm_compat, pkgutil, inspect, petastorm
        for module in pkgutil.walk_packages(petastorm.__path__, "petastorm."):
            source = module.module_finder.find_spec(module.name).loader.get_source(module.name)
            renamed = training.data.petastorm_compat.renamed(source)
            for name in ("np.unicode_", "np.string_", "np.in1d", "dtype=np.float)"):
                assert name not in renamed, (module.name, name)
        from petastorm.weighted_sampling_reader import WeightedSamplingReader
        from petastorm.predicates import in_intersection
        assert in_intersection([3], "a").do_include({"a": [1, 3]})
    """)
    assert done.returncode == 0, done.stderr


def test_a_file_system_class_of_ones_own_travels_to_executors() -> None:
    import cloudpickle

    class Mine(petastorm_compat.LocalFileSystem):
        pass

    assert cloudpickle.loads(cloudpickle.dumps(Mine))().exists("/")


# --- HDFS ------------------------------------------------------------------------------------------------------------


class Namenode(pafs.LocalFileSystem):
    """Local files as if on HDFS, as there is no libhdfs here; the rest, petastorm and fsspec, is real. Of a dead
    namenode pyarrow was seen to connect and find nothing (HDFS 2.7.3); that it opens nothing is assumed."""

    active: ClassVar[str | None] = "nn2"
    connected: ClassVar[list[tuple[str, int]]] = []
    unlistable: ClassVar[str] = ""

    def __init__(self, host: str, port: int, **_: Any) -> None:
        super().__init__()
        self.name = host
        self.connected.append((host, port))

    def get_file_info(self, wanted: Any) -> Any:
        if isinstance(wanted, pafs.FileSelector):
            if self.unlistable and wanted.base_dir.endswith(self.unlistable):
                raise PermissionError(f"{wanted.base_dir}: not yours")
            return super().get_file_info(wanted)
        missing = [pafs.FileInfo(path, pafs.FileType.NotFound) for path in wanted]
        return super().get_file_info(wanted) if self.name == self.active else missing

    def open_input_file(self, path: str) -> Any:
        if self.name != self.active:
            raise OSError("StandbyException")
        return super().open_input_file(path)


@pytest.fixture
def hdfs(dataset: DatasetManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 130 rows on the name service `Nest`, whose second namenode, nn2, is active."""
    settings = {
        "dfs.ha.namenodes.Nest": "a,b",
        "dfs.namenode.rpc-address.Nest.a": "nn1:1",
        "dfs.namenode.rpc-address.Nest.b": "nn2:2",
    }
    xml = "".join(f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items())
    (tmp_path / "etc/hadoop").mkdir(parents=True)
    for name in ("core-site.xml", "hdfs-site.xml"):
        (tmp_path / "etc/hadoop" / name).write_text(f"<configuration>{xml}</configuration>")
    monkeypatch.setenv("HADOOP_HOME", str(tmp_path))
    monkeypatch.setattr(pafs, "HadoopFileSystem", Namenode)
    monkeypatch.setattr(Namenode, "active", "nn2")
    monkeypatch.setattr(Namenode, "connected", [])
    return tmp_path / "data-test"


def hdfs_ids(url: str, pool: Any = "thread") -> list[int]:
    reader = PetastormReader(url, None, 10, settings=PetastormSettings(pool=pool))
    return sorted(i for batch in reader.batches(0) for i in batch.columns["id"].tolist())


@pytest.mark.parametrize("authority", ["nn2:9000", "nn2", "Nest"])
def test_hdfs_is_read_through_a_namenode_or_a_name_service(hdfs: Path, authority: str) -> None:
    assert hdfs_ids(f"hdfs://{authority}{hdfs}") == list(range(130))
    asked = {"nn2:9000": {("nn2", 9000)}, "nn2": {("nn2", 8020)}, "Nest": {("nn1", 1), ("nn2", 2)}}
    assert set(Namenode.connected) == asked[authority]


def test_reading_goes_on_when_the_other_namenode_takes_over(hdfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PetastormReader(f"hdfs://Nest{hdfs}", None, 10, settings=PetastormSettings(pool="dummy"))
    batches = reader.batches(0)
    rows = next(batches).rows
    monkeypatch.setattr(Namenode, "active", "nn1")
    assert rows + sum(batch.rows for batch in batches) == 130
    assert Namenode.connected[-1] == ("nn1", 1)


def test_a_silent_namenode_is_not_taken_for_an_empty_folder(hdfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Namenode, "active", None)
    with pytest.raises(
        OSError, match="hdfs://nn2:9000: no active namenode answers; check the address, that HADOOP_HOME"
    ):
        hdfs_ids(f"hdfs://nn2:9000{hdfs}")


def test_a_folder_that_cannot_be_listed_is_an_error_not_a_smaller_dataset(
    hdfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hdfs / "year=1").mkdir()
    monkeypatch.setattr(Namenode, "unlistable", "year=1")
    with pytest.raises(PermissionError, match="not yours"):
        hdfs_ids(f"hdfs://nn2:9000{hdfs}")


def test_a_schema_pickled_with_a_name_that_numpy_dropped_is_read() -> None:
    from petastorm.etl.legacy import restricted_loads

    assert [restricted_loads(f"cnumpy\n{name}\n.".encode()) for name in ("unicode_", "string_")] == [np.str_, np.bytes_]
