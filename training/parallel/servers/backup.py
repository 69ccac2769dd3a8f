"""A rank on servers whose step does not wait for the slowest ranks (docs/explanation/asynchronous.md).

In each step a rank asks for a batch share, pulls, computes and pushes as with bound 0, and then waits until the first
server knows which gradients make the step. Every rank makes every step, with or without a gradient: a late rank goes
through the steps it has missed without computing. So evaluations, checkpoints and logs are at the same step
on all ranks, as on the ring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from sparkring.training.data.audit.log import AuditLog
from sparkring.training.data.audit.parts import PartsAudit
from sparkring.training.data.batch import Batch, BatchShare, Reader
from sparkring.training.data.parts import PartsReader
from sparkring.training.parallel.local import StepInfo
from sparkring.training.parallel.servers.strategy import ServersStrategy, norm_of
from sparkring.training.parallel.strategy import MeetsAt, OpenShare
from sparkring.training.servers.backup import AHEAD, StepOutcome
from sparkring.training.servers.client import statuses
from sparkring.training.servers.messages import ShardStatus
from sparkring.training.tables.hot_ids import HotIds


def usable_backup(wanted: int, world: int) -> int:
    """Return how many ranks a step need not wait for: at most half, after the world shrank."""
    return min(wanted, world // 2)


class BackupStrategy(ServersStrategy):
    """See strategy.Strategy. Batches have a batch share, or no rows."""

    lookahead = AHEAD

    _hot: Mapping[str, HotIds]

    @property
    def backup(self) -> int:  # type: ignore[override]
        return usable_backup(self.settings.backup, self.link.world)

    @property
    def parts(self) -> int:
        return self.link.world - self.backup

    def take(self, limit: int) -> BatchShare | None:
        """Take the batch share that this rank computes in the next step, or None; steps stay below `limit`.

        Ranks at a synchronization point continue first: a rank without a share waits for another's gradient, and that
        rank for all to continue.
        """
        if self.link.met_at == self.clock:
            self._go_on()
        return self.link.client.take(self.clock, limit)

    def open_training(self, open_share: OpenShare, meets_at: MeetsAt) -> Reader:
        """Open the batch shares that this rank is given, of any stream; its own is verified, others by their ranks."""
        stream = self.data_rank % self.parts
        own = open_share(stream, self.parts)

        def open_stream(other: int) -> Reader:
            return open_share(other, self.parts, verified=False)

        return PartsReader(own, stream, open_stream, lambda step: self.take(meets_at(step, own.steps_per_epoch)))

    def record_again(self, audit: AuditLog | PartsAudit, training: Reader, begun: int, step: int) -> None:
        """Record the batch shares that this rank's gradients have made steps with since the last checkpoint."""
        assert isinstance(audit, PartsAudit) and isinstance(training, PartsReader)
        audit.record_again(self.link.client.counted(), training.read, training.steps_per_epoch)

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        self._hot = dict(self.tables.hot)
        if batch.part is not None:
            return super().forward_backward(batch)
        self._batch, self.awaits_step = batch, True
        return torch.zeros((), dtype=torch.float64)

    def _draws_at(self) -> tuple[int, int]:
        assert self._batch is not None and self._batch.part is not None
        return self._batch.part.stream, self._batch.part.clock

    def _step(self, lr: float) -> StepInfo:
        assert self._batch is not None
        has_gradient = False
        if self._batch.part is not None:
            frames, _ = self._pushed(lr)
            has_gradient = ShardStatus.LATE not in statuses(frames)
        with self.local.data_parallel.waiting():
            outcome = self._outcome(has_gradient)
        counted = has_gradient and self.rank in outcome.counted
        if not counted:
            self.tables.hot = dict(self._hot)
        if self.rank in outcome.counted and math.isfinite(outcome.norm):  # also one of the process that this replaces
            self.late.commit(self.clock, self._batch)
        return self._made(
            StepInfo(
                outcome.norm,
                skipped=not math.isfinite(outcome.norm),
                first_bad_rank=outcome.bad_worker,
                counted=counted,
            )
        )

    def _outcome(self, has_gradient: bool) -> StepOutcome:
        """Wait until the step is made; it is this rank that has all servers make it where no other was faster."""
        client = self.link.client
        while True:
            found = client.choose(self.clock, has_gradient)
            if isinstance(found, StepOutcome):
                return found
            if (sums := client.add_up(self.clock, found)) is not None:
                norm, bad = norm_of(sums)
                client.settle(self.clock, self.settled_factor(norm))
                client.made(self.clock, norm, bad)
