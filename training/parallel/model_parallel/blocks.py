"""Which modules are treated as a unit: gathered together (ZeRO-3), recomputed together (activation checkpointing)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper


def repeated_blocks(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(container, key, block) for every parameter-holding child of an outermost ModuleList, ModuleDict or Sequential.

    That is how torch models spell "the same thing n times"; nothing else is asked of a user's module.
    """
    found: list[tuple[nn.Module, str, nn.Module]] = []

    def visit(module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            compound = [(key, child) for key, child in module.named_children() if _worth_a_unit(child)]
            found.extend((module, key, child) for key, child in compound)
            return
        for child in module.children():
            visit(child)

    visit(model)
    return found


def _worth_a_unit(module: nn.Module) -> bool:
    """Has modules of its own and parameters; single layers stay with what is around them."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def compile_blocks(model: nn.Module) -> None:
    """torch.compile the forward of each block, or of the whole model where it has none.

    The forward alone, so that the hooks by which ZeRO gathers and frees a block's weights run outside of the compiled
    code; and block by block, so that equal blocks are compiled once and there is code between two to gather in.
    """
    for module in [block for _, _, block in repeated_blocks(model)] or [model]:
        inner = module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module
        inner.forward = torch.compile(inner.forward)


def own_units(model: nn.Module, chain: Sequence[str]) -> list[str]:
    """Names of what ZeRO-3 gathers by itself: blocks, and the layers of the chain with a matrix that are none (an
    embedding, a head: the chain says that they are called as modules). What shares a weight with another module, or is
    called in two places, is gathered with the rest.
    """
    found = {id(block) for _, _, block in repeated_blocks(model)}
    blocks = [name for name, module in model.named_modules() if id(module) in found]
    layers = [
        name
        for name in chain
        if not any(f"{name}.".startswith(f"{block}.") or block.startswith(f"{name}.") for block in blocks)
        and any(p.ndim > 1 for p in model.get_submodule(name).parameters())
    ]
    places = Counter(p for _, p in model.named_parameters(remove_duplicate=False))

    def alone(name: str) -> bool:
        inside = Counter(p for _, p in model.get_submodule(name).named_parameters(remove_duplicate=False))
        return all(places[p] == count for p, count in inside.items())

    return [name for name in (*blocks, *layers) if alone(name)]


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute each block's activations in backward (https://arxiv.org/abs/1604.06174): one third more compute, and
    only the blocks' inputs kept. Parameter names in checkpoints do not change."""
    for container, key, block in repeated_blocks(model):
        container._modules[key] = checkpoint_wrapper(block)
