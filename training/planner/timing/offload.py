"""Seconds of shards on the host (`parallel.offload`): they travel to the device and back, and the host steps them.

fully_shard copies a shard to the device before each gather, in its own dtype, and the reduced gradient back after each
reduction (torch 2.13, FSDPParam.all_gather_inputs and foreach_reduce). Both are from and to pinned memory, in the
streams of the collectives, and so parallel to compute as these are. Not so gradients of later passes, which the host
adds to its own: it waits for the copy before it starts more operations.

The host's cores update the shards of all devices of a machine at once, as fast as its memory is: 2.57 s for 10^10
parameters and 0.22 s for 10^9 by Adam (https://arxiv.org/abs/2101.06840, table 4), 28 bytes each, are 0.43 and 0.50 of
the 256 GB/s of that machine (DGX-2, 12 channels of DDR4-2666): `reached.host`, unless `plan measure` has measured it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sparkring.conf.clusters.cluster import Cluster
from sparkring.training.planner.traffic import gathered_elements, reductions_of
from sparkring.training.planner.workload import RankParameters

ADDED = 3  # tensors that the host reads or writes to add a gradient to another


@dataclass(frozen=True)
class ShardCopies:
    """Bytes that a rank copies in a step.

    forward, backward: from and to the device, parallel to compute. added: that the host adds.
    """

    forward: float
    backward: float
    added: float


def shard_copies(rank: RankParameters) -> ShardCopies | None:
    """Return what a rank copies in a step; None without offload."""
    if not rank.is_offloaded:
        return None
    element, reductions = rank.workload.element_bytes, reductions_of(rank)
    gradients = rank.updated * element
    forward, again = (elements / rank.shard * element for elements in gathered_elements(rank))
    return ShardCopies(forward, again + gradients, (reductions - 1) * gradients)


def host_bytes_per_s(cluster: Cluster, world: int) -> float:
    """Return bytes per second the host reads and writes for each of the ranks that step at once."""
    return cluster.node.memory_bytes_per_s * cluster.reached.host / min(world, cluster.node.devices)


class CopySeconds(NamedTuple):
    """Seconds of a step's copies. forward, backward: parallel to compute. waited: without any compute."""

    forward: float = 0.0
    backward: float = 0.0
    waited: float = 0.0


def copy_seconds(copies: ShardCopies | None, cluster: Cluster, world: int) -> CopySeconds:
    if copies is None:
        return CopySeconds()
    copy = cluster.node.copy_bytes_per_s
    added = copies.added * (1 / copy + ADDED / host_bytes_per_s(cluster, world))
    return CopySeconds(copies.forward / copy, copies.backward / copy, added)
