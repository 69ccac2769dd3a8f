"""What an entry returns, on its way to the driver.

JSON where it is JSON, else what torch saves and loads without running code. What is large goes through a file.
"""

from __future__ import annotations

import _codecs
import base64
import contextlib
import dataclasses
import io
import json
import socket
import tempfile
import types
import typing
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from sparkring.conf.storage import open_storage
from sparkring.training.launch.messages import RankResult, StoredResult

MAX_SENT_BYTES = 8 << 20  # in one message to the driver, which may hold 16 MiB
_PREFIX = "sparkring-result-"
_ABSTRACT = ("collections.abc", "typing")  # modules whose types say nothing of the value
_RETURNABLE = {  # by name: torch and numpy need not be imported to look at an annotation
    "builtins": ("NoneType", "bool", "int", "float", "complex", "str", "bytes", "list", "tuple", "dict", "set"),
    "torch": ("Tensor", "Size", "dtype", "device"),
    "numpy": ("ndarray", "generic"),
}


def unreturnable(entry: Callable[..., Any]) -> str | None:
    """Find the type in the entry's return annotation that cannot come back. None where all can, or nothing is known."""
    try:
        annotation = typing.get_type_hints(entry).get("return", Any)
    except Exception:  # a name that exists for type checkers only: the value itself is looked at later
        return None
    return _unreturnable(annotation, ())


def _unreturnable(kind: Any, inside: tuple[Any, ...]) -> str | None:
    parts = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType) or parts:
        found = [_unreturnable(part, inside) for part in parts if part is not Ellipsis]
        return next(filter(None, found), None) if origin is not typing.Literal else None
    if not isinstance(kind, type) or kind is object or kind in inside or kind.__module__ in _ABSTRACT:
        return None
    if dataclasses.is_dataclass(kind):
        with contextlib.suppress(Exception):
            hints = typing.get_type_hints(kind).values()
            return next(filter(None, (_unreturnable(part, (*inside, kind)) for part in hints)), None)
        return None
    if any(base.__qualname__ in _RETURNABLE.get(base.__module__, ()) for base in kind.__mro__):
        return None
    return f"{kind.__module__}.{kind.__qualname__}"


def pack(value: Any, name: str, folder: str | None, rank: int = 0, attempt: int = 1) -> RankResult:
    """Make the message that brings a returned value to `unpack`.

    TypeError where it cannot come back: the error names a file with its pickle.

    Args:
        value: returned value of the entry.
        name: name of the entry, for errors.
        folder: URI for values over MAX_SENT_BYTES; None for the temporary folder.
        rank: rank that has returned it.
        attempt: attempt in which it returned.
    """
    plain = as_plain(value)
    form: Literal["json", "torch"] = "json"
    try:
        data = json.dumps(plain).encode()
    except (TypeError, ValueError):
        data, form = _saved(plain, value, name, folder), "torch"
    if len(data) > MAX_SENT_BYTES:
        return RankResult(rank, attempt, form, None, _store(data, folder))
    return RankResult(rank, attempt, form, data.decode() if form == "json" else base64.b64encode(data).decode())


def unpack(result: RankResult) -> Any:
    """Return the value that was packed, with dataclasses as dicts. RuntimeError where its file cannot be read here."""
    if result.stored is not None:
        data = _fetch(result.stored)
    else:
        text = result.data or ""
        data = text.encode() if result.form == "json" else base64.b64decode(text)
    return json.loads(data) if result.form == "json" else _loaded(data)


def as_plain(value: Any) -> Any:
    """Convert dataclasses to dicts, and subclasses of dict, list and tuple to these, all the way down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(as_plain(part) for part in value)
    return value


def _saved(plain: Any, value: Any, name: str, folder: str | None) -> bytes:
    """Save a value as torch does, and load it again to see that it can be."""
    try:
        import torch

        buffer = io.BytesIO()
        torch.save(plain, buffer)
        _loaded(buffer.getvalue())
        return buffer.getvalue()
    except Exception as error:
        kept = "it cannot be pickled either"
        with contextlib.suppress(Exception):
            stored = _store(cloudpickle.dumps(value), folder)
            kept = f"its pickle is {stored.folder}/{stored.file} on {stored.host}"
        why = next((line for line in str(error).splitlines() if "Unsupported" in line), str(error)[:200])
        raise TypeError(
            f"{name} returned a {type(value).__name__} that cannot come back ({why}); {kept}. Return numbers, strings, "
            "tensors, numpy arrays, dataclasses, and lists and dicts of them"
        ) from None


def _loaded(data: bytes) -> Any:
    """Load tensors to the CPU, numpy arrays and scalars, and containers; nothing in the file runs."""
    import numpy as np
    import torch
    from numpy._core import multiarray

    numpys: list[Any] = [np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar, _codecs.encode]
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"]}
    with torch.serialization.safe_globals([*numpys, *kinds]):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _store(data: bytes, folder: str | None) -> StoredResult:

    storage = open_storage(folder or tempfile.mkdtemp(prefix=_PREFIX))
    file = f"{_PREFIX}{uuid.uuid4().hex}"
    storage.put_atomic(file, data)
    return StoredResult(storage.uri, file, socket.gethostname())


def _fetch(stored: StoredResult) -> bytes:

    folder, file = stored.folder, stored.file
    storage = open_storage(folder)
    try:
        data = storage.read_bytes(file)
    except OSError as error:
        raise RuntimeError(
            f"a large result is in {folder}/{file} on {stored.host}, which cannot be read here ({error}); give "
            "JobSpec(results=...) a folder that every host and the driver reach"
        ) from error
    storage.delete(file)
    if Path(folder).name.startswith(_PREFIX):  # made for this one file
        Path(folder).rmdir()
    return data
