"""From a recipe's data block to a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.build import make_reader
from sparkring.training.data.mix import MixedReader
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest

MakeDataset = Callable[..., DatasetManifest]


def request(folder: Path, manifest: DatasetManifest, columns: Any, gb: int, split: str = "train") -> ReadRequest:
    return ReadRequest(open_storage(str(folder)), manifest, split, columns, gb)


def test_evaluation_reads_every_row_once_whatever_training_does(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[30, 7]])
    config = DataConfig(tail="drop", audit=True)
    reader = make_reader(config, request(tmp_path, manifest, ["id"], 16), evaluation=True)
    batches = list(reader.batches(0))
    reader.close()
    assert len(batches) == 3
    assert sorted(i for b in batches for i in b.columns["id"][b.row_weights() > 0].tolist()) == list(range(37))
    assert sum(b.global_rows for b in batches) == 37


def test_a_mix_is_built_from_its_parts(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifests = []
    for number, rows in enumerate((200, 100)):

        def make(ids: np.ndarray, number: int = number) -> dict[str, pa.Array]:
            return {"id": pa.array(ids), "x": pa.array(np.full(len(ids), number, np.float32))}

        manifests.append(make_dataset(tmp_path / str(number), [[20] * (rows // 20)], make=make))
    parts = [{"dataset": str(tmp_path / "0"), "weight": 3}, {"dataset": str(tmp_path / "1")}]
    config = DataConfig.model_validate({"mix": {"parts": parts, "stop": "first_exhausted"}})
    reader = make_reader(config, request(tmp_path / "0", manifests[0], None, 20))
    assert isinstance(reader, MixedReader)
    batches = list(reader.batches(0))
    assert len(batches) == 13  # 200 rows at three quarters
    assert all(Counter(b.columns["x"].tolist()) == {0.0: 15, 1.0: 5} for b in batches)
    taken = reader.meter.take()
    assert taken["rows"] == 260 and taken["decode_s"] > 0
    assert [s["seed"] for s in reader.order_state()["mix"]] == [0, 1]
    reader.close()


def test_parts_without_the_columns_are_refused(make_dataset: MakeDataset, tmp_path: Path) -> None:
    first = make_dataset(tmp_path / "a", [[20]])
    columns = [Column(name="id", dtype="int64")]
    make_dataset(tmp_path / "b", [[20]], columns, lambda ids: {"id": ids})
    parts = [{"dataset": str(tmp_path / name)} for name in ("a", "b")]
    config = DataConfig.model_validate({"mix": {"parts": parts}})
    with pytest.raises(KeyError, match=r"no column 'x'; it has \['id'\]"):
        make_reader(config, request(tmp_path / "a", first, ["id", "x"], 4))


def test_columns_that_were_not_requested_are_not_read(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """With the pages of `x` gone, and the file as long as before, only a reader of `x` notices."""
    manifest = make_dataset(tmp_path, [[500]], compression="none", use_dictionary=False)
    path = tmp_path / manifest.files[0].path
    x = pq.read_metadata(path).row_group(0).column(1)
    data, begin = path.read_bytes(), x.data_page_offset
    path.write_bytes(data[:begin] + b"?" * x.total_compressed_size + data[begin + x.total_compressed_size :])
    for columns, whole in ((["id"], True), (["id", "x"], False)):
        config = DataConfig(verify="size")
        reader = make_reader(config, request(tmp_path, manifest, columns, 100))
        with nullcontext() if whole else pytest.raises(ValueError, match="row group 0: cannot be read"):
            assert sum(batch.rows for batch in reader.batches(0)) == 500
        reader.close()


def test_the_data_must_have_the_split(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[20]])
    with pytest.raises(ValueError, match=r"no split 'valid'; it has \['train'\]"):
        make_reader(DataConfig(), request(tmp_path, manifest, None, 4, split="valid"))


def test_batches_go_to_the_device_whole(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[25]])
    config = DataConfig(tail="pad", audit=True)
    meta = torch.device("meta")
    reader = make_reader(config, request(tmp_path, manifest, None, 10), DataRank(device=meta))
    assert isinstance(reader, ParquetReader)
    batches = list(reader.batches(0))
    assert all(b.columns["x"].device == meta for b in batches)
    assert batches[-1].weight is not None and batches[-1].weight.device == meta
    assert batches[0].ids is not None and batches[0].ids.device.type == "cpu"  # the audit is the host's
    assert reader.meter.take()["transfer_s"] > 0
    reader.close()


@pytest.mark.gpu
def test_cuda_batches_are_the_hosts(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[500] * 4])
    readers = [
        make_reader(DataConfig(), request(tmp_path, manifest, None, 64), DataRank(device=torch.device(kind)))
        for kind in ("cpu", "cuda")
    ]
    batches = list(zip(*(r.batches(0) for r in readers), strict=True))
    assert len(batches) == 31
    for host, device in batches:
        assert device.columns["x"].is_cuda and torch.equal(host.columns["x"], device.columns["x"].cpu())
    for reader in readers:
        reader.close()


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (
            ("id", "==", "five"),
            r"data\.filters = \[\['id', '==', 'five'\]\]: stored are \{'id': 'int64'\}; .*\(int64, string\)",
        ),
        (("id", "in", [1, "five"]), r"data\.filters = \[\['id', 'in', \[1, 'five'\]\]\]: Could not convert 'five'"),
    ],
)
def test_a_filter_of_another_type_than_its_column_says_so(
    make_dataset: MakeDataset, tmp_path: Path, condition: tuple[str, Any, Any], expected: str
) -> None:
    manifest = make_dataset(tmp_path, [[10]])
    with pytest.raises(ValueError, match=expected):
        make_reader(DataConfig(filters=[condition]), request(tmp_path, manifest, None, 4))


def test_every_file_that_is_read_whole_is_reported_as_progress(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Hashes, filters and quarantine read whole files before the first step: progress, and not a hang."""
    manifest, texts = make_dataset(tmp_path, [[10]] * 4), list[str]()
    config = DataConfig(lanes=4, filters=[("id", ">=", 5)])
    reader: Any = make_reader(config, request(tmp_path, manifest, None, 4), DataRank(on_progress=texts.append))
    names = [file.path for file in manifest.files]
    assert texts == [f"filter {name}" for name in names]
    texts.clear()
    reader.verify()
    assert texts == [f"{what} {name}" for what in ("found", "hashed") for name in names]
    reader.close()
    texts.clear()
    quarantine = DataConfig(lanes=4, on_corrupt="quarantine")
    make_reader(quarantine, request(tmp_path, manifest, None, 4), DataRank(on_progress=texts.append)).close()
    assert texts == [f"check {name}" for name in names]
