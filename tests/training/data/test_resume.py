"""The order of a checkpoint and that of a reader, compared by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.data.resume import OrderState, explain_difference

MakeDataset = Callable[..., DatasetManifest]


def test_what_differs_is_named(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[30]])

    def state(rank: int = 0, size: int = 1, gb: int = 10, **how: Any) -> dict[str, Any]:
        request = ReadRequest(open_storage(str(tmp_path)), manifest, "train", None, gb)
        reader = ParquetReader(request, DataRank(rank, size), DataConfig(**how))
        reader.close()
        return reader.order_state()

    assert (
        explain_difference(state(), state(1, 3, threads=7, max_bytes=10**8, ahead=5, chunk_bytes=1, audit=True)) == []
    )
    assert explain_difference(state(), state(seed=4, lanes=3)) == [
        "lanes: 10 in the checkpoint, 3 now",
        "seed: 0 in the checkpoint, 4 now",
        "window_row_groups: 6 in the checkpoint, 21 now",
    ]
    assert "global_batch: 10 in the checkpoint, 15 now (another global batch)" in explain_difference(
        state(), state(gb=15)
    )
    assert explain_difference({"mix": [{"seed": 1}, {"seed": 2}]}, {"mix": [{"seed": 1}, {"seed": 3}]}) == [
        "mix.1.seed: 2 in the checkpoint, 3 now"
    ]


def test_an_order_is_read_back_as_it_was_stored(make_dataset: MakeDataset, tmp_path: Path) -> None:
    request = ReadRequest(open_storage(str(tmp_path)), make_dataset(tmp_path, [[30]]), "train", None, 10)
    reader = ParquetReader(request)
    reader.close()
    state = reader.order_state()
    assert OrderState.model_validate(state).model_dump(mode="json") == state
