"""Patterns of a sharding plan name the modules of a model, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkring.training.models.gpt import GPT
from sparkring.training.models.sharding_plan import ShardingPlan, expand, plan_of, required_plan
from sparkring.training.parallel.check import check_widths
from sparkring.training.parallel.mesh import Mesh


def test_a_star_stands_for_every_key_also_of_a_module_in_two_places() -> None:
    block = nn.Sequential(nn.Linear(1, 1))
    model = nn.ModuleDict({"blocks": nn.ModuleList([block, nn.Sequential(nn.Linear(1, 1)), block])})
    assert [*expand("blocks.*.0", model)] == ["blocks.0.0", "blocks.1.0", "blocks.2.0"]


def test_a_pattern_without_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names 'blocks\.\*', which Linear does not have"):
        expand("blocks.*", nn.Linear(1, 1))


def test_the_plan_beside_a_models_class_is_found() -> None:
    model = GPT(vocab=8, width=8, layers=2, heads=2)
    plan = required_plan(model, "pp")
    assert plan.layer_names(model) == ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert plan.attention_names(model) == ["blocks.0.attn", "blocks.1.attn"]
    assert plan.kinds(model)["blocks.1.attn.o"] == "row"


def test_a_model_without_a_plan_gets_an_error_with_the_remedy() -> None:
    assert plan_of(nn.Linear(1, 1)) is None and ShardingPlan().layer_names(nn.Linear(1, 1)) == []
    with pytest.raises(ValueError, match=r"parallel\.tp > 1: Linear has no sharding plan; define PLAN"):
        required_plan(nn.Linear(1, 1), "tp")


PLAN = ShardingPlan(layers=("inner", "blocks.*", "head"), tensor={"blocks.*.up": "column"}, heads=())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)


class Planned(nn.Module):
    """Has all that PLAN names, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.more = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])


class WithoutHead(Planned):
    def __init__(self) -> None:
        super().__init__()
        del self.head


class OtherBlocks(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Linear(4, 4)])  # one has it is enough for a star


class NoBlocks(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()


class UpWithoutWeight(Planned):
    """The same names, of modules of another kind."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = nn.Sequential(nn.Linear(4, 4))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize("planned", [Planned, OtherBlocks])
def test_a_plan_counts_for_the_classes_of_its_file_that_have_all_it_names(planned: type[nn.Module]) -> None:
    assert plan_of(planned()) is PLAN is required_plan(planned(), "tp")


@pytest.mark.parametrize("other", [Plain, WithoutHead, NoBlocks, Block])
@pytest.mark.parametrize("axis", ["pp", "tp", "cp"])
def test_another_class_beside_a_plan_has_none_and_is_told_so_where_it_needs_one(
    other: type[nn.Module], axis: str
) -> None:
    assert plan_of(other()) is None
    with pytest.raises(ValueError, match=rf"the sharding plan names '.*', which {other.__name__} does not have"):
        required_plan(other(), axis)
    check_widths(other(), Mesh(dp=2))


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(tp=2), Mesh(cp=2)])
def test_another_class_whose_modules_have_the_names_alone_has_no_plan(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan_of(UpWithoutWeight(), "tp") is None
    assert plan_of(UpWithoutWeight()) is required_plan(UpWithoutWeight(), "cp") is PLAN, "only tp cuts weights"
    check_widths(UpWithoutWeight(), mesh)
    with pytest.raises(ValueError, match=r"'blocks\.0\.up', which has no 'weight' in UpWithoutWeight; change PLAN"):
        required_plan(UpWithoutWeight(), "tp")
    monkeypatch.setitem(globals(), "PLAN", ShardingPlan(heads=("inner",)))
    check_widths(Planned(), mesh)
    with pytest.raises(ValueError, match="'inner', which has no 'heads' in Planned; change PLAN"):
        required_plan(Planned(), "cp")
