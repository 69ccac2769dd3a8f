"""Check an Avro file before pyiceberg reads it: whole, of bounded size, every length within its bytes.

pyiceberg's decoder trusts counts and lengths, and decompresses without a bound: a damaged manifest would end the
process or fill the memory.
"""

from __future__ import annotations

import bz2
import io
import json
import zlib
from collections.abc import Callable
from typing import Any

from sparkring.conf.plain_text import count_of

MOST_BYTES = 128 << 20  # of a file, compressed and not; writers split manifests at 8 MB
MOST_OBJECTS = 1 << 25  # of Python, about, that pyiceberg makes of a file: at most 1.5 GB
OF_A_RECORD = 16  # objects, besides those of its fields
MAGIC, SYNC_BYTES = b"Obj\x01", 16
LONGEST = 10  # bytes of an integer
FIXED = {"null": 0, "boolean": 1, "float": 4, "double": 8}
Skip = Callable[[bytes, int], int]  # (data, position of a value) -> position behind it; ValueError beyond the end


class _Objects:
    """Counts what a file is made into. Few bytes may be many: those that repeat are packed a thousandfold."""

    def __init__(self) -> None:
        self._left = MOST_OBJECTS

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError(f"holds more than {MOST_OBJECTS} values")


def check_avro(data: bytes) -> None:
    """Raise ValueError unless the bytes are one whole Avro file of at most MOST_BYTES once decompressed.

    It also has at most MOST_OBJECTS values, a record counted as OF_A_RECORD more.
    """
    if not data.startswith(MAGIC):
        raise ValueError("is not an Avro file")
    meta, position = _header(data)
    sync, position = data[position : position + SYNC_BYTES], position + SYNC_BYTES
    skip = _skip(json.loads(meta.get("avro.schema", b"null")), _Objects())
    codec = meta.get("avro.codec", b"null").decode()
    left = MOST_BYTES
    while position < len(data):
        records, position = _integer(data, position)
        size, position = _integer(data, position)
        block, position = _within(data, position, size), position + size
        if data[position : position + SYNC_BYTES] != sync:
            raise ValueError(f"is cut off or damaged before byte {position}")
        position += SYNC_BYTES
        values = _decompressed(block, codec, left)
        left -= len(values)
        if not 0 <= records <= len(values):  # pyiceberg writes an empty block where a list has no manifest
            raise ValueError(f"has a block of {count_of(records, 'record')} in {count_of(len(values), 'byte')}")
        at = 0
        for _ in range(records):
            at = skip(values, at)
        if at != len(values):
            raise ValueError(f"has {len(values) - at} bytes behind the records of a block")


def _header(data: bytes) -> tuple[dict[str, bytes], int]:
    """Read the map behind the magic bytes; returns it and the position behind it."""
    meta, position = dict[str, bytes](), len(MAGIC)
    while True:
        count, position = _integer(data, position)
        if count < 0:
            _, position = _integer(data, position)
        if count == 0:
            return meta, position
        for _ in range(abs(count)):
            size, position = _integer(data, position)
            name, position = _within(data, position, size), position + size
            size, position = _integer(data, position)
            meta[name.decode()], position = _within(data, position, size), position + size


def _decompressed(block: bytes, codec: str, most: int) -> bytes:
    if codec == "null":
        return block
    if codec == "deflate":
        return _bounded(zlib.decompressobj(-15).decompress(block, most + 1), most)
    if codec == "bzip2":
        return _bounded(bz2.BZ2Decompressor().decompress(block, most + 1), most)
    if codec == "zstandard":
        from zstandard import ZstdDecompressor, ZstdError

        try:
            with ZstdDecompressor().stream_reader(io.BytesIO(block)) as reader:
                return _bounded(reader.read(most + 1), most)
        except ZstdError as error:
            raise ValueError(f"is damaged: {error}") from error
    if codec == "snappy":
        import snappy  # the package of pyiceberg's extra `snappy`

        size, _ = _integer(block, 0, zigzag=False)
        if size > most:
            raise ValueError(f"decompresses to more than {MOST_BYTES} bytes")
        return bytes(snappy.decompress(block[:-4]))
    raise ValueError(f"is compressed with {codec!r}, which Iceberg does not use")


def _bounded(values: bytes, most: int) -> bytes:
    if len(values) > most:
        raise ValueError(f"decompresses to more than {MOST_BYTES} bytes")
    return values


def _within(data: bytes, position: int, size: int) -> bytes:
    if size < 0 or position + size > len(data):
        raise ValueError(
            f"is cut off or damaged: {count_of(size, 'byte is')} announced at byte {position} of {len(data)}"
        )
    return data[position : position + size]


def _integer(data: bytes, position: int, zigzag: bool = True) -> tuple[int, int]:
    """Read an integer of variable length; returns it and the position behind it."""
    value = 0
    for shift in range(LONGEST):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return ((value >> 1) ^ -(value & 1)) if zigzag else value, position
    raise ValueError(f"is cut off or damaged at byte {position}")


# --- what is behind a value of each type


def _skip(schema: Any, objects: _Objects) -> Skip:
    """Make the function that steps over a value. ValueError for a schema that Iceberg does not write."""
    if isinstance(schema, list):
        return _union([_skip(one, objects) for one in schema])
    kind = schema.get("type") if isinstance(schema, dict) else schema
    if isinstance(kind, dict | list):
        return _skip(kind, objects)
    if kind in FIXED:
        return _fixed(FIXED[kind])
    if kind in ("int", "long"):
        return lambda data, at: _integer(data, at)[1]
    if kind in ("string", "bytes"):
        return _sized
    if isinstance(schema, dict) and kind == "fixed" and type(schema.get("size")) is int and schema["size"] > 0:
        return _fixed(schema["size"])
    if isinstance(schema, dict) and kind == "record" and isinstance(schema.get("fields"), list):
        kinds = [field.get("type") if isinstance(field, dict) else None for field in schema["fields"]]
        return _record([_skip(kind, objects) for kind in kinds], objects)
    if isinstance(schema, dict) and kind == "array":
        return _items([_skip(schema.get("items"), objects)], objects)
    if isinstance(schema, dict) and kind == "map":
        return _items([_sized, _skip(schema.get("values"), objects)], objects)
    raise ValueError(f"has a schema with the type {str(schema)[:80]}, which Iceberg does not write")


def _sized(data: bytes, at: int) -> int:
    size, at = _integer(data, at)
    if size < 0 or at + size > len(data):
        raise ValueError(f"is damaged: a value of {count_of(size, 'byte')}")
    return at + size


def _fixed(size: int) -> Skip:
    def skip(data: bytes, at: int) -> int:
        if at + size > len(data):
            raise ValueError(f"is damaged: a value of {count_of(size, 'byte')}")
        return at + size

    return skip


def _union(parts: list[Skip]) -> Skip:
    def skip(data: bytes, at: int) -> int:
        chosen, at = _integer(data, at)
        if not 0 <= chosen < len(parts):
            raise ValueError(f"is damaged: a value of type {chosen} of {len(parts)}")
        return parts[chosen](data, at)

    return skip


def _record(parts: list[Skip], objects: _Objects) -> Skip:
    cost = OF_A_RECORD + len(parts)

    def skip(data: bytes, at: int) -> int:
        objects.take(cost)
        for part in parts:
            at = part(data, at)
        return at

    return skip


def _items(parts: list[Skip], objects: _Objects) -> Skip:
    def skip(data: bytes, at: int) -> int:
        while True:
            count, at = _integer(data, at)
            if count < 0:
                count, at = -count, _integer(data, at)[1]
            if count == 0:
                return at
            if count > len(data) - at:  # an item of no bytes would be one without limit, too
                raise ValueError(f"is damaged: {count_of(count, 'item')} in {count_of(len(data) - at, 'byte')}")
            objects.take(count * len(parts))
            for _ in range(count):
                for part in parts:
                    at = part(data, at)

    return skip
