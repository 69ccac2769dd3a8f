"""What a reader is predicted to hold, beside what it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.held import chunk_bytes, page_count
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest


def test_a_long_epoch_has_three_whole_chunks_and_a_short_one_what_it_has() -> None:
    assert chunk_bytes(100, 8, 10.0) == 3 * (80 + 10)
    assert chunk_bytes(4, 8, 10.0) == 3 * (40 + 5)


def test_a_page_has_rows_of_one_lane() -> None:
    assert page_count([10, 11], 10, 15) == 1 + 2 + 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("gb", "chunk"), [(64, 4096), (32, 16384), (512, 100)])
def test_a_reader_holds_what_was_predicted(
    make_dataset: Callable[..., DatasetManifest], tmp_path: Path, size: int, gb: int, chunk: int
) -> None:
    manifest = make_dataset(tmp_path, [[200] * 8] * 4)
    request = ReadRequest(open_storage(str(tmp_path)), manifest, "train", None, gb)
    reader = ParquetReader(request, DataRank(0, size), DataConfig(lanes=8, chunk_bytes=chunk))
    for _ in reader.batches(0, 3 * reader.steps_per_epoch):
        pass
    held, most = reader.held(), reader.most_held()
    reader.close()
    assert held.pages <= most.pages <= 1.4 * held.pages
    assert 0.9 * most.chunks <= held.chunks <= 1.4 * most.chunks  # four where this loop was slow to release one
