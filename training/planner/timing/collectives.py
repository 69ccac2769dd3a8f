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


@dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange something: how many, and how far apart in the numbering of all ranks."""

    size: int
    stride: int


@dataclass(frozen=True)
class Topology:
    """The links of a cluster as collectives meet them."""

    cluster: Cluster
    world: int

    def per_node(self, group: RankGroup) -> int:
        """Ranks of a group on one node."""
        return max(1, min(group.size, self.cluster.node.devices // group.stride))

    def crosses(self, group: RankGroup) -> bool:
        """Whether a group has ranks on several nodes."""
        return group.size > self.per_node(group)

    def bytes_per_s(self, group: RankGroup) -> float:
        """What one rank of a group sends per second in a ring."""
        node, reached = self.cluster.node, self.cluster.reached
        link = node.link_bytes_per_s * reached.link
        if not self.crosses(group):
            return link
        inside = self.per_node(group)
        groups = min(node.devices, self.world) // inside
        return min(link, self.cluster.network.bytes_per_s * reached.network / groups)

    def latency_s(self, group: RankGroup, is_ring: bool = False) -> float:
        """Of one collective. A ring passes every rank once; an all-reduce goes there and back, over nodes by a tree."""
        inside = self.per_node(group)
        nodes = math.ceil(group.size / inside)
        hops, network = (inside - 1) * self.cluster.node.link_latency_s, self.cluster.network.latency_s
        if is_ring:
            return nodes * hops + (nodes * network if nodes > 1 else 0.0)
        return 2 * (hops + math.ceil(math.log2(nodes)) * network)

    def sent_s(self, sent: float, group: RankGroup, calls: float = 1.0, is_ring: bool = False) -> float:
        """Seconds in which one rank of a group sends so many bytes, in so many collectives (rings: see latency_s)."""
        if group.size == 1 or not sent:
            return 0.0
        return sent / self.bytes_per_s(group) + calls * self.latency_s(group, is_ring)

    def send_s(self, size: float, stride: int) -> float:
        """Seconds to send `size` bytes to the rank `stride` further, at the boundary where it takes longest."""
        node, network, reached = self.cluster.node, self.cluster.network, self.cluster.reached
        if self.world <= node.devices:
            return size / (node.link_bytes_per_s * reached.link) + node.link_latency_s
        senders = min(stride, node.devices)  # the devices of a node whose next stage is on another one
        return size / (network.bytes_per_s * reached.network / senders) + network.latency_s
