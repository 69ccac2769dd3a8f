"""The reader against the order it must serve, on every kind of column, and on every kind of bad input."""

from __future__ import annotations

import datetime as dt
import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import Column, DatasetManifest, ManifestError
from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import Batch, Ragged
from sparkring.training.data.order import epoch_ids
from sparkring.training.data.reader import ParquetReader, decode_threads
from sparkring.training.data.request import DataRank, ReadRequest

ROW_BYTES = 8 + 4 + 8  # of the default dataset: id, x and the row number
MakeDataset = Callable[..., DatasetManifest]


def read(folder: Path, manifest: DatasetManifest, gb: int, rank: int = 0, size: int = 1, **how: Any) -> ParquetReader:
    request = ReadRequest(open_storage(str(folder)), manifest, "train", how.pop("columns", None), gb)
    return ParquetReader(request, DataRank(rank, size), DataConfig(audit=True, **how))


def at(reader: ParquetReader, epoch: int, step: int) -> int:
    """Samples consumed before a step of an epoch."""
    return epoch * reader.epochs.samples + step * reader.epochs.global_batch


def epoch_of(reader: ParquetReader, epoch: int = 0, start: int = 0) -> list[Batch]:
    try:
        return list(reader.batches(at(reader, epoch, start)))
    finally:
        reader.close()


def real_ids(batch: Batch) -> list[int]:
    assert batch.ids is not None
    return batch.ids[batch.row_weights() > 0].tolist()


groups = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=60)
@given(
    groups, st.integers(1, 40), st.integers(1, 20), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3),
    st.sampled_from(["pad", "drop"]), st.booleans(), st.data(),
)  # fmt: skip
def test_any_world_thread_count_and_restart_serves_the_same_global_batches(
    make_dataset: MakeDataset, tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], gb: int, lanes: int,
    size: int, window: int, threads: int, tail: str, shuffle: bool, data: st.DataObject,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("d")
    manifest = make_dataset(folder, files)
    rows = sum(map(sum, files))
    if tail == "drop":
        gb = min(gb, rows)
    how: dict[str, Any] = {"lanes": lanes, "window_row_groups": window, "tail": tail, "shuffle": shuffle, "seed": 7}
    how |= {"chunk_bytes": 600, "ahead": 1, "block_rows": data.draw(st.none() | st.integers(1, 5))}
    readers = [read(folder, manifest, gb, rank, size, threads=threads, **how) for rank in range(size)]
    epoch = data.draw(st.integers(0, 2))
    start = data.draw(st.integers(0, readers[0].steps_per_epoch - 1))
    expected = epoch_ids(readers[0].plan, epoch)
    parts = [epoch_of(reader, epoch, start) for reader in readers]
    assert {len(p) for p in parts} == {readers[0].steps_per_epoch - start}
    for step, batches in enumerate(zip(*parts, strict=True), start):
        served = [i for batch in batches for i in real_ids(batch)]
        assert sorted(served) == sorted(expected[step * gb : (step + 1) * gb].tolist())
        assert {b.global_rows for b in batches} == {len(served)}
        assert len({b.consumed_samples for b in batches}) == 1
        for batch in batches:
            assert batch.rows == len(batch.columns["id"])
            assert batch.columns["id"].tolist() == batch.ids.tolist()  # type: ignore[union-attr]
            assert batch.columns["x"].dtype == torch.float32
        assert tail == "pad" or all(b.weight is None for b in batches)
    if size == 1 and tail == "drop":  # one rank sees the samples in the very order of the plan
        assert [i for b in parts[0] for i in real_ids(b)] == expected[
            start * gb : len(parts[0]) * gb + start * gb
        ].tolist()


@settings(max_examples=40)
@given(
    groups, st.integers(1, 40), st.integers(1, 20), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3),
    st.sampled_from(["pad", "drop"]), st.booleans(), st.integers(0, 25), st.data(),
)  # fmt: skip
def test_reading_on_serves_what_the_epochs_do_one_by_one(
    make_dataset: MakeDataset, tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], gb: int, lanes: int,
    size: int, window: int, threads: int, tail: str, tight: bool, steps: int, data: st.DataObject,
) -> None:  # fmt: skip
    """From any step of any epoch, for any number of steps, with memory to spare or with none."""
    folder = tmp_path_factory.mktemp("d")
    manifest = make_dataset(folder, files)
    rows = sum(map(sum, files))
    gb = min(gb, rows) if tail == "drop" else gb
    how: dict[str, Any] = {"lanes": lanes, "window_row_groups": window, "tail": tail, "seed": 7, "chunk_bytes": 600}
    if tight:
        in_use = min(2 * window * min(lanes, gb, rows), sum(map(len, files)))
        how |= {"max_bytes": (in_use + 1) * max(map(max, files)) * ROW_BYTES}
    for rank in range(size):
        one_by_one, on = (read(folder, manifest, gb, rank, size, threads=threads, **how) for _ in range(2))
        each = on.steps_per_epoch
        start = data.draw(st.integers(0, each - 1))
        served = list(on.batches(at(on, 2, start), steps))
        epochs = range(2, 3 + (start + steps) // each)
        expected = [batch for epoch in epochs for batch in one_by_one.batches(at(on, epoch, 0))]
        for batch, alone in zip(served, expected[start : start + steps], strict=True):
            assert batch.columns["id"].tolist() == alone.columns["id"].tolist()
            assert batch.row_weights().tolist() == alone.row_weights().tolist()
            assert (batch.consumed_samples, batch.global_rows) == (alone.consumed_samples, alone.global_rows)
        on.close()
        one_by_one.close()


def test_the_next_epoch_is_decoded_while_this_one_is_served(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_dataset(tmp_path, [[64] * 32])
    decoded: list[int] = []
    load = ParquetReader._load
    monkeypatch.setattr(
        ParquetReader,
        "_load",
        lambda self, group, key, to: decoded.append(to[0].lane.epoch) or load(self, group, key, to),
    )
    reader = read(tmp_path, manifest, 64, lanes=4, window_row_groups=1, chunk_bytes=1)
    batches = reader.batches(0, 80)
    for _ in range(31):
        next(batches)
    deadline = time.monotonic() + 30
    while decoded.count(1) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert decoded.count(1) >= 4  # the first window of every lane, before the epoch's last batch is asked for
    assert len(list(batches)) == 80 - 31
    assert decoded.count(0) == decoded.count(1) == 32
    assert 16 <= decoded.count(2) <= 16 + 4  # windows in which the last step lies, and none after it
    reader.close()


def test_memory_is_bounded_between_epochs_too(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[64] * 32])
    # Row groups max_bytes allows; pages, 4 of each: of two windows of 4 lanes, 3 ahead, and each lane's first and last.
    for most, expected in ((9, 9 * 4), (100, (8 + 3) * 4 + 8)):
        reader = read(
            tmp_path, manifest, 64, lanes=4, window_row_groups=1, chunk_bytes=1, ahead=3,
            max_bytes=most * 64 * ROW_BYTES,
        )  # fmt: skip
        used = []
        for _ in reader.batches(0, 96):
            assert reader._pool is not None
            used.append(reader._pool._pages - reader._pool.free_pages)
        assert max(used) <= expected and reader._pool is not None and reader._pool._pages == expected
        reader.close()


def test_a_rank_decodes_each_row_group_once_an_epoch(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[100] * 9, [100] * 9, [37]])
    for size in (1, 3):
        decoded = 0
        for rank in range(size):
            reader = read(tmp_path, manifest, 64, rank, size, lanes=16, tail="pad")
            epoch_of(reader)
            decoded += int(reader.meter.take()["row_groups"])
        assert 19 <= decoded <= 19 + size - 1  # a row group cut between two ranks is decoded by both


def test_resuming_late_decodes_only_what_is_left(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[64] * 32])
    whole, late = (read(tmp_path, manifest, 64, lanes=4, window_row_groups=1) for _ in range(2))
    every, tail = epoch_of(whole), epoch_of(late, start=28)
    assert [real_ids(b) for b in every[28:]] == [real_ids(b) for b in tail]
    assert int(whole.meter.take()["row_groups"]) == 32
    assert int(late.meter.take()["row_groups"]) <= 4 + 4  # one window per lane, and the one after it


def test_more_ranks_than_rows_each_get_a_batch(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[3]])
    parts = [epoch_of(read(tmp_path, manifest, 8, rank, 5, tail="pad")) for rank in range(5)]
    assert [len(p) for p in parts] == [1] * 5
    assert sorted(i for p in parts for i in real_ids(p[0])) == [0, 1, 2]
    empty = [p[0] for p in parts if p[0].rows == 0]
    assert len(empty) == 2 and all(b.columns["x"].shape == (0,) and b.global_rows == 3 for b in empty)


def test_one_row_and_empty_row_groups_and_an_empty_file(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[], [1], [0]])
    (batch,) = epoch_of(read(tmp_path, manifest, 1))
    assert batch.columns["id"].tolist() == [0] and batch.consumed_samples == 1


def test_row_groups_smaller_than_a_batch(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[2] * 40, [1] * 20])
    batches = epoch_of(read(tmp_path, manifest, 50))
    assert sorted(i for b in batches for i in real_ids(b)) == sorted(set(range(100)))


Kind = tuple[Column, Callable[[int], Any], pa.DataType]
EPOCH = dt.datetime(1970, 1, 1)


def kind(
    name: str, dtype: str, value: Callable[[int], Any], stored: pa.DataType, layout: str = "scalar", *shape: int
) -> Kind:
    return Column.model_validate({"name": name, "dtype": dtype, "layout": layout, "shape": shape}), value, stored


ALL_KINDS = [
    kind("flag", "bool", lambda i: i % 3 == 0, pa.bool_()),
    kind("tiny", "int8", lambda i: i % 100 - 50, pa.int8()),
    kind("half", "float16", lambda i: float(i % 50), pa.float32()),
    kind("wide", "float64", lambda i: i / 3, pa.float64()),
    kind("day", "int32", lambda i: EPOCH.date() + dt.timedelta(i), pa.date32()),
    kind("moment", "int64", lambda i: EPOCH + dt.timedelta(seconds=i), pa.timestamp("ms")),
    kind("price", "float64", lambda i: Decimal(i) / 4, pa.decimal128(12, 2)),
    kind("point", "float32", lambda i: [i, i + 0.5, -i], pa.list_(pa.float32()), "vector", 3),
    kind("fixed", "int32", lambda i: [i, 1, 2, i], pa.list_(pa.int32(), 4), "vector", 2, 2),
    kind("grid", "int16", lambda i: [[i, 1], [2, i]], pa.list_(pa.list_(pa.int16())), "vector", 2, 2),
    kind("packed", "int32", lambda i: np.array([i, -i], "<i4").tobytes(), pa.binary(), "vector", 2),
    kind("words", "int64", lambda i: list(range(i % 5)), pa.list_(pa.int64()), "ragged"),
    kind("tree", "int32", lambda i: [[i] * (j + 1) for j in range(i % 3)], pa.list_(pa.list_(pa.int32())), "nested"),
    kind("blob", "binary", lambda i: str(i).encode() * (i % 4), pa.binary(), "binary"),
    kind("text", "binary", lambda i: f"n{i}", pa.string(), "binary"),
]
KINDS = {column.name: (column, value, stored) for column, value, stored in ALL_KINDS}


def expected_value(name: str, i: int) -> Any:
    value = KINDS[name][1](i)
    special = {"day": i, "moment": i * 1_000_000, "price": i / 4, "fixed": [[i, 1], [2, i]], "packed": [i, -i]}
    return special.get(name, value.encode() if isinstance(value, str) else value)


def table_rows(value: Any) -> list[Any]:
    """Plain Python rows of whatever a reader made of a column."""
    if isinstance(value, torch.Tensor):
        return list(value.tolist())
    if isinstance(value, Ragged):
        inner: list[Any] = value.values.tolist()
        for offsets in value.offsets:
            inner = [inner[a:b] for a, b in pairwise(offsets.tolist())]
        return inner
    return list(value)


@pytest.fixture
def all_kinds(make_dataset: MakeDataset, tmp_path: Path) -> DatasetManifest:
    def make(ids: np.ndarray) -> dict[str, Any]:
        return {"id": ids} | {n: pa.array([v(int(i)) for i in ids], t) for n, (_, v, t) in KINDS.items()}

    return make_dataset(
        tmp_path, [[40, 13], [70]], [Column(name="id", dtype="int64"), *(c for c, _, _ in KINDS.values())], make
    )


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_kind_of_column_arrives_unchanged(
    all_kinds: DatasetManifest, tmp_path: Path, shuffle: bool, rank: int
) -> None:
    batches = epoch_of(
        read(tmp_path, all_kinds, 25, rank, 2, lanes=6, tail="pad", shuffle=shuffle, window_row_groups=2)
    )
    assert len(batches) == 5
    for batch in batches:
        ids = batch.columns["id"].tolist()
        for name, (column, _, _) in KINDS.items():
            value = batch.columns[name]
            assert table_rows(value) == [expected_value(name, i) for i in ids], name
            if isinstance(value, torch.Tensor):
                assert str(value.dtype) == f"torch.{column.dtype}" and value.shape == (batch.rows, *column.shape)


def nullable(policy: str, fill: Any = None) -> tuple[list[Column], Callable[[np.ndarray], dict[str, Any]]]:
    extra: dict[str, Any] = {"nulls": policy, "fill": fill}
    columns = [
        Column(name="id", dtype="int64"),
        Column(name="n", dtype="int64", **extra),
        Column(name="v", dtype="float32", layout="vector", shape=(2,), **extra),
        Column(name="f", dtype="bool", **extra),
    ]

    def make(ids: np.ndarray) -> dict[str, Any]:
        gone = [i % 3 == 0 for i in ids]
        return {
            "id": ids,
            "n": pa.array([None if g else int(i) + 2**60 for i, g in zip(ids, gone, strict=True)], pa.int64()),
            "v": pa.array([None if g else [i, i] for i, g in zip(ids, gone, strict=True)], pa.list_(pa.float32())),
            "f": pa.array([None if g else True for g in gone], pa.bool_()),
        }

    return columns, make


def test_nulls_masked_keep_their_dtype_and_say_where(make_dataset: MakeDataset, tmp_path: Path) -> None:
    columns, make = nullable("mask")
    batches = epoch_of(read(tmp_path, make_dataset(tmp_path, [[50]], columns, make), 10))
    assert len(batches) == 5
    for batch in batches:
        there = [i % 3 != 0 for i in batch.columns["id"].tolist()]
        for name in ("n", "v", "f"):
            assert batch.columns[f"{name}__valid"].tolist() == there
        for i, ok, n in zip(batch.columns["id"].tolist(), there, batch.columns["n"].tolist(), strict=True):
            assert n == (i + 2**60 if ok else 0)  # an int64 stays one: no float64 in between


def test_nulls_filled(make_dataset: MakeDataset, tmp_path: Path) -> None:
    columns, make = nullable("fill", 1)
    batches = epoch_of(read(tmp_path, make_dataset(tmp_path, [[50]], columns, make), 10))
    assert len(batches) == 5
    for batch in batches:
        for i, n, v in zip(*(batch.columns[k].tolist() for k in ("id", "n", "v")), strict=True):
            assert (n, v) == ((i + 2**60, [i, i]) if i % 3 else (1, [1, 1]))


@pytest.mark.parametrize("column", ["n", "v", "f"])
def test_a_refused_null_names_file_row_group_and_column(make_dataset: MakeDataset, tmp_path: Path, column: str) -> None:
    columns, make = nullable("refuse")
    manifest = make_dataset(tmp_path, [[50]], columns, make)
    with pytest.raises(ValueError, match=rf"train-00000.parquet, row group 0: column '{column}' has 17 nulls"):
        epoch_of(read(tmp_path, manifest, 10, columns=["id", column]))


def test_images_are_decoded_in_the_readers_threads(make_dataset: MakeDataset, tmp_path: Path) -> None:
    def png(i: int) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (5, 4), (i, 2 * i, 0)).save(out, "PNG")
        return out.getvalue()

    def make(ids: np.ndarray) -> dict[str, Any]:
        return {"id": ids, "image": pa.array([png(int(i)) for i in ids], pa.binary())}

    for shape in ((4, 5, 3), ()):
        columns = [Column(name="id", dtype="int64"), Column(name="image", dtype="binary", layout="binary", shape=shape)]
        manifest = make_dataset(tmp_path, [[30]], columns, make)
        for batch in epoch_of(read(tmp_path, manifest, 10, decoders={"image": "image"})):
            images = batch.columns["image"]
            assert isinstance(images, torch.Tensor if shape else list)
            assert [tuple(im[0, 0].tolist()) for im in images] == [(i, 2 * i, 0) for i in batch.columns["id"].tolist()]
    manifest = make_dataset(tmp_path, [[30]], [columns[0], columns[1].model_copy(update={"shape": (9, 9, 3)})], make)
    with pytest.raises(
        ValueError, match=r"column 'image': decoded to shape \(4, 5, 3\), the manifest declares \(9, 9, 3\)"
    ):
        epoch_of(read(tmp_path, manifest, 10, decoders={"image": "image"}))


def test_features_of_images_are_batches_of_their_shape(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Images of several sizes, without an entry in data.decoders."""

    def png(i: int) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (5 + i % 3, 4), (i, 2 * i, 0)).save(out, "PNG")
        return out.getvalue()

    def make(ids: np.ndarray) -> dict[str, Any]:
        return {"id": ids, "image": pa.array([png(int(i)) for i in ids], pa.binary())}

    stored = Column(name="image", dtype="binary", layout="binary", shape=(2, 2, 3))
    manifest = make_dataset(tmp_path, [[30]], [Column(name="id", dtype="int64"), stored], make)
    passed = {"kind": "passthrough", "dtype": None, "nulls": "refuse", "fill": None}
    state = passed | {"name": "image", "column": "content", "shape": [2, 2, 3], "fit": "resize"}
    features = {"version": 1, "inputs": {"content": "binary"}, "features": [state]}
    manifest = DatasetManifest.model_validate(dict(manifest) | {"features": features})
    for batch in epoch_of(read(tmp_path, manifest, 10)):
        images = batch.columns["image"]
        assert images.dtype == torch.uint8 and images.shape == (10, 2, 2, 3)
        assert images[:, 0, 0].tolist() == [[i, 2 * i, 0] for i in batch.columns["id"].tolist()]


# --- bad input -------------------------------------------------------------------------------------------------------


def spoil(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def test_a_file_short_of_one_byte_is_named_before_the_epoch(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[10], [10]])
    spoil(tmp_path / manifest.files[1].path, lambda data: data[:-1])
    reader = read(tmp_path, manifest, 5)
    with pytest.raises(ValueError, match=r"train-00001.parquet: .* the manifest says"):
        reader.batches(0)
    reader.close()


def flip_in_first_page(data: bytes) -> bytes:
    at = 60
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize("verify", ["hash", "size"])
def test_a_damaged_page_names_file_and_row_group(make_dataset: MakeDataset, tmp_path: Path, verify: str) -> None:
    manifest = make_dataset(tmp_path, [[2000, 2000]], compression="none")
    spoil(tmp_path / manifest.files[0].path, flip_in_first_page)
    reader = read(tmp_path, manifest, 500, verify=verify)
    with pytest.raises(ValueError, match=r"train-00000.parquet, row group 0"):
        list(reader.batches(0))
    reader.close()


def test_a_listed_file_that_is_missing(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[10], [10]])
    (tmp_path / manifest.files[0].path).unlink()
    for verify in ("hash", "off"):
        reader = read(tmp_path, manifest, 5, verify=verify)
        with pytest.raises(ValueError, match=r"train-00000.parquet: listed in the manifest, missing"):
            list(reader.batches(0))
        reader.close()


def test_an_unlisted_file_is_ignored_and_said(
    make_dataset: MakeDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = make_dataset(tmp_path, [[10]])
    (tmp_path / "data-test" / "train-99999.parquet").write_bytes(b"not even Parquet")
    with caplog.at_level(logging.WARNING):
        batches = epoch_of(read(tmp_path, manifest, 5))
    assert sorted(i for b in batches for i in real_ids(b)) == list(range(10))
    assert "1 Parquet files are not in the manifest" in caplog.text and "train-99999.parquet" in caplog.text
    caplog.clear()
    of_test = manifest.files[0].model_copy(update={"path": "data-test/test-00000.parquet", "split": "test"})
    (tmp_path / of_test.path).write_bytes((tmp_path / manifest.files[0].path).read_bytes())
    both = manifest.model_copy(
        update={"files": [*manifest.files, of_test], "splits": {"test": manifest.splits["train"], **manifest.splits}}
    )
    request = ReadRequest(open_storage(str(tmp_path)), both, "test", None, 5)
    epoch_of(ParquetReader(request, DataRank(0, 1), DataConfig()))
    assert "not in the manifest" not in caplog.text, "the reader of the training rows has said it"


def test_schema_drift_names_both_files(make_dataset: MakeDataset, tmp_path: Path) -> None:
    def make(ids: np.ndarray) -> dict[str, Any]:
        return {"id": ids, "x": pa.array(ids, pa.int32() if ids[0] < 10 else pa.int64())}

    columns = [Column(name="id", dtype="int64"), Column(name="x", dtype="int64")]
    manifest = make_dataset(tmp_path, [[10]], columns, make)
    second = tmp_path / "data-test" / "train-00001.parquet"
    pq.write_table(pa.table(make(np.arange(10, 20))), second)
    drifted = type(manifest.files[0]).model_validate(
        manifest.files[0].model_dump() | {"path": "data-test/train-00001.parquet", "bytes": second.stat().st_size}
    )
    both = manifest.model_copy(update={"files": (*manifest.files, drifted)})
    reader = read(tmp_path, both, 20, verify="size", threads=1)
    with pytest.raises(ValueError, match=r"train-0000\d.parquet: column 'x' is stored as int.*schema drift"):
        list(reader.batches(0))
    reader.close()


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (Column(name="x", dtype="int64"), "column 'x' is stored as float, the manifest declares scalar int64"),
        (Column(name="x", dtype="float32", layout="ragged"), "the manifest declares ragged float32"),
        (Column(name="gone", dtype="float32"), "no column 'gone'"),
    ],
)
def test_columns_that_are_not_what_is_declared(
    make_dataset: MakeDataset, tmp_path: Path, declared: Column, message: str
) -> None:
    manifest = make_dataset(tmp_path, [[10]], [Column(name="id", dtype="int64"), declared])
    with pytest.raises(ValueError, match=message):
        epoch_of(read(tmp_path, manifest, 5))


def test_integers_that_do_not_fit_are_refused(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[300]], [Column(name="id", dtype="int8")])
    with pytest.raises(ValueError, match=r"row group 0: column 'id' holds 0..299, which int8 cannot"):
        epoch_of(read(tmp_path, manifest, 5))


def test_a_newer_manifest_is_refused(make_dataset: MakeDataset, tmp_path: Path) -> None:
    text = make_dataset(tmp_path, [[3]]).to_json().replace('"format_version": 2', '"format_version": 99')
    with pytest.raises(ManifestError, match="format_version = 99"):
        DatasetManifest.from_json(text, "here")


def test_windows_larger_than_the_memory_allowed_are_refused_with_a_remedy(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    manifest = make_dataset(tmp_path, [[1000] * 8])
    with pytest.raises(
        ValueError, match=r"8 row groups may be in use at once .* exceeds data.max_bytes = 50000; lower data.lanes"
    ):
        read(tmp_path, manifest, 64, lanes=8, window_row_groups=1, max_bytes=50_000)
    reader = read(tmp_path, manifest, 64, lanes=2, window_row_groups=1, max_bytes=110_000)
    assert len(epoch_of(reader)) == 125


def test_wrong_settings_say_what_there_is(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[10]])
    with pytest.raises(KeyError, match=r"no column 'y'; it has \['id', 'x'\]"):
        read(tmp_path, manifest, 5, columns=["y"])
    with pytest.raises(ValueError, match="column 'x' is scalar, only binary columns are decoded"):
        read(tmp_path, manifest, 5, decoders={"x": "image"})


# --- life and death --------------------------------------------------------------------------------------------------


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("sparkring")]


def test_leaving_in_the_middle_ends_every_thread(
    make_dataset: MakeDataset, tmp_path: Path, no_threads_left: None
) -> None:
    manifest = make_dataset(tmp_path, [[100] * 20])
    reader = read(tmp_path, manifest, 10, chunk_bytes=100)
    batches = reader.batches(0)
    first = real_ids(next(batches))
    with pytest.raises(RuntimeError, match="still being read"):
        next(reader.batches(0))
    batches.close()  # type: ignore[attr-defined]
    assert real_ids(next(iter(reader.batches(0)))) == first
    reader.close()


def test_leaving_between_two_epochs_ends_every_thread(
    make_dataset: MakeDataset, tmp_path: Path, no_threads_left: None
) -> None:
    reader = read(tmp_path, make_dataset(tmp_path, [[100] * 20]), 100, lanes=4, chunk_bytes=100)
    for steps in (19, 20, 21):
        batches = reader.batches(0, 1000)
        for _ in range(steps):
            next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert reader._pool is not None and reader._pool.free_pages == reader._pool._pages
    reader.close()


def test_an_error_in_the_middle_comes_after_the_batches_before_it(
    make_dataset: MakeDataset, tmp_path: Path, no_threads_left: None
) -> None:
    columns = [Column(name="id", dtype="int64"), Column(name="n", dtype="int64")]

    def make(ids: np.ndarray) -> dict[str, Any]:
        return {"id": ids, "n": pa.array([None if i == 95 else int(i) for i in ids], pa.int64())}

    manifest = make_dataset(tmp_path, [[10] * 10], columns, make)
    reader = read(tmp_path, manifest, 10, lanes=1, window_row_groups=1, shuffle=False, chunk_bytes=1)
    seen = []
    with pytest.raises(ValueError, match="row group 9: column 'n' has 1 null"):
        for batch in reader.batches(0):
            seen.append(batch)
    assert len(seen) == 9
    reader.close()


def test_the_meter_accounts_for_the_epoch(make_dataset: MakeDataset, tmp_path: Path) -> None:
    reader = read(tmp_path, make_dataset(tmp_path, [[500] * 8]), 50)
    epoch_of(reader)
    taken = reader.meter.take()
    assert taken["rows"] == 4000 and taken["row_groups"] == 8
    for name in ("read_s", "decode_s", "shuffle_s", "collate_s", "data_stall_s", "first_batch_s", "verify_s"):
        assert taken[name] > 0, name
    assert reader.meter.take() == {}


def test_batches_someone_keeps_stay_what_they_were(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Chunks are made in memory that was used before: never in memory a batch still holds."""
    reader = read(tmp_path, make_dataset(tmp_path, [[50] * 20]), 10, chunk_bytes=1)
    kept = [(batch, real_ids(batch)) for batch in reader.batches(0, 300)]
    reader.close()
    assert len(kept) == 300 and all(batch.columns["id"].tolist() == ids for batch, ids in kept)
    assert len({batch.columns["id"].data_ptr() for batch, _ in kept}) == 300


def test_reading_does_not_import_pandas(all_kinds: DatasetManifest, tmp_path: Path) -> None:
    """pyarrow would, at the first `to_numpy`: 30 MB and a quarter of a second in every rank."""
    program = f"""if True:
        import sys
        from pathlib import Path
        from sparkring.conf.manifest import DatasetManifest
        from sparkring.conf.storage import open_storage
        from sparkring.training.data.reader import ParquetReader
        from sparkring.training.data.request import ReadRequest
        manifest = DatasetManifest.from_json(Path({str(tmp_path)!r}, "_manifest.json").read_text(), "m")
        reader = ParquetReader(ReadRequest(open_storage({str(tmp_path)!r}), manifest, "train", None, 25))
        rows = sum(batch.rows for batch in reader.batches())
        reader.close()
        print(rows, "pandas" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["100", "False"], done.stderr


def test_images_get_a_second_thread_unless_the_recipe_says_how_many() -> None:
    expected = (({}, False, 1), ({}, True, 2), ({"threads": 1}, True, 1), ({"threads": 3}, False, 3))
    for words, images, threads in expected:
        assert decode_threads(DataConfig.model_validate(words), images) == threads
