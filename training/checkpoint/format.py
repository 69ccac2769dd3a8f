"""The bytes of a checkpoint: safetensors files and JSON, nothing that has to be unpickled.

A safetensors file is: header length (8 bytes, little endian), a JSON header `{name: {dtype, shape, data_offsets}}`,
then the raw little-endian data (https://huggingface.co/docs/safetensors). It is written here directly: streamed, hashed
on the way, to any storage. A tensor sharded over ranks is cut into chunks named `<name>@<offset>,<offset>...`.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator

from sparkring.conf.storage import Storage

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or loaded; the message names the rank, the file or tensors, and the cause."""


@dataclass(frozen=True)
class Chunk:
    """A box of one tensor in a file. `shape` is the whole tensor's; `begin` and `end` are byte positions in `file`."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str = ""
    begin: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """Its key in the file: the tensor's own name where the chunk is the whole tensor."""
        return self.fqn if self.sizes == self.shape else f"{self.fqn}@{','.join(map(str, self.offsets))}"


def place_chunks(
    chunks: Sequence[Chunk], file: str, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[Chunk]]:
    """Make the header of a safetensors file of `chunks`, in order; returns it and the chunks placed in `file`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    ends = list(itertools.accumulate((chunk.nbytes for chunk in chunks), initial=0))
    for chunk, (begin, end) in zip(chunks, itertools.pairwise(ends), strict=True):
        entry = {"dtype": DTYPE_NAMES[chunk.dtype], "shape": list(chunk.sizes), "data_offsets": [begin, end]}
        header[chunk.name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    placed = [
        replace(chunk, file=file, begin=start + begin, end=start + end)
        for chunk, (begin, end) in zip(chunks, itertools.pairwise(ends), strict=True)
    ]
    return len(text).to_bytes(8, "little") + text, placed


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def read_rows(storage: Storage, chunk: Chunk, start: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Read the box `lengths` at `start`, relative to a stored chunk. Reads whole rows of dim 0."""
    first, count = (start[0], lengths[0]) if chunk.sizes else (0, 1)
    row_bytes = math.prod(chunk.sizes[1:]) * chunk.dtype.itemsize
    with storage.fs.open_input_file(storage.path(chunk.file)) as file:
        data = bytearray(file.read_at(count * row_bytes, chunk.begin + first * row_bytes))
    if len(data) != count * row_bytes:
        raise CheckpointError(f"{storage.uri}/{chunk.file}: {chunk.fqn} ends before its last byte")
    if not data:
        return torch.empty(tuple(lengths), dtype=chunk.dtype)
    tensor = torch.frombuffer(data, dtype=torch.uint8).view(chunk.dtype).reshape((count, *chunk.sizes[1:]))
    if not chunk.sizes:
        return tensor.reshape(())
    for dim in range(1, len(chunk.sizes)):
        tensor = tensor.narrow(dim, start[dim], lengths[dim])
    return tensor


def encode_value(value: Any, where: str) -> Any:
    """Return a JSON form that `decode_value` turns back into an equal value of the same type.

    Raises CheckpointError naming `where` for a value that is neither plain data nor a numpy array.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"__float__": repr(float(value))}
    if isinstance(value, list):
        return [encode_value(item, f"{where}.{i}") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"__tuple__": [encode_value(item, f"{where}.{i}") for i, item in enumerate(value)]}
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("__") for key in value):
        return {key: encode_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"__array__": data, "dtype": value.dtype.str, "shape": list(value.shape)}
    raise CheckpointError(
        f"{where}: a {type(value).__name__} cannot be checkpointed; use a tensor, a number, a string, a list, a tuple "
        "or a dict with string keys (no `__` in front)"
    )


def decode_value(value: Any) -> Any:
    """Turn the form of `encode_value` back into the value. ValueError for any other form."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next((key for key in value if key.startswith("__")), None)
    if kind is None:
        return {key: decode_value(item) for key, item in value.items()}
    try:
        return DECODERS[kind](value)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{kind}: not a value of this kind ({error!r})") from error


def _decode_array(value: dict[str, Any]) -> np.ndarray:
    dtype = value["dtype"]
    if not re.fullmatch(r"[<>|=][biuf]\d{1,2}", dtype):
        raise ValueError(f"__array__: {dtype!r} is no type of numbers")
    array = np.frombuffer(base64.b64decode(value["__array__"]), dtype=np.dtype(dtype))
    return array.reshape(value["shape"]).copy()


DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "__float__": lambda value: float(value["__float__"]),
    "__tuple__": lambda value: tuple(decode_value(item) for item in value["__tuple__"]),
    "__bytes__": lambda value: base64.b64decode(value["__bytes__"]),
    "__array__": _decode_array,
}
Decoded = Annotated[Any, AfterValidator(decode_value)]  # a field of a stored model


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
