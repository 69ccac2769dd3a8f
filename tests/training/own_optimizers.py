"""Optimizers as users write them: right ones, and one for each thing that they may not do."""

from __future__ import annotations

from typing import Any

import torch


class SignMomentum(torch.optim.Optimizer):
    """Lion (https://arxiv.org/abs/2302.06675): elementwise, its step count is a number."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"], state["momentum"] = 0, torch.zeros_like(parameter)
                state["count"] += 1
                scale = 1.0 / (1.0 + 0.1 * state["count"])
                update = state["momentum"].mul(group["beta"]).add(parameter.grad, alpha=1 - group["beta"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update * (group["lr"] * scale))
                state["momentum"].copy_(update)


class Normalized(SignMomentum):
    """Looks at the whole parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm() * group["lr"])


class Forgetful(SignMomentum):
    """Remembers on itself, of which checkpoints know nothing."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = group["lr"] / self.steps
        super().step()


class WithClosure(SignMomentum):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Undecayed(torch.optim.Optimizer):
    """Knows no weight decay."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


NOT_ONE = dict
