"""Predict what a table holds in a rank's memory."""

from __future__ import annotations

import math

from sparkring.training.tables.hashing import BUCKETS
from sparkring.training.tables.id_map import FULLEST, PLACE_BYTES, PLACES
from sparkring.training.tables.slab import slab_bytes
from sparkring.training.tables.slots import BLOCK

USE_BYTES = 24  # of a row that may be evicted: its last push, its pushes, its id
MARKS = 2  # bytes a slot at most: one, in a power of two of them


def table_bytes(rows: int, row_bytes: int, ranks: int = 1, share: int | None = None) -> int:
    """Predict the most bytes of one rank's share of a table, including the map of its ids.

    Args:
        rows: distinct ids of all ranks.
        row_bytes: bytes of a row's weights and optimizer state.
        ranks: number of ranks that share the rows.
        share: rows of a bucket at most; None: no limit.
    """
    own, places = -(-rows // ranks), PLACES
    while own > FULLEST * places / 1.5:
        places *= 2
    if share is None:
        return slab_bytes(own, row_bytes) + places * PLACE_BYTES + MARKS * own
    slots = block_slots(own, -(-BUCKETS // ranks), share)
    return slab_bytes(slots, row_bytes) + slab_bytes(slots, USE_BYTES) + places * PLACE_BYTES + MARKS * slots


def block_slots(rows: int, buckets: int, share: int) -> int:
    """Estimate the slots for rows hashed to buckets: whole blocks, sized by the fuller buckets."""
    mean, block = rows / buckets, min(BLOCK, share)
    fuller = math.ceil(min(share, mean + 2 * math.sqrt(mean)))
    return min(rows, buckets) * -(-fuller // block) * block
