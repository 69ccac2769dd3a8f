"""Rows that were pulled ahead (tables.lag) and whose gradients have not come yet: at their owner, and in checkpoints.

The gradient of a row that was evicted since it was pulled is dropped, even where its id is stored again: it is the
gradient of a row that is gone. One of a row that was not stored yet when it was pulled counts as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.tables.files import RowFile, whole
from sparkring.training.tables.hashing import Ids, bucket_of
from sparkring.training.tables.table import Table

Array = NDArray[Any]
INITIAL, STORED, EVICTED = 0, 1, 2  # a row when it was pulled: not stored, stored; and evicted since


@dataclass(frozen=True)
class RowsAhead:
    """What was answered to one pull. ids: (n,), which may repeat; rows: (n, dim); state: (n,) uint8, of the above."""

    ids: Ids
    rows: Array
    state: NDArray[np.uint8]

    def mark_evicted(self, evicted: Ids) -> None:
        """Record ids whose rows are gone now."""
        if len(evicted):
            self.state[(self.state == STORED) & np.isin(self.ids, evicted)] = EVICTED

    def of_buckets(self, buckets: NDArray[np.int64]) -> RowsAhead:
        """Copy what it has of `buckets`: each id once, sorted."""
        ids, first = np.unique(self.ids, return_index=True)
        inside = np.isin(bucket_of(ids), buckets)
        first = first[inside]
        return RowsAhead(ids[inside], self.rows[first], self.state[first])


def pulled_ahead(table: Table, ids: Ids, kept: RowsAhead | None = None) -> RowsAhead:
    """Look ids up, (n,). `kept`: rows that a checkpoint has of this pull, which are answered as they were then."""
    rows, state = table.pull(ids), table.stores(ids).astype(np.uint8)
    if kept is not None and len(kept.ids):
        place = np.minimum(np.searchsorted(kept.ids, ids), len(kept.ids) - 1)
        known = kept.ids[place] == ids  # all of them, unless the order of rows is another one now
        rows[known], state[known] = kept.rows[place[known]], kept.state[place[known]]
    return RowsAhead(ids, rows, state)


def ahead_tensors(parts: Sequence[RowsAhead], batches: int, like: Array) -> dict[str, torch.Tensor]:
    """Return the tensors for a checkpoint's file.

    Args:
        parts: pulled rows whose gradients are outstanding, oldest first.
        batches: batches trained since the process started; ties the file to older files of the same process.
        like: array (0, dim) with the dtype of the rows.
    """
    return {
        "ahead_batches": torch.tensor([batches]),
        "ahead_starts": torch.from_numpy(np.cumsum([0, *(len(part.ids) for part in parts)])),
        "ahead_ids": torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(part.ids for part in parts)])),
        "ahead_rows": torch.from_numpy(np.concatenate([like, *(part.rows for part in parts)])),
        "ahead_state": torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *(part.state for part in parts)])),
    }


def rows_ahead_of(files: Sequence[Mapping[str, RowFile]], buckets: NDArray[np.int64]) -> list[RowsAhead]:
    """Read a checkpoint's outstanding pulls of `buckets`; returns [] for runs without lag.

    `files`: files of a table from all ranks, including earlier steps; the newest count.
    """
    counted = [(int(whole(file["ahead_batches"])[0]), file) for file in files if "ahead_batches" in file]
    batches = max((count for count, _ in counted), default=0)
    newest = [file for count, file in counted if count == batches]
    if not newest:
        return []
    starts = [whole(file["ahead_starts"]) for file in newest]
    parts = []
    for pull in range(len(starts[0]) - 1):
        spans = [(file, int(start[pull]), int(start[pull + 1])) for file, start in zip(newest, starts, strict=True)]
        ids, rows, state = (
            np.concatenate([file[f"ahead_{name}"].read_rows(begin, end).numpy() for file, begin, end in spans])
            for name in ("ids", "rows", "state")
        )
        parts.append(RowsAhead(ids, rows, state).of_buckets(buckets))
    return parts
