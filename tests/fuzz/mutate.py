"""Damage to stored files and frames: of bytes, and of the values inside where they are JSON."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

RAW = "@raw@"  # a string that begins so is written as it stands, not as a JSON string
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3.5, -0.0, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30, "", "0", "x",
    "../../outside", "/etc/passwd", "a/../../b", "..", ".", "a\0b", "\x1b[2J", "\u202e", "\ud800", "\U0001f600",
    "x" * 5000, "subprocess:Popen", "os:system", "$x^$", "%s{0}", "nan", "1e999", [], {}, [[]], [None], {"": None},
    {"__proto__": 1}, {"__array__": "AAAA", "dtype": "O", "shape": [1]}, {"__tuple__": 1}, {"__float__": []},
    {"__bytes__": "?"},
    f"{RAW}1e999", f"{RAW}-1e999", f"{RAW}NaN", f"{RAW}Infinity", f"{RAW}-0", f"{RAW}{'9' * 400}", f"{RAW}{'9' * 5000}",
    f"{RAW}{'[' * 300}{']' * 300}", f"{RAW}{'[' * 20_000}", RAW + '{"a":' * 5000, f"{RAW}\"\\ud800\"",
    f"{RAW}1.0", f"{RAW}01", list(range(2000)),
]  # fmt: skip


def mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` with one to three kinds of damage."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = _values(rng, data) if rng.random() < 0.7 else _bytes(rng, data)
    return data


def overwritten(rng: random.Random, data: bytes) -> bytes:
    """`data` with one to four bytes changed, and its length kept: damage that leaves most of a binary file in form."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        changed[at] = rng.choice((rng.randrange(256), changed[at] ^ 1 << rng.randrange(8)))
    return bytes(changed)


def _bytes(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 1, 4, 64, len(data))))
    kind = rng.randrange(7)
    if kind == 0 and data:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 3, 20))):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(changed)
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[end:]
    if kind == 3:
        return data[:end] + data[at:]
    if kind == 4:
        return data[:at] + rng.randbytes(rng.choice((1, 8, 300))) + data[at:]
    if kind == 5:
        return (
            data[:at]
            + rng.choice((b"[" * 2000, b"{", b"\xff", b"\\ud800", b'"', b"\0", b"9" * 6000, b"../"))
            + data[at:]
        )
    return rng.choice((b"", b"\n", b"null", b"[]", b"{}", b"0", b'""', b"\xef\xbb\xbf" + data, rng.randbytes(200)))


def _values(rng: random.Random, data: bytes) -> bytes:
    """A JSON document with some values changed; other bytes get `_bytes`."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(rng, data)
    holder = [content]
    for _ in range(rng.choice((1, 1, 2, 5))):
        _change(rng, holder)
    text = json.dumps(holder[0])
    while (at := text.find(f'"{RAW}')) >= 0:
        raw = json.JSONDecoder().raw_decode(text, at)
        text = text[:at] + raw[0].removeprefix(RAW) + text[raw[1] :]
    return text.encode()


def _change(rng: random.Random, holder: list[Any]) -> None:
    places: list[tuple[Any, Any]] = [(holder, 0)]
    for parent, key in places:
        value = parent[key]
        if isinstance(value, dict):
            places += [(value, inner) for inner in value]
        elif isinstance(value, list):
            places += [(value, inner) for inner in range(min(len(value), 50))]
    parent, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0 and parent is not holder:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice((f"{key}x", "../x", "", "__float__", "extra", "format"))] = parent.pop(key)
    elif kind == 2:
        other, other_key = rng.choice(places)
        parent[key] = copy.deepcopy(other[other_key])
    elif kind == 3 and isinstance(parent[key], int | float):
        was = parent[key]
        parent[key] = rng.choice((-was, was + 1, was * 10**6, str(was)))
    elif kind == 4 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[key] = copy.deepcopy(rng.choice(NASTY))
