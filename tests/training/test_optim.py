"""Optimizers against their papers' equations, groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig, ParameterGroup
from sparkring.training.loop.optim.build import LayerWise, build_optimizer, parameter_groups
from sparkring.training.models.groups import freeze
from sparkring.training.parallel.state import optimizer_tensors


def two_parameters() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    matrix, bias = nn.Parameter(torch.randn(3, 2).double()), nn.Parameter(torch.randn(3).double())
    matrix.grad, bias.grad = torch.randn(3, 2).double(), torch.randn(3).double()
    return [("w", matrix), ("b", bias)]


def test_only_matrices_decay() -> None:
    named = two_parameters()
    groups = parameter_groups(named, 0.1)
    assert [(len(g["params"]), g["weight_decay"], g["adapt"]) for g in groups] == [(1, 0.1, True), (1, 0.0, False)]
    assert groups[0]["params"][0] is named[0][1]


def test_groups_are_by_name_and_the_first_that_matches_has_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [
        ParameterGroup(match=r"0\..*", lr_scale=0.1),
        ParameterGroup(match=r".*bias", weight_decay=0.3),
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made = parameter_groups(model.named_parameters(), 0.2, groups)
    assert {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in made for p in g["params"]} == {
        "0.weight": (0.1, 0.2), "0.bias": (0.1, 0.0), "1.weight": (1.0, 0.2), "1.bias": (1.0, 0.3)
    }  # fmt: skip


def test_frozen_parameters_have_no_gradients_and_a_pattern_of_nothing_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    freeze(model, [ParameterGroup(match=r"0\.weight", lr_scale=2.0), ParameterGroup(match=r"0\..*", frozen=True)])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["0.weight", "1.weight", "1.bias"]
    for groups in (
        [ParameterGroup(match="weight", frozen=True)],  # a part of a name is not the name
        [ParameterGroup(match=r"0\.", frozen=True)],  # nor is its beginning
        [ParameterGroup(match=r"1\..*", lr_scale=2.0), ParameterGroup(match=r"1\.bias", frozen=True)],
    ):
        with pytest.raises(ValueError, match=r"match = .*: is the whole name of no parameter .* 0\.weight, 0\.bias"):
            freeze(model, groups)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"match": "(", "frozen": True}, "no regular expression"),
        ({"match": "a"}, "says nothing"),
        ({"match": "a", "frozen": True, "lr_scale": 2.0}, "frozen parameters have no learning rate"),
    ],
)
def test_groups_that_make_no_sense_are_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ParameterGroup(**keys)


@pytest.mark.parametrize("keys", [{"frozen": True}, {"lr_scale": 0.0}, {"weight_decay": 0.0}])
def test_a_group_is_the_same_after_it_was_stored(keys: dict[str, Any]) -> None:
    group = ParameterGroup(match="a", **keys)
    assert ParameterGroup.model_validate(group.model_dump(mode="json")) == group


def test_adamw_is_torchs() -> None:
    ours, theirs = two_parameters(), two_parameters()
    build_optimizer(ours, OptimConfig(name="adamw", lr=0.1, weight_decay=0.2)).step()
    torch.optim.AdamW([theirs[0][1]], lr=0.1, weight_decay=0.2).step()
    torch.optim.AdamW([theirs[1][1]], lr=0.1, weight_decay=0.0).step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


def test_lamb_follows_algorithm_2() -> None:
    named = two_parameters()
    w, g = named[0][1].detach().clone(), named[0][1].grad
    build_optimizer(named, OptimConfig(name="lamb", lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)).step()
    update = g / (g.abs() + 1e-6) + 0.01 * w
    expected = w - 0.1 * w.norm() / update.norm() * update
    assert torch.allclose(named[0][1], expected, atol=1e-9)
    bias = two_parameters()[1][1]
    assert torch.allclose(named[1][1], bias - 0.1 * bias.grad / (bias.grad.abs() + 1e-6), atol=1e-9)


def test_lars_follows_equation_6() -> None:
    named = two_parameters()
    w, g = named[0][1].detach().clone(), named[0][1].grad
    build_optimizer(named, OptimConfig(name="lars", lr=0.5, momentum=0.9, weight_decay=0.01)).step()
    local = 1e-3 * w.norm() / (g.norm() + 0.01 * w.norm())
    assert torch.allclose(named[0][1], w - 0.5 * local * (g + 0.01 * w), atol=1e-12)


def test_a_layer_wise_optimizer_needs_a_rule() -> None:
    with pytest.raises(TypeError, match="_update"):
        LayerWise([nn.Parameter(torch.zeros(1))], {})


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars"])
def test_every_optimizer_lowers_a_loss(name: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 1), torch.randn(64, 4)
    target = x @ torch.randn(4, 1)
    optimizer = build_optimizer(
        list(layer.named_parameters()), OptimConfig(name=name, lr=1.0 if name == "lars" else 0.05)
    )
    losses = []
    for _ in range(300 if name == "lars" else 50):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("name", ["adamw", "sgd", "lars", "lamb"])
def test_a_checkpoint_before_the_first_step_changes_nothing(name: str) -> None:
    looked_at, left_alone = two_parameters(), two_parameters()
    optimizers = [
        build_optimizer(named, OptimConfig(name=name, lr=0.1, weight_decay=0.2)) for named in (looked_at, left_alone)
    ]
    state = optimizer_tensors(optimizers[0], looked_at, {})
    assert state and not any(bool(tensor.any()) for tensor in state.values())
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(looked_at, left_alone, strict=True))
