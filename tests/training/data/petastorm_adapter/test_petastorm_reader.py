"""petastorm behind the reader protocol: equal steps, exact batches, declared dtypes, on local files and on HDFS."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import torch

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.build import make_reader
from sparkring.training.data.decoding.columns import DataError
from sparkring.training.data.petastorm_adapter.reader import PetastormReader
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("pool", ["dummy", "thread", "process"])
def test_uneven_shards_end_together_with_exact_batches(
    dataset: DatasetManifest, tmp_path: Path, caplog: pytest.LogCaptureFixture, pool: str
) -> None:
    config = DataConfig.model_validate({"reader": "petastorm", "petastorm": {"pool": pool, "workers": 2}})
    request = ReadRequest(open_storage(str(tmp_path)), dataset, "train", None, 20)
    readers = [make_reader(config, request, DataRank(rank, 2)) for rank in range(2)]
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
        assert [b.consumed_samples for b in batches] == [20, 40, 60, 80, 100, 120]
        reader.close()
    assert len(set(ids)) == len(ids) == 120


def test_evaluation_is_native_and_has_every_row(dataset: DatasetManifest, tmp_path: Path) -> None:
    config = DataConfig(reader="petastorm")
    request = ReadRequest(open_storage(str(tmp_path)), dataset, "train", None, 50)
    reader = make_reader(config, request, evaluation=True)
    assert isinstance(reader, ParquetReader)
    assert sorted(i for b in reader.batches(0) for i in b.columns["id"][b.row_weights() > 0].tolist()) == list(
        range(130)
    )
    reader.close()


def config_of(pool: str = "dummy", workers: int = 1, shuffle_rows: int = 0, **data: Any) -> DataConfig:
    block = {"pool": pool, "workers": workers, "shuffle_rows": shuffle_rows}
    return DataConfig.model_validate({"reader": "petastorm", "petastorm": block} | data)


def read(
    folder: Path, gb: int = 10, consumed: int = 0, columns: Any = None, steps: int | None = None, **how: Any
) -> list[Any]:
    reader = PetastormReader(f"file://{folder}", columns, gb, config=config_of(**how))
    return list(reader.batches(consumed, steps))


def test_order_follows_seed_and_epoch_and_resumes(dataset: DatasetManifest, tmp_path: Path) -> None:
    folder = tmp_path / "data-test"
    order = [b.columns["id"].tolist() for b in read(folder)]
    assert order == [b.columns["id"].tolist() for b in read(folder)]
    assert order[4:] == [b.columns["id"].tolist() for b in read(folder, consumed=40)]
    later = [b.columns["id"].tolist() for b in read(folder, consumed=130)]
    assert order != later
    assert (order + later)[4:-2] == [
        b.columns["id"].tolist() for b in read(folder, consumed=40, steps=2 * len(order) - 6)
    ]
    assert order != [b.columns["id"].tolist() for b in read(folder, seed=5)]
    plain = [i for b in read(folder, shuffle=False) for i in b.columns["id"].tolist()]
    assert plain == list(range(130))
    blocks = [i for b in read(folder, shuffle_rows=65) for i in b.columns["id"].tolist()]
    assert sorted(blocks) == list(range(130))


def test_fewer_row_groups_than_ranks_are_refused_before_anyone_hangs(dataset: DatasetManifest, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="6 row groups for 7 ranks"):
        PetastormReader(f"file://{tmp_path}/data-test", None, 70, DataRank(0, 7))


def test_integers_with_nulls_are_refused_not_turned_into_floats(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([1, None, 3] * 10, pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"column 'n' is declared int64, petastorm gives torch.float64"):
        read(tmp_path, columns=[Column(name="n", dtype="int64")])


def test_dates_and_timestamps_are_what_the_native_reader_makes_of_them(make_dataset: Any, tmp_path: Path) -> None:
    kinds = {"day": pa.date32(), "at": pa.timestamp("us", "UTC"), "wall": pa.timestamp("us")}
    kinds |= {f"{name}s": pa.list_(kind) for name, kind in kinds.items()}
    names = {"day": "date", "at": "timestamp", "wall": "timestamp_ntz"}
    columns = [Column(name="id", dtype="int64")]
    for name, logical in names.items():
        dtype: Any = "int32" if name == "day" else "int64"
        columns.append(Column(name=name, dtype=dtype, logical=logical))
        pair = {"layout": "vector", "shape": (2,), "logical": f"array<{logical}>"}
        columns.append(Column.model_validate({"name": f"{name}s", "dtype": dtype} | pair))

    def make(ids: np.ndarray, gone: tuple[int, ...] = ()) -> dict[str, Any]:
        numbers = [None if i in gone else int(i) * 7_919 - 9_000 for i in ids]  # before 1970, and after
        rows = {n: numbers if n in names else [[n or 0, 5] for n in numbers] for n in kinds}
        arrays = {name: pa.array(values).cast(pa.int32()) if name == "day" else pa.array(values)
                  for name, values in rows.items()}  # fmt: skip
        arrays["days"] = arrays["days"].cast(pa.list_(pa.int32()))
        return {"id": ids} | {name: array.cast(kinds[name]) for name, array in arrays.items()}

    manifest = make_dataset(tmp_path, [[10, 10]], columns, make)
    request = ReadRequest(open_storage(str(tmp_path)), manifest, "train", None, 20)
    read_by = {}
    for reader in ("native", "petastorm"):
        with closing(make_reader(DataConfig.model_validate({"reader": reader}), request)) as opened:
            (batch,) = opened.batches(0)
        order = batch.columns["id"].argsort()
        read_by[reader] = {name: batch.columns[name][order] for name in batch.columns}
    for name, values in read_by["native"].items():
        assert torch.equal(read_by["petastorm"][name], values) and read_by["petastorm"][name].dtype == values.dtype
    assert read_by["native"]["at"].tolist() == [i * 7_919 - 9_000 for i in range(20)]
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        pq.write_table(pa.table({name: make(np.arange(20), gone=(3,))[name]}), folder / "a.parquet")
        with pytest.raises(DataError, match=f"column '{name}' holds nulls"):
            read(folder, columns=[c for c in columns if c.name == name])


def test_partitions_of_folders_become_columns(tmp_path: Path) -> None:
    for year in (2024, 2025):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(pa.table({"v": list(range(10))}), tmp_path / f"year={year}" / "a.parquet")
    (batch,) = read(tmp_path, gb=20)
    assert sorted(batch.columns["year"].tolist()) == [2024] * 10 + [2025] * 10


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
    reader = PetastormReader(url, None, 10, config=config_of(pool, workers=2))
    return sorted(i for batch in reader.batches(0) for i in batch.columns["id"].tolist())


@pytest.mark.parametrize("authority", ["nn2:9000", "nn2", "Nest"])
def test_hdfs_is_read_through_a_namenode_or_a_name_service(hdfs: Path, authority: str) -> None:
    assert hdfs_ids(f"hdfs://{authority}{hdfs}") == list(range(130))
    asked = {"nn2:9000": {("nn2", 9000)}, "nn2": {("nn2", 8020)}, "Nest": {("nn1", 1), ("nn2", 2)}}
    assert set(Namenode.connected) == asked[authority]


def test_reading_goes_on_when_the_other_namenode_takes_over(hdfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PetastormReader(f"hdfs://Nest{hdfs}", None, 10, config=config_of(workers=2))
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
