"""Weigh the rows of batches by a column of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sparkring.training.data.batch import Batch, Reader


class WeightedReader:
    """A `Reader` whose batches weigh their rows by the column `name`, which they have no longer.

    Weights are divided by `mean`, that of all training rows, so a global batch's divisor is its number of rows on every
    rank: no rank must ask others for their weights, and the expected gradient is that of the weighted mean loss.
    """

    def __init__(self, reader: Reader, name: str, mean: float) -> None:
        self._reader, self._name, self._mean = reader, name, mean
        self.steps_per_epoch, self.epochs, self.meter = reader.steps_per_epoch, reader.epochs, reader.meter

    def verify(self) -> None:
        self._reader.verify()

    def batches(self, consumed_samples: int = 0, steps: int | None = None) -> Iterator[Batch]:
        return map(self._weighted, self._reader.batches(consumed_samples, steps))

    def order_state(self) -> dict[str, Any]:
        return self._reader.order_state()

    def close(self) -> None:
        self._reader.close()

    def _weighted(self, batch: Batch) -> Batch:
        columns = dict(batch.columns)
        weight = columns.pop(self._name).double() / self._mean
        return replace(batch, columns=columns, weight=weight if batch.weight is None else weight * batch.weight)
