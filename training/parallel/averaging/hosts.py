"""Average over hosts, whose ranks have the same weights: between one rank of each, then within each.

Bytes a host sends to others for a mean: 2 (h-1)/h x bytes of the tensors, h hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sparkring.conf.rank_info import RankInfo
from sparkring.training.parallel.data_parallel.compress import Collectives


def find_hosts(info: RankInfo) -> list[list[int]]:
    """List the ranks of each host. Collective; ValueError if they are not consecutive."""
    found: list[Any] = [0] * info.world_size
    dist.all_gather_object(found, info.local_rank)
    return cut_hosts(found)


def cut_hosts(local_ranks: Sequence[int]) -> list[list[int]]:
    """Group ranks by host, from each rank's number on its host."""
    hosts: list[list[int]] = []
    for rank, local_rank in enumerate(local_ranks):
        if local_rank == 0:
            hosts.append([])
        if not hosts or local_rank != len(hosts[-1]):
            raise ValueError(
                f"parallel.averaging.groups=host: the ranks of a host are not consecutive, their numbers on the hosts "
                f"are {list(local_ranks)}; use groups=rank"
            )
        hosts[-1].append(rank)
    return hosts


class HostCollectives(Collectives):
    """The sum over hosts; `rank` is the host's number."""

    def __init__(self, hosts: Sequence[Sequence[int]], rank: int) -> None:
        """Form the groups. Collective. `hosts`: ranks of each host."""
        insides = [dist.new_group(list(ranks)) for ranks in hosts]
        self.leaders = dist.new_group([ranks[0] for ranks in hosts])
        host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        self.inside, self.leader = insides[host], hosts[host][0]
        self.leads = rank == self.leader
        super().__init__(host, len(hosts))

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        return buffer, dist.all_reduce(buffer, group=self.leaders, async_op=True) if self.leads else None

    def wait(self, handle: Any) -> torch.Tensor:
        buffer: torch.Tensor
        buffer, work = handle
        if work is not None:
            work.wait()
        dist.broadcast(buffer, src=self.leader, group=self.inside)
        return buffer

    def start_all_to_all(self, name: str, rows: torch.Tensor) -> Any:
        raise NotImplementedError("hosts only average")

    def start_all_gather(self, name: str, flat: torch.Tensor) -> Any:
        raise NotImplementedError("hosts only average")
