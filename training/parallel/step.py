"""Step together: every rank's gradients make one step, on the ring, with ZeRO, or alone (see strategy.Strategy)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sparkring.training.data.batch import Batch
from sparkring.training.parallel.local import LocalStep, StepInfo
from sparkring.training.parallel.meeting import GroupMeeting
from sparkring.training.parallel.strategy import Strategy


class MeshStrategy(Strategy):
    """See strategy.Strategy. One process is the same code with `SingleProcess` and nothing placed."""

    def __init__(self, local: LocalStep) -> None:
        super().__init__(local, GroupMeeting(local), local.context.at.dp, local.mesh.dp)

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        self.expect_step()
        return self.local.compute(batch)

    def step(self, lr: float) -> StepInfo:
        self.awaits_step = False
        info = self.local.step(lr)
        return replace(info, first_bad_rank=self._first_bad_rank()) if info.skipped else info

    def _first_bad_rank(self) -> int | None:
        """Return the lowest rank whose own loss was not finite; None if only gradients overflowed."""
        rank, world = self.local.rank, self.local.mesh.world
        first = torch.tensor(world if math.isfinite(float(self.local.loss_sum)) else rank)
        if world > 1:
            dist.all_reduce(first, op=dist.ReduceOp.MIN)
        return int(first) if int(first) < world else None

    # --- between steps -------------------------------------------------------------------------------------------

    def state_dict(self, stored: Mapping[str, Sequence[int] | None] | None = None) -> dict[str, Any]:
        return self.local.state_dict(stored)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.local.load_state_dict(state)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        average, data_parallel = self.prepared.average, self.local.data_parallel
        if average is None:
            yield
            return
        average.swap()
        data_parallel.share_weights()
        yield  # not in a `try`: after an error no rank waits for the others to share weights again
        average.swap()
        data_parallel.share_weights()
