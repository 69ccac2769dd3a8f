"""The ring's transports; that they sum over ranks is proven in tests/ranks/test_ring.py."""

from __future__ import annotations

import torch

from sparkring.conf.rank_info import RankInfo
from sparkring.training.parallel.data_parallel.ddp import (
    GroupTransport,
    HostTransport,
    broadcast_tensors,
    host_transport,
)


def test_a_transport_of_one_rank_changes_nothing(alone) -> None:
    for transport in (GroupTransport(alone), HostTransport(alone, alone)):
        buffer = torch.arange(5.0)
        transport.wait(transport.start("name", buffer))
        assert buffer.tolist() == [0, 1, 2, 3, 4]


def test_two_levels_need_several_hosts_with_several_ranks_each(alone) -> None:
    assert host_transport(RankInfo()) is None
    assert host_transport(RankInfo(0, 4, 0, 4)) is None, "one host"
    assert host_transport(RankInfo(0, 3, 0, 2)) is None, "hosts of different sizes"


def test_tensors_without_memory_are_not_broadcast(alone) -> None:
    strided = torch.arange(4.0)[::2]
    broadcast_tensors([torch.empty(2, device="meta"), strided], alone)
    assert strided.tolist() == [0, 2]
