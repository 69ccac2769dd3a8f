"""Learning rates by the step, the share that a plateau leaves, and a schedule of the user's."""

from __future__ import annotations

import itertools
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig, PlateauConfig
from sparkring.training.loop.optim.schedules import (
    PlateauState,
    after_value,
    learning_rate,
    make_schedule,
    scaled_lr,
    schedule_problems,
)


def rate(step: int, schedule: str) -> float:
    optim = OptimConfig(schedule=schedule, warmup_steps=2, final_lr_share=0.1)  # type: ignore[arg-type]
    return learning_rate(optim, step, total_steps=11, peak=2.0)


def test_the_rate_warms_up_and_falls_to_its_final_share() -> None:
    for name in ("linear", "cosine"):
        assert [rate(step, name) for step in (0, 1, 2)] == [1.0, 2.0, 2.0]
        assert rate(10, name) == pytest.approx(0.2)
        assert rate(99, name) == pytest.approx(0.2)
        assert rate(6, name) == pytest.approx(1.1)
    assert rate(10, "constant") == 2.0


@pytest.mark.parametrize(
    ("rule", "batch", "expected"),
    [("linear", 1024, 0.4), ("sqrt", 1024, 0.2), ("none", 1024, 0.1), ("linear", 64, 0.025)],
)
def test_the_rate_scales_with_the_batch(rule: str, batch: int, expected: float) -> None:
    optim = OptimConfig(lr=0.1, scale_lr=rule, reference_batch=256)  # type: ignore[arg-type]
    assert scaled_lr(optim, batch) == pytest.approx(expected)


@pytest.mark.parametrize(("rising", "share"), [(0, 0.3), (5, 0.25)])
def test_one_cycle_is_torchs(rising: int, share: float) -> None:
    steps, peak = 20, 0.4
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=steps, pct_start=share, final_div_factor=8.0, cycle_momentum=False
    )
    optim = OptimConfig(schedule="one_cycle", warmup_steps=rising, final_lr_share=1 / 25 / 8)
    for step in range(steps):
        assert learning_rate(optim, step, steps, peak) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12), step
        optimizer.step()
        theirs.step() if step < steps - 1 else None
    assert learning_rate(optim, 99, steps, peak) == learning_rate(optim, steps - 1, steps, peak)
    assert rising or learning_rate(optim, 0, 1, peak) == peak


def test_a_plateau_lowers_the_rate_after_its_patience_and_never_below_the_least() -> None:
    rule, state, shares = PlateauConfig(factor=0.5, patience=2), PlateauState(), []
    for value in (3.0, 2.0, 2.5, 2.5, 2.6, 1.0, 2.0, 2.0, 2.0, 2.0):
        is_better = state.best is None or value < state.best
        state = after_value(state, value, is_better, rule, least=0.2)
        shares.append(state.share)
    assert shares == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.2] and state.best == 1.0


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's module of schedules."""
    module, calls = ModuleType("schedules_of_test"), itertools.count()
    functions: dict[str, Any] = {
        "halving": lambda step, total_steps, every: 0.5 ** (step // every),
        "by_call": lambda step, total_steps: 1.0 / (1 + next(calls)),
        "negative": lambda step, total_steps: -1.0,
        "late": lambda step, total_steps: math.inf if step > 3 else 1.0,
        "broken": lambda step, total_steps: 1 / 0,
        "constant": 5,
    }
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, "schedules_of_test", module)
    return module


def optim(name: str, **args: Any) -> OptimConfig:
    return OptimConfig(schedule=f"schedules_of_test:{name}", schedule_args=args)


def test_a_users_function_gives_the_share_of_the_rate(own: ModuleType) -> None:
    rate = make_schedule(optim("halving", every=2), 10, 8.0)
    assert [rate(step) for step in range(5)] == [8, 8, 4, 4, 2]
    assert schedule_problems(optim("halving", every=2), 10) == [] == schedule_problems(OptimConfig(), None)
    late = make_schedule(optim("late"), 10, 1.0)
    assert late(3) == 1.0
    with pytest.raises(ValueError, match=r"schedules_of_test:late': gave inf for step 4 of 10; it must be a number"):
        late(4)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (optim("halving"), "does not take (step, total_steps, **{}): missing a required argument: 'every'"),
        (optim("by_call"), "gave 1.0 and then 0.5 for step 0; every rank calls it, so it must be a pure function"),
        (optim("negative"), "gave -1.0 for step 0 of 1000"),
        (optim("broken"), "fails for step 0 of 1000: ZeroDivisionError"),
        (optim("constant"), "is 5, not a function"),
        (optim("gone"), "has no 'gone'"),
        (OptimConfig(schedule="no_such_module:f"), "cannot be imported"),
    ],
)
def test_what_is_no_schedule_is_named(own: ModuleType, config: OptimConfig, why: str) -> None:
    (problem,) = schedule_problems(config, None)
    assert why in problem and problem.startswith("optim.schedule = ")
