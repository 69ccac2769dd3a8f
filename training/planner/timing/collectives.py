"""Seconds of collectives on a topology: alpha-beta costs of rings (https://arxiv.org/abs/1909.09756, section 2).

What each rank sends is counted in traffic.py: of an all-reduce of b bytes between n ranks 2 (n - 1) / n b, of an
all-gather, a reduce-scatter or an all-to-all half of that. Within a node a device sends at the link's rate. Between
nodes all groups that the devices of a node are in send at the same time, so each has its share of the node's network:
with p of a group's ranks in a node, p / devices of it. A ring over nodes is as fast as the slower of the two. NCCL has
rings only for gathers and scatters, so that their latency grows with the ranks, and trees over nodes for all-reduces
(https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkring.conf.clusters.cluster import Cluster
from sparkring.training.planner.timing.shared_cores import ranks_per_core


@dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange something: how many, and how far apart in the numbering of all ranks."""

    size: int
    stride: int


@dataclass(frozen=True)
class Topology:
    """The links of a cluster as collectives use them."""

    cluster: Cluster
    world: int

    @property
    def per_core(self) -> float:
        return ranks_per_core(self.cluster, self.world)

    @property
    def _hop_s(self) -> float:
        """Latency of a message within a node."""
        node = self.cluster.node
        return max(node.link_latency_s, node.turn_s) if self.per_core > 1 else node.link_latency_s

    def per_node(self, group: RankGroup) -> int:
        """Return the ranks of a group on one node."""
        return max(1, min(group.size, self.cluster.node.devices // group.stride))

    def crosses(self, group: RankGroup) -> bool:
        """Return whether a group has ranks on several nodes."""
        return group.size > self.per_node(group)

    def bytes_per_s(self, group: RankGroup) -> float:
        """Return the bytes that one rank of a group sends per second in a ring."""
        node, reached = self.cluster.node, self.cluster.reached
        link = node.link_bytes_per_s * reached.link / self.per_core  # on a CPU cores copy and add
        if not self.crosses(group):
            return link
        inside = self.per_node(group)
        groups = min(node.devices, self.world) // inside
        return min(link, self.cluster.network.bytes_per_s * reached.network / groups)

    def latency_s(self, group: RankGroup, is_ring: bool = False) -> float:
        """Return one collective's latency: a ring passes all ranks; an all-reduce a node's ranks, then a tree."""
        inside = self.per_node(group)
        nodes = math.ceil(group.size / inside)
        if is_ring:
            return (group.size - nodes) * self._hop_s + (nodes - 1) * self.cluster.network.latency_s
        return (inside - 1) * self._hop_s + math.ceil(math.log2(nodes)) * self.cluster.network.latency_s

    def sent_s(self, sent: float, group: RankGroup, calls: float = 1.0, is_ring: bool = False) -> float:
        """Return seconds to send `sent` bytes from one rank in `calls` collectives (rings: see latency_s)."""
        if group.size == 1 or not sent:
            return 0.0
        return sent / self.bytes_per_s(group) + calls * self.latency_s(group, is_ring)

    def all_to_all_s(self, sent: float, group: RankGroup, most: float = math.inf) -> float:
        """Return the seconds of an all-to-all in which each rank sends `sent` bytes in equal shares.

        Args:
            sent: bytes of a rank to all others.
            group: the group of ranks; others of their kind send at the same time.
            most: bytes per second that a rank can send.
        """
        node, reached, inside = self.cluster.node, self.cluster.reached, self.per_node(group)
        away = sent * (group.size - inside) / max(1, group.size - 1)
        per_rank = self.cluster.network.bytes_per_s * reached.network / min(node.devices, self.world)
        link = node.link_bytes_per_s * reached.link / self.per_core
        return (sent - away) / min(link, most) + away / min(per_rank, most)

    def send_s(self, size: float, stride: int) -> float:
        """Return seconds to send `size` bytes to the rank `stride` further, at the slowest boundary."""
        node, network, reached = self.cluster.node, self.cluster.network, self.cluster.reached
        if self.world <= node.devices:
            return size / (node.link_bytes_per_s * reached.link) + self._hop_s
        senders = min(stride, node.devices)  # the devices of a node whose next stage is on another one
        return size / (network.bytes_per_s * reached.network / senders) + network.latency_s
