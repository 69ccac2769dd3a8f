from __future__ import annotations

import math
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
        (
            Tabular,
            {"width": 10**12},
            ["model.args.width = 1000000000000: input should be less than or equal to 10000000"],
        ),
        (Tabular, {"blocks": 10**9}, ["model.args.blocks = 1000000000: input should be less than or equal to 1000"]),
        (Tabular, {"dropout": 3}, ["model.args.dropout = 3: input should be less than 1"]),
        (Tabular, {"output_center": math.nan}, ["model.args.output_center = nan: input should be a finite number"]),
        (Tabular, {"hashed": ["a"]}, ["model.args.hashed = ['a']: is taken from the dataset; remove it"]),
        (GPT, {"vocab": 0}, ["model.args.vocab = 0: input should be greater than or equal to 1"]),
        (GPT, {"layers": 10**8}, ["model.args.layers = 100000000: input should be less than or equal to 1000"]),
        (SmallCnn, {"channels": 3}, ["model.args.channels = 3: is taken from the dataset; remove it"]),
        (SmallCnn, {"width": 6}, ["model.args.width = 6: a multiple of 4 is needed, the groups of a layer"]),
        (FactorizationMachine, {"codes": {}}, ["model.args.codes = {}: is taken from the dataset; remove it"]),
        (
            FactorizationMachine,
            {"factors": 10**11},
            ["model.args.factors = 100000000000: input should be less than or equal to 10000000"],
        ),
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
    assert list(argument_problems(SmallCnn, {"classes": 10, "width": 8})) == []


def test_heads_that_do_not_divide_the_width_are_found_without_a_dataset() -> None:
    (problem,) = argument_problems(GPT, {"width": 192, "heads": 5})
    assert problem.startswith("model.args: width(192) must be heads(5)")


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Tabular, {"width": 100_000, "blocks": 2}),
        (GPT, {"width": 65_536, "heads": 64}),
        (GPT, {"vocab": 10_000_000, "width": 4096, "heads": 32}),
        (SmallCnn, {"width": 4096, "layers": 6}),
        (FactorizationMachine, {"factors": 10_000_000}),
    ],
)
def test_weights_larger_than_the_memory_are_refused(model: type[nn.Module], args: dict[str, Any]) -> None:
    (problem,) = argument_problems(model, args, memory=16 << 20)
    assert "the weights alone take" in problem
    assert list(argument_problems(model, args, memory=1 << 50)) == list(argument_problems(model, args)) == []


def test_a_layer_too_large_for_a_tensor_is_refused_on_any_machine() -> None:
    (problem,) = argument_problems(SmallCnn, {"width": 10_000_000, "layers": 16})
    assert "a layer has more weights than a tensor can hold" in problem
