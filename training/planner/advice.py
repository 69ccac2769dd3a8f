"""Say what a person can act on: whether to distribute, what limits a layout, and how often to write checkpoints.

The best interval between checkpoints is Young's, sqrt(2 C M) with C the seconds of one and M those between failures
(https://doi.org/10.1145/361147.361115; Daly's higher orders matter for C near M only,
https://doi.org/10.1016/j.future.2004.11.016). Goodput is the share of time that is not writing, not
repeating what a failure lost, half an interval on average, and not starting again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sparkring.conf.clusters.cluster import Cluster
from sparkring.conf.plain_text import count_of
from sparkring.training.planner.timing.step_time import StepTime

LEAST_EFFICIENCY = 0.6  # share of its own rate that each device keeps, below which several are not worth it
LAUNCH_S = 3.0  # from the call to a ring that is formed (benchmarks/results/launch_2core_202611.md)
LINK_LIMITED = 0.15  # share of a step that waits for exchanges
PAYS = 1.05  # rate per device that a doubled batch, or another precision, must gain to be worth it
RESTART_S = 300.0  # from a failure to the first step of the next attempt


@dataclass(frozen=True)
class CheckpointPlan:
    """write_s: seconds of one checkpoint. interval_s: best between two. goodput: share of time that trains."""

    write_s: float
    interval_s: float
    goodput: float


def checkpoint_plan(state_bytes: float, cluster: Cluster, devices: int) -> CheckpointPlan:
    """Return the best checkpoint interval for this size (all nodes), written in equal shares by the nodes."""
    nodes = cluster.nodes(devices)
    write_s = state_bytes / (cluster.storage.write_bytes_per_s * nodes)
    between_s = 1 / (cluster.node.failures_per_s * nodes)
    interval_s = math.sqrt(2 * write_s * between_s)
    lost = write_s / interval_s + (interval_s / 2 + RESTART_S) / between_s
    return CheckpointPlan(write_s, interval_s, max(0.0, 1 - lost))


@dataclass(frozen=True)
class Distribution:
    """A step on one device and on several. steps: of the whole run; None: not known."""

    alone_s: float
    together_s: float
    devices: int
    steps: int | None = None

    @property
    def efficiency(self) -> float:
        """Share of its own rate that each device keeps."""
        return self.alone_s / self.together_s / self.devices

    @property
    def run_s(self) -> tuple[float, float] | None:
        """Seconds of the whole run, alone and together, with the launch."""
        return None if self.steps is None else (self.steps * self.alone_s, LAUNCH_S + self.steps * self.together_s)

    @property
    def is_worth_it(self) -> bool:
        is_shorter = self.run_s is None or self.run_s[1] < self.run_s[0]
        return is_shorter and self.efficiency >= LEAST_EFFICIENCY


def distribute_advice(found: Distribution, seconds: Callable[[float], str]) -> str | None:
    """Explain why not to distribute a step that fits on one device, or None. `seconds`: formats a time."""
    if found.devices == 1 or found.is_worth_it:
        return None
    whole = ""
    if found.run_s is not None:
        whole = (
            f"; the whole run takes {seconds(found.run_s[0])} in place of {seconds(found.run_s[1])}, launch included"
        )
    return (
        f"do not distribute: one device takes {seconds(found.alone_s)} a step, {count_of(found.devices, 'device')} "
        f"{seconds(found.together_s)}, so that each keeps {found.efficiency:.0%} of its own rate{whole}"
    )


def link_advice(
    time: StepTime,
    faster: Callable[[float], float],
    larger_batch: Callable[[int], float],
    with_codec: Callable[[], float | None] = lambda: None,
) -> str | None:
    """Suggest what helps a step that waits for links, or None.

    Args:
        time: predicted times of the step.
        faster: seconds of the step if the network had this multiple of its bandwidth.
        larger_batch: relative rows per second with this multiple of the batch.
        with_codec: seconds of the step with gradients in bf16; None if no codec fits.
    """
    waited = time.exchange + time.tensor + time.context + time.pipeline
    if waited < LINK_LIMITED * time.total:
        return None
    coded = with_codec()
    codec = "" if coded is None else f"; gradients in bf16 (parallel.compress.codec) {time.total / coded:.2f} times"
    return (
        f"links are the limit: {waited / time.total:.0%} of a step waits for them. A network four times as fast gives "
        f"{time.total / faster(4.0):.2f} times the rate; twice the batch, in as many passes, "
        f"{larger_batch(2):.2f} times{codec}"
    )


def paying_batch(rows: int, rate: Callable[[int], float]) -> int:
    """Return the batch from which doubling gains less than PAYS. `rate`: rows per second by batch size."""
    while rate(2 * rows) >= PAYS * rate(rows) and rows < 1 << 30:
        rows *= 2
    return rows
