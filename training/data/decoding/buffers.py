"""Memory for gathered rows, used again once nothing refers to it.

Memory given back to the system comes from it again page by page, and both hold up every thread of the process: with
new memory every few milliseconds, the training step waited longer for that than for data.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT = 4  # arrays per name: one consumed, one waiting, one being made, one that a consumer was slow to release
UNUSED = 3  # references to a kept array that nobody uses: the list, the local variable, the argument of getrefcount


def with_spare(size: int) -> int:
    """Return the size to allocate, an eighth larger, so that a slightly larger array fits later."""
    return size + size // 8


class BufferPool:
    """Arrays by name, whose memory is used again.

    Belongs to one thread; views of the arrays, and tensors of the views, may live in any.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[NDArray[Any]]] = {}

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for kept in self._kept.values() for array in kept)

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array with any content, kept until no view or tensor of it is left."""
        size, kept = math.prod(shape), self._kept.setdefault(name, [])
        for number in range(len(kept)):
            array = kept[number]
            # TRICK: a view refers to the array that owns its memory, so the reference count says whether any is left
            # (test_buffers.py::test_no_view_and_no_tensor_ever_loses_its_memory).
            if sys.getrefcount(array) == UNUSED:
                if len(array) < size:
                    array = kept[number] = np.empty(with_spare(size), dtype)
                return array[:size].reshape(shape)
        array = np.empty(with_spare(size), dtype)
        if len(kept) < KEPT:
            kept.append(array)
        return array[:size].reshape(shape)
