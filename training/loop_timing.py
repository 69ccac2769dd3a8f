"""Where the loop's seconds go, and how often ranks ask what the driver wants."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sparkring.training.data.batch import ONCE, Batch, Reader
from sparkring.training.parallel.strategy import Strategy

POLL_S = 1.0


class LoopTiming:
    """Seconds of the open logging window by cause. `stepping_s`: of all steps so far, with the wait for their data."""

    def __init__(self) -> None:
        self.stepping_s = 0.0
        self.spent_s: dict[str, float] = {}
        self.steps = 0
        self.waited_s = 0.0  # of the strategy, when the window was opened
        self.opened = self.last_checkpoint = time.monotonic()

    @contextmanager
    def measure(self, cause: str) -> Iterator[None]:
        """Add the seconds of the block to `cause`; those of a block that raises count for nothing."""
        began = time.monotonic()
        yield
        spent_s = time.monotonic() - began
        self.spent_s[cause] = self.spent_s.get(cause, 0.0) + spent_s
        if cause in ("step", "data_stall"):
            self.stepping_s += spent_s

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
        self.last_checkpoint = time.monotonic()

    def since_checkpoint_s(self) -> float:
        return time.monotonic() - self.last_checkpoint

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


class ControlPoller:
    """At which steps ranks ask what the driver wants: after the first, then about once a second.

    The answers are summed over ranks, which costs too much for every short step; and a driver that waits for a
    checkpoint has no time for many long ones.
    """

    def __init__(self, most_steps: int) -> None:
        self.most_steps, self.every, self.steps = most_steps, 1, 0
        self.before_s = 0.0

    def due(self) -> bool:
        """Whether to ask now. Called once per step."""
        self.steps += 1
        return self.steps >= self.every

    def own_share(self, stepping_s: float) -> tuple[float, float]:
        """This rank's summands for `plan`: its milliseconds since the last poll, and 1 for itself.

        Whole milliseconds: their sum is the same in whatever order ranks are added.
        """
        spent_s, self.before_s = stepping_s - self.before_s, stepping_s
        return float(round(1000 * spent_s)), 1.0

    def plan(self, spent_ms: float, ranks: float) -> None:
        """Set the next poll from the sums over ranks of `own_share`."""
        self.every, self.steps = poll_interval(spent_ms, ranks, self.steps, self.most_steps), 0


def poll_interval(spent_ms: float, ranks: float, steps: int, most: int) -> int:
    """Steps until the next poll: as many as POLL_S holds, at least 1 and at most `most`; the same on every rank.

    Args:
        spent_ms: of all ranks together, over `steps`.
    """
    step_ms = spent_ms / max(ranks, 1.0) / steps
    return max(1, min(most, int(POLL_S * 1000 / step_ms))) if step_ms > 0 else most
