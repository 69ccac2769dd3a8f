"""Simulate what slow ranks cost under other forms of training, from each rank's own seconds per step.

A form's rate is rank-steps per second whose gradients count. All are simulated on the same steps:

- ring: a step ends when the slowest rank has ended it, and then takes the exchange.
- bounded staleness s, at parameter servers: a rank begins step k when all have ended step k - s - 1; no bound: at once.
  Each step has the exchange. A bound limits how far ranks are apart, not how fast the slowest is: whatever s, in the
  long run all go at its pace. (Stale synchronous parallel, https://papers.nips.cc/paper/4894)
- b backup workers: a step ends with the first n - b gradients; a rank that is late ends its gradient, which does not
  count, and joins the step that is open then. (https://arxiv.org/abs/1604.00981)
- local SGD: ranks meet, and exchange, once in H steps. (https://arxiv.org/abs/1805.09767)
- lag: the exchange is made while ranks compute; the ring's wait for the slowest stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MOST_STEPS = 4000  # simulated
BOUNDS, EVERY = (1, 3, 10), (10, 50)


@dataclass(frozen=True)
class Window:
    """Some steps of a run. busy_s, sd_s: (ranks,) mean and standard deviation of each rank's own seconds per step.

    step_s: of a whole step, waits included.
    """

    steps: int
    busy_s: Array
    sd_s: Array
    step_s: float


@dataclass(frozen=True)
class StepTimes:
    """busy_s: (steps, ranks) each rank's own seconds. exchange_s: of a step, once all ranks are there."""

    busy_s: Array
    exchange_s: float = 0.0

    @property
    def steps(self) -> int:
        return int(self.busy_s.shape[0])

    @property
    def ranks(self) -> int:
        return int(self.busy_s.shape[1])


@dataclass(frozen=True)
class FormRate:
    """A form of training. rate: counted rank-steps per second, over the ring's."""

    family: str
    setting: str
    rate: float


def sampled(windows: Sequence[Window], seed: int = 0) -> StepTimes:
    """Draw steps like those of a run: lognormal about each window's means, window after window.

    The exchange is what the run's steps took beyond the slowest rank's own seconds.
    """
    draw = np.random.default_rng(seed)
    share = min(1.0, MOST_STEPS / sum(window.steps for window in windows))
    counts = [max(1, round(share * window.steps)) for window in windows]
    busy = np.concatenate([_lognormal(draw, window, count) for window, count in zip(windows, counts, strict=True)])
    measured_s = float(np.average([window.step_s for window in windows], weights=counts))
    return StepTimes(busy, max(0.0, measured_s - float(busy.max(axis=1).mean())))


def _lognormal(draw: np.random.Generator, window: Window, steps: int) -> Array:
    mean = np.maximum(window.busy_s, 1e-9)
    spread = np.log1p((window.sd_s / mean) ** 2)
    return np.exp(draw.normal(np.log(mean) - spread / 2, np.sqrt(spread), (steps, len(mean))))


def ring_rate(times: StepTimes) -> float:
    """Rank-steps per second of a ring: each step waits for the slowest rank, then exchanges."""
    seconds = times.busy_s.max(axis=1).sum() + times.steps * times.exchange_s
    return float(times.steps * times.ranks / seconds)


def bounded_rate(times: StepTimes, bound: int | None) -> float:
    """`bound` None: no rank waits, and the rate is that until the first has made all steps."""
    if bound is None:
        ends = np.cumsum(times.busy_s + times.exchange_s, axis=0)
        until = ends[-1].min()
        return float((ends <= until).sum() / until)
    ends = np.zeros((times.steps + 1, times.ranks))  # after so many steps
    for step in range(times.steps):
        open_s = ends[step - bound].max() if step >= bound else 0.0
        ends[step + 1] = np.maximum(ends[step], open_s) + times.busy_s[step] + times.exchange_s
    return float(times.steps * times.ranks / ends[-1].max())


def backup_rate(times: StepTimes, backups: int) -> float:
    """Counted rank-steps per second where a step ends without the gradients of the last `backups` ranks."""
    counted = times.ranks - backups
    free, now = np.zeros(times.ranks), 0.0  # when each rank can begin; when the step was opened
    for busy_s in times.busy_s:
        ends = np.maximum(free, now) + busy_s
        last = float(np.partition(ends, counted - 1)[counted - 1])
        began = free <= last  # the others are still at a gradient of an earlier step
        free = np.where(began, ends, free)
        now = last + times.exchange_s
    return float(times.steps * counted / now)


def local_rate(times: StepTimes, every: int) -> float:
    """Rank-steps per second of local SGD: ranks wait for each other, and exchange, once in `every` steps."""
    firsts = np.arange(0, times.steps, every)
    seconds = np.add.reduceat(times.busy_s, firsts, axis=0).max(axis=1).sum() + len(firsts) * times.exchange_s
    return float(times.steps * times.ranks / seconds)


def lag_rate(times: StepTimes) -> float:
    """Rank-steps per second where a step's exchange goes on during the next step's computation."""
    seconds = np.maximum(times.busy_s.max(axis=1), times.exchange_s).sum()
    return float(times.steps * times.ranks / seconds)


def simulated_forms(times: StepTimes, has_tables: bool) -> list[FormRate]:
    """The forms that go with this many ranks, those nearest to the ring's training first."""
    made: list[tuple[str, str, Callable[[], float]]] = []
    if has_tables:
        made.append(("lag", "tables.lag: 1, if rows are all that is exchanged", lambda: lag_rate(times)))
    for backups in range(1, max(1, times.ranks // 4) + 1) if times.ranks > 1 else ():
        made.append(("backup", f"servers, {backups} backup", lambda backups=backups: backup_rate(times, backups)))  # type: ignore[misc]
    for bound in BOUNDS:
        made.append(("bound", f"servers, bound {bound}", lambda bound=bound: bounded_rate(times, bound)))  # type: ignore[misc]
    for every in EVERY:
        made.append(("local", f"local SGD, every {every}", lambda every=every: local_rate(times, every)))  # type: ignore[misc]
    made.append(("none", "servers, no bound", lambda: bounded_rate(times, None)))
    ring = ring_rate(times)
    return [FormRate(family, setting, rate() / ring) for family, setting, rate in made]


def constant_stragglers(windows: Sequence[Window], factor: float = 1.5, share: float = 0.8) -> dict[int, float]:
    """Ranks that took `factor` times the median rank in `share` of the windows -> how many times, over all of them."""
    busy = np.stack([window.busy_s for window in windows])  # (windows, ranks)
    middle = np.sort(busy, axis=1)[:, (busy.shape[1] - 1) // 2]
    slow = (busy > factor * middle[:, None]).mean(axis=0) >= share
    return {int(rank): float(busy[:, rank].sum() / middle.sum()) for rank in np.flatnonzero(slow)}


def as_fast_as_others(times: StepTimes, slow: Sequence[int]) -> StepTimes:
    """The steps, had the slow ranks the median's seconds of the others."""
    busy, others = times.busy_s.copy(), np.delete(times.busy_s, list(slow), axis=1)
    busy[:, list(slow)] = np.median(others, axis=1)[:, None]
    return StepTimes(busy, times.exchange_s)


def without(times: StepTimes, slow: Sequence[int]) -> StepTimes:
    """The steps of a world without the slow ranks."""
    return StepTimes(np.delete(times.busy_s, list(slow), axis=1), times.exchange_s)
