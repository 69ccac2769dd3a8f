"""The ids that batches use most, counted in bounded memory.

Misra-Gries, in batches and merged: Agarwal 2012, https://doi.org/10.1145/2213556.2213562. 1,024 counters are kept.
Where there would be more, the largest that has no place is taken off all of them; its sum is `missed`. So a count is
never too high, and too low by at most `missed`, which is at most a 1,025th of all uses. An id of a larger share is
among the counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.tables.files import RowFile, whole
from sparkring.training.tables.hashing import Ids

COUNTERS = 1024


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class HotIds:
    """Counters of uses. ids: (k,) sorted; counts: (k,); total: uses of all ids; missed: in no counter, per id."""

    ids: Ids = field(default_factory=_none)
    counts: NDArray[np.int64] = field(default_factory=_none)
    total: int = 0
    missed: int = 0

    def with_uses(self, ids: Ids, counts: NDArray[np.int64]) -> HotIds:
        """Add the uses of a batch: distinct ids (n,), sorted, and how often it has each."""
        return self.merged(HotIds(ids, counts, int(counts.sum())))

    def merged(self, other: HotIds) -> HotIds:
        """Add the counters of other batches, such as another rank's."""
        ids, counts, alone = other.ids, other.counts.copy(), np.ones(len(self.ids), np.bool_)
        if len(ids):
            place = np.minimum(np.searchsorted(ids, self.ids), len(ids) - 1)
            alone = ids[place] != self.ids
            counts[place[~alone]] += self.counts[~alone]
        ids, counts = np.concatenate([ids, self.ids[alone]]), np.concatenate([counts, self.counts[alone]])
        missed = self.missed + other.missed
        if len(ids) > COUNTERS:
            cut = int(np.partition(counts, -COUNTERS - 1)[-COUNTERS - 1])
            kept = counts > cut
            ids, counts, missed = ids[kept], counts[kept] - cut, missed + cut
        order = np.argsort(ids)
        return HotIds(ids[order], counts[order], self.total + other.total, missed)

    def top(self, most: int) -> list[tuple[int, int]]:
        """List (id, uses) of the most used ids; equal counts in order of ids."""
        order = np.lexsort((self.ids, -self.counts))[:most]
        return [(int(self.ids[place]), int(self.counts[place])) for place in order]

    def to_json(self) -> list[Any]:
        """Convert to JSON, for another rank's `of_json`."""
        return [self.ids.tolist(), self.counts.tolist(), self.total, self.missed]

    @classmethod
    def of_json(cls, stored: list[Any]) -> HotIds:
        ids, counts, total, missed = stored
        return cls(np.array(ids, np.int64), np.array(counts, np.int64), total, missed)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors for a checkpoint's file."""
        counters = np.column_stack([self.ids, self.counts])
        return {"hot_ids": torch.from_numpy(counters), "hot_uses": torch.tensor([self.total, self.missed])}


def hot_ids_of(files: Sequence[Mapping[str, RowFile]], rank: int, world: int) -> HotIds:
    """Read a rank's share of the counters in a checkpoint: those of ranks rank, rank + world, ...

    Args:
        files: files of a table, including those of earlier steps.
        rank: number of this rank.
        world: number of ranks.
    """
    newest: dict[int, HotIds] = {}  # by the first bucket of who wrote it
    for file in files:
        if "hot_ids" in file:
            ids, counts = (np.ascontiguousarray(column) for column in whole(file["hot_ids"]).T)
            total, missed = whole(file["hot_uses"]).tolist()
            writer = int(whole(file["buckets"])[:1].sum())
            if writer not in newest or newest[writer].total <= total:
                newest[writer] = HotIds(ids, counts, total, missed)
    return reduce(HotIds.merged, [*newest.values()][rank::world], HotIds())
