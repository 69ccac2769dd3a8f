"""Synchronization points of a run: evaluate, checkpoint, stop. A class per way of communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sparkring.training.parallel.local import LocalStep
from sparkring.training.parallel.measure import combined
from sparkring.training.parallel.process_groups import abort_process_groups

Gather = Callable[[bytes], list[bytes]]
"""All-gather of bytes between all ranks: every rank gets all values, in the order of the ranks."""


class Meeting(ABC):
    """Between all ranks of the world; every method but `share_of_sum` is collective unless it says otherwise."""

    rank: int
    world: int

    @abstractmethod
    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small float64 tensor over the data ranks, the same result on every rank of the world."""

    def share_of_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand of `sum_over_data`, on the CPU; 0 if another rank reports the same rows."""
        return values.detach().to("cpu", torch.float64)

    @abstractmethod
    def combine(self, mine: dict[str, float]) -> dict[str, float]:
        """Combine what every rank has measured (Strategy.measure)."""

    def open_gather(self, behind: int = 0) -> Gather | None:
        """Open an all-gather of its own; None: a process group of torch's carries it.

        `behind`: how many calls in a row come from a thread parallel to training, for one purpose; 0: none do.
        """
        return None

    def keep(self, state: bytes) -> None:
        """Keep the loop's state after an evaluation, for a rank that takes another's place. Not collective."""
        return None

    def server_counts(self) -> list[dict[str, Any]]:
        """Return the counts of each server; [] without servers. Not collective."""
        return []

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Destroy what ranks talk over on success, abort it on error; never waits for a dead peer."""


class GroupMeeting(Meeting):
    """Over torch.distributed. One process is a special case."""

    def __init__(self, local: LocalStep) -> None:
        self.local, self.rank, self.world = local, local.rank, local.mesh.world

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        if self.world == 1:
            return values
        share = self.share_of_sum(values)
        dist.all_reduce(share)
        return share

    def share_of_sum(self, values: torch.Tensor) -> torch.Tensor:
        share = torch.zeros(values.shape).double()
        if self.local.is_sequence_leader:
            share = values.detach().to("cpu", torch.float64)
        return share / self.local.mesh.cp

    def combine(self, mine: dict[str, float]) -> dict[str, float]:
        everyone: list[Any] = [mine] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, mine)
        return combined(everyone)

    def close(self, failed: bool) -> None:
        self.local.close(failed)
        if not dist.is_initialized():
            return
        if failed:
            abort_process_groups()
        else:
            dist.destroy_process_group()
