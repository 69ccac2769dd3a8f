"""Gradients in buckets: how they are filled, when they are sent, and what has none afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkring.training.parallel.data_parallel.reduce import (
    BucketedDataParallel,
    GradientReducer,
    Transport,
    bucket_limit,
    plan_buckets,
)


class EqualRanks(Transport):
    """A transport of `ranks` ranks that all send the same."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.sent = ranks, list[str]()

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        self.sent.append(name)
        return buffer

    def wait(self, handle: Any) -> None:
        handle.mul_(self.ranks)


def test_buckets_hold_one_dtype_and_the_last_parameters_come_first() -> None:
    half, single = torch.float16, torch.float32
    assert plan_buckets([4, 4, 2, 4], [single, single, half, single], 8) == [[3], [2], [1, 0]]
    assert plan_buckets([100], [single], 8) == [[0]], "one larger than the limit is alone"


@pytest.mark.parametrize(
    ("total", "limit", "size"), [(100, 2**25, 2**20), (2**24, 2**25, 2**22), (2**30, 2**25, 2**25)]
)
def test_a_small_model_has_several_buckets_too(total: int, limit: int, size: int) -> None:
    assert bucket_limit(total, limit) == size


def test_gradients_are_summed_and_sent_while_backward_runs() -> None:
    transport, model = EqualRanks(3), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    reducer = GradientReducer(list(model.parameters()), transport, bucket_bytes=8)
    reducer.arm()
    model(torch.ones(1, 2)).sum().backward()
    assert len(transport.sent) == len(reducer.buckets) > 1
    expected = [p.grad.clone() for p in model.parameters()]
    reducer.finish()
    assert all(torch.equal(p.grad, 3 * grad) for p, grad in zip(model.parameters(), expected, strict=True))


def test_a_parameter_that_no_rank_reached_has_no_gradient() -> None:
    used, idle = nn.Linear(2, 1), nn.Linear(2, 1)
    reducer = GradientReducer([*used.parameters(), *idle.parameters()], EqualRanks(2), bucket_bytes=2**20)
    used(torch.ones(1, 2)).sum().backward()
    reducer.finish()
    assert used.weight.grad.tolist() == [[2.0, 2.0]] and idle.weight.grad is None


def test_without_overlap_everything_is_sent_at_the_end() -> None:
    transport, model = EqualRanks(2), nn.Linear(2, 1)
    ring = BucketedDataParallel(2, "test", transport, bucket_bytes=2**20, overlap=False)
    assert ring.wrap(model) is model
    with ring.pass_scope(last=True):
        model(torch.ones(1, 2)).sum().backward()
    assert transport.sent == []
    ring.finish_reduction()
    assert transport.sent == ["gradients.0"] and model.weight.grad.tolist() == [[2.0, 2.0]]
    ring.close(failed=False)
