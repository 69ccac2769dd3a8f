"""Send rows between all ranks: what a table on several ranks needs of a network."""

from __future__ import annotations

import math
import time
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from sparkring.training.waiting import waits_for_ranks

Counts = NDArray[np.int64]  # (world,)


class Exchange(Protocol):
    """Collectives over all ranks, called in the same order on each."""

    rank: int
    world: int
    waited_s: float  # in all calls so far
    sent_bytes: float  # in all calls so far, to other ranks

    def counts(self, send: Counts) -> Counts:
        """Send number r to rank r; returns the number from each rank."""
        ...

    def rows(self, rows: torch.Tensor, send: Counts, receive: Counts) -> torch.Tensor:
        """Send rows (n, ...), in order of their ranks, `send` of them to each; returns those received, likewise."""
        ...


class Alone:
    """A single process, which sends nothing."""

    rank, world = 0, 1
    waited_s = sent_bytes = 0.0

    def counts(self, send: Counts) -> Counts:
        return send

    def rows(self, rows: torch.Tensor, send: Counts, receive: Counts) -> torch.Tensor:
        return rows


class TorchExchange:
    """All-to-all of torch.distributed between the hosts' memories, which tables are in: Gloo, also besides NCCL.

    Bytes sent per rank and call: those of the rows for other ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Use `group`, with a backend for CPU tensors; None: the world."""
        self._group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.waited_s = self.sent_bytes = 0.0

    def counts(self, send: Counts) -> Counts:
        one = np.ones(self.world, np.int64)
        received: Counts = self.rows(torch.from_numpy(send), one, one).numpy()
        return received

    @waits_for_ranks
    def rows(self, rows: torch.Tensor, send: Counts, receive: Counts) -> torch.Tensor:
        began = time.monotonic()
        width = math.prod(rows.shape[1:])
        # flat: measure.CommsMeter takes all-to-alls of more dims for activations
        flat = torch.empty(int(receive.sum()) * width, dtype=rows.dtype)
        received, sent = (receive * width).tolist(), (send * width).tolist()
        dist.all_to_all_single(flat, rows.reshape(-1), received, sent, group=self._group)
        self.waited_s += time.monotonic() - began
        others = int(send.sum() - send[self.rank])
        self.sent_bytes += others * width * rows.element_size()
        return flat.reshape(-1, *rows.shape[1:])
