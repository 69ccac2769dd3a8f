"""Where a run stands: from consumed samples to steps, for every reader."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)


class StepRange(NamedTuple):
    """Steps [first, stop) of one epoch."""

    epoch: int
    first: int
    stop: int


class EpochSpan(NamedTuple):
    """Batches of one epoch: batch i is its samples [edges[i], edges[i + 1])."""

    epoch: int
    edges: NDArray[np.int64]  # (batches + 1,) ascending


@dataclass(frozen=True)
class EpochSteps:
    """Epochs of `samples` samples in global batches; the last batch may be padded."""

    samples: int
    global_batch: int

    @property
    def steps(self) -> int:
        return -(-self.samples // self.global_batch)

    def consumed_after(self, epoch: int, step: int) -> int:
        """Count the samples consumed since the start of the run after `step` of `epoch`."""
        return epoch * self.samples + min((step + 1) * self.global_batch, self.samples)

    def consumed_at(self, steps: int) -> int:
        """Count the samples consumed after `steps` steps of the run."""
        epoch, step = divmod(steps, self.steps)
        return self.consumed_after(epoch, step - 1)

    def ranges(self, consumed_samples: int, steps: int | None = None) -> Iterator[StepRange]:
        """Divide the next `steps` steps after `consumed_samples` into epochs.

        None: the rest of the epoch. Only a run that continues in another order can stand inside a global batch; it
        repeats that batch.
        """
        epoch, rest = divmod(consumed_samples, self.samples)
        step, inside = divmod(rest, self.global_batch)
        if inside:
            log.warning(
                "%d consumed samples are not whole global batches of %d: the last %d are read again",
                consumed_samples, self.global_batch, inside,
            )  # fmt: skip
        begin = epoch * self.steps + step
        end = (epoch + 1) * self.steps if steps is None else begin + steps
        epochs = range(begin // self.steps, -(-end // self.steps)) if begin < end else ()
        starts = ((each, each * self.steps) for each in epochs)
        return (StepRange(e, max(0, begin - start), min(self.steps, end - start)) for e, start in starts)
