"""Which of Horovod's collectives takes ZeRO-1's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkring.training.parallel.data_parallel.horovod_zero import ShardReducer


class Link:
    """Of `ranks` ranks that all send what this one sends."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.calls: list[str] = []

    def start_all_to_all(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        self.calls.append("all-to-all")
        return rows[:1].repeat(self.ranks, 1)

    def start_reduce_scatter(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        self.calls.append("reduce-scatter")
        return self.ranks * rows[:1]

    def wait(self, handle: Any) -> Any:
        return handle


@pytest.mark.parametrize(("ranks", "call"), [(2, "reduce-scatter"), (3, "all-to-all")])
def test_two_ranks_never_exchange_gradients_over_their_one_connection_by_all_to_all(ranks: int, call: str) -> None:
    link, layer = Link(ranks), nn.Linear(4, 6, bias=False)
    reducer = ShardReducer([layer.weight], link, bucket_bytes=2**20)  # type: ignore[arg-type]
    reducer.arm()
    layer(torch.ones(1, 4)).sum().backward()
    reducer.finish()
    assert link.calls == [call]
    # a rank's share of the 24 gradients, and how many ranks have one for the parameter
    summed = reducer.buckets[0].result.view(-1, 24 // ranks + 1).sum(dim=0)
    assert summed.tolist() == [float(ranks)] * (24 // ranks + 1)
