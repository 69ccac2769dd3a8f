"""The table of a finished model: rows that are read where they are asked for, and never more of them.

A shard has three arrays in order of the ids' hashes: `hashes` (n,), which are searched, `ids` (n,) and `rows` (n, dim).
A process maps the files into its memory, so it holds the rows that it has looked at and others share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.tables.hashing import Ids, bucket_of_hash, bucket_owners, hash_of, initial_rows, table_key

Array = NDArray[Any]


@dataclass(frozen=True)
class LookupPart:
    """What one rank wrote."""

    hashes: NDArray[np.uint64]
    ids: Ids
    rows: Array


class LookupTable:
    """Rows by id. An id that is not stored has its initial row, as in evaluation, and stays out."""

    def __init__(self, name: str, seed: int, scale: Array, parts: Sequence[LookupPart]) -> None:
        """Combine the lookup data of all ranks, in rank order.

        Args:
            name: name of the table.
            seed: seed of the run.
            scale: half-width of initial values, (dim,), in the dtype of the rows.
            parts: lookup data, one item per rank.
        """
        self._key, self._scale, self._parts = table_key(seed, name), scale, parts
        self._owners = bucket_owners(len(parts))

    def content(self, buckets: Array, at_once: int = 1 << 16) -> Iterator[tuple[Ids, Array]]:
        """Yield ids and rows of `buckets`, a block at a time."""
        for part in self._parts:
            picked = np.flatnonzero(np.isin(bucket_of_hash(np.asarray(part.hashes)), buckets))
            for start in range(0, len(picked), at_once):
                some = picked[start : start + at_once]
                yield np.asarray(part.ids[some]), np.asarray(part.rows[some])

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, dim) of ids (n,) int64."""
        asked = ids.cpu().numpy()
        out = initial_rows(self._key, asked, self._scale)
        hashes = hash_of(asked)
        owner = self._owners[bucket_of_hash(hashes)]
        for number, part in enumerate(self._parts):
            own = np.flatnonzero(owner == number)
            if len(own) and len(part.hashes):
                place = np.minimum(np.searchsorted(part.hashes, hashes[own]), len(part.hashes) - 1)
                known = part.hashes[place] == hashes[own]
                out[own[known]] = part.rows[place[known]]
        return torch.from_numpy(out).to(ids.device)
