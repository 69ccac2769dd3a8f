"""A rank makes its part of a model: the same values as the whole, wherever they come from."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from sparkring.training.models.initial import eager_model, record_model
from sparkring.training.parallel.initialize import fill, initialize_parameters, names_from_rank0, value_of_rank0

CPU = torch.device("cpu")


def test_a_model_with_memory_keeps_its_values() -> None:
    layer = nn.Linear(3, 2)
    expected = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    initial = eager_model(layer, "it has memory")
    assert layer.weight.is_meta and initial.not_recorded
    initialize_parameters(layer, initial, CPU, offload=False, world=1)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in layer.state_dict().items())


def test_one_process_takes_nothing_from_rank_0() -> None:
    initial = record_model(lambda: nn.Linear(3, 2), seed=1)
    assert names_from_rank0(initial, world=1) == set()
    initialize_parameters(initial.module, initial, CPU, offload=False, world=1)
    assert torch.equal(initial.module.weight, value_of_rank0(initial.values["weight"], world=1))


def test_a_shard_is_filled_from_pieces_of_rows(fake_mesh) -> None:
    whole = torch.arange(20.0).view(5, 4)
    pieces = [(0, whole[:2]), (2, whole[2:])]
    rows = distribute_tensor(torch.zeros(5, 4), fake_mesh(2, "dp"), [Shard(0)], src_data_rank=None)
    fill(rows, iter(pieces))
    assert torch.equal(rows.to_local(), whole[:3])
    columns = distribute_tensor(torch.zeros(5, 4), rows.device_mesh, [Shard(1)], src_data_rank=None)
    fill(columns, iter(pieces))
    assert torch.equal(columns.to_local(), whole[:, :2])


def test_a_value_without_dims_is_filled_too() -> None:
    scalar = torch.zeros(())
    fill(scalar, iter([(0, torch.tensor(3.0))]))
    assert scalar == 3
