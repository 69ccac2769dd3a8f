"""Where the loop's seconds go, and when the next checkpoint by the clock is due."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sparkring.training.data.batch import ONCE, Batch, Reader
from sparkring.training.parallel.strategy import Strategy


class LoopTiming:
    """Seconds of the open logging window by cause."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        self.steps = 0
        self.waited_s = 0.0  # of the strategy, when the window was opened
        self.opened = self.last_checkpoint = time.monotonic()
        self.asked = False  # for the next checkpoint

    @contextmanager
    def measure(self, cause: str) -> Iterator[None]:
        """Add the seconds of the block to `cause`; those of a block that raises count for nothing."""
        began = time.monotonic()
        yield
        self.spent_s[cause] = self.spent_s.get(cause, 0.0) + time.monotonic() - began

    def waiting(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; the wait for each counts as `data_stall`."""
        while True:
            with self.measure("data_stall"):
                batch = next(batches, None)
            if batch is None:
                return
            self.steps += 1
            yield batch

    def checkpoint_written(self) -> None:
        self.last_checkpoint, self.asked = time.monotonic(), False

    def is_overdue(self, every_s: float | None) -> bool:
        """Whether the last checkpoint is `every_s` seconds old; True once before each checkpoint."""
        if every_s is None or self.asked or time.monotonic() - self.last_checkpoint < every_s:
            return False
        self.asked = True
        return True

    def take(self, reader: Reader, strategy: Strategy, global_rows: int) -> dict[str, float]:
        """Close the window: mean seconds per step by cause, rows per second of the job, and the reader's meter.

        What the meter has of the beginning (ONCE) is not divided by steps.
        """
        wall_s, steps = max(time.monotonic() - self.opened, 1e-9), max(self.steps, 1)
        taken = {f"perf/{cause}_s": spent_s / steps for cause, spent_s in self.spent_s.items()}
        taken["perf/wait_s"] = (strategy.waited_s - self.waited_s) / steps
        taken["perf/rows_per_s"] = steps * global_rows / wall_s
        taken |= {f"data/{name}": v if name in ONCE else v / steps for name, v in reader.meter.take().items()}
        self.waited_s = strategy.waited_s
        self.spent_s, self.steps, self.opened = {}, 0, time.monotonic()
        return taken
