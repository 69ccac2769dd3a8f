"""Dataclasses of numbers and texts to bytes and back, generated from the field types.

What the control channel's codec is for JSON, for messages of which a step sends several: a float keeps its bits, and a
message costs microseconds. Fields follow each other in their order, little-endian, without padding:

    int, float      8 bytes                   X | None     1 byte, and X unless that is 0
    bool            1 byte                    str          4 bytes (its UTF-8 bytes), and these
    a dataclass     its fields                tuple[X, ...]  4 bytes (entries), and these
"""

from __future__ import annotations

import dataclasses
import struct
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import takewhile
from typing import Any, Union

from sparkring.conf.plain_text import count_of

Buffer = bytes | bytearray | memoryview
_SCALARS = {int: "q", float: "d", bool: "?"}
_COUNT = struct.Struct("<I")
_FLAG = struct.Struct("<?")


@dataclass(frozen=True)
class FieldCodec:
    """How values of one type are written, and read at an offset: (value, offset of what follows)."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[Buffer, int], tuple[Any, int]]


def pack(message: Any) -> bytes:
    """Return the bytes of a dataclass. struct.error where a value is not of its field's type."""
    kind: Any = type(message)
    return codec_of(kind).pack(message)


def unpack(kind: Any, data: Buffer) -> Any:
    """Read a dataclass of this class. ValueError where the bytes are not one."""
    try:
        found, end = codec_of(kind).unpack(data, 0)
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"no {kind.__name__}: {error}") from None
    if end != len(data):
        raise ValueError(f"a {kind.__name__} of {end} bytes, and {len(data) - end} more")
    return found


@cache
def codec_of(kind: Any) -> FieldCodec:
    """Make the codec of a field type. TypeError for a type that messages do not use."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SCALARS:
        return _scalar(_SCALARS[kind])
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return _converted(_scalar(_SCALARS[int]), kind)
    if kind is str:
        return _text()
    if origin in (Union, types.UnionType):
        (inner,) = (part for part in parts if part is not types.NoneType)  # `X | None` alone is used
        return _optional(codec_of(inner))
    if origin is tuple and parts[-1] is Ellipsis:
        return _numbers(_SCALARS[parts[0]]) if parts[0] in (int, float) else _entries(codec_of(parts[0]))
    if dataclasses.is_dataclass(kind):
        return _object(kind)
    raise TypeError(f"{kind}: no type of a message's field")


def _scalar(form: str) -> FieldCodec:
    one = struct.Struct(f"<{form}")
    return FieldCodec(one.pack, lambda data, at: (one.unpack_from(data, at)[0], at + one.size))


def _converted(inner: FieldCodec, kind: Callable[[Any], Any]) -> FieldCodec:
    def unpack(data: Buffer, at: int) -> tuple[Any, int]:
        value, end = inner.unpack(data, at)
        return kind(value), end

    return FieldCodec(inner.pack, unpack)


def _counted(data: Buffer, at: int, least_bytes: int) -> tuple[int, int]:
    """Read a count of entries that have `least_bytes` each: (count, offset of the first)."""
    (count,) = _COUNT.unpack_from(data, at)
    at += _COUNT.size
    if count * least_bytes > len(data) - at:
        raise ValueError(f"{count_of(count, 'entry', ',')} in {count_of(len(data) - at, 'byte', ',')}")
    return count, at


def _text() -> FieldCodec:
    def pack(value: str) -> bytes:
        encoded = value.encode()
        return _COUNT.pack(len(encoded)) + encoded

    def unpack(data: Buffer, at: int) -> tuple[str, int]:
        count, at = _counted(data, at, 1)
        return bytes(data[at : at + count]).decode(), at + count

    return FieldCodec(pack, unpack)


def _optional(inner: FieldCodec) -> FieldCodec:
    def unpack(data: Buffer, at: int) -> tuple[Any, int]:
        (is_there,) = _FLAG.unpack_from(data, at)
        return inner.unpack(data, at + 1) if is_there else (None, at + 1)

    return FieldCodec(lambda value: b"\0" if value is None else b"\1" + inner.pack(value), unpack)


def _numbers(form: str) -> FieldCodec:
    """Make the codec of a tuple of numbers, packed at once."""

    def pack(values: tuple[Any, ...]) -> bytes:
        return struct.pack(f"<I{len(values)}{form}", len(values), *values)

    def unpack(data: Buffer, at: int) -> tuple[Any, int]:
        count, at = _counted(data, at, 8)
        return struct.unpack_from(f"<{count}{form}", data, at), at + 8 * count

    return FieldCodec(pack, unpack)


def _entries(inner: FieldCodec) -> FieldCodec:
    def unpack(data: Buffer, at: int) -> tuple[Any, int]:
        count, at = _counted(data, at, 1)
        found = []
        for _ in range(count):
            value, at = inner.unpack(data, at)
            found.append(value)
        return tuple(found), at

    return FieldCodec(lambda values: _COUNT.pack(len(values)) + b"".join(map(inner.pack, values)), unpack)


def _object(kind: Any) -> FieldCodec:
    """Make the codec of a dataclass: leading numbers at once, then the other fields one by one."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    numbers = list(takewhile(lambda name: hints[name] in _SCALARS, names))
    head = struct.Struct("<" + "".join(_SCALARS[hints[name]] for name in numbers))
    rest = [(name, codec_of(hints[name])) for name in names[len(numbers) :]]

    def pack(value: Any) -> bytes:
        packed = head.pack(*[getattr(value, name) for name in numbers])
        for name, codec in rest:
            packed += codec.pack(getattr(value, name))
        return packed

    def unpack(data: Buffer, at: int) -> tuple[Any, int]:
        values: list[Any] = [*head.unpack_from(data, at)]
        at += head.size
        for _, codec in rest:
            value, at = codec.unpack(data, at)
            values.append(value)
        return kind(*values), at

    return FieldCodec(pack, unpack)
