"""Map ids to buckets, buckets to ranks, and ids to initial rows: pure functions of their arguments.

The mixer is splitmix64 (Steele 2014, https://doi.org/10.1145/2714064.2660195).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkring.conf.digest import digest

Ids = NDArray[np.int64]
BUCKETS = 1024
"""Of every table, on every world: rows are stored, checkpointed and given to ranks by bucket."""
_BUCKET_SHIFT = np.uint64(64 - 10)  # the top bits: the map of a rank takes the low ones
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each number; one to one."""
    z = values + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    made: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return made


def hash_of(ids: Ids) -> NDArray[np.uint64]:
    """Hash each id, (n,), for buckets and for places in a map."""
    return mixed(ids.view(np.uint64))


def bucket_of(ids: Ids) -> NDArray[np.int16]:
    """Return the bucket of each id, (n,), 0 to 1,023."""
    return bucket_of_hash(hash_of(ids))


def bucket_of_hash(hashes: NDArray[np.uint64]) -> NDArray[np.int16]:
    """Return the bucket of each hash, (n,); sorted hashes give sorted buckets."""
    return (hashes >> _BUCKET_SHIFT).astype(np.int16)


def bucket_owners(world: int) -> NDArray[np.int64]:
    """Return the rank that owns each bucket, (1024,), by rendezvous hashing.

    From w to w + 1 ranks only the new rank's share of the buckets moves, 1 / (w + 1) of them.
    """
    cells = np.arange(BUCKETS, dtype=np.uint64)[:, None] << np.uint64(32) | np.arange(world, dtype=np.uint64)
    return mixed(cells).argmax(axis=1)


def table_key(seed: int, table: str) -> int:
    """Return a 64-bit key for (seed, table), which with an id seeds its initial row."""
    return int(digest([seed, table])[:16], 16)


def initial_rows(key: int, ids: Ids, scale: NDArray[Any]) -> NDArray[Any]:
    """Draw the first rows of ids, (n, dim): uniform in [-scale, scale), a function of (key, id) alone.

    Args:
        key: key from `table_key`.
        ids: ids to draw rows for, (n,).
        scale: half-width per value, (dim,), in the dtype of the rows.
    """
    own = mixed(ids.view(np.uint64) ^ np.uint64(key))[:, None]
    steps = np.array([(column + 1) * _GOLDEN & _MASK for column in range(len(scale))], np.uint64)
    unit = (mixed(own + steps) >> np.uint64(11)).astype(np.float64)
    unit *= 2.0**-52
    unit -= 1.0
    return (unit * scale).astype(scale.dtype)
