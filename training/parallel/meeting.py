"""What the ranks of a process group do when they meet: to sum scores, to compare measurements, to write the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from sparkring.training.parallel.local import LocalStep
from sparkring.training.parallel.measure import combined
from sparkring.training.parallel.process_groups import abort_process_groups
from sparkring.training.parallel.state import TensorInfo, model_tensors, stream_tensors


class GroupMeeting:
    """All ranks of the world, over torch.distributed. Its methods are collective; one process is a special case."""

    def __init__(self, local: LocalStep) -> None:
        self.local, self.rank, self.world = local, local.rank, local.mesh.world

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """See Strategy.sum_over_data."""
        if self.world == 1:
            return values
        share = self.share_of_sum(values)
        dist.all_reduce(share)
        return share

    def share_of_sum(self, values: torch.Tensor) -> torch.Tensor:
        """See Strategy.share_of_sum; not collective."""
        share = torch.zeros(values.shape).double()
        if self.local.is_sequence_leader:
            share = values.detach().to("cpu", torch.float64)
        return share / self.local.mesh.cp

    def combine(self, mine: dict[str, float]) -> dict[str, float]:
        """Combine what every rank has measured."""
        everyone: list[Any] = [mine] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, mine)
        return combined(everyone)

    def stream_model(self) -> tuple[list[TensorInfo], Iterator[torch.Tensor | None]]:
        """See Strategy.stream_model."""
        prepared = self.local.prepared
        return stream_tensors(
            model_tensors(prepared.module, self.local.aliases), prepared.plain_keys, self.rank, self.world
        )

    def close(self, failed: bool) -> None:
        """See Strategy.close."""
        local = self.local
        local.tables.close(failed)
        if local.is_prepared:
            local.data_parallel.close(failed)
        if not dist.is_initialized():
            return
        if failed:
            abort_process_groups()
        else:
            dist.destroy_process_group()
