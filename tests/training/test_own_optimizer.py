"""An optimizer of the user's is tried before it is used: its state in a checkpoint, and shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.loop.optim.own import optimizer_problems, states_per_parameter

OWN = "tests.training.own_optimizers"


def optim(name: str, **settings: Any) -> OptimConfig:
    return OptimConfig(name=name if ":" in name else f"{OWN}:{name}", **settings)


@pytest.mark.parametrize(
    ("config", "states"),
    [
        (optim("SignMomentum", args={"beta": 0.5}), 1),
        (optim("Undecayed"), 0),
        (optim("torch.optim:RMSprop", args={"momentum": 0.9}), 2),
        (optim("torch.optim:Adagrad"), 1),
        (optim("torch.optim:NAdam"), 2),
        (optim("torch.optim:SGD", args={"momentum": 0.9, "nesterov": True}), 1),
    ],
    ids=lambda case: getattr(case, "name", ""),
)
def test_an_elementwise_optimizer_goes_with_shards(config: OptimConfig, states: int) -> None:
    assert optimizer_problems(config, is_sharded=True) == []
    assert states_per_parameter(config) == states


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (optim("Normalized"), "is not elementwise: stepping half of a matrix gives other values"),
        (optim("Forgetful"), "does not continue from a checkpoint as if it had not stopped"),
        (optim("WithClosure"), "its step fails: TypeError: "),
        (optim("NOT_ONE"), "not a class derived from torch.optim.Optimizer"),
        (optim("SignMomentum", args={"betta": 1}), "cannot be made as Class(groups, lr=0.001, **{'betta': 1}): "),
        (optim("Undecayed", weight_decay=0.5), "optim.weight_decay = 0.5: has no effect on"),
        (optim("Gone"), "has no 'Gone'"),
    ],
    ids=lambda case: getattr(case, "name", ""),
)
def test_what_cannot_be_an_optimizer_is_named(config: OptimConfig, why: str) -> None:
    (problem,) = optimizer_problems(config, is_sharded=True)
    assert why in problem and problem.startswith("optim.")


def test_one_that_is_not_elementwise_goes_where_weights_are_whole() -> None:
    assert optimizer_problems(optim("Normalized"), is_sharded=False) == [] == optimizer_problems(OptimConfig(), True)


def test_groups_have_their_decay_and_rate() -> None:
    named = list(torch.nn.Linear(2, 2).named_parameters())
    made = build_optimizer(named, optim("SignMomentum", lr=0.5, weight_decay=0.2, args={"beta": 0.1}))
    assert type(made).__name__ == "SignMomentum"
    assert [(g["lr"], g["beta"], g["weight_decay"]) for g in made.param_groups] == [(0.5, 0.1, 0.2), (0.5, 0.1, 0.0)]
