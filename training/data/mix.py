"""Several datasets in every batch, by weight: which sample comes from which is a fixed pattern, so the cursor of every
dataset follows from the one cursor of the mix."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from training.data.batch import SAMPLE, Batch, Meter, Ragged
from training.data.order import Ints, epochs_of
from training.data.reader import ParquetReader, Span
from training.data.transfer import to_device

PERIOD = 1 << 16
Stop = Literal["first_exhausted", "all_exhausted", "forever"]
Run = tuple[int, int, int]
"""An epoch of the mix, the first of its steps, and the step after the last."""


@dataclass(frozen=True)
class MixPlan:
    """weights become shares of a period of 65536 samples; `taken` (PERIOD + 1, D) counts what each dataset has given
    after j samples of a period, spread as evenly as whole numbers allow."""

    rows: tuple[int, ...]
    shares: Ints
    taken: Ints
    global_batch: int
    stop: Stop
    steps_per_epoch: int

    @property
    def epoch_samples(self) -> int:
        return self.steps_per_epoch * self.global_batch

    def given(self, samples: Ints) -> Ints:
        """(n, D): how many of the first `samples` (n,) samples come from each dataset."""
        periods, rest = np.divmod(samples, PERIOD)
        counts: Ints = periods[:, None] * self.shares + self.taken[rest]
        return counts

    def locate(self, cursor: int) -> tuple[int, int]:
        epoch, rest = divmod(cursor, self.epoch_samples)
        if rest % self.global_batch:
            raise ValueError(f"cursor {cursor} is not at the end of a global batch of {self.global_batch} samples")
        return epoch, rest // self.global_batch


def make_mix(
    rows: Sequence[int], weights: Sequence[float], global_batch: int, stop: Stop, epoch_samples: int | None = None
) -> MixPlan:
    """ValueError for a weight too small to be kept, or an epoch without a whole batch."""
    shares = _shares(weights)
    taken = _pattern(shares)
    if stop == "forever":
        steps = (epoch_samples or sum(rows)) // global_batch
    elif stop == "first_exhausted":
        steps = min(_samples_until(taken[:, d], n, int(shares[d])) for d, n in enumerate(rows)) // global_batch
    else:
        most = max(_samples_until(taken[:, d], n - 1, int(shares[d])) + 1 for d, n in enumerate(rows))
        steps = -(-most // global_batch)
    if steps < 1:
        raise ValueError(
            f"a mix of {list(rows)} rows by weights {list(weights)} ends ({stop}) before one global batch of "
            f"{global_batch}; lower the batch, change the weights or the stop rule"
        )
    return MixPlan(tuple(rows), shares, taken, global_batch, stop, steps)


def _shares(weights: Sequence[float]) -> Ints:
    """Whole shares of PERIOD that add up to it (largest remainder)."""
    given = np.asarray(weights, dtype=np.float64)
    if len(given) < 2 or not np.isfinite(given).all() or (given <= 0).any():
        raise ValueError(f"data.mix: weights {list(weights)} must be two or more positive numbers")
    exact = given / given.sum() * PERIOD
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: PERIOD - shares.sum()]] += 1
    if (shares == 0).any():
        raise ValueError(f"data.mix: weight {given.min():g} is less than 1/{PERIOD} of all; leave the dataset out")
    return shares


def _pattern(shares: Ints) -> Ints:
    """(PERIOD + 1, D) cumulative counts: the i-th sample of dataset d is due at (i + 1/2) / share."""
    due = np.concatenate([(np.arange(n) + 0.5) / n for n in shares.tolist()])
    dataset = np.repeat(np.arange(len(shares)), shares)[np.argsort(due, kind="stable")]
    hits = dataset[:, None] == np.arange(len(shares))
    return np.concatenate([np.zeros((1, len(shares)), np.int64), np.cumsum(hits, axis=0, dtype=np.int64)])


def _samples_until(taken: Ints, rows: int, share: int) -> int:
    """The most samples of the mix that take no more than `rows` from a dataset."""
    periods, rest = divmod(rows, share)
    return periods * PERIOD + int(np.searchsorted(taken, rest, side="right")) - 1


class MixedReader:
    """A `Reader` over several `ParquetReader`s of one global batch. Its parts' own epochs are passes over their rows,
    each in its own order; a dataset whose pass ends inside a batch begins the next one there.

    With first_exhausted and all_exhausted every epoch of the mix begins new passes; with forever they go on across.
    Its batches carry no row numbers: a mix repeats rows by design, so nothing is audited.
    """

    def __init__(self, parts: Sequence[ParquetReader], plan: MixPlan, device: torch.device | None = None) -> None:
        self._parts, self.plan, self._device = tuple(parts), plan, device
        self.meter = Meter()
        self.steps_per_epoch = plan.steps_per_epoch

    def order_state(self) -> dict[str, Any]:
        return {
            "mix": [part.order_state() for part in self._parts],
            "shares": self.plan.shares.tolist(),
            "stop": self.plan.stop,
            "global_batch": self.plan.global_batch,
            "epoch_samples": self.plan.epoch_samples,
        }

    def locate(self, cursor: int) -> tuple[int, int]:
        return self.plan.locate(cursor)

    def batches(self, epoch: int, start_step: int = 0, steps: int | None = None) -> Iterator[Batch]:
        runs = list(epochs_of(epoch, start_step, steps, self.steps_per_epoch))
        return to_device(self._on_host(runs), self._device, self.meter)

    def verify(self) -> None:
        for part in self._parts:
            part.verify()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _on_host(self, runs: Sequence[Run]) -> Iterator[Batch]:
        plan = self.plan
        streams = [self._stream(number, runs) for number in range(len(self._parts))]
        try:
            for epoch, first, stop in runs:
                for step in range(first, stop):
                    pieces = [piece for stream in streams for piece in next(stream)]
                    cursor = epoch * plan.epoch_samples + (step + 1) * plan.global_batch
                    yield _joined(pieces, plan.global_batch, cursor)
                    self._collect()
        finally:
            for stream in streams:
                stream.close()

    def _stream(self, number: int, runs: Sequence[Run]) -> Generator[list[Batch], None, None]:
        """Per step, one dataset's rows of it: a list, for a step may take the end of one pass and begin the next."""
        rows = self.plan.rows[number]
        spans = (span for run in runs for span in self._spans(number, run))
        with closing(self._parts[number].serve(spans)) as served:
            for run in runs:
                for begin, end in pairwise(self._cuts(number, run).tolist()):
                    passes = 0 if begin == end else (end - 1) // rows - begin // rows + 1
                    yield [self._renumbered(next(served), number) for _ in range(passes)]

    def _cuts(self, number: int, run: Run) -> Ints:
        """What the dataset has given before each step of the run and after the last, in samples."""
        plan, (epoch, first, stop) = self.plan, run
        before = epoch * plan.epoch_samples if plan.stop == "forever" else 0
        cuts: Ints = plan.given(before + np.arange(first, stop + 1, dtype=np.int64) * plan.global_batch)[:, number]
        return cuts

    def _spans(self, number: int, run: Run) -> Iterator[Span]:
        """The dataset's rows between the cuts, cut once more where one pass ends and the next begins."""
        cuts, rows = self._cuts(number, run), self.plan.rows[number]
        base = 0 if self.plan.stop == "forever" else run[0] * self._passes(number)
        first, last = int(cuts[0]), int(cuts[-1])
        for turn in range(first // rows, -(-last // rows)):
            begin = turn * rows
            yield base + turn, np.unique(np.clip(cuts, max(first, begin), min(last, begin + rows))) - begin

    def _passes(self, number: int) -> int:
        """Passes an epoch of the mix begins of a dataset: each gets an order of its own."""
        total = int(self.plan.given(np.array([self.plan.epoch_samples]))[0, number])
        return -(-total // self.plan.rows[number])

    def _renumbered(self, batch: Batch, number: int) -> Batch:
        """No two datasets' samples have one number."""
        if SAMPLE in batch.columns:
            batch.columns[SAMPLE] = batch.columns[SAMPLE] * len(self._parts) + number
        return batch

    def _collect(self) -> None:
        for part in self._parts:
            for name, seconds in part.meter.seconds.items():
                self.meter.add(name, seconds)
            for name, amount in part.meter.counts.items():
                self.meter.count(name, amount)
            part.meter.take()


def _joined(pieces: Sequence[Batch], global_rows: int, cursor: int) -> Batch:
    columns = {name: _concatenate([p.columns[name] for p in pieces]) for name in pieces[0].columns}
    return Batch(columns, sum(p.rows for p in pieces), global_rows, cursor)


def _concatenate(values: Sequence[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.cat(list(values))
    if isinstance(values[0], Ragged):
        levels = zip(*(v.offsets for v in values), strict=True)
        return Ragged(torch.cat([v.values for v in values]), tuple(_stacked_offsets(list(level)) for level in levels))
    return [row for value in values for row in value]


def _stacked_offsets(offsets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Offsets of rows laid end to end."""
    lengths = torch.cat([o.diff() for o in offsets])
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
