"""Which modules are treated as a unit: gathered together (ZeRO-3), recomputed together (activation checkpointing)."""

from __future__ import annotations

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


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute each block's activations in backward (https://arxiv.org/abs/1604.06174): one third more compute, and
    only the blocks' inputs kept. Parameter names in checkpoints do not change."""
    for container, key, block in repeated_blocks(model):
        container._modules[key] = checkpoint_wrapper(block)
