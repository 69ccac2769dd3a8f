"""Where the loop's seconds go, and when the next checkpoint by the clock is due."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sparkring.training.data.batch import ONCE, Batch, Reader
from sparkring.training.launch.messages import WindowTiming
from sparkring.training.parallel.strategy import Ranks


class LoopTiming:
    """Seconds of the open logging window by cause."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        self.last_s: dict[str, float] = {}  # of the last block of each cause
        self.busy_s: list[float] = []  # of each step: its data and computation, without waits for other ranks
        self.steps = 0
        self.waited_s = 0.0  # of the ranks, when the window was opened
        self.opened = self.last_checkpoint = time.monotonic()
        self.asked = False  # for the next checkpoint

    @contextmanager
    def measure(self, cause: str) -> Iterator[None]:
        """Add the seconds of the block to `cause`; those of a block that raises count for nothing."""
        began = time.monotonic()
        yield
        self.last_s[cause] = time.monotonic() - began
        self.spent_s[cause] = self.spent_s.get(cause, 0.0) + self.last_s[cause]

    def waiting(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; the wait for each counts as `data_stall`."""
        while True:
            with self.measure("data_stall"):
                batch = next(batches, None)
            if batch is None:
                return
            self.steps += 1
            yield batch

    def step_done(self, waited_s: float) -> None:
        """Record the last step's seconds; `waited_s`: seconds of it spent waiting for other ranks."""
        self.busy_s.append(max(0.0, self.last_s["step"] - waited_s) + self.last_s.get("data_stall", 0.0))

    def checkpoint_written(self) -> None:
        self.last_checkpoint, self.asked = time.monotonic(), False

    def is_overdue(self, every_s: float | None) -> bool:
        """Return whether the last checkpoint is `every_s` seconds old; True once before each checkpoint."""
        if every_s is None or self.asked or time.monotonic() - self.last_checkpoint < every_s:
            return False
        self.asked = True
        return True

    def take(self, reader: Reader, ranks: Ranks, global_rows: int) -> tuple[WindowTiming, dict[str, float]]:
        """Close the window: its timing, and all that was measured under the names that MLflow shows.

        These are the timing's seconds, rows per second of the job, GPU memory, and the reader's counts per step.
        """
        wall_s, steps = max(time.monotonic() - self.opened, 1e-9), max(self.steps, 1)
        seconds = {f"{cause}_s": spent_s / steps for cause, spent_s in self.spent_s.items()}
        reader_s, counts = reader.meter.take_seconds(), reader.meter.take_counts()
        timing = WindowTiming(
            step_s=seconds.pop("step_s", 0.0),
            wait_s=(ranks.waited_s - self.waited_s) / steps,
            data_stall_s=seconds.pop("data_stall_s", 0.0),
            busy_sd_s=statistics.pstdev(self.busy_s) if self.busy_s else 0.0,
            between_s=seconds,
            reader_s={name: spent_s / steps for name, spent_s in reader_s.items() if name not in ONCE},
            once_s={name: spent_s for name, spent_s in reader_s.items() if name in ONCE},
        )
        shown = shown_names(timing) | {"perf/rows_per_s": steps * global_rows / wall_s}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            shown["gpu/peak_allocated_bytes"] = float(torch.cuda.max_memory_allocated())
        shown |= {f"data/{name}": count / steps for name, count in counts.items()}
        self.waited_s = ranks.waited_s
        self.spent_s, self.busy_s, self.steps, self.opened = {}, [], 0, time.monotonic()
        return timing, shown


def shown_names(timing: WindowTiming) -> dict[str, float]:
    """Return a window's seconds by MLflow's names."""
    loop_s = timing.loop_s | {"busy_sd_s": timing.busy_sd_s}
    reader_s = timing.reader_s | timing.once_s
    return {f"perf/{name}": s for name, s in loop_s.items()} | {f"data/{name}": s for name, s in reader_s.items()}
