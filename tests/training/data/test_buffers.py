"""Memory is used again when, and only when, nothing refers to it."""

from __future__ import annotations

import numpy as np
import torch

from sparkring.training.data.decoding.buffers import KEPT, BufferPool

FLOAT = np.dtype(np.float32)


def place(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_what_nothing_refers_to_is_used_again() -> None:
    buffers = BufferPool()
    first = place(buffers.take("x", (10, 3), FLOAT))
    again = buffers.take("x", (7,), FLOAT)
    assert place(again) == first and again.shape == (7,) and again.dtype == FLOAT
    assert place(buffers.take("y", (7,), FLOAT)) != first


def test_no_view_and_no_tensor_ever_loses_its_memory() -> None:
    buffers = BufferPool()
    array = buffers.take("x", (8, 2), FLOAT)
    array[:] = 1
    held = torch.from_numpy(array[2:5]).split([1, 2])[1]
    del array
    for number in range(2 * KEPT):  # more than are kept, each let go at once
        buffers.take("x", (8, 2), FLOAT)[:] = number
    assert held.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    before = held.data_ptr()
    del held
    arrays = [buffers.take("x", (8, 2), FLOAT) for _ in range(2)]
    assert any(place(a) <= before < place(a) + a.nbytes for a in arrays)


def test_what_is_too_small_is_replaced_and_no_more_is_kept_than_said() -> None:
    buffers = BufferPool()
    buffers.take("x", (4,), FLOAT)
    assert buffers.take("x", (400,), FLOAT).shape == (400,)
    arrays = [buffers.take("x", (400,), FLOAT) for _ in range(KEPT + 3)]
    assert len({place(a) for a in arrays}) == KEPT + 3 and len(buffers._kept["x"]) == KEPT
    assert buffers.take("x", (0, 5), FLOAT).shape == (0, 5)
