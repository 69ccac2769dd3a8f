"""An optimizer of the user's (optim.name: module:Class), and what it must be able to do, found by trying it.

Its state must survive a checkpoint. Where ranks hold shards of weights (ZeRO, tensor parallelism) it must be
elementwise: the update of an element may depend on that element's gradients and state alone. Both are tried on two
small parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.errors import first_line
from sparkring.conf.references import load_setting
from sparkring.training.models.torch_private import is_dtensor
from sparkring.training.parallel.state import fill_optimizer_state, load_optimizer_state, optimizer_tensors

STEPS = 4
HALVES = (slice(0, 2), slice(2, 4))  # of dim 0
SHAPES = {"matrix": (4, 3), "vector": (4,)}
Values = list[torch.Tensor]
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def build_own_optimizer(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """Make `optim.name` over parameter groups. ValueError where it does not go with shards."""
    is_sharded = any(is_dtensor(parameter) for group in groups for parameter in group["params"])
    if is_sharded and (problems := optimizer_problems(optim, is_sharded)):
        raise ValueError(problems[0])
    return _make(optim, groups)


def _make(optim: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    key = f"optim.name = {optim.name!r}"
    cls = load_setting(optim.name, "optim.name")
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ValueError(f"{key}: is {cls!r}, not a class derived from torch.optim.Optimizer")
    make: Any = cls
    try:
        made: torch.optim.Optimizer = make(groups, lr=optim.lr, **optim.args)
    except Exception as error:  # the user's code runs
        raise ValueError(
            f"{key}: cannot be made as Class(groups, lr={optim.lr}, **{optim.args}): {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    if "weight_decay" not in made.defaults and optim.weight_decay != OptimConfig().weight_decay:
        raise ValueError(
            f"optim.weight_decay = {optim.weight_decay}: has no effect on {optim.name}, whose defaults have no "
            "weight_decay; remove it"
        )
    return made


def optimizer_problems(optim: OptimConfig, is_sharded: bool) -> list[str]:
    """List why a user's optimizer cannot be used. `is_sharded`: ranks hold shards of weights."""
    if not optim.has_own_optimizer:
        return []
    key = f"optim.name = {optim.name!r}"
    try:
        whole = _stepped(optim, _weights(), STEPS)
        if not _close(_resumed(optim), whole):
            return [
                f"{key}: does not continue from a checkpoint as if it had not stopped; what it remembers of a "
                "parameter must be tensors and numbers in self.state[parameter]"
            ]
        halves = [_stepped(optim, _weights(rows), STEPS, rows) for rows in HALVES] if is_sharded else []
    except ValueError as error:
        return [str(error)]
    except Exception as error:
        return [f"{key}: its step fails: {type(error).__name__}: {first_line(error)}"]
    if is_sharded and not _close([torch.cat(parts) for parts in zip(*halves, strict=True)], whole):
        return [
            f"{key}: is not elementwise: stepping half of a matrix gives other values than stepping all of it, so it "
            "cannot step shards; use parallel.zero = 0, parallel.tp = 1 and no parallel.servers with it"
        ]
    return []


def states_per_parameter(optim: OptimConfig) -> int:
    """Count the tensors of parameter size that the user's optimizer keeps."""
    weights = _named(_weights())
    optimizer = _make(optim, _groups(optim, weights))
    _step(optimizer, weights, 0)
    matrix = weights[0][1]
    return sum(isinstance(t, torch.Tensor) and t.shape == matrix.shape for t in optimizer.state[matrix].values())


def _weights(rows: slice = slice(None)) -> Values:
    make = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=make, dtype=torch.float64)[rows] for shape in SHAPES.values()]


def _named(values: Values) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(value.clone())) for name, value in zip(SHAPES, values, strict=True)]


def _groups(optim: OptimConfig, named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    return [{"params": [parameter], "weight_decay": optim.weight_decay} for _, parameter in named]


def _step(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], step: int, rows: slice = slice(None)
) -> None:
    """Step on gradients that are drawn by the step number."""
    make = torch.Generator().manual_seed(100 + step)
    for (_, parameter), shape in zip(named, SHAPES.values(), strict=True):
        parameter.grad = torch.randn(shape, generator=make, dtype=torch.float64)[rows].clone()
    optimizer.step()


def _stepped(optim: OptimConfig, values: Values, steps: int, rows: slice = slice(None)) -> Values:
    named = _named(values)
    optimizer = _make(optim, _groups(optim, named))
    for step in range(steps):
        _step(optimizer, named, step, rows)
    return [parameter.detach() for _, parameter in named]


def _resumed(optim: OptimConfig) -> Values:
    """Compute weights after as many steps, the second half by an optimizer with restored state."""
    before = _named(_weights())
    first = _make(optim, _groups(optim, before))
    for step in range(STEPS // 2):
        _step(first, before, step)
    saved = {name: value.clone() if isinstance(value, torch.Tensor) else value
             for name, value in optimizer_tensors(first, before, {}).items()}  # fmt: skip
    after = _named([parameter.detach() for _, parameter in before])
    second = _make(optim, _groups(optim, after))
    fill_optimizer_state(second)
    load_optimizer_state(second, after, {}, saved)
    for step in range(STEPS // 2, STEPS):
        _step(second, after, step)
    return [parameter.detach() for _, parameter in after]


def _close(left: Values, right: Values) -> bool:
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(left, right, strict=True))
