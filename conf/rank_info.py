"""One rank's position in the world: the only form of it, from the launcher to the strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RankInfo:
    """A rank's position, as torchrun and Horovod define it. Default: one process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the ranks of its host
    local_size: int = 1
    node_rank: int = 0  # of its host
    node_count: int = 1
    cross_rank: int = 0  # among the hosts that have this local rank
    cross_size: int = 1

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, int]) -> RankInfo:
        return cls(**values)
