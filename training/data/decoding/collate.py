"""Cut gathered arrays into batches: views, except for decoded images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import torch

from sparkring.conf.manifest import Column
from sparkring.training.data.batch import Columns, Ragged
from sparkring.training.data.decoding.buffers import BufferPool
from sparkring.training.data.decoding.cells import Decoder, decode_into, decode_rows
from sparkring.training.data.decoding.columns import RaggedArray
from sparkring.training.data.decoding.pool import Gathered

DECODE_ROWS = 32  # binary rows decoded by one task


class Collator:
    """Cuts gathered rows into batches; images are decoded in the executor's threads."""

    def __init__(
        self, columns: Sequence[Column], decoders: Mapping[str, Decoder], executor: Executor, buffers: BufferPool
    ) -> None:
        """Raise ValueError for decoders (by column) of what is not read, or not binary."""
        self._columns = {c.name: c for c in columns}
        self._order = [name for c in columns for name in (c.name, c.mask) if name is not None]
        if unknown := set(decoders) - set(self._columns):
            raise ValueError(
                f"data.decoders names {sorted(unknown)}, which are not read; columns: {sorted(self._columns)}"
            )
        for column in (self._columns[name] for name in decoders):
            if column.layout != "binary":
                raise ValueError(
                    f"data.decoders: column {column.name!r} is {column.layout}, only binary columns are decoded"
                )
        self._decoders = dict(decoders)
        self._executor, self._buffers = executor, buffers

    @property
    def decoded_row_bytes(self) -> int:
        """Bytes of the decoded columns of one row, as far as their shape is declared."""
        return sum(math.prod(self._columns[name].shape) for name in self._decoders if self._columns[name].shape)

    def split(self, gathered: Gathered, sizes: Sequence[int]) -> list[Columns]:
        """Split rows into one dict of columns per batch of `sizes` rows, in column order."""
        found: dict[str, Sequence[Any]] = {
            name: self._split_ragged(name, values, sizes) for name, values in gathered.ragged.items()
        }
        for names, stack in gathered.stacks:
            # one call cuts a batch of all columns, not one a column
            cut = torch.from_numpy(stack).split_with_sizes(list(sizes), 1)
            found |= zip(names, zip(*(batch.unbind() for batch in cut), strict=True), strict=True)
        return [{name: found[name][number] for name in self._order} for number in range(len(sizes))]

    def _split_ragged(self, name: str, values: RaggedArray, sizes: Sequence[int]) -> Sequence[Any]:
        edges = list(itertools.accumulate(sizes, initial=0))
        column = self._columns[name]
        if column.layout != "binary":
            levels = tuple(torch.from_numpy(level) for level in reversed(values.offsets))
            ragged = Ragged(torch.from_numpy(values.values), levels)
            return [ragged.rows(a, b) for a, b in itertools.pairwise(edges)]
        data = values.values.tobytes()
        rows: Sequence[Any] = [data[a:b] for a, b in itertools.pairwise(values.offsets[0].tolist())]
        if name in self._decoders and column.shape:
            return self._decode_same(column, rows).split(list(sizes))
        if name in self._decoders:
            rows = self._decode_apart(column, rows)
        return [rows[a:b] for a, b in itertools.pairwise(edges)]

    def _decode_same(self, column: Column, rows: Sequence[bytes]) -> torch.Tensor:
        """Decode rows of one declared shape, (n, *shape) uint8."""
        out = self._buffers.take(f"{column.name} decoded", (len(rows), *column.shape), np.dtype(np.uint8))

        def decode(begin: int) -> None:
            part = slice(begin, begin + DECODE_ROWS)
            decode_into(column, self._decoders[column.name], rows[part], out[part])

        for _ in self._executor.map(decode, range(0, len(rows), DECODE_ROWS)):
            pass  # raises the first error
        return torch.from_numpy(out)

    def _decode_apart(self, column: Column, rows: Sequence[bytes]) -> list[torch.Tensor]:
        """Decode rows of different shapes into one tensor per row."""
        parts = [rows[i : i + DECODE_ROWS] for i in range(0, len(rows), DECODE_ROWS)]
        decode = self._decoders[column.name]
        decoded = self._executor.map(lambda part: [row.copy() for row in decode_rows(column, decode, part)], parts)
        return [torch.from_numpy(row) for part in decoded for row in part]
