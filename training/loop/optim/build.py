"""Build optimizers.

Layer-wise rates take the norm of the whole parameter: on DTensors torch sums the squares over the shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig, ParameterGroup
from sparkring.training.loop.optim.own import build_own_optimizer
from sparkring.training.models.groups import group_of
from sparkring.training.models.torch_private import is_dtensor
from sparkring.training.parallel.dtensor import local_tensor
from sparkring.training.parallel.local import LR_SCALE

Named = Iterable[tuple[str, nn.Parameter]]


def parameter_groups(named: Named, weight_decay: float, groups: Sequence[ParameterGroup] = ()) -> list[dict[str, Any]]:
    """Group parameters: matrices decay; vectors and scalars (biases, norms) do not, nor are layer-adapted.

    `groups` may override this by name. Whole and sharded parameters are in separate groups: torch's foreach kernels
    take no mixture.
    """
    sorted_out: dict[tuple[float, float, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        group, matrix = group_of(name, groups), parameter.ndim >= 2
        decay = weight_decay if matrix else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        scale = 1.0 if group is None else group.lr_scale
        sorted_out.setdefault((scale, decay, matrix, is_dtensor(parameter)), []).append(parameter)
    return [
        {"params": params, "weight_decay": decay, "adapt": matrix, LR_SCALE: scale}
        for (scale, decay, matrix, _), params in sorted(sorted_out.items(), key=lambda item: item[0][2:], reverse=True)
    ]


def build_optimizer(named: Named, optim: OptimConfig) -> torch.optim.Optimizer:
    """Build adamw (fused kernels), sgd (momentum), lars, lamb or a user's class over `parameter_groups`."""
    groups = parameter_groups(named, optim.weight_decay, optim.groups)
    if optim.has_own_optimizer:
        return build_own_optimizer(groups, optim)
    if optim.name == "adamw":
        return AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    if optim.name == "lamb":
        return Lamb(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    return Lars(groups, lr=optim.lr, momentum=optim.momentum)


def whole_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the 2-norm of the whole tensor, 0-dim; collective if this rank holds only a shard of it."""
    norm = torch.linalg.vector_norm(tensor)
    return norm.full_tensor() if is_dtensor(norm) else norm


def _ratio(weight_norm: torch.Tensor, update_norm: torch.Tensor) -> torch.Tensor:
    """Compute weight / update; 1 if either is 0 (a weight that starts at 0 must be able to change)."""
    usable = (weight_norm > 0) & (update_norm > 0)
    return torch.where(usable, weight_norm / update_norm.clamp_min(1e-30), torch.ones_like(weight_norm))


class AdamW(torch.optim.AdamW):
    """Step this rank's shards as plain tensors by torch's AdamW; state is DTensors.

    The update is by element, and on a small model DTensor's own dispatch would cost more than the arithmetic.
    """

    # TRICK: overrides a private method of torch (tests/training/models/test_torch_private.py)
    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex


class LayerWise(torch.optim.Optimizer, ABC):
    """Step parameter by parameter with the rule `_update`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    @abstractmethod
    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """Change `parameter` in place; it and `grad` are whole, or this rank's shards."""


class Lars(LayerWise):
    """Layer-wise adaptive rate scaling (You et al. 2017, https://arxiv.org/abs/1708.03888, equation 6)."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, trust: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": 0.0, "adapt": True})

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        decay, rate = group["weight_decay"], group["lr"]
        if group["adapt"]:
            weight_norm = whole_norm(parameter)
            local = _ratio(weight_norm, whole_norm(grad) + decay * weight_norm)
            rate = rate * torch.where(weight_norm > 0, group["trust"] * local, local)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        update = grad.add(parameter, alpha=decay) if decay else grad
        state["momentum_buffer"].mul_(group["momentum"]).add_(update * rate)
        parameter.sub_(state["momentum_buffer"])


class Lamb(LayerWise):
    """Layer-wise Adam for large batches (You et al. 2019, https://arxiv.org/abs/1904.00962, algorithm 2, phi = id)."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "adapt": True})

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float64)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        steps = float(state["step"])
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1**steps)).div_(root).add_(parameter, alpha=group["weight_decay"])
        # On the device, in double: a float here would wait for the device at every parameter.
        trust = _ratio(whole_norm(parameter), whole_norm(update)).double() if group["adapt"] else 1.0
        parameter.sub_(update * (group["lr"] * trust))
