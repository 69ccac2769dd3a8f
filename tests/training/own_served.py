"""Models, hooks and entries of ranks on parameter servers that are slow, stop or die; a light module to import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from sparkring.training.hooks import Hook, StepSeen
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.models.tabular import Tabular
from sparkring.training.servers.client import Client
from sparkring.training.worker.result import WorkerResult
from sparkring.training.worker.train import train


class Noisy(Tabular):
    """Draws torch's random numbers in each forward pass of training."""

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        out = super().forward(*columns)
        return out + 0.1 * torch.randn_like(out) if self.training else out


class Slow(Tabular):
    """Sleeps in each forward pass of training, on rank 1 fifteen times as long."""

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        if self.training and "RANK" in os.environ:  # not in a replay
            time.sleep(0.075 if os.environ["RANK"] == "1" else 0.005)
        return super().forward(*columns)


class Late(Tabular):
    """Rank 1's first pass of training ends when rank 0, whose hook is SaysStep3, has made step 3 without it."""

    passes = 0

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        while self.training and self.passes == 1 and os.environ.get("RANK") == "1" and not _step_3().exists():
            time.sleep(0.01)
        return super().forward(*columns)


class SaysStep3(Hook):
    def on_step(self, seen: StepSeen) -> None:
        if seen.step == 3:
            _step_3().touch()


def _step_3() -> Path:
    return Path(os.environ["BEST_FILE"]).with_name("step-3")


class Stopping(Tabular):
    """Stops rank 1's process in its tenth step."""

    passes = 0

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.training and self.passes == 10 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(*columns)


def is_first_time() -> bool:
    """In this run, whatever process asks."""
    marker = Path(os.environ["BEST_FILE"])
    first = not marker.exists()
    marker.touch()
    return first


class Dying(Slow):
    """Rank 1's process dies, once, long after the other is done with the epoch."""

    passes = 0

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.training and self.passes == 7 and os.environ.get("RANK") == "1" and is_first_time():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(*columns)


class DiesAtMeeting(Hook):
    """Rank 0 dies, once, when it has made the last step before an evaluation and has not come to that."""

    step = 10

    def on_step(self, seen: StepSeen) -> None:
        if seen.step == self.step and is_first_time():
            os.kill(os.getpid(), signal.SIGKILL)


class DiesAtStep31(DiesAtMeeting):
    step = 31


class WaitsForKills(Hook):
    """Rank 0 waits after these steps until a file says that a rank was killed."""

    steps = (10, 30)

    def on_step(self, seen: StepSeen) -> None:
        killed_at = Path(os.environ["BEST_FILE"]).with_name(f"killed-{seen.step}")
        while seen.step in self.steps and not killed_at.exists():
            time.sleep(0.01)


def dies_at_begin(ctx: WorkerContext, when: str) -> WorkerResult:
    """`train` of a rank 0 whose first process dies, in attempt 2, `before` ranks may make steps or right `after`."""
    begin = Client.begin

    def die(client: Client, clock: int) -> None:
        if when == "after":
            begin(client, clock)
        os.kill(os.getpid(), signal.SIGKILL)

    if ctx.rank == 0 and ctx.attempt == 2 and ctx.replacement == 0:
        Client.begin = die  # type: ignore[method-assign]
    return train(ctx)


def dies_before_begin(ctx: WorkerContext) -> WorkerResult:
    return dies_at_begin(ctx, "before")


def dies_after_begin(ctx: WorkerContext) -> WorkerResult:
    return dies_at_begin(ctx, "after")
