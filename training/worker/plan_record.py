"""What was predicted of a run's layout on its cluster, and what its ranks measured: a part of summary.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from sparkring.conf.stored import CLOSED, Count

Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """The predicted cost of one layout."""

    __pydantic_config__ = CLOSED

    layout: str  # in words
    causes: dict[str, float]  # seconds of a step by cause
    memory: Count  # bytes of the fullest rank

    @property
    def step_s(self) -> float:
        return sum(self.causes.values())


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A layout on a cluster, with the others that it was chosen from."""

    __pydantic_config__ = CLOSED

    cluster: str  # its name or file
    machines: str  # its devices and network
    world: Count
    limit: Count  # bytes of a device that a layout may take
    used: LayoutCost
    others: list[LayoutCost] = field(default_factory=list)  # the next best, of other axes or ZeRO
    tried: list[tuple[float, Count]] = field(default_factory=list)  # (seconds of a step, bytes) of layouts that can run
    basis: str = ""  # what the seconds rest on, and their band; empty: of before it was kept
    predicted_peak: Count | None = None  # bytes of a step's fullest moment, by a trace of whole passes; None: none
    measured_peak: Positive | None = None
    measured_step_s: Positive | None = None  # median over the logging windows; None: there was none

    @property
    def layouts(self) -> list[LayoutCost]:
        """The one that was used first."""
        return [self.used, *self.others]

    @property
    def peak(self) -> int:
        """Bytes that the fullest rank holds in the layout that was used, as surely as they were predicted."""
        return self.predicted_peak or self.used.memory

    def metrics(self) -> dict[str, float]:
        """Return the values by MLflow's names."""
        peak = float(self.peak)
        found = {"plan/predicted_step_s": self.used.step_s, "plan/predicted_peak_bytes": peak}
        if self.measured_step_s is not None:
            error = self.used.step_s / self.measured_step_s - 1
            found |= {"plan/measured_step_s": self.measured_step_s, "plan/step_error": error}
        if self.measured_peak is not None:
            found |= {"plan/measured_peak_bytes": self.measured_peak, "plan/peak_error": peak / self.measured_peak - 1}
        return found


def pareto(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the Pareto front: points that no other beats in both time and memory, by time."""
    front: list[tuple[float, int]] = []
    for seconds, size in sorted(points):
        if not front or size < front[-1][1]:
            front.append((seconds, size))
    return front
