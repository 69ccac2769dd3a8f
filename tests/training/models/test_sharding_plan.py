"""Patterns of a sharding plan name the modules of a model, or are refused."""

from __future__ import annotations

import pytest
from torch import nn

from sparkring.training.models.gpt import GPT
from sparkring.training.models.sharding_plan import ShardingPlan, expand, plan_of, required_plan


def test_a_star_stands_for_every_key_also_of_a_module_in_two_places() -> None:
    block = nn.Sequential(nn.Linear(1, 1))
    model = nn.ModuleDict({"blocks": nn.ModuleList([block, nn.Sequential(nn.Linear(1, 1)), block])})
    assert expand("blocks.*.0", model) == ["blocks.0.0", "blocks.1.0", "blocks.2.0"]


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
