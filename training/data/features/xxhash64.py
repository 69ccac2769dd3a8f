"""xxHash64 of many byte strings at once, in numpy: bit by bit what Spark's `xxhash64` gives for one column.

https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, with Spark's seed. Spark hashes a string by its UTF-8
bytes, and a bigint by its 8 bytes, lowest first; a null changes nothing, so its hash is the seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

SEED = 42
NULL_ID = SEED  # xxhash64(NULL) in Spark
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
_STRIPE = 32  # bytes that four lanes take at once
U64 = NDArray[np.uint64]


def hash_whole(values: NDArray[Any], seeds: U64 | int = SEED) -> NDArray[np.int64]:
    """Hash whole numbers, (n,), as Spark hashes a bigint. `seeds`: (n,) hashes of preceding columns."""
    hashes = np.full(len(values), seeds, np.uint64) + _P5 + np.uint64(8)
    return _finished(_with_word(hashes, values.astype(np.int64).view(np.uint64))).view(np.int64)


def hash_bytes(offsets: NDArray[np.int64], data: NDArray[np.uint8], seeds: U64 | int = SEED) -> NDArray[np.int64]:
    """Hash byte strings, (n,): string i is data[offsets[i] : offsets[i + 1]]. `seeds`: as in hash_whole."""
    sizes = offsets[1:] - offsets[:-1]
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    words: U64 = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))  # at every byte, not only every eighth
    at = offsets[:-1].copy()
    hashes = _striped(words, at, sizes, np.full(len(sizes), seeds, np.uint64)) + sizes.astype(np.uint64)
    rest = sizes % _STRIPE
    for word in range(3):
        more = np.flatnonzero(rest >= 8 * (word + 1))
        hashes[more] = _with_word(hashes[more], words[at[more]])
        at[more] += 8
    half = np.flatnonzero(rest % 8 >= 4)
    low = words[at[half]] & np.uint64(0xFFFFFFFF)
    hashes[half] = _rotated(hashes[half] ^ low * _P1, 23) * _P2 + _P3
    at[half] += 4
    for byte in range(3):
        more = np.flatnonzero(rest % 4 > byte)
        hashes[more] = _rotated(hashes[more] ^ (words[at[more] + byte] & np.uint64(0xFF)) * _P5, 11) * _P1
    return _finished(hashes).view(np.int64)


def _striped(words: U64, at: NDArray[np.int64], sizes: NDArray[np.int64], seeds: U64) -> U64:
    """Return the hashes after all whole stripes, and move `at` past them."""
    hashes = seeds + _P5
    long = np.flatnonzero(sizes >= _STRIPE)
    if not len(long):
        return hashes
    seed = seeds[long]
    lanes = [seed + _P1 + _P2, seed + _P2, seed.copy(), seed - _P1]
    stripes = sizes[long] // _STRIPE
    for stripe in range(int(stripes.max())):
        on = np.flatnonzero(stripes > stripe)
        place = at[long[on]]
        for number, lane in enumerate(lanes):
            lane[on] = _round(lane[on], words[place + 8 * number])
        at[long[on]] += _STRIPE
    turns = zip(lanes, (1, 7, 12, 18), strict=True)
    merged = np.sum([_rotated(lane, turn) for lane, turn in turns], axis=0, dtype=np.uint64)
    for lane in lanes:
        merged = (merged ^ _round(np.zeros_like(lane), lane)) * _P1 + _P4
    hashes[long] = merged
    return hashes


def _rotated(values: U64, bits: int) -> U64:
    turned: U64 = values << np.uint64(bits) | values >> np.uint64(64 - bits)
    return turned


def _round(lane: U64, words: U64) -> U64:
    return _rotated(lane + words * _P2, 31) * _P1


def _with_word(hashes: U64, words: U64) -> U64:
    return _rotated(hashes ^ _round(np.zeros_like(words), words), 27) * _P1 + _P4


def _finished(hashes: U64) -> U64:
    hashes = (hashes ^ hashes >> np.uint64(33)) * _P2
    hashes = (hashes ^ hashes >> np.uint64(29)) * _P3
    made: U64 = hashes ^ hashes >> np.uint64(32)
    return made
