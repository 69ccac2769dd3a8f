"""Batches: one rank's share of one global batch, from a reader to a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sparkring.training.data.epochs import EpochSteps

SAMPLE = "sparkring_sample"
"""Column (B,) int64 that a reader makes on request: the row's number in the run, unique and the same on any world.
Padding rows are numbered too."""

Columns = dict[str, Any]
"""Column name -> tensor (B, ...), `Ragged`, or a list of B decoded values for binary columns."""


@dataclass(frozen=True)
class Ragged:
    """Rows of unequal length: row i is `values[offsets[-1][i] : offsets[-1][i + 1]]`.

    values (N, *shape); offsets: one int64 tensor (rows + 1,) per nesting level, innermost first.
    """

    values: torch.Tensor
    offsets: tuple[torch.Tensor, ...]

    def rows(self, start: int, stop: int) -> Ragged:
        """Return rows [start, stop), as views of the values."""
        levels: list[torch.Tensor] = []
        for offsets in reversed(self.offsets):
            cut = offsets[start : stop + 1]
            start, stop = int(cut[0]), int(cut[-1])
            levels.insert(0, cut - start)
        return Ragged(self.values[start:stop], tuple(levels))


@dataclass(frozen=True, order=True)
class BatchShare:
    """What data rank `stream` reads of global batch number `clock` of the run."""

    clock: int
    stream: int


@dataclass(frozen=True)
class Batch:
    """One rank's rows of one global batch; a rank may hold none.

    Gradients are sums over rows divided by `global_rows`, never by the number of ranks.
    """

    columns: Columns
    rows: int  # of this rank
    global_rows: int  # of all ranks, without padding
    consumed_samples: int  # since the run began, over all ranks, once this batch is done
    weight: torch.Tensor | None = None  # (B,) how much a row counts: 0 on padding rows; None = all ones
    ids: torch.Tensor | None = None  # (B,) int64 stored row numbers, decoded with the values, in audit mode
    real: torch.Tensor | None = None  # (B,) bool, on the host: false on padding rows; None = all true
    part: BatchShare | None = None  # with backup workers: whose rows these are; None: this rank's own, of this step
    step_rows: int | None = None  # with backup workers: rows of this step's global batch; None: `global_rows`
    host_columns: Columns | None = None  # `columns` as they were before they were moved to a device

    @property
    def on_host(self) -> Columns:
        """The columns in host memory, for what works there: reading them back from a device would wait for it."""
        return self.columns if self.host_columns is None else self.host_columns

    @property
    def rows_of_step(self) -> int:
        """Rows of the global batch that this step is counted as, without padding."""
        return self.global_rows if self.step_rows is None else self.step_rows

    def row_weights(self, device: torch.device | None = None) -> torch.Tensor:
        if self.weight is not None:
            return self.weight.to(device) if device is not None else self.weight
        return torch.ones(self.rows, device=device)

    def real_rows(self) -> torch.Tensor:
        """Return which rows are not padding, (B,) bool, on the host; their weight may be 0."""
        return torch.ones(self.rows, dtype=torch.bool) if self.real is None else self.real


ONCE = ("first_batch_s", "verify_s")
"""What a meter measures once, at the beginning, and not per step."""


@dataclass
class Meter:
    """Seconds by cause and counts: the reader adds to it, the loop takes and logs."""

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, seconds_s: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds_s

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def absorb(self, other: Meter) -> None:
        """Add everything `other` holds, and empty it."""
        for name, seconds_s in other.seconds.items():
            self.add(name, seconds_s)
        for name, amount in other.counts.items():
            self.count(name, amount)
        other.take()

    def take_seconds(self) -> dict[str, float]:
        """Return `{<name>_s: seconds}` since the last call."""
        taken, self.seconds = self.seconds, {}
        return {f"{name}_s": spent_s for name, spent_s in taken.items()}

    def take_counts(self) -> dict[str, int]:
        """Return `{<name>: count}` since the last call."""
        taken, self.counts = self.counts, {}
        return taken

    def take(self) -> dict[str, float]:
        """Return `{<name>_s: seconds, <name>: count}` since the last call."""
        return self.take_seconds() | self.take_counts()


class Reader(Protocol):
    """One split of one dataset, as seen by one rank."""

    steps_per_epoch: int  # the same on every rank
    epochs: EpochSteps
    meter: Meter

    def verify(self) -> None:
        """Check the files that this rank reads, once.

        ValueError names the first that is not what was written. `batches` calls it, if nobody did before.
        """
        ...

    def batches(self, consumed_samples: int = 0, steps: int | None = None) -> Iterator[Batch]:
        """Read the rank's share of the next `steps` global batches, across epochs.

        steps None: of the rest of the epoch. `consumed_samples` of all ranks since the run began say where to continue;
        each batch carries the next value.
        """
        ...

    def order_state(self) -> dict[str, Any]:
        """Return every setting, but the world, that decides the order; JSON-able."""
        ...

    def close(self) -> None: ...
