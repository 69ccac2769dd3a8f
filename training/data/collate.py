"""From gathered arrays to the tensors of batches: views, no copies, for everything but decoded binary columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conf.manifest import ROW_NUMBER, Column
from training.data.batch import Batch, Columns, Ragged
from training.data.columns import Rows
from training.data.decode import Decoder, decode_into, decode_rows, find_decoder
from training.data.spare import Spare

DECODE_ROWS = 32  # binary rows decoded by one task


class Collator:
    """Cuts gathered rows into batches. `decoders`: column name -> decoder name, for binary columns."""

    def __init__(self, columns: Sequence[Column], decoders: Mapping[str, str]) -> None:
        self._columns = {c.name: c for c in columns}
        if unknown := set(decoders) - set(self._columns):
            raise ValueError(
                f"data.decoders names {sorted(unknown)}, which are not read; columns: {sorted(self._columns)}"
            )
        self._decoders = {name: find_decoder(self._columns[name], kind) for name, kind in decoders.items()}

    @property
    def decoded_row_bytes(self) -> int:
        """What the decoded columns of one row take, as far as their shape is declared."""
        return sum(math.prod(self._columns[name].shape) for name in self._decoders if self._columns[name].shape)

    def split(
        self, gathered: Mapping[str, NDArray[Any] | Rows], sizes: Sequence[int], executor: Executor, spare: Spare
    ) -> list[Columns]:
        """One dict of columns per batch of `sizes` rows; what is decoded, in spare memory."""
        parts: list[Columns] = [{} for _ in sizes]
        for name, values in gathered.items():
            for part, value in zip(parts, self._split_column(name, values, sizes, executor, spare), strict=True):
                part[name] = value
        return parts

    def _split_column(
        self, name: str, values: NDArray[Any] | Rows, sizes: Sequence[int], executor: Executor, spare: Spare
    ) -> Sequence[Any]:
        if not isinstance(values, Rows):
            return torch.from_numpy(values).split(list(sizes))
        edges = np.concatenate(([0], np.cumsum(sizes))).tolist()
        column = self._columns[name]
        if column.layout != "binary":
            return [_ragged(values, a, b) for a, b in itertools.pairwise(edges)]
        rows = _byte_strings(values)
        decoder = self._decoders.get(name)
        if decoder is None:
            return [rows[a:b] for a, b in itertools.pairwise(edges)]
        if column.shape:
            out = spare.take(f"{name} decoded", (len(rows), *column.shape), np.dtype(np.uint8))
            _decode(column, decoder, rows, out, executor)
            return torch.from_numpy(out).split(list(sizes))
        images = _decoded_apart(column, decoder, rows, executor)
        return [images[a:b] for a, b in itertools.pairwise(edges)]


def _decode(column: Column, decoder: Decoder, rows: list[bytes], out: NDArray[np.uint8], executor: Executor) -> None:
    """Decode rows of one shape in the executor's threads into `out` (n, *shape)."""

    def decode(begin: int) -> None:
        part = slice(begin, begin + DECODE_ROWS)
        decode_into(column, decoder, rows[part], out[part])

    for _ in executor.map(decode, range(0, len(rows), DECODE_ROWS)):
        pass  # the first error, if any


def _decoded_apart(column: Column, decoder: Decoder, rows: list[bytes], executor: Executor) -> list[torch.Tensor]:
    """The same for rows whose shapes differ."""
    parts = [rows[i : i + DECODE_ROWS] for i in range(0, len(rows), DECODE_ROWS)]
    decoded = executor.map(lambda part: [row.copy() for row in decode_rows(column, decoder, part)], parts)
    return [torch.from_numpy(row) for part in decoded for row in part]


def _ragged(rows: Rows, begin: int, end: int) -> Ragged:
    offsets = []
    for level in rows.offsets:
        cut = level[begin : end + 1]
        begin, end = int(cut[0]), int(cut[-1])
        offsets.append(torch.from_numpy(cut - begin))
    return Ragged(torch.from_numpy(rows.values[begin:end]), tuple(reversed(offsets)))


def _byte_strings(rows: Rows) -> list[bytes]:
    data = rows.values.tobytes()
    offsets = rows.offsets[0].tolist()
    return [data[a:b] for a, b in itertools.pairwise(offsets)]


def batch_of(columns: Columns, rows: int, global_rows: int, cursor: int) -> Batch:
    ids = columns.pop(ROW_NUMBER, None)
    return Batch(columns, rows, global_rows, cursor, ids=ids)
