"""The whole model as one safetensors file, written and read one tensor at a time.

A weight with several names in the model is stored under the first; the others are in the header's `tied`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from sparkring.conf.storage import Storage
from sparkring.conf.stored import StoredError
from sparkring.training.checkpoint.format import DTYPES, Chunk, place_chunks, raw_bytes

FILE = "weights.safetensors"
LONGEST_HEADER = 100 * 2**20  # safetensors' own bound


class Described(Protocol):
    """What is written of a tensor besides its values: parallel.state.TensorInfo, of which this folder knows nothing."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def write_weights(
    folder: Storage, described: Iterable[Described], values: Iterable[torch.Tensor], tied: Mapping[str, str]
) -> None:
    """Write `weights.safetensors` into `folder`, taking one value at a time.

    `tied`: further name of a weight -> its first name.
    """
    chunks = [Chunk(each.name, each.dtype, each.shape, (0,) * len(each.shape), each.shape) for each in described]
    header, _ = place_chunks(chunks, FILE, {"tied": json.dumps(dict(tied))})

    with folder.create(FILE) as file:
        file.write(header)
        for value in values:
            file.write(raw_bytes(value))


@dataclass(frozen=True)
class WeightsTensor:
    """A tensor of a safetensors file, which is read when it is asked for."""

    folder: Storage
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int

    def read(self) -> torch.Tensor:
        """Read the values into new memory."""
        return self._read(self.begin, self.end, self.shape)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Read the values [start, stop) of dim 0 into new memory."""
        shape = (stop - start, *self.shape[1:])
        row_bytes = (self.end - self.begin) // max(self.shape[0], 1)
        return self._read(self.begin + start * row_bytes, self.begin + stop * row_bytes, shape)

    def mapped(self) -> np.ndarray:
        """Return the values as memory mapped read-only from the file; remote files are read."""
        if not self.folder.is_local or self.begin == self.end:
            return self.read().numpy()
        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        return np.memmap(self.folder.path(self.file), dtype, "r", self.begin, self.shape)

    def _read(self, begin: int, end: int, shape: tuple[int, ...]) -> torch.Tensor:
        if begin == end:
            return torch.empty(shape, dtype=self.dtype)
        with self.folder.fs.open_input_file(self.folder.path(self.file)) as file:
            data = bytearray(file.read_at(end - begin, begin))
        return torch.frombuffer(data, dtype=torch.uint8).view(self.dtype).reshape(shape)


def open_weights(folder: Storage, name: str = FILE) -> dict[str, WeightsTensor]:
    """Read the header of a safetensors file; in ours a shared weight has all of its names.

    StoredError names a damaged file.
    """
    where = f"{folder.uri}/{name}"
    with folder.fs.open_input_file(folder.path(name)) as file:
        size = file.size()
        length = int.from_bytes(file.read_at(8, 0), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise StoredError(f"{where}: no weights (its header is {length} bytes long, the file {size})")
        text = file.read_at(length, 8)
    try:
        header = json.loads(text)
        tied = json.loads(header.pop("__metadata__", {}).get("tied", "{}"))
        found = {key: WeightsTensor(folder, name, *_placed(8 + length, size, entry)) for key, entry in header.items()}
        return found | {other: found[first] for other, first in tied.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoredError(f"{where}: no weights ({type(error).__name__}: {str(error)[:200]})") from error


def read_weights(folder: Storage) -> dict[str, torch.Tensor]:
    """Read name -> tensor, every name of the model's state. StoredError names a damaged file."""
    found = open_weights(folder)
    values = {id(stored): stored.read() for stored in found.values()}  # a shared weight is one tensor
    return {name: values[id(stored)] for name, stored in found.items()}


def _placed(start: int, size: int, entry: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Return dtype, shape, and byte range in the file. `start`: offset of values, `size`: of the file."""
    dtype, shape, (begin, end) = DTYPES[entry["dtype"]], torch.Size(entry["shape"]), entry["data_offsets"]
    if not 0 <= begin <= end <= size - start or end - begin != shape.numel() * dtype.itemsize:
        raise ValueError(f"bytes {begin} to {end} do not hold {dtype} {tuple(shape)}")
    return dtype, tuple(shape), start + begin, start + end
