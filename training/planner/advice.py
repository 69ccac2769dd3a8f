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

WORTH_IT = 1.3  # times one device's rate, below which a ring is not worth its trouble
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
    """The best interval for checkpoints of so many bytes, all nodes together, which every node writes a part of."""
    nodes = cluster.nodes(devices)
    write_s = state_bytes / (cluster.storage.write_bytes_per_s * nodes)
    between_s = 1 / (cluster.node.failures_per_s * nodes)
    interval_s = math.sqrt(2 * write_s * between_s)
    lost = write_s / interval_s + (interval_s / 2 + RESTART_S) / between_s
    return CheckpointPlan(write_s, interval_s, max(0.0, 1 - lost))


def distribute_advice(one_device_s: float | None, best_s: float, devices: int) -> str | None:
    """Why not to distribute. `one_device_s`: a step on one device; None if it does not fit."""
    if devices == 1 or one_device_s is None or one_device_s / best_s >= WORTH_IT:
        return None
    return (
        f"do not distribute: the step fits on one device and takes {one_device_s:.3g} s there; "
        f"{count_of(devices, 'device needs')} {best_s:.3g} s, {one_device_s / best_s:.2f} times the rate, less than "
        f"{WORTH_IT}"
    )


def link_advice(time: StepTime, faster: Callable[[float], float], larger_batch: Callable[[int], float]) -> str | None:
    """What helps a step that waits for links.

    Args:
        time: of the step.
        faster: seconds of the step if the network has so many times its bandwidth.
        larger_batch: rows per second over those now, with so many times the batch.
    """
    waited = time.exchange + time.tensor + time.context + time.pipeline
    if waited < LINK_LIMITED * time.total:
        return None
    return (
        f"links are the limit: {waited / time.total:.0%} of a step waits for them. A network four times as fast gives "
        f"{time.total / faster(4.0):.2f} times the rate; twice the batch, in as many passes, "
        f"{larger_batch(2):.2f} times; gradients in half of their bytes (parallel.compress.codec: bf16, "
        f"where ZeRO is off) at most {time.total / (time.total - time.exchange / 2):.2f} times"
    )


def paying_batch(rows: int, rate: Callable[[int], float]) -> int:
    """The batch from which doubling gains less than PAYS. `rate`: rows per second with a batch of so many rows."""
    while rate(2 * rows) >= PAYS * rate(rows) and rows < 1 << 30:
        rows *= 2
    return rows
