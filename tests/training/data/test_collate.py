"""Gathered rows are cut into batches without copies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from sparkring.conf.manifest import Column
from sparkring.training.data.batch import Ragged
from sparkring.training.data.buffers import BufferPool
from sparkring.training.data.collate import Collator
from sparkring.training.data.columns import RaggedArray

COLUMNS = (
    Column(name="x", dtype="float32"),
    Column(name="n", dtype="int64", layout="nested"),
    Column(name="b", dtype="binary", layout="binary"),
)
NESTED = RaggedArray(np.arange(6), (np.array([0, 2, 2, 3]), np.array([0, 1, 4, 6])))  # [[[0], [1, 2, 3]], [], [[4, 5]]]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_batches_are_views_of_what_was_gathered(executor: ThreadPoolExecutor) -> None:
    collator = Collator(COLUMNS, {}, executor, BufferPool())
    x = np.arange(3, dtype=np.float32)
    texts = RaggedArray(np.frombuffer(b"abc", np.uint8), (np.array([0, 2, 2, 3]),))
    first, empty, last = collator.split({"x": x, "n": NESTED, "b": texts}, [2, 0, 1])
    assert first["x"].tolist() == [0, 1] and first["x"].data_ptr() == x.ctypes.data and last["x"].tolist() == [2]
    assert (first["b"], empty["b"], last["b"]) == ([b"ab", b""], [], [b"c"])
    assert first["n"].values.tolist() == [0, 1, 2, 3] and [o.tolist() for o in first["n"].offsets] == [
        [0, 1, 4],
        [0, 2, 2],
    ]
    assert last["n"].values.tolist() == [4, 5] and [o.tolist() for o in last["n"].offsets] == [[0, 2], [0, 1]]
    assert empty["n"].values.tolist() == [] and isinstance(empty["n"], Ragged) and isinstance(empty["x"], torch.Tensor)


def test_only_binary_columns_that_are_read_can_be_decoded(executor: ThreadPoolExecutor) -> None:
    with pytest.raises(
        ValueError, match=r"data.decoders names \['y'\], which are not read; columns: \['b', 'n', 'x'\]"
    ):
        Collator(COLUMNS, {"y": "image"}, executor, BufferPool())
    with pytest.raises(ValueError, match="column 'x' is scalar, only binary columns are decoded"):
        Collator(COLUMNS, {"x": "image"}, executor, BufferPool())
