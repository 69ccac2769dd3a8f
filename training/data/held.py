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
    """Predict the bytes of chunks, each of which keeps the memory of the largest.

    Args:
        epoch_steps: steps of an epoch.
        most_steps: of a chunk.
        step_bytes: of a rank's rows of a step.
    """
    return CHUNKS * with_spare(int(min(epoch_steps, most_steps) * step_bytes))


def page_count(lane_rows: Sequence[int], page_rows: int, ahead_rows: int) -> int:
    """Predict the most pages: those of an epoch, and what is decoded ahead of the next one.

    Args:
        lane_rows: rows of each lane.
        page_rows: of a page, all of one lane.
        ahead_rows: of the next epoch, decoded before this one is served.
    """
    return sum(-(-rows // page_rows) for rows in (*lane_rows, ahead_rows))
