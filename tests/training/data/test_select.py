"""What is decided before the order is planned: damaged files and filtered rows, alike on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.build import make_reader
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.data.select import make_row_filter

MakeDataset = Callable[..., DatasetManifest]


def request(folder: Path, manifest: DatasetManifest, gb: int, columns: Any = None) -> ReadRequest:
    return ReadRequest(open_storage(str(folder)), manifest, "train", columns, gb)


def spoil(folder: Path, manifest: DatasetManifest, number: int) -> None:
    path = folder / manifest.files[number].path
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes([data[40] ^ 255]) + data[41:])


class Ranks:
    """An all-gather among threads: what several ranks would do, without processes."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def all_gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return all_gather

    def run(self, work: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self._values))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("size", [1, 3])
def test_damaged_and_missing_files_are_quarantined_by_all_ranks_alike(
    make_dataset: MakeDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    manifest = make_dataset(tmp_path, [[20, 20]] * 5)
    spoil(tmp_path, manifest, 1)
    (tmp_path / manifest.files[3].path).unlink()
    ranks, served, states = Ranks(size), {}, {}

    def work(rank: int) -> None:
        config = DataConfig(on_corrupt="quarantine", tail="pad", audit=True)
        reader = make_reader(config, request(tmp_path, manifest, 16), DataRank(rank, size, gather=ranks.gather(rank)))
        assert isinstance(reader, ParquetReader)
        assert sum(rows for _, rows, _ in reader.selection.quarantined) == 80
        states[rank] = reader.order_state()
        served[rank] = [i for b in reader.batches(0) for i in b.columns["id"][b.row_weights() > 0].tolist()]
        reader.close()

    ranks.run(work)
    left = [i for i in range(200) if not 40 <= i < 80 and not 120 <= i < 160]
    assert sorted(i for part in served.values() for i in part) == left
    assert len({str(state) for state in states.values()}) == 1
    assert states[0]["quarantined"] == [manifest.files[1].path, manifest.files[3].path]
    assert "quarantined data-test/train-00001.parquet with 40 rows: " in caplog.text


def test_a_storage_that_fails_is_no_reason_to_leave_out_its_files(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_dataset(tmp_path, [[20]])

    def refuse(*_: Any) -> str:
        raise OSError("AWS Error NETWORK_CONNECTION")

    monkeypatch.setattr("sparkring.conf.storage.Storage.sha256", refuse)
    with pytest.raises(ValueError, match=r"train-00000.parquet: cannot be read from .* \(AWS Error"):
        make_reader(DataConfig(on_corrupt="quarantine"), request(tmp_path, manifest, 5))


def test_nothing_left_is_an_error(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[20]])
    spoil(tmp_path, manifest, 0)
    with pytest.raises(ValueError, match="all 1 file is damaged"):
        make_reader(DataConfig(on_corrupt="quarantine"), request(tmp_path, manifest, 5))


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ([("id", ">=", 30), ("id", "<", 75)], range(30, 75)),
        ([("id", "in", [3, 50, 99])], [3, 50, 99]),
        ([("x", "not in", list(range(10, 100)))], range(10)),
        ([("id", "!=", 5)], [i for i in range(100) if i != 5]),
    ],
)
def test_filters_are_decided_before_the_plan(
    make_dataset: MakeDataset, tmp_path: Path, filters: Any, kept: Any
) -> None:
    manifest = make_dataset(tmp_path, [[25, 25], [50]])
    config = DataConfig(filters=filters, tail="pad", audit=True)
    reader = make_reader(config, request(tmp_path, manifest, 8, ["x"]))
    assert isinstance(reader, ParquetReader) and reader.plan.rows == len(list(kept))
    batches = list(reader.batches(0))
    assert sorted(i for b in batches for i in b.columns["x"][b.row_weights() > 0].tolist()) == list(kept)
    assert sorted(i for b in batches for i in b.ids[b.row_weights() > 0].tolist()) == list(kept)  # type: ignore[index]
    assert list(batches[0].columns) == ["x"]
    reader.close()


def test_filters_say_what_they_cannot_do(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[20]])
    for filters, message in (([("y", ">", 3)], "no column 'y'"), ([("id", ">", 99)], "the split has no rows")):
        with pytest.raises(ValueError, match=message):
            make_reader(DataConfig(filters=filters), request(tmp_path, manifest, 5))


def test_conditions_compare_values_as_people_write_them(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Texts, dates and timestamps; a null meets no condition, `not in` and `!=` neither."""
    columns = (
        Column(name="id", dtype="int64"),
        Column(name="carrier", dtype="string", role="meta", logical="string", nulls="keep"),
        Column(name="day", dtype="int32", logical="date"),
        Column(name="at", dtype="int64", logical="timestamp"),
    )

    def make(ids: np.ndarray) -> dict[str, Any]:
        days = pa.array(ids.astype(np.int32), pa.int32()).view(pa.date32())
        at = pa.array(ids * 3_600_000_000, pa.int64()).view(pa.timestamp("us", "UTC"))
        return {
            "id": ids,
            "carrier": pa.array([(None, "UA", "AA")[i % 3] for i in ids], pa.string()),
            "day": days,
            "at": at,
        }

    manifest = make_dataset(tmp_path, [[7, 7], [6]], columns, make)
    for condition, kept in (
        (("carrier", "==", "UA"), range(1, 20, 3)),
        (("carrier", "!=", "UA"), range(2, 20, 3)),
        (("carrier", "not in", ["UA"]), range(2, 20, 3)),
        (("day", ">=", "1970-01-15"), range(14, 20)),
        (("day", "in", ["1970-01-03", "1970-01-05"]), (2, 4)),
        (("at", "<", "1970-01-01T03:00:00"), range(3)),
        (("at", "<", "1970-01-01T03:00:00+02:00"), range(1)),
    ):
        config = DataConfig.model_validate({"filters": [condition]})
        reader = make_reader(config, request(tmp_path, manifest, 4, ["id", "day"]), evaluation=True)
        found = sorted(i for b in reader.batches(0) for i in b.columns["id"][b.row_weights() > 0].tolist())
        reader.close()
        assert found == list(kept), condition
    with pytest.raises(ValueError, match=r"data\.filters = \[\['day', '>', 'May'\]\]: Invalid isoformat"):
        make_row_filter(manifest, [("day", ">", "May")])
    with pytest.raises(ValueError, match=r"'carrier'.*stored are \{'carrier': 'string'\}"):
        make_reader(DataConfig.model_validate({"filters": [["carrier", "==", 3]]}), request(tmp_path, manifest, 4))
