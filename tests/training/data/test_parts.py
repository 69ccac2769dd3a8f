"""A rank reads the parts it is given, whoever else reads them too, and in any order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data import parts as parts_module
from sparkring.training.data.batch import BatchShare
from sparkring.training.data.parts import OPEN, PartsReader
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest

STREAMS, BATCH, STEPS = 4, 20, 10  # steps of an epoch


class Opened:
    """Readers of one dataset by stream; how many are open, and how often each was begun."""

    def __init__(self, folder: Path, manifest: DatasetManifest, monkeypatch: pytest.MonkeyPatch) -> None:
        self.request = ReadRequest(open_storage(str(folder)), manifest, "train", None, BATCH)
        self.open: set[int] = set()
        self.begun = 0
        batches = ParquetReader.batches

        def counted(reader: ParquetReader, *at: int) -> object:
            self.begun += 1
            return batches(reader, *at)

        monkeypatch.setattr(ParquetReader, "batches", counted)

    def reader(self, stream: int) -> ParquetReader:
        found = ParquetReader(self.request, DataRank(stream, STREAMS), DataConfig(lanes=8, audit=True))
        self.open.add(stream)
        close = found.close

        def closed() -> None:
            self.open.discard(stream)
            close()

        found.close = closed  # type: ignore[method-assign]
        return found

    def ids(self, stream: int, clocks: int) -> list[list[int]]:
        """By clock, the rows of a stream, read in one go."""
        reader = self.reader(stream)
        found = [batch.ids.tolist() for batch in reader.batches(0, clocks) if batch.ids is not None]
        reader.close()
        return found


@pytest.fixture
def opened(make_dataset: Callable[..., DatasetManifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    return Opened(tmp_path, make_dataset(tmp_path, [[20] * 10]), monkeypatch)


def test_parts_of_any_stream_are_those_that_its_own_rank_reads(opened: Opened) -> None:
    """Late ones, repeated ones, of the next epoch, and steps without a part."""
    expected = [opened.ids(stream, 2 * STEPS) for stream in range(STREAMS)]
    places = [
        (0, 1), (0, 1), None, (1, 2), (3, 1), (2, 1), (0, 2), (7, 3),
        (5, 0), (4, 1), (10, 1), (9, 1), (12, 0), (11, 3), (19, 1),
    ]  # fmt: skip
    given = [None if place is None else BatchShare(*place) for place in places]
    asked: list[int] = []

    def take(step: int) -> BatchShare | None:
        asked.append(step)
        return given[step]

    reader = PartsReader(opened.reader(1), 1, opened.reader, take)
    assert reader.steps_per_epoch == STEPS
    batches = list(reader.batches(0, len(given)))
    assert asked == list(range(len(given)))
    for step, (part, batch) in enumerate(zip(given, batches, strict=True)):
        assert batch.part == part and batch.consumed_samples == (step + 1) * BATCH and batch.rows_of_step == BATCH
        if part is None:
            assert batch.rows == 0 and not batch.columns
        else:
            assert batch.ids is not None and batch.ids.tolist() == expected[part.stream][part.clock]
    assert len(opened.open) <= 1 + OPEN
    reader.close()
    assert not opened.open


def test_a_stream_is_read_on_and_not_begun_anew_for_each_part(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PartsReader(
        opened.reader(0), 0, opened.reader, lambda step: BatchShare(max(step - 1 ^ 1, -1) + 1, 0)
    )  # 0, 2, 1, 4, 3, ..
    before = opened.begun
    clocks = [batch.part.clock for batch in reader.batches(0, 2 * STEPS - 1) if batch.part is not None]
    assert clocks[:5] == [0, 2, 1, 4, 3] and sorted(clocks) == list(range(2 * STEPS - 1))
    assert opened.begun == before + 1
    reader.read(BatchShare(2, 0))
    assert opened.begun == before + 2, "long gone"
    monkeypatch.setattr(parts_module, "FAR", 4)
    reader.read(BatchShare(15, 0))
    assert opened.begun == before + 3, "nearer by beginning again"
    reader.close()


def test_a_run_that_goes_on_asks_for_the_steps_that_are_left(opened: Opened) -> None:
    asked: list[int] = []
    reader = PartsReader(opened.reader(2), 2, opened.reader, lambda step: asked.append(step))  # type: ignore[func-returns-value, arg-type]
    consumed = [batch.consumed_samples for batch in reader.batches(13 * BATCH, 3)]
    assert asked == [13, 14, 15] and consumed == [14 * BATCH, 15 * BATCH, 16 * BATCH]
    reader.close()
