"""One rank's record of the batch shares that it computed for others, each as if its data rank had recorded it.

Files are `rank-<stream>-by-<rank>-<number>.ids`: with backup workers any rank may compute any share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sparkring.conf.storage import Storage
from sparkring.training.data.audit.log import AuditHeader, AuditLog
from sparkring.training.data.batch import Batch, BatchShare


@dataclass
class PartsAudit:
    """See AuditLog. header: of this rank, among ranks that each record their own."""

    storage: Storage
    header: AuditHeader
    _logs: dict[int, AuditLog] = field(default_factory=dict)  # by stream

    def record(self, epoch: int, step: int, batch: Batch) -> None:
        """Record a batch share of a step; `epoch`, `step`: position of that step."""
        assert batch.part is not None
        self._log(batch.part.stream).record(epoch, step, batch)

    def _log(self, stream: int) -> AuditLog:
        if stream not in self._logs:
            header = self.header.model_copy(update={"rank": stream})
            self._logs[stream] = AuditLog(self.storage, header, by=self.header.rank)
        return self._logs[stream]

    def record_again(
        self, counted: Sequence[BatchShare], read: Callable[[BatchShare], Batch], steps_per_epoch: int
    ) -> None:
        """Record what a process of this rank, which died in this attempt, computed and did not record.

        Args:
            counted: batch shares that servers got from it since the last checkpoint.
            read: returns the rows of a batch share.
            steps_per_epoch: number of steps per epoch.
        """
        for stream in range(self.header.size):
            log = self._log(stream)
            recorded = {(record.epoch, record.step) for record in log.take_over()}
            for part in sorted(part for part in counted if part.stream == stream):
                epoch, step = divmod(part.clock, steps_per_epoch)
                if (epoch, step) not in recorded:
                    log.record(epoch, step, read(part))

    def flush(self) -> None:
        for log in self._logs.values():
            log.flush()
