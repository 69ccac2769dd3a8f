"""One step in one process. That every layout gives the same step is in tests/ranks/test_mesh.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig, ParameterGroup
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.task import Task
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.gradients import REACH_STEPS
from sparkring.training.parallel.step import MeshStrategy


class SquaredOutput(Task):
    def inputs(self, columns: dict[str, Any]) -> tuple[Any, ...]:
        return (columns["x"],)

    def loss(self, outputs: torch.Tensor, columns: dict[str, Any]) -> torch.Tensor:
        return outputs.square().mean(dim=1)


class OneUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def prepared(model: nn.Module, **settings: Any) -> MeshStrategy:
    strategy = build_strategy(ParallelConfig(**settings), RankInfo(), torch.device("cpu"), clip_norm=0.5)
    strategy.prepare(model, SquaredOutput(), lambda named: build_optimizer(named, OptimConfig()))
    return strategy


def moved(*groups: ParameterGroup) -> dict[str, torch.Tensor]:
    """How far a step of plain SGD moves each parameter of `linear`."""
    plain = OptimConfig(name="sgd", momentum=0.0, weight_decay=0.0, groups=list(groups))
    strategy = build_strategy(ParallelConfig(), RankInfo(), torch.device("cpu"), clip_norm=None)
    strategy.prepare(model := linear(), SquaredOutput(), lambda named: build_optimizer(named, plain))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    strategy.forward_backward(batch())
    strategy.step(0.1)
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def test_a_group_has_its_share_of_the_steps_rate() -> None:
    whole, half = moved(), moved(ParameterGroup(match="bias", lr_scale=0.5))
    torch.testing.assert_close(half["weight"], whole["weight"])
    torch.testing.assert_close(half["bias"], whole["bias"] / 2)
    assert whole["bias"].all()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def batch(value: float = 1.0) -> Batch:
    x = torch.arange(15.0, dtype=torch.float64).view(5, 3)
    x[0, 0] = value
    return Batch({"x": x}, 5, 5, 5, weight=torch.tensor([1.0, 1, 0, 2, 1]))


def test_accumulation_changes_no_step() -> None:
    results = []
    for accumulate in (1, 2, 5):
        strategy = prepared(linear(), accumulate=accumulate)
        loss, info = strategy.forward_backward(batch()), strategy.step(0.1)
        results.append((float(loss), info.grad_norm, strategy.prepared.module.weight.detach().clone()))
    for loss, norm, weight in results[1:]:
        assert (loss, norm) == pytest.approx(results[0][:2], rel=1e-12)
        torch.testing.assert_close(weight, results[0][2], rtol=1e-12, atol=0)


def test_a_step_whose_gradients_are_not_finite_moves_nothing() -> None:
    strategy = prepared(linear())
    before = strategy.prepared.module.weight.detach().clone()
    strategy.forward_backward(batch(float("nan")))
    info = strategy.step(0.1)
    assert info.skipped and info.first_bad_rank == 0 and strategy.local.steps == 0
    assert torch.equal(strategy.prepared.module.weight, before)


def test_a_second_batch_without_a_step_is_refused() -> None:
    strategy = prepared(linear())
    strategy.forward_backward(batch())
    with pytest.raises(RuntimeError, match="twice without step"):
        strategy.forward_backward(batch())


def test_a_parameter_that_no_step_reaches_is_refused_after_the_first_ones() -> None:
    strategy = prepared(OneUsed().double())
    for step in range(REACH_STEPS):
        strategy.forward_backward(batch())
        if step < REACH_STEPS - 1:
            strategy.step(0.1)
    with pytest.raises(ValueError, match=r"no gradient reached \['idle.bias', 'idle.weight'\] in the first 10 steps"):
        strategy.step(0.1)


def test_a_strategy_says_what_it_measured() -> None:
    strategy = prepared(linear())
    for _ in range(2):
        strategy.forward_backward(batch())
        strategy.step(0.1)
    measured = strategy.measure()
    assert measured["weights_bytes"] == measured["gradients_bytes"] == 8 * (6 + 2)
    assert not any(name.startswith("sent_bytes") for name in measured)


def test_the_exported_model_has_the_plain_names_and_evaluation_sees_its_weights() -> None:
    strategy = prepared(linear())
    infos, values = strategy.stream_model()
    assert [(info.name, info.shape) for info in infos] == [("weight", (2, 3)), ("bias", (2,))]
    weight, bias = (value.clone() for value in values if value is not None)
    x = batch().columns["x"]
    torch.testing.assert_close(strategy.evaluate(batch()), x @ weight.T + bias)
