"""Reading tensors that may be distributed."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from sparkring.training.parallel.dtensor import finalize_partial_grad, local_box, local_tensor, shard_count


def test_a_plain_tensor_is_whole() -> None:
    x = torch.zeros(3, 2)
    assert local_tensor(x) is x and local_box(x) == ((3, 2), (0, 0)) and shard_count(x) == 1


def test_a_sharded_tensor_is_this_ranks_piece(fake_mesh) -> None:
    mesh = fake_mesh(4, "dp")
    sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None)
    assert local_tensor(sharded).tolist() == [0, 1] and local_box(sharded) == ((2,), (0,)) and shard_count(sharded) == 4
    whole = distribute_tensor(torch.arange(8.0), mesh, [Replicate()], src_data_rank=None)
    assert local_box(whole) == ((8,), (0,)) and shard_count(whole) == 1


def test_a_partial_gradient_gets_its_parameters_placements(fake_mesh) -> None:
    mesh = fake_mesh(2, "tp")
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()], src_data_rank=None))
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    finalize_partial_grad(parameter)
    assert parameter.grad.placements == (Replicate(),)
