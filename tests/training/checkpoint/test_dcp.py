"""The index of a checkpoint: its chunks cover each tensor once, and it names why a state does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparkring.training.checkpoint.dcp import build_index, mismatch, state_shapes
from sparkring.training.checkpoint.layout import covered


def box(offsets: list[int], sizes: list[int]) -> dict[str, Any]:
    nbytes = int(np.prod(sizes)) * 4
    return {"file": "f", "name": "n", "offsets": offsets, "sizes": sizes, "begin": 0, "end": nbytes}


@pytest.mark.parametrize(
    ("shape", "chunks", "fits"),
    [
        ([4, 4], [box([0, 0], [4, 2]), box([0, 2], [4, 2])], True),
        ([4, 4], [box([0, 0], [2, 2]), box([0, 2], [2, 2]), box([2, 0], [2, 4])], True),
        ([4, 4], [box([0, 0], [4, 2]), box([0, 1], [4, 2])], False),
        ([4, 4], [box([0, 0], [2, 4]), box([1, 0], [2, 4])], False),
        ([4, 4], [box([0, 0], [4, 2])], False),
        ([4], [box([2], [4])], False),
        ([3], [box([0], [3]), box([3], [0])], True),
        ([], [box([], [])], True),
        ([], [box([], []), box([], [])], False),
        ([0, 3], [], True),
        ([0, 3], [box([0, 0], [0, 3])], True),
    ],
)
def test_chunks_cover_a_tensor_exactly_once(shape: list[int], chunks: list[Any], fits: bool) -> None:
    tensors: Any = {"w": {"dtype": "F32", "shape": shape, "chunks": chunks}}
    if fits:
        covered(tensors)
    else:
        with pytest.raises(ValueError, match="w: "):
            covered(tensors)


def test_a_state_that_does_not_fit_is_named_by_kind_of_problem() -> None:
    index = build_index([{"values": {"lr": 1}, "chunks": []}], {"lr": ("lr",)})
    index["tensors"] = {
        "w": {"dtype": "F32", "shape": [2], "chunks": []},
        "old": {"dtype": "F32", "shape": [1], "chunks": []},
    }
    have = state_shapes({"w": torch.zeros(3), "lr": 1, "new": torch.zeros(1)})
    assert have == {"w": [3], "lr": None, "new": [1]}
    assert mismatch(have, index, {*have}) == [
        "1 missing from the checkpoint: new",
        "1 unexpected in the checkpoint: old",
        "1 misshapen: w shape (2,) there, shape (3,) here",
    ]
    assert mismatch({"lr": None}, index, {"w", "old", "lr"}) == []  # a pipeline rank has a part
