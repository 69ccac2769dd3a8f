from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from sparkring.training.models.arguments import argument_problems
from sparkring.training.models.cnn import SmallCnn
from sparkring.training.models.factors import FactorizationMachine
from sparkring.training.models.gpt import GPT
from sparkring.training.models.tabular import Tabular


@pytest.mark.parametrize("model", [Tabular, GPT, SmallCnn, FactorizationMachine])
def test_defaults_are_allowed(model: type[nn.Module]) -> None:
    assert list(argument_problems(model, {})) == []


@pytest.mark.parametrize(
    ("model", "args", "expected"),
    [
        (Tabular, {"width": 0, "dropout": 0.5}, ["model.args.width = 0: input should be greater than or equal to 1"]),
        (Tabular, {"output_scale": 0.0}, ["model.args.output_scale = 0.0: input should be greater than 0"]),
        (Tabular, {"members": True}, ["model.args.members = True: input should be a valid integer"]),
        (GPT, {"kv_heads": 0}, ["model.args.kv_heads = 0: input should be greater than or equal to 1"]),
        (SmallCnn, {"norm": "layer"}, ["model.args.norm = 'layer': input should be 'group' or 'batch'"]),
        (FactorizationMachine, {"factors": 1.5}, ["model.args.factors = 1.5: input should be a valid integer"]),
    ],
)
def test_a_value_outside_the_annotation_is_named(
    model: type[nn.Module], args: dict[str, Any], expected: list[str]
) -> None:
    assert list(argument_problems(model, args)) == expected


def test_values_that_a_recipe_may_have_are_allowed() -> None:
    args = {"width": 8, "blocks": 0, "dropout": 0, "additive_only": ["x"], "output_center": -3, "output_scale": 1e3}
    assert list(argument_problems(Tabular, args)) == []
    assert list(argument_problems(GPT, {"kv_heads": None, "theta": 500_000})) == []
