"""Mix several datasets in every batch, by weight, in a fixed pattern.

So the position in every dataset follows from one integer, the consumed samples of the mix.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from sparkring.conf.blocks.data import MixConfig
from sparkring.training.data.batch import SAMPLE, Batch, Meter, Ragged
from sparkring.training.data.epochs import EpochSpan, EpochSteps, StepRange
from sparkring.training.data.order import Ints
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.transfer import to_device

PERIOD = 1 << 16


@dataclass(frozen=True)
class MixPlan:
    """How many samples each of D datasets gives.

    rows: of each dataset. shares (D,): samples of a period of 65536 that it gives. given (PERIOD + 1, D): how many it
    has given after j samples of a period, spread as evenly as whole numbers allow.
    """

    rows: tuple[int, ...]
    shares: Ints
    given: Ints
    stop: str
    epochs: EpochSteps

    def given_after(self, samples: Ints) -> Ints:
        """Return (n, D): how many of the first `samples` (n,) samples come from each dataset."""
        periods, rest = np.divmod(samples, PERIOD)
        counts: Ints = periods[:, None] * self.shares + self.given[rest]
        return counts


def make_mix(rows: Sequence[int], mix: MixConfig, global_batch: int) -> MixPlan:
    """Plan a mix of datasets of `rows` rows.

    ValueError for a weight too small to be kept, or an epoch without a whole batch.
    """
    weights = [part.weight for part in mix.parts]
    shares = _shares(weights)
    given = _pattern(shares)
    if mix.stop == "forever":
        steps = (mix.epoch_samples or sum(rows)) // global_batch
    elif mix.stop == "first_exhausted":
        steps = min(_samples_until(given[:, d], n, int(shares[d])) for d, n in enumerate(rows)) // global_batch
    else:
        most = max(_samples_until(given[:, d], n - 1, int(shares[d])) + 1 for d, n in enumerate(rows))
        steps = -(-most // global_batch)
    if steps < 1:
        raise ValueError(
            f"a mix of {list(rows)} rows by weights {weights} ends ({mix.stop}) before one global batch of "
            f"{global_batch}; lower the batch, change the weights or the stop rule"
        )
    return MixPlan(tuple(rows), shares, given, mix.stop, EpochSteps(steps * global_batch, global_batch))


def _shares(weights: Sequence[float]) -> Ints:
    """Convert weights to (D,) whole shares that add up to PERIOD (largest remainder)."""
    given = np.asarray(weights, dtype=np.float64)
    exact = given / given.sum() * PERIOD
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: PERIOD - shares.sum()]] += 1
    if (shares == 0).any():
        raise ValueError(f"data.mix: weight {given.min():g} is less than 1/{PERIOD} of all; leave the dataset out")
    return shares


def _pattern(shares: Ints) -> Ints:
    """Spread the shares evenly: sample i of dataset d is due at (i + 1/2) / share."""
    due = np.concatenate([(np.arange(n) + 0.5) / n for n in shares.tolist()])
    dataset = np.repeat(np.arange(len(shares)), shares)[np.argsort(due, kind="stable")]  # (PERIOD,)
    hits = dataset[:, None] == np.arange(len(shares))  # (PERIOD, D)
    return np.concatenate([np.zeros((1, len(shares)), np.int64), np.cumsum(hits, axis=0, dtype=np.int64)])


def _samples_until(given: Ints, rows: int, share: int) -> int:
    """Return the most samples of the mix that take at most `rows` from a dataset."""
    periods, rest = divmod(rows, share)
    return periods * PERIOD + int(np.searchsorted(given, rest, side="right")) - 1


class MixedReader:
    """A `Reader` over several `ParquetReader`s of one global batch.

    Its parts' own epochs are passes over their rows, each in its own order; a dataset whose pass ends inside a batch
    begins the next one there. With first_exhausted and all_exhausted every epoch of the mix begins new passes; with
    forever they continue across. Its batches carry no row numbers: a mix repeats rows by design, so nothing is audited.
    """

    def __init__(self, parts: Sequence[ParquetReader], plan: MixPlan, device: torch.device | None = None) -> None:
        self._parts, self.plan, self._device = tuple(parts), plan, device
        self.meter = Meter()
        self.epochs = plan.epochs
        self.steps_per_epoch = plan.epochs.steps

    def order_state(self) -> dict[str, Any]:
        return {
            "mix": [part.order_state() for part in self._parts],
            "shares": self.plan.shares.tolist(),
            "stop": self.plan.stop,
            "global_batch": self.epochs.global_batch,
            "epoch_samples": self.epochs.samples,
        }

    def batches(self, consumed_samples: int = 0, steps: int | None = None) -> Iterator[Batch]:
        ranges = list(self.epochs.ranges(consumed_samples, steps))
        return to_device(self._on_host(ranges), self._device, self.meter)

    def verify(self) -> None:
        for part in self._parts:
            part.verify()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _on_host(self, ranges: Sequence[StepRange]) -> Iterator[Batch]:
        streams = [self._stream(number, ranges) for number in range(len(self._parts))]
        try:
            for epoch, first, stop in ranges:
                for step in range(first, stop):
                    pieces = [piece for stream in streams for piece in next(stream)]
                    yield _joined(pieces, self.epochs.global_batch, self.epochs.consumed_after(epoch, step))
                    for part in self._parts:
                        self.meter.absorb(part.meter)
        finally:
            for stream in streams:
                stream.close()

    def _stream(self, number: int, ranges: Sequence[StepRange]) -> Generator[list[Batch], None, None]:
        """Yield one dataset's rows of each step, from one pass or from two."""
        rows = self.plan.rows[number]
        spans = (span for steps in ranges for span in self._spans(number, steps))
        with closing(self._parts[number].serve(spans)) as served:
            for steps in ranges:
                for begin, end in pairwise(self._cuts(number, steps).tolist()):
                    passes = 0 if begin == end else (end - 1) // rows - begin // rows + 1
                    yield [self._renumbered(next(served), number) for _ in range(passes)]

    def _cuts(self, number: int, steps: StepRange) -> Ints:
        """Count what the dataset has given before each step and at the end: (steps + 1,)."""
        before = steps.epoch * self.epochs.samples if self.plan.stop == "forever" else 0
        samples = before + np.arange(steps.first, steps.stop + 1, dtype=np.int64) * self.epochs.global_batch
        cuts: Ints = self.plan.given_after(samples)[:, number]
        return cuts

    def _spans(self, number: int, steps: StepRange) -> Iterator[EpochSpan]:
        """Cut the dataset's rows at the steps, and where one pass ends."""
        cuts, rows = self._cuts(number, steps), self.plan.rows[number]
        base = 0 if self.plan.stop == "forever" else steps.epoch * self._passes(number)
        first, last = int(cuts[0]), int(cuts[-1])
        for turn in range(first // rows, -(-last // rows)):
            begin = turn * rows
            edges = np.unique(np.clip(cuts, max(first, begin), min(last, begin + rows))) - begin
            yield EpochSpan(base + turn, edges)

    def _passes(self, number: int) -> int:
        """Count the passes over a dataset per epoch of the mix; each pass has its own order."""
        total = int(self.plan.given_after(np.array([self.epochs.samples]))[0, number])
        return -(-total // self.plan.rows[number])

    def _renumbered(self, batch: Batch, number: int) -> Batch:
        """Return the batch with sample numbers that are unique over all datasets."""
        if SAMPLE in batch.columns:
            batch.columns[SAMPLE] = batch.columns[SAMPLE] * len(self._parts) + number
        return batch


def _joined(pieces: Sequence[Batch], global_rows: int, consumed_samples: int) -> Batch:
    columns = {name: _concatenate([p.columns[name] for p in pieces]) for name in pieces[0].columns}
    return Batch(columns, sum(p.rows for p in pieces), global_rows, consumed_samples)


def _concatenate(values: Sequence[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.cat(list(values))
    if isinstance(values[0], Ragged):
        levels = zip(*(v.offsets for v in values), strict=True)
        return Ragged(torch.cat([v.values for v in values]), tuple(_stacked_offsets(list(level)) for level in levels))
    return [row for value in values for row in value]


def _stacked_offsets(offsets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the offsets of rows laid end to end."""
    lengths = torch.cat([o.diff() for o in offsets])
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
