"""Checks before a model is cut, and tied weights. The cuts themselves are in tests/ranks/test_mesh.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.check import check_widths
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.parallel.model_parallel.placement import (
    MeshPlacement,
    ModelPlacement,
    make_placement,
    sum_tied,
)
from sparkring.training.parallel.process_groups import RankContext

CPU = torch.device("cpu")


def test_the_mesh_decides_on_the_placement() -> None:
    plain = make_placement(RankContext(ParallelConfig(), Mesh(dp=2), RankInfo(0, 2), CPU))
    assert type(plain) is ModelPlacement and plain.pipeline is None
    assert isinstance(make_placement(RankContext(ParallelConfig(), Mesh(tp=2), RankInfo(0, 2), CPU)), MeshPlacement)


def test_a_plain_placement_changes_nothing_but_checkpointing() -> None:
    model = GPT(vocab=8, width=8, layers=1, heads=2)
    placement = ModelPlacement(RankContext(ParallelConfig(activation_checkpointing=True), Mesh(), RankInfo(), CPU))
    assert placement.place(model, None, None) is model  # type: ignore[arg-type]
    assert type(model.blocks[0]).__name__ == "CheckpointWrapper"
    assert placement.columns({"a": 1}) == {"a": 1} and placement.groups() == {} and placement.counts_in_norm("a")


@pytest.mark.parametrize(
    ("mesh", "problem"), [(Mesh(tp=3), "4 heads and 2 key/value heads"), (Mesh(cp=4), "not divisible by cp(4)")]
)
def test_heads_that_do_not_divide_are_refused(mesh: Mesh, problem: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError) as caught:
        check_widths(GPT(vocab=8, width=16, layers=1, heads=4, kv_heads=2), mesh)
    assert problem in str(caught.value)


def test_a_copy_without_a_gradient_gets_the_sum_and_none_where_no_copy_has_one(alone) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    sum_tied(parameter, alone)
    assert parameter.grad is None
    parameter.grad = torch.ones(2)
    sum_tied(parameter, alone)
    assert parameter.grad.tolist() == [1, 1]
