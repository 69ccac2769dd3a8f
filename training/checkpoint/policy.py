"""Which checkpoints may go, and which is best: pure decisions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Retention:
    """Kept are the newest `last`, the `best` by metric, and every step that is a multiple of `every`."""

    last: int = 2
    best: int = 1
    every: int | None = None
    mode: Literal["min", "max"] = "min"


def expendable(committed: Iterable[tuple[int, float | None]], keep: Retention) -> list[int]:
    """Steps of the committed checkpoints (step, metric) that no rule keeps, oldest first; never the newest."""
    by_step = sorted(dict(committed).items())
    kept = {step for step, _ in by_step[-max(keep.last, 1) :]}
    if keep.best:
        kept |= set(_ranked(by_step, keep.mode)[: keep.best])
    if keep.every:
        kept |= {step for step, _ in by_step if step % keep.every == 0}
    return [step for step, _ in by_step if step not in kept]


def best_step(committed: Iterable[tuple[int, float | None]], mode: Literal["min", "max"]) -> int | None:
    """The step of the best metric; the earliest of equals; None where no checkpoint has a finite metric."""
    ranked = _ranked(sorted(committed), mode)
    return ranked[0] if ranked else None


def _ranked(by_step: list[tuple[int, float | None]], mode: str) -> list[int]:
    sign = 1.0 if mode == "min" else -1.0
    finite = [(sign * metric, step) for step, metric in by_step if metric is not None and math.isfinite(metric)]
    return [step for _, step in sorted(finite)]
