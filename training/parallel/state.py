"""Names and tensors of model and optimizer for checkpoints, the same under every layout.

Keys are the plain module's parameter names; values are plain tensors or DTensors, which torch.distributed.checkpoint
saves by shard and loads into any other sharding. A tied weight has one key: the first of its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

WRAPPERS = ("module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """`module.blocks.0._checkpoint_wrapped_module.w` -> `blocks.0.w`."""
    if name.startswith("module."):
        name = name.removeprefix("module.")
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a shared parameter or buffer -> its first name."""
    first: dict[int, str] = {}
    aliases = {}
    both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in both:
        owner = first.setdefault(id(tensor), name)
        if owner != name:
            aliases[name] = owner
    return aliases


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    kept = set(model.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def model_tensors(model: nn.Module, aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Canonical name -> parameter or persistent buffer, detached."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]:
        name = plain_name(name)
        found.setdefault(aliases.get(name, name), tensor.detach())
    return found


def fill_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give what was never stepped its state tensors by one step of learning rate 0 on zero gradients, counted as no
    step: all of it in a fresh optimizer, else parameters that no gradient has reached so far."""
    kept = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
    new = [p for p in kept if not optimizer.state.get(p)]
    if not new:
        return
    kept_settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0  # SGD's decay goes into its momentum whatever the rate
    for parameter in kept:
        parameter.grad = None
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state in (optimizer.state[parameter] for parameter in new):
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0
    for group, (rate, decay) in zip(optimizer.param_groups, kept_settings, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    for parameter, grad in kept.items():
        parameter.grad = grad


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]], aliases: Mapping[str, str]
) -> dict[str, Any]:
    """`<parameter>.<key>` -> state tensor (moments as the parameter is sharded, the step count as it is)."""
    fill_optimizer_state(optimizer)
    found: dict[str, Any] = {}
    for name, parameter in named:
        name = plain_name(name)
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found.setdefault(f"{aliases.get(name, name)}.{key}", value)
    return found


def load_tensors(into: Mapping[str, Any], saved: Mapping[str, Any], what: str) -> None:
    """Copy by name; KeyError names what is missing. Tensors that were loaded in place copy onto themselves."""
    missing = sorted(set(into) - set(saved))
    if missing:
        raise KeyError(f"the checkpoint's {what} lacks {missing[:5]}{' and more' if len(missing) > 5 else ''}")
    with torch.no_grad():
        for name, target in into.items():
            source = saved[name]
            if isinstance(target, torch.Tensor) and target is not source:
                _copy(target, source)


def _copy(target: torch.Tensor, source: Any) -> None:
    if not isinstance(target, DTensor):
        target.copy_(torch.as_tensor(source))
    elif isinstance(source, DTensor):
        target.to_local().copy_(source.to_local())
    else:
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(source.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(whole.to_local())


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full value on the CPU, detached from the parameter's storage; collective for DTensors."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True)
