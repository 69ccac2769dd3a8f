"""Decide which checkpoints may be deleted, rank them by their metric, and when a table is written whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

MOST_INCREMENTS = 8  # of one base
INCREMENTS_SHARE = 0.5  # of the base's bytes, together


@dataclass(frozen=True)
class Retention:
    """Kept are the newest `last`, the `best` by metric, and every step that is a multiple of `every`."""

    last: int = 2
    best: int = 1
    every: int | None = None
    mode: Literal["min", "max"] = "min"


def expendable(committed: Iterable[tuple[int, float | None]], keep: Retention) -> list[int]:
    """List the steps of checkpoints (step, metric) that no rule keeps, oldest first; never the newest."""
    by_step = sorted(dict(committed).items())
    kept = {step for step, _ in by_step[-max(keep.last, 1) :]}
    if keep.best:
        kept |= set(ranked_steps(by_step, keep.mode)[: keep.best])
    if keep.every:
        kept |= {step for step, _ in by_step if step % keep.every == 0}
    return [step for step, _ in by_step if step not in kept]


def most_increment_bytes(written: Sequence[int]) -> int:
    """Return the most bytes the next checkpoint of a table may add to `written` (base and increments).

    -1: write a base. Loading then reads at most one and a half times what it must, from at most nine files a rank.
    """
    if not written or len(written) > MOST_INCREMENTS:
        return -1
    return int(INCREMENTS_SHARE * written[0]) - sum(written[1:])


def ranked_steps(committed: Iterable[tuple[int, float | None]], mode: Literal["min", "max"]) -> list[int]:
    """List the steps with a finite metric, best first; equals in order of steps."""
    sign = 1.0 if mode == "min" else -1.0
    finite = [(sign * metric, step) for step, metric in committed if metric is not None and math.isfinite(metric)]
    return [step for _, step in sorted(finite)]
