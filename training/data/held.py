"""Predict what a reader holds on the host: chunks of gathered rows, and pages of decoded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparkring.training.data.decoding.buffers import with_spare

CHUNKS = 3  # one is served, one is ready, one is being made


class HeldRows(NamedTuple):
    """Bytes of a reader's rows: gathered in chunks, and decoded in pages."""

    chunks: int
    pages: int

    @property
    def total(self) -> int:
        return self.chunks + self.pages


def chunk_bytes(epoch_steps: int, most_steps: int, step_bytes: float) -> int:
    """Predict the bytes of chunks; each chunk keeps the memory of the largest one.

    Args:
        epoch_steps: number of steps per epoch.
        most_steps: number of steps per chunk, at most.
        step_bytes: bytes of a rank's rows per step.
    """
    return CHUNKS * with_spare(int(min(epoch_steps, most_steps) * step_bytes))


def page_count(lane_rows: Sequence[int], page_rows: int, ahead_rows: int) -> int:
    """Predict the largest page count: pages of an epoch plus those decoded ahead for the next.

    Args:
        lane_rows: rows of each canonical shard.
        page_rows: rows per page, all of one canonical shard.
        ahead_rows: rows of the next epoch, decoded before this one is served.
    """
    return sum(-(-rows // page_rows) for rows in (*lane_rows, ahead_rows))
