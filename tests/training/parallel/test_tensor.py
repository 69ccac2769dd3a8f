"""How a sharding plan becomes torch's tensor-parallel styles. Equality is in tests/ranks/test_mesh.py."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from sparkring.training.models.gpt import GPT, PLAN
from sparkring.training.models.sharding_plan import ShardingPlan
from sparkring.training.parallel.dtensor import shard_count
from sparkring.training.parallel.model_parallel.tensor import ReplicatedModule, apply_tensor, tensor_styles


def small() -> GPT:
    return GPT(vocab=16, width=16, layers=1, heads=4, hidden=32)


def test_every_kind_has_its_style() -> None:
    styles = tensor_styles(PLAN, small(), sequence=False)
    assert isinstance(styles["blocks.0.attn.q"], ColwiseParallel)
    assert isinstance(styles["blocks.0.attn.o"], RowwiseParallel)
    assert isinstance(styles["blocks.0.norm1"], ReplicatedModule)
    assert isinstance(tensor_styles(PLAN, small(), sequence=True)["blocks.0.norm1"], SequenceParallel)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="has 'rows' for 'head': not one of column, row, vocab"):
        tensor_styles(ShardingPlan(tensor={"head": "rows"}), small(), sequence=False)


def test_tied_and_frozen_weights_stay_so_and_all_become_dtensors(fake_mesh) -> None:
    model = small()
    model.blocks[0].norm1.weight.requires_grad_(False)
    apply_tensor(model, PLAN, fake_mesh(2, "tp"), sequence=False)
    assert model.head.weight is model.embed.weight and shard_count(model.head.weight) == 2
    assert not model.blocks[0].norm1.weight.requires_grad
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert model.blocks[0].mlp.down.weight.placements == (Shard(1),)


def test_a_parameter_that_the_plan_leaves_out_is_refused(fake_mesh) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"leaves out '1.weight'; add its module as column"):
        apply_tensor(model, ShardingPlan(tensor={"0": "column"}), fake_mesh(2, "tp"), sequence=False)
