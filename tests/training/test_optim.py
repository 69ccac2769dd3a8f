"""Optimizers against their papers' equations, groups, schedules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from training.optim import LayerWise, build_optimizer, learning_rate, parameter_groups, scaled_lr
from training.parallel.state import optimizer_tensors


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


def test_adamw_is_torchs() -> None:
    ours, theirs = two_parameters(), two_parameters()
    build_optimizer(ours, "adamw", lr=0.1, weight_decay=0.2).step()
    torch.optim.AdamW([theirs[0][1]], lr=0.1, weight_decay=0.2).step()
    torch.optim.AdamW([theirs[1][1]], lr=0.1, weight_decay=0.0).step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


def test_lamb_follows_algorithm_2() -> None:
    named = two_parameters()
    w, g = named[0][1].detach().clone(), named[0][1].grad
    build_optimizer(named, "lamb", lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01).step()
    update = g / (g.abs() + 1e-6) + 0.01 * w
    expected = w - 0.1 * w.norm() / update.norm() * update
    assert torch.allclose(named[0][1], expected, atol=1e-9)
    bias = two_parameters()[1][1]
    assert torch.allclose(named[1][1], bias - 0.1 * bias.grad / (bias.grad.abs() + 1e-6), atol=1e-9)


def test_lars_follows_equation_6() -> None:
    named = two_parameters()
    w, g = named[0][1].detach().clone(), named[0][1].grad
    build_optimizer(named, "lars", lr=0.5, momentum=0.9, weight_decay=0.01).step()
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
    optimizer = build_optimizer(list(layer.named_parameters()), name, lr=1.0 if name == "lars" else 0.05)
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
    optimizers = [build_optimizer(named, name, lr=0.1, weight_decay=0.2) for named in (looked_at, left_alone)]
    state = optimizer_tensors(optimizers[0], looked_at, {})
    assert state and not any(bool(tensor.any()) for tensor in state.values())
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(looked_at, left_alone, strict=True))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"optim\.name = 'adam'"):
        build_optimizer(two_parameters(), "adam")
    with pytest.raises(ValueError, match=r"optim\.schedule"):
        learning_rate(5, peak=1.0, total_steps=10, schedule="step")
    with pytest.raises(ValueError, match=r"optim\.scale_lr"):
        scaled_lr(1.0, "log", 1, 1)


def test_schedules() -> None:
    rate = {"peak": 2.0, "total_steps": 11, "warmup_steps": 2, "final_share": 0.1}
    assert [learning_rate(s, **rate) for s in (0, 1)] == [1.0, 2.0]
    for name in ("linear", "cosine"):
        assert learning_rate(2, schedule=name, **rate) == 2.0
        assert learning_rate(10, schedule=name, **rate) == pytest.approx(0.2)
        assert learning_rate(99, schedule=name, **rate) == pytest.approx(0.2)
        assert learning_rate(6, schedule=name, **rate) == pytest.approx(1.1)
    assert learning_rate(10, schedule="constant", **rate) == 2.0


def test_batch_scaling() -> None:
    assert scaled_lr(0.1, "linear", 1024, 256) == pytest.approx(0.4)
    assert scaled_lr(0.1, "sqrt", 1024, 256) == pytest.approx(0.2)
    assert scaled_lr(0.1, "none", 1024, 256) == 0.1
    assert math.isclose(scaled_lr(0.1, "linear", 64, 256), 0.025)
