"""Gathered rows are cut into batches without copies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from sparkring.conf.manifest import Column
from sparkring.training.data.batch import Ragged
from sparkring.training.data.decoding.buffers import BufferPool
from sparkring.training.data.decoding.collate import Collator
from sparkring.training.data.decoding.columns import RaggedArray
from sparkring.training.data.decoding.pool import Gathered

COLUMNS = (
    Column(name="x", dtype="float32", nulls="mask"),
    Column(name="n", dtype="int64", layout="nested"),
    Column(name="b", dtype="binary", layout="binary"),
    Column(name="y", dtype="float32"),
)
NESTED = RaggedArray(np.arange(6), (np.array([0, 2, 2, 3]), np.array([0, 1, 4, 6])))  # [[[0], [1, 2, 3]], [], [[4, 5]]]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_batches_are_views_of_what_was_gathered(executor: ThreadPoolExecutor) -> None:
    collator = Collator(COLUMNS, {}, executor, BufferPool())
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    texts = RaggedArray(np.frombuffer(b"abc", np.uint8), (np.array([0, 2, 2, 3]),))
    stacks = [(["x", "y"], x), (["x__valid"], np.array([[True, False, True]]))]
    first, empty, last = collator.split(Gathered(stacks, {"n": NESTED, "b": texts}), [2, 0, 1])
    assert [*first] == [*empty] == [*last] == ["x", "x__valid", "n", "b", "y"]
    assert first["x"].tolist() == [0, 1] and first["x"].data_ptr() == x.ctypes.data and last["x"].tolist() == [2]
    assert first["y"].tolist() == [3, 4] and last["y"].tolist() == [5] and first["y"].is_contiguous()
    assert first["x__valid"].tolist() == [True, False] and last["x__valid"].tolist() == [True]
    assert (first["b"], empty["b"], last["b"]) == ([b"ab", b""], [], [b"c"])
    assert first["n"].values.tolist() == [0, 1, 2, 3] and [o.tolist() for o in first["n"].offsets] == [
        [0, 1, 4],
        [0, 2, 2],
    ]
    assert last["n"].values.tolist() == [4, 5] and [o.tolist() for o in last["n"].offsets] == [[0, 2], [0, 1]]
    assert empty["n"].values.tolist() == [] and isinstance(empty["n"], Ragged) and isinstance(empty["x"], torch.Tensor)


def test_only_binary_columns_that_are_read_can_be_decoded(executor: ThreadPoolExecutor) -> None:
    with pytest.raises(
        ValueError, match=r"data.decoders names \['z'\], which are not read; columns: \['b', 'n', 'x', 'y'\]"
    ):
        Collator(COLUMNS, {"z": "image"}, executor, BufferPool())
    with pytest.raises(ValueError, match="column 'x' is scalar, only binary columns are decoded"):
        Collator(COLUMNS, {"x": "image"}, executor, BufferPool())
