"""Rows of one width in chunks of memory that are added and never copied."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

CHUNK_BYTES = 16 << 20


def chunk_shift(row_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the base-2 logarithm of the rows per chunk."""
    return max(1, chunk_bytes // row_bytes).bit_length() - 1


def slab_bytes(rows: int, row_bytes: int) -> int:
    """Return the bytes of the chunks that hold `rows` rows."""
    shift = chunk_shift(row_bytes)
    return (-(-rows >> shift) << shift) * row_bytes


class Slab:
    """A growing array (rows, width), read and written by row numbers. Rows that were never written hold anything."""

    def __init__(self, width: int, dtype: DTypeLike, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Start without memory.

        Args:
            width: number of values per row.
            dtype: data type of a value.
            chunk_bytes: approximate size of a chunk.
        """
        self.width, self.dtype = width, np.dtype(dtype)
        self._shift = chunk_shift(max(width, 1) * self.dtype.itemsize, chunk_bytes)
        self._chunks: list[NDArray[Any]] = []

    @property
    def bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def reserve(self, rows: int) -> None:
        """Allocate memory for row numbers below `rows`."""
        while len(self._chunks) << self._shift < rows:
            self._chunks.append(np.empty((1 << self._shift, self.width), self.dtype))

    def gather(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Copy the rows of `slots`, (n, width)."""
        if len(self._chunks) == 1:
            return self._chunks[0].take(slots, axis=0)
        out = np.empty((len(slots), self.width), self.dtype)
        for chunk, picked, offsets in self._by_chunk(slots):
            out[picked] = chunk.take(offsets, axis=0)
        return out

    def scatter(self, slots: NDArray[Any], rows: NDArray[Any]) -> None:
        """Write rows (n, width) at distinct row numbers (n,)."""
        for chunk, picked, offsets in self._by_chunk(slots):
            chunk[offsets] = rows[picked]

    def _by_chunk(self, slots: NDArray[Any]) -> list[tuple[NDArray[Any], Any, NDArray[Any]]]:
        if not len(slots):
            return []
        if len(self._chunks) == 1:
            return [(self._chunks[0], slice(None), slots)]
        number = slots >> self._shift
        order = np.argsort(number, kind="stable")
        used, starts = np.unique(number[order], return_index=True)
        offsets = slots[order] & ((1 << self._shift) - 1)
        parts = zip(used, np.split(order, starts[1:]), np.split(offsets, starts[1:]), strict=True)
        return [(self._chunks[chunk], picked, offset) for chunk, picked, offset in parts]
