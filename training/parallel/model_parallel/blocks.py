"""Find the modules that are gathered (ZeRO-3) or recomputed as one unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparkring.training.models.torch_private import checkpoint_wrapper, replace_child, unwrapped


def repeated_blocks(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """List (container, key, block) for children with parameters of outermost ModuleLists, -Dicts, Sequentials.

    That is how torch models write "the same thing n times"; a user's module needs nothing else.
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
    """Return whether it has submodules and parameters; single layers stay with the modules around them."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def compile_blocks(model: nn.Module) -> None:
    """Compile the forward of each block with torch.compile, or of the whole model if it has no blocks.

    The forward alone, so that the hooks by which ZeRO gathers and frees a block's weights run outside of the compiled
    code; and block by block, so that equal blocks are compiled once and there is code between two to gather in.
    """
    for module in [block for _, _, block in repeated_blocks(model)] or [model]:
        inner = unwrapped(module)
        inner.forward = torch.compile(inner.forward)


def own_units(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """List the modules that ZeRO-3 gathers separately: blocks, and other planned layers with a matrix.

    Such layers are an embedding, a head: the plan says that they are called as modules. A module that shares a weight
    with another one, or is called in two places, is gathered with the rest.
    """
    found = {id(block) for _, _, block in repeated_blocks(model)}
    blocks = [name for name, module in model.named_modules() if id(module) in found]
    others = [
        name
        for name in layers
        if not any(f"{name}.".startswith(f"{block}.") or block.startswith(f"{name}.") for block in blocks)
        and any(p.ndim > 1 for p in model.get_submodule(name).parameters())
    ]
    places = Counter(p for _, p in model.named_parameters(remove_duplicate=False))

    def alone(name: str) -> bool:
        inside = Counter(p for _, p in model.get_submodule(name).named_parameters(remove_duplicate=False))
        return all(places[p] == count for p, count in inside.items())

    return [name for name in (*blocks, *others) if alone(name)]


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute each block's activations in backward (https://arxiv.org/abs/1604.06174).

    One third more compute, and only the blocks' inputs are kept. Parameter names in checkpoints do not change. What
    batch normalization keeps for evaluations is updated once a pass, as without.
    """
    for container, key, block in repeated_blocks(model):
        replace_child(container, key, checkpoint_wrapper(block, context_fn=partial(_contexts, block)))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts for the first forward of a block and for its recomputation."""
    return nullcontext(), _keeping_statistics(block)


@contextmanager
def _keeping_statistics(block: nn.Module) -> Iterator[None]:
    """Make batch normalization layers normalize as in training without changing their running statistics."""
    layers = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
