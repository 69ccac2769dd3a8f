"""What a reader hands to a strategy: one rank's part of one global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

SAMPLE = "sparkring_sample"
"""Column (B,) int64 a reader makes where it is among the wanted: the row's number in the run, which no other has and
which is the same on any world. Padding is numbered too."""

Columns = dict[str, Any]
"""Column name -> tensor (B, ...), `Ragged`, or a list of B decoded values for binary columns."""


@dataclass(frozen=True)
class Ragged:
    """Rows of unequal length: row i is `values[offsets[-1][i] : offsets[-1][i + 1]]`.

    values (N, *shape); offsets: one int64 tensor (rows + 1,) per nesting level, innermost first.
    """

    values: torch.Tensor
    offsets: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Batch:
    """`rows` are this rank's; `global_rows` is the number of real (unpadded) rows of the whole global batch: gradients
    are sums over rows divided by it, never by the number of ranks. A rank may hold 0 rows of a global batch.
    """

    columns: Columns
    rows: int
    global_rows: int
    cursor: int  # samples the optimizer has consumed, over all ranks and epochs, once this batch has been
    weight: torch.Tensor | None = None  # (B,) float32: 0 on padding rows; None = all ones
    ids: torch.Tensor | None = None  # (B,) int64 stored row numbers, decoded with the values, in audit mode

    def row_weights(self, device: torch.device | None = None) -> torch.Tensor:
        if self.weight is not None:
            return self.weight.to(device) if device is not None else self.weight
        return torch.ones(self.rows, device=device)


ONCE = ("first_batch_s", "verify_s")
"""What a meter has of the beginning, once, and not of every step."""


@dataclass
class Meter:
    """Seconds by cause and counts since the last `take`; the reader adds, the loop takes and logs."""

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, seconds_s: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds_s

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """`{<name>_s: seconds, <name>: count}` since the last call."""
        taken: dict[str, float] = {f"{k}_s": v for k, v in self.seconds.items()} | dict(self.counts)
        self.seconds, self.counts = {}, {}
        return taken


class Reader(Protocol):
    """One split of one dataset, as seen by one rank."""

    steps_per_epoch: int  # the same on every rank
    meter: Meter

    def verify(self) -> None:
        """Check, once, the files that this rank reads; ValueError names the first that is not what was written. What
        was not checked before is checked when `batches` is called."""
        ...

    def batches(self, epoch: int, start_step: int = 0, steps: int | None = None) -> Iterator[Batch]:
        """The rank's part of `steps` global batches: start_step, start_step + 1, ... of the epoch and, past its end, of
        the epochs after it; None: those that are left of the epoch."""
        ...

    def order_state(self) -> dict[str, Any]:
        """Every setting that decides the order of global batches, JSON-able; the world is not among them."""
        ...

    def close(self) -> None: ...
